"""Measuring and judging: ways to write one text against each other, and whether a pair is sound."""
