"""Preallocated keys and values with rows of their own length, rollback and keep-path."""
