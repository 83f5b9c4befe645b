"""The check of a rule: it answers any evidence with a decision that the server can follow."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np

from fedbranch.core.geometry import to_numpy
from fedbranch.rules import Decision, Evidence, Review, Rule
from fedbranch.server.examine import check_decision
from fedbranch.server.options import ServerOptions
from fedbranch.server.reviews import review
from fedbranch.server.server import Server
from fedbranch.testing.contract import Contract, shortened
from fedbranch.testing.evidence import made_evidence, made_reviews
from fedbranch.testing.quadratic_clients import NUM_PARAMS, QuadraticClients

__all__ = ["check_rule"]

ROUNDS, FEW_LEAVE_IN = 30, 12
OPTIONS: dict[str, dict[str, Any]] = {
    "keeps updates": {},
    "has sketches": {"sketch": 16},
    "adds updates up": {"sketch": 16, "keep_updates": False},
}
SAME_DECISION_REMEDY = (
    "decide by the evidence only: no random numbers, no clock, no memory of calls"
)


def check_rule(rule: Rule) -> None:
    """Check that a rule keeps the contract of :class:`fedbranch.Rule`.

    Parameters
    ----------
    rule
        The rule. If it has ``review`` and ``review_after``, these are checked as well.

    Raises
    ------
    AssertionError
        With the first clause of the contract that does not hold.

    Examples
    --------
    >>> from fedbranch import NeverSplit
    >>> check_rule(NeverSplit())
    """
    contract = Contract("fedbranch.Rule", shortened(rule))
    if isinstance(rule, type) or not callable(getattr(rule, "examine", None)):
        raise contract.broken(
            "a rule is an object with examine(evidence)",
            f"{rule!r} of type {type(rule).__name__}",
            "pass an object, not its class",
        )
    has_review = callable(getattr(rule, "review", None))
    if has_review:
        _check_dates(contract, rule)
    for name, make in made_evidence().items():
        _check_examination(contract, rule, name, make)
    if has_review:
        for name, (tree, losses) in made_reviews().items():
            with _refused(contract, "a review", name):
                watched = _Watched(contract, rule, name)
                review(tree, watched, tree.root.id, ROUNDS, dict(losses))
    for name, settings in OPTIONS.items():
        records = [_run(contract, rule, name, ServerOptions(**settings)) for _ in range(2)]
        if records[0] != records[1]:
            raise contract.broken(
                "the same evidence leads to the same decision",
                f"two runs of one server that {name}, with the same clients, differ",
                SAME_DECISION_REMEDY,
            )


def _check_examination(
    contract: Contract, rule: Rule, name: str, make: Callable[[], Evidence]
) -> None:
    """Show one piece of evidence twice."""
    watched = _Watched(contract, rule, name)
    decisions = []
    with _other_global_randomness() as draw_anew:
        for _ in range(2):
            evidence = make()
            with _refused(contract, "an examination", name):
                decision = watched.examine(evidence)
                check_decision(decision, evidence, rule)
            decisions.append(decision)
            draw_anew()
    if not _are_equal(*decisions):
        raise contract.broken(
            "the same evidence leads to the same decision",
            f"evidence {name!r}: first {shortened(decisions[0])}, then {shortened(decisions[1])}",
            SAME_DECISION_REMEDY,
        )


def _check_dates(contract: Contract, rule: Rule) -> None:
    dates = getattr(rule, "review_after", None)
    try:
        in_order = [int(date) for date in dates]  # type: ignore[union-attr]  # checked by trying
        is_right = all(a < b for a, b in zip([0, *in_order], in_order, strict=False))
    except TypeError:
        is_right = False
    if not is_right:
        raise contract.broken(
            "a rule with review has review_after: numbers of rounds, ascending and positive",
            f"review_after is {dates!r}",
            "set it, for example to (2, 5, 20)",
        )


# A server


def _run(contract: Contract, rule: Rule, name: str, options: ServerOptions) -> list[Any]:
    """Let a server run with the rule, while clients join, leave, and do not answer."""
    clients = QuadraticClients()
    watched = _Watched(contract, rule, f"of a server that {name}")
    server = Server(NUM_PARAMS, options=options, rule=watched)
    records = []
    for number in range(1, ROUNDS + 1):
        if number == FEW_LEAVE_IN:
            server.remove(clients.ids[:2])
        awaited = server.awaited()
        if awaited and number % 3 == 0:  # a client leaves while its cluster waits for it
            server.remove(awaited[:1])
        present = clients.present(number)
        tasks = server.plan(present)
        trials = server.trials(present)
        replies = {i: clients.update(i, task, number) for i, task in tasks.items()}
        losses = {i: clients.losses(i, own) for i, own in trials.items()}
        with _refused(contract, f"round {number}", f"of a server that {name}"):
            record = server.step(replies, losses)
        records.append(repr(record))
        known, placed = server.tree.client_ids, []
        for node in server.tree:
            placed += server.tree.members(node.id)
        if sorted(placed) != known:
            raise contract.broken(
                "after every decision each client has exactly one position",
                f"after round {number} clients {sorted(placed)} have positions; known are {known}",
                "name each client in one group at most",
            )
    return records


class _Watched:
    """A rule, with checks of what it does to its evidence and of what it returns."""

    def __init__(self, contract: Contract, rule: Rule, name: str) -> None:
        self._contract = contract
        self._rule = rule
        self._name = name
        if callable(getattr(rule, "review", None)):
            self.review_after = rule.review_after  # type: ignore[attr-defined]  # checked before
            self.review = self._review

    def __repr__(self) -> str:
        return repr(self._rule)

    def examine(self, evidence: Evidence) -> Decision:
        """Ask the rule about a cluster."""
        return self._asked("examine", self._rule.examine, evidence)

    def _review(self, shown: Review) -> Decision:
        return self._asked("review", self._rule.review, shown)  # type: ignore[attr-defined]  # it has one

    def _asked(self, call: str, ask: Callable[[Any], Decision], shown: Any) -> Decision:
        before = _digests(shown)
        with self._contract.answering(f"{call}, for evidence {self._name!r},"):
            decision = ask(shown)
        changed = sorted(name for name, digest in _digests(shown).items() if digest != before[name])
        if changed:
            raise self._contract.broken(
                "a rule never changes what it is shown",
                f"{call} changed {changed} of evidence {self._name!r}",
                "compute with copies",
            )
        if isinstance(decision, Decision):
            self._check_words(call, decision)
        return decision

    def _check_words(self, call: str, decision: Decision) -> None:
        reason = decision.reason
        if not isinstance(reason, str) or not reason.strip() or "\n" in reason:
            raise self._contract.broken(
                "a decision has a reason of one line",
                f"{call}, for evidence {self._name!r}: the reason is {reason!r}",
                "say in one line why",
            )
        odd = {
            name: value
            for name, value in decision.measurements.items()
            if not isinstance(name, str) or not isinstance(value, int | float | np.number)
        }
        if odd:
            raise self._contract.broken(
                "measurements are numbers, by name",
                f"{call}, for evidence {self._name!r}: {shortened(odd)}",
                "put texts into the reason",
            )


@contextmanager
def _refused(contract: Contract, what: str, name: str) -> Iterator[None]:
    """Turn the refusal of a decision into an error about the contract."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise contract.broken(
            "the server accepts every decision: about the asked node and round, with a verdict "
            "and a question that go together, and with disjoint groups of known clients",
            f"{what} {name!r}: {type(error).__name__}: {error}",
            "see fedbranch.Decision for what a decision may be",
        ) from error


@contextmanager
def _other_global_randomness() -> Iterator[Callable[[], None]]:
    """Yield a function that changes NumPy's global random state; restore it afterwards."""
    before = np.random.get_state()  # noqa: NPY002 -- a rule might draw from it
    try:
        yield lambda: np.random.seed(1)  # noqa: NPY002 -- likewise
    finally:
        np.random.set_state(before)  # noqa: NPY002 -- likewise


def _digests(shown: Any) -> dict[str, str]:
    """Hash every field of evidence, or of a review."""
    return {field.name: _digest(getattr(shown, field.name)) for field in fields(shown)}


def _digest(value: object) -> str:
    if hasattr(value, "shape"):
        return hashlib.sha256(to_numpy(value).tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return repr({key: value[key] for key in value})
    return repr(value)


def _are_equal(one: Decision, other: Decision) -> bool:
    """Compare decisions; measurements that are not numbers equal each other."""

    def key(decision: Decision) -> tuple[Any, ...]:
        measured = {
            name: None if math.isnan(value) else float(value)
            for name, value in decision.measurements.items()
        }
        rest = (decision.groups, decision.asks, decision.is_examination, dict(decision.moves))
        return decision.verdict, decision.reason, measured, *rest

    return key(one) == key(other)
