"""What is drafted, as data and as decisions: trees and their geometry (`shape`, `draft_tree`), and how long,
from where, or nothing (`planner`), in plain arithmetic on counts and seconds.

Whatever is decided, the text is the target's own.
"""
