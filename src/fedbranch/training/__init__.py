"""How one client trains and measures in PyTorch. The readable reference of all engines."""
