"""What the server has collected about a leaf, and what an examination made of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fedbranch.core.projection import Projection
from fedbranch.rules import Decision, Groups, PastRound
from fedbranch.server.guard import REPLIES_TO_COMPARE
from fedbranch.server.replies.reply import (
    LENGTHS_OF,
    Reply,
    replies_from_state,
    replies_to_state,
    replies_to_tensors,
    stacked,
)
from fedbranch.server.replies.summed import Sums
from fedbranch.storage.checkpoint import LastingTensors, Tensors
from fedbranch.types import JSON, Vector

__all__ = ["Case", "Outcome", "usual_lengths"]


@dataclass
class Case:
    """What the server has collected about a leaf, and remembers of its examinations."""

    replies: dict[str, Reply] = field(default_factory=dict)  # at the leaf's present parameters
    rounds_held: int = 0
    hold_ended: int | None = None  # the leaf's version after a hold without a split
    halves: int | None = None  # names the halves that its clients are asked for
    proposal: Groups = ()
    proposed_in: int = 0  # round
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    num_examined: int = 0
    num_merged: int = 0
    examined_at: int | None = None  # the leaf's version after the last examination
    rounds_held_for_it: int = 0
    last_measured: Mapping[str, float] = field(default_factory=dict)
    past: list[PastRound] = field(default_factory=list)
    sums: Sums | None = None  # of updates that were not kept, at the leaf's present parameters
    usual: Mapping[str, float] = field(default_factory=dict)  # median lengths when it last trained
    held_since: dict[str, int] = field(default_factory=dict)  # client id -> round of its reply
    # For checkpoints: round -> whose replies of that round are held, and these, which never change.
    _held: dict[int, tuple[list[str], LastingTensors]] = field(default_factory=dict, repr=False)

    def copy(self) -> Case:
        """Copy it, so that what comes in can be added to the copy."""
        return replace(
            self,
            replies=dict(self.replies),
            losses=dict(self.losses),
            held_since=dict(self.held_since),
            _held=dict(self._held),
        )

    def forget(self, client_id: str) -> None:
        """Drop what a client has sent."""
        self.replies.pop(client_id, None)
        self.held_since.pop(client_id, None)
        self.losses.pop(client_id, None)

    @property
    def present_proposal(self) -> Groups:
        """The proposed groups without clients that have left; empty if a group has."""
        groups = tuple(tuple(i for i in group if i in self.replies) for group in self.proposal)
        return groups if all(groups) else ()

    def lacking(self, client_ids: Iterable[str]) -> list[str]:
        """Give those of the clients who can still give what the examination waits for."""
        proposed = {client_id for group in self.present_proposal for client_id in group}
        if self.sums is not None:  # nobody can be asked for losses
            proposed = set()
        return [
            client_id
            for client_id in client_ids
            if client_id not in self.replies
            or (client_id in proposed and client_id not in self.losses)
        ]

    def close(self, outcome: Outcome, version: int, this_round: int) -> None:
        """Go on after a decision that did not split; the leaf's version is the one after it."""
        decision = outcome.decision
        if decision.verdict == "hold":
            self.rounds_held += 1
            for client_id in self.replies:
                self.held_since.setdefault(client_id, this_round)
            if decision.groups != self.present_proposal:  # also if a whole group has left
                self.proposal, self.proposed_in = decision.groups, this_round
                self.losses = {}
            return
        if self.halves is not None:
            self.num_examined += 1
            self.examined_at, self.rounds_held_for_it = version, self.rounds_held
            self.last_measured = decision.measurements
        if self.rounds_held:
            self.hold_ended = version
        if outcome.past_round is not None:
            self.past.append(outcome.past_round)
            self.usual = usual_lengths(self.replies.values())
        self.sums = None
        self.replies, self.losses, self.proposal, self.rounds_held = {}, {}, (), 0
        self.held_since, self._held = {}, {}
        self.halves = this_round if decision.asks == "halves" else None

    def to_state(self, name: str = "held") -> tuple[JSON, dict[str, Tensors]]:
        """Describe the case as JSON and files, whose names begin with this one, for a checkpoint.

        What was held before is in files of its own, one for each round, which last.
        """
        self._held = dict(self._grouped())
        files: dict[str, Tensors] = {f"{name}-{i}": held for i, (_, held) in self._held.items()}
        state: JSON = {
            "held": {
                str(round_): replies_to_state({i: self.replies[i] for i in client_ids})
                for round_, (client_ids, _) in self._held.items()
            },
            "rounds_held": self.rounds_held,
            "hold_ended": self.hold_ended,
            "halves": self.halves,
            "proposal": [list(group) for group in self.proposal],
            "proposed_in": self.proposed_in,
            "losses": {i: [repr(loss) for loss in own] for i, own in self.losses.items()},
            "num_examined": self.num_examined,
            "num_merged": self.num_merged,
            "examined_at": self.examined_at,
            "rounds_held_for_it": self.rounds_held_for_it,
            "last_measured": {name: repr(float(v)) for name, v in self.last_measured.items()},
            "past": [list(entry) for entry in self.past],
            "usual": {name: repr(float(length)) for name, length in self.usual.items()},
        }
        if self.sums is not None:
            state["sums"], files[name] = self.sums.to_state()
        return state, files

    def _grouped(self) -> Iterator[tuple[int, tuple[list[str], LastingTensors]]]:
        """Give the rounds from which replies are held, whose they are, and their tensors."""
        held: dict[int, list[str]] = {}
        for client_id in sorted(self.replies):
            held.setdefault(self.held_since[client_id], []).append(client_id)
        for round_, client_ids in sorted(held.items()):
            known = self._held.get(round_)
            if known is not None and known[0] == client_ids:
                yield round_, known
                continue
            replies = {client_id: self.replies[client_id] for client_id in client_ids}
            yield round_, (client_ids, LastingTensors(partial(replies_to_tensors, replies)))

    @classmethod
    def from_state(
        cls,
        state: JSON,
        files: Mapping[str, Tensors],
        name: str = "held",
        projection: Projection | None = None,
    ) -> Case:
        """Rebuild a case from what :meth:`to_state` gave."""
        replies: dict[str, Reply] = {}
        held_since: dict[str, int] = {}
        held: dict[int, tuple[list[str], LastingTensors]] = {}
        for key, of_round in state["held"].items():
            tensors = files[f"{name}-{int(key)}"]
            found = replies_from_state(of_round, tensors)
            if held_since.keys() & found.keys():
                raise ValueError("a client's reply is held twice")
            replies |= found
            held_since |= dict.fromkeys(found, int(key))
            same = LastingTensors(partial(dict, tensors), read=tensors)
            held[int(key)] = sorted(found), same
        sums = None
        if "sums" in state:
            if projection is None:
                raise ValueError("there are sums of updates, but no sketches of them")
            sums = Sums.from_state(state["sums"], files.get(name, {}), projection)
        return cls(
            replies=replies,
            rounds_held=state["rounds_held"],
            hold_ended=state["hold_ended"],
            halves=state["halves"],
            proposal=tuple(tuple(group) for group in state["proposal"]),
            proposed_in=state["proposed_in"],
            losses={i: tuple(map(float, own)) for i, own in state["losses"].items()},
            num_examined=state["num_examined"],
            num_merged=state["num_merged"],
            examined_at=state["examined_at"],
            rounds_held_for_it=state["rounds_held_for_it"],
            last_measured={which: float(v) for which, v in state["last_measured"].items()},
            past=[PastRound(*entry) for entry in state["past"]],
            sums=sums,
            # Not in states of older versions.
            usual={which: float(length) for which, length in state.get("usual", {}).items()},
            held_since=held_since,
            _held=held,
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """A decision, and the steps to take if it is to train."""

    decision: Decision
    params_step: Vector | None = None
    buffers_step: Vector | None = None
    past_round: PastRound | None = None


def usual_lengths(replies: Collection[Reply]) -> dict[str, float]:
    """Give the median lengths of replies that were not kept, for those who come after them."""
    measured = [reply for reply in replies if reply.rows.lengths is not None]
    if len(measured) < REPLIES_TO_COMPARE:
        return {}
    medians = np.median(stacked(measured, "lengths"), axis=0)
    return dict(zip(LENGTHS_OF, medians.tolist(), strict=True))
