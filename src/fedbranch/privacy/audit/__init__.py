"""What leaks: attacks of an honest-but-curious server, measured on real digits.

Client-side code that attacks itself. Nothing here is used in training.
"""

from fedbranch.privacy.audit.attacks import ATTACKS, Attack
from fedbranch.privacy.audit.measures import Measured
from fedbranch.privacy.audit.results import Results, audit
from fedbranch.privacy.audit.scene import Scene, Sizes
from fedbranch.privacy.audit.table import markdown, print_results, with_table

__all__ = [
    "ATTACKS",
    "Attack",
    "Measured",
    "Results",
    "Scene",
    "Sizes",
    "audit",
    "markdown",
    "print_results",
    "with_table",
]
