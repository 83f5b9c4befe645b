"""The settings of a run in a few words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from fedbranch import rules
from fedbranch.types import JSON

__all__ = ["METHOD_TITLES", "rule_text", "small_facts"]

LONGEST_VALUE = 200  # characters

METHOD_TITLES = {
    "cfl": "CFL",
    "fedavg": "plain FL",
    "local": "alone",
    "oracle": "oracle",
    "ifca": "IFCA (told k)",
}


def small_facts(about: JSON, num_clients: int, *, in_training: bool) -> list[list[str]]:
    """Return the settings that readers ask for first, as pairs of name and value.

    Parameters
    ----------
    about
        The content of ``run.json``.
    num_clients
        Number of clients that the run ever had.
    in_training
        Whether its metrics are those that clients report in training.
    """
    model = about.get("model")
    facts: dict[str, object] = {
        "clients": f"{num_clients:,}",
        "parameters": f"{about['num_params']:,}" if "num_params" in about else None,
        "arrays of the model": f"{len(model):,}" if isinstance(model, Mapping) else None,
        "engine": about.get("engine"),
        "participation": about.get("participation"),
        "weighting": about.get("weighting"),
        "evaluated every": _rounds(about.get("evaluate_every")),
        "measured on": "training data, as the clients report it" if in_training else None,
        "clients' replies pass": about.get("before_send"),
        "privacy": (about.get("privacy") or {}).get("kind"),
    }
    training = about.get("training")
    if isinstance(training, Mapping):
        facts["optimizer"] = _optimizer_text(str(training.get("optimizer")))
        facts["batch size"] = training.get("batch_size")
        duration = str(training.get("duration")).split(", ")
        facts["trained for"] = ", ".join(d for d in duration if not d.startswith("None"))
    return [
        [name, str(value)[:LONGEST_VALUE]] for name, value in facts.items() if value is not None
    ]


def rule_text(rule: JSON | None) -> str:
    """Write a rule as in Python, without the settings that have their default.

    Examples
    --------
    >>> rule_text({"name": "AutoRule", "settings": {"coverage": 0.5, "error_level": 0.05}})
    'AutoRule(coverage=0.5)'
    """
    if not isinstance(rule, dict):
        return ""
    name, settings = str(rule.get("name")), rule.get("settings") or {}
    shipped = getattr(rules, name, None)
    defaults = (
        {field.name: field.default for field in dataclasses.fields(shipped)}
        if dataclasses.is_dataclass(shipped)
        else {}
    )
    changed = [
        f"{key}={value!r}"
        for key, value in settings.items()
        if key not in defaults or _as_json(defaults[key]) != value
    ]
    return f"{name}({', '.join(changed)})"


def _optimizer_text(saved: str) -> str:
    """Shorten the saved description of an optimizer to its name and learning rate."""
    rate = re.search("'lr': '([^']+)'", saved)
    return saved.split(" [")[0] + (f", learning rate {rate[1]}" if rate else "")


def _rounds(count: int | None) -> str | None:
    return None if count is None else f"{count} rounds" if count != 1 else "round"


def _as_json(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
