"""What is on disk: written as a whole or not at all, and checked when it is read."""
