"""Which clients are known, where each stands in the tree, and which are away."""
