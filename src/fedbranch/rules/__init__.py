"""When to split a cluster: a rule looks at the evidence and returns a decision with its reason.

Users write their own rule by passing any object with ``examine(evidence) -> Decision``.
"""

from fedbranch.rules.auto import AutoRule
from fedbranch.rules.evidence import (
    Asks,
    Decision,
    Evidence,
    Groups,
    PastRound,
    Review,
    Rule,
    Verdict,
)
from fedbranch.rules.saved import rule_from_state, rule_to_state
from fedbranch.rules.thresholds import NeverSplit, Thresholds

__all__ = [
    "Asks",
    "AutoRule",
    "Decision",
    "Evidence",
    "Groups",
    "NeverSplit",
    "PastRound",
    "Review",
    "Rule",
    "Thresholds",
    "Verdict",
    "rule_from_state",
    "rule_to_state",
]
