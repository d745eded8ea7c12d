"""Draft trees as data: grow, prune, mask, paths, and the geometry of a draft."""
