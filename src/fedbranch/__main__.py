"""``python -m fedbranch`` is the command line."""

from fedbranch.cli import main

main()
