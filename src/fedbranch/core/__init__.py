"""The mathematics: pure functions on arrays of any Array API library."""
