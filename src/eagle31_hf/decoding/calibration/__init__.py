"""What rounds cost on this machine: measured once for a pair, kept on disk, and looked up by whoever adapts drafts."""
