"""One client in PyTorch: how it trains and measures. The readable reference of all engines."""
