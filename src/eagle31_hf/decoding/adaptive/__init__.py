"""Drafts that adapt: how long, from where, or none at all, by this machine's costs and what was accepted so far.

Plain arithmetic on counts, no torch and no clock: a seed writes the same text twice, and whatever is decided, the text
is the target's own.
"""
