"""The drafter: network, files, its state during a generation, and what it proposes."""
