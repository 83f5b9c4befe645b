"""Runs in the terminal."""
