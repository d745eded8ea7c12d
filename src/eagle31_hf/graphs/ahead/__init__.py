"""Graphs for a CPU, compiled ahead of time and kept on disk: all that a card has no use for."""
