"""Rules in checkpoints and run folders."""

from __future__ import annotations

from dataclasses import asdict

from fedbranch.errors import DamagedFile
from fedbranch.rules.auto import AutoRule
from fedbranch.rules.evidence import Rule
from fedbranch.rules.thresholds import NeverSplit, Thresholds
from fedbranch.types import JSON

__all__ = ["rule_from_state", "rule_to_state"]


def rule_to_state(rule: Rule) -> JSON:
    """Describe a rule for a checkpoint; of a rule that is not fedbranch's own only the name."""
    if isinstance(rule, AutoRule | Thresholds | NeverSplit):
        return {"name": type(rule).__name__, "settings": asdict(rule)}
    return {"name": type(rule).__name__, "settings": None}


def rule_from_state(state: JSON) -> Rule:
    """Rebuild a rule that :func:`rule_to_state` described."""
    shipped = {rule.__name__: rule for rule in (AutoRule, Thresholds, NeverSplit)}
    if state["settings"] is None or state["name"] not in shipped:
        raise DamagedFile(
            f"the rule {state['name']!r} is not part of fedbranch and was not saved; "
            "pass it when loading: Server.load(folder, rule=...)"
        )
    return shipped[state["name"]](**state["settings"])
