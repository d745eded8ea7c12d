"""Measuring: methods to write the same text against each other, bare costs, growth with the context."""
