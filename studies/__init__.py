"""Studies: what is measured and committed, but not installed."""
