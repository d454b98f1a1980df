"""Users of one daemon that are kept apart: each has a node of its own, all draw on one budget."""
