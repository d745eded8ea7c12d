"""Measuring and judging: methods to write the same text against each other, bare costs, and whether a pair is sound."""
