"""Stage 2: drafts are rolled out and the expected number of accepted tokens is raised."""
