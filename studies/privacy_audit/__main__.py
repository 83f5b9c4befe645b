"""``python -m studies.privacy_audit``: ``fedbranch audit``, with the same options."""

import sys

from fedbranch.cli.commands import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.argv.insert(1, "audit")
    main()
