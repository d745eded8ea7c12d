"""What to draft in each round: how long, from where, or nothing.

Plain arithmetic on counts and seconds, without torch; whatever is decided, the text is the target's own.
"""
