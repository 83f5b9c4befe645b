"""The command line."""

from fedbranch.cli.commands import main

__all__ = ["main"]
