"""Files: written as a whole or not at all, and checked when they are read."""
