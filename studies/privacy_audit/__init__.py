"""The privacy audit: attacks of an honest-but-curious server, measured on real digits.

The audit compares what the server learns with and without the secret transforms of
:mod:`fedbranch.privacy`. Nothing here is used in training.
"""

from studies.privacy_audit.attacks import ATTACKS, Attack
from studies.privacy_audit.command import run_command
from studies.privacy_audit.measures import Measured
from studies.privacy_audit.results import Results, audit
from studies.privacy_audit.scene import Scene, Sizes
from studies.privacy_audit.table import markdown, print_results, with_table

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
    "run_command",
    "with_table",
]
