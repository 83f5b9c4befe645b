"""The life of a leaf: its phases, and what leads from one to the next.

A leaf is a cluster of the tree. In each round in which it has replies a rule examines it and
decides; the decision is an event, and :data:`TRANSITIONS` says which phase comes after which. The
rule's questions to clients, the checks of its decisions and the diagram in ``docs/algorithm.md``
all follow from that table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from fedbranch.rules import Decision, Groups, PastRound
from fedbranch.server.replies.store import LeafStore

__all__ = [
    "EVENT_OF",
    "TRANSITIONS",
    "Collecting",
    "Event",
    "Halving",
    "Leaf",
    "LeafMemory",
    "Phase",
    "Proposing",
    "Split",
    "Training",
    "event_of",
    "phase_after",
]


# Phases


@dataclass(frozen=True)
class Training:
    """Updates are averaged, and the parameters move in every round."""

    rounds_held = 0
    halves = None


@dataclass(frozen=True)
class Halving:
    """Like training, but clients are asked for half updates; the number names the halves."""

    halves: int
    rounds_held = 0


@dataclass(frozen=True)
class Collecting:
    """The parameters stand still until enough clients have answered at them."""

    rounds_held: int
    halves: int | None


@dataclass(frozen=True)
class Proposing:
    """The parameters stand still until clients have measured what the proposed groups gain.

    Attributes
    ----------
    groups
        Client ids of each group, as the rule proposed them.
    since
        The round of the proposal.
    losses
        Client id -> its losses under the proposal's trials.
    """

    rounds_held: int
    halves: int | None
    groups: Groups
    since: int
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """The leaf has become an inner node; its parameters are frozen."""


Phase: TypeAlias = Training | Halving | Collecting | Proposing


# Events and transitions


class Event(Enum):
    """What leads from one phase to the next: a rule's decision, or its review of a split."""

    TRAIN = "train"
    ASK_HALVES = "train, ask for half updates"
    HOLD = "hold"
    PROPOSE = "propose groups, ask for losses"
    SPLIT = "split"
    KEEP = "review: keep"
    MERGE = "review: merge"
    UNDO = "undo"


# (verdict, asks) of a decision about a leaf -> event. A decision of any other kind is refused.
EVENT_OF = {
    ("train", "nothing"): Event.TRAIN,
    ("train", "halves"): Event.ASK_HALVES,
    ("hold", "nothing"): Event.HOLD,
    ("hold", "losses"): Event.PROPOSE,
    ("split", "nothing"): Event.SPLIT,
}

_AFTER_AN_EXAMINATION: Mapping[Event, type] = {
    Event.TRAIN: Training,
    Event.ASK_HALVES: Halving,
    Event.HOLD: Collecting,
    Event.PROPOSE: Proposing,
    Event.SPLIT: Split,
}

TRANSITIONS: Mapping[type, Mapping[Event, type]] = {
    Training: _AFTER_AN_EXAMINATION,
    Halving: _AFTER_AN_EXAMINATION,
    Collecting: _AFTER_AN_EXAMINATION,
    Proposing: _AFTER_AN_EXAMINATION,
    Split: {Event.KEEP: Split, Event.MERGE: Training, Event.UNDO: Training},
}


def event_of(decision: Decision) -> Event:
    """Return the event that a decision about a leaf is.

    Raises
    ------
    KeyError
        If it asks for what its verdict does not go with.
    """
    return EVENT_OF[decision.verdict, decision.asks]


# A leaf


@dataclass(frozen=True, kw_only=True)
class LeafMemory:
    """What a leaf remembers of its rounds and examinations.

    Attributes
    ----------
    past
        The rounds in which it trained, from the first on.
    usual
        Median lengths of the replies when it last trained, where they are sketched.
    num_examined
        How many examinations with half updates did not end in a split.
    examined_at, rounds_held_for_it, last_measured
        Of the last of these: the leaf's version after it, for how many rounds the leaf stood
        still, and what was measured.
    num_merged
        How many splits of the leaf were merged back.
    hold_ended
        The leaf's version after the last hold without a split.
    """

    past: tuple[PastRound, ...] = ()
    usual: Mapping[str, float] = field(default_factory=dict)
    num_examined: int = 0
    examined_at: int | None = None
    rounds_held_for_it: int = 0
    last_measured: Mapping[str, float] = field(default_factory=dict)
    num_merged: int = 0
    hold_ended: int | None = None

    def after_training(
        self, phase: Phase, decision: Decision, version: int, past: PastRound | None
    ) -> LeafMemory:
        """Remember an examination after which the leaf trains.

        Parameters
        ----------
        phase
            In which it was examined.
        decision
            What came of it.
        version
            Of the leaf, after it has trained.
        past
            The round; None if there was no reply to train on.
        """
        memory = self
        if phase.halves is not None:
            memory = replace(
                memory,
                num_examined=self.num_examined + 1,
                examined_at=version,
                rounds_held_for_it=phase.rounds_held,
                last_measured=decision.measurements,
            )
        if phase.rounds_held:
            memory = replace(memory, hold_ended=version)
        if past is not None:
            memory = replace(memory, past=(*self.past, past))
        return memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Leaf:
    """A leaf of the tree, but for its model and its members.

    Attributes
    ----------
    phase
        Where it is in its life.
    memory
        What it remembers.
    store
        The replies at its present parameters; None if there are none. Beyond the round only a
        leaf that stands still has any; one whose replies were all set aside keeps its sums.
    """

    phase: Phase = Training()
    memory: LeafMemory = LeafMemory()
    store: LeafStore | None = None

    @property
    def stands_still(self) -> bool:
        """True while the parameters stand still and replies are collected."""
        return self.phase.rounds_held > 0

    def has_reply_of(self, client_id: str) -> bool:
        """Return whether a client has answered at the leaf's present parameters."""
        return self.store is not None and client_id in self.store.replies

    @property
    def proposal(self) -> Groups:
        """The proposed groups without clients that have left; empty if a whole group has."""
        if not isinstance(self.phase, Proposing):
            return ()
        groups = tuple(
            tuple(i for i in group if self.has_reply_of(i)) for group in self.phase.groups
        )
        return groups if all(groups) else ()

    @property
    def losses(self) -> Mapping[str, tuple[float, ...]]:
        """Client id -> its losses under the proposal's trials."""
        return self.phase.losses if isinstance(self.phase, Proposing) else {}

    def with_losses(self, losses: Mapping[str, tuple[float, ...]]) -> Leaf:
        """Take what clients measured; without a proposal nothing was asked for."""
        if not losses or not isinstance(self.phase, Proposing):
            return self
        return replace(self, phase=replace(self.phase, losses={**self.phase.losses, **losses}))

    def without(self, client_ids: Iterable[str]) -> Leaf:
        """Drop the replies and the losses of some clients."""
        gone = set(client_ids)
        leaf = self
        if self.store is not None and not gone.isdisjoint(self.store.replies):
            leaf = replace(leaf, store=self.store.without(gone))
        if isinstance(self.phase, Proposing) and not gone.isdisjoint(self.phase.losses):
            losses = {i: own for i, own in self.phase.losses.items() if i not in gone}
            leaf = replace(leaf, phase=replace(self.phase, losses=losses))
        return leaf

    def lacking(self, client_ids: Iterable[str]) -> list[str]:
        """Return those of some clients that can still give what the examination waits for."""
        proposed: set[str] = set()
        if self.store is None or self.store.can_measure:
            proposed = {client_id for group in self.proposal for client_id in group}
        return [
            client_id
            for client_id in client_ids
            if not self.has_reply_of(client_id)
            or (client_id in proposed and client_id not in self.losses)
        ]


def phase_after(leaf: Leaf, decision: Decision, this_round: int) -> Phase:
    """Return the phase after a decision that does not split.

    Parameters
    ----------
    leaf
        As it was examined.
    decision
        About it.
    this_round
        In which it was made.
    """
    event = event_of(decision)
    kind = TRANSITIONS[type(leaf.phase)][event]
    phase = leaf.phase
    if kind is Halving:
        return Halving(halves=this_round)
    if kind is Collecting:
        return Collecting(rounds_held=phase.rounds_held + 1, halves=phase.halves)
    if kind is Proposing:
        if isinstance(phase, Proposing) and decision.groups == leaf.proposal:
            return replace(phase, rounds_held=phase.rounds_held + 1)  # it goes on waiting
        return Proposing(
            rounds_held=phase.rounds_held + 1,
            halves=phase.halves,
            groups=decision.groups,
            since=this_round,
        )
    assert kind is Training, f"{event} leads to {kind.__name__}, which is no phase of a leaf"
    return Training()
