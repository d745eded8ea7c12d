"""Preallocated keys and values with rows of their own length, of whose drafts a path is kept."""
