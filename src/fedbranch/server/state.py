"""Everything that a server knows between two rounds, and how checkpoints keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fedbranch.core.projection import Projection
from fedbranch.population import Presence
from fedbranch.rules import PastRound
from fedbranch.server.leaf import (
    Collecting,
    Halving,
    Leaf,
    LeafMemory,
    Phase,
    Proposing,
    Training,
)
from fedbranch.server.replies.held import HeldReplies
from fedbranch.server.replies.kept import Kept
from fedbranch.server.replies.store import LeafStore
from fedbranch.server.replies.summed import Summed
from fedbranch.storage.checkpoint import Tensors
from fedbranch.tree import ParameterTree
from fedbranch.types import JSON

__all__ = ["Changes", "OnTrial", "ServerState", "state_from_json", "state_to_json"]


class OnTrial(NamedTuple):
    """What a client was asked to measure: at which node, how many models, of which leaves."""

    node_id: int
    num_trials: int
    leaf_ids: tuple[int, ...]


@dataclass
class Changes:
    """What happened to the population and the tree since the last record; see it.

    ``gone`` has all clients that were removed, also those that are in no record.
    """

    gone: set[str] = field(default_factory=set)
    joined: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    children: dict[int, tuple[int, ...]] = field(default_factory=dict)
    vanished: dict[int, int] = field(default_factory=dict)


@dataclass
class ServerState:
    """The state of a server. Between rounds :mod:`fedbranch.server.surgery` changes it too.

    Attributes
    ----------
    tree
        The clusters with their models, and where every client stands.
    presence
        Which clients are away.
    round
        How many rounds are complete.
    leaves
        Leaf -> phase, memory and replies; a leaf that is not here has the initial ones.
    archive
        Inner node -> what it remembers if its split is taken back.
    num_reviews
        Inner node -> how often its split was reviewed.
    asked
        Client id -> base of its task in the coming round.
    on_trial
        Client id -> what it was asked to measure in the coming round.
    set_aside
        Clients whose last reply the guard set aside.
    changes
        Since the last record.
    """

    tree: ParameterTree
    presence: Presence
    round: int = 0
    leaves: dict[int, Leaf] = field(default_factory=dict)
    archive: dict[int, LeafMemory] = field(default_factory=dict)
    num_reviews: dict[int, int] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    on_trial: dict[str, OnTrial] = field(default_factory=dict)
    set_aside: set[str] = field(default_factory=set)
    changes: Changes = field(default_factory=Changes)

    @classmethod
    def of(cls, tree: ParameterTree) -> ServerState:
        """Make the state of a new server."""
        return cls(tree, Presence(tree.positions))

    @property
    def standing_still(self) -> dict[int, Leaf]:
        """The leaves whose parameters stand still while replies are collected."""
        return {leaf_id: leaf for leaf_id, leaf in self.leaves.items() if leaf.stands_still}


# Files


def state_to_json(state: ServerState) -> tuple[JSON, dict[str, Tensors]]:
    """Describe the state as JSON and tensors, for a checkpoint."""
    tree_state, files = state.tree.to_state()
    is_presence_known, of_presence = state.presence.to_state()
    files |= of_presence
    cases: JSON = {}
    for leaf_id, leaf in state.leaves.items():
        cases[str(leaf_id)], held = _leaf_to_json(leaf, f"held-{leaf_id}")
        files |= held
    archive = {
        str(node_id): _leaf_to_json(Leaf(memory=memory), "held")[0]
        for node_id, memory in state.archive.items()
    }
    changes = state.changes
    return {
        "set_aside": sorted(state.set_aside),
        "round": state.round,
        "asked": state.asked,
        "on_trial": {i: [*asked[:2], list(asked.leaf_ids)] for i, asked in state.on_trial.items()},
        "cases": cases,
        "archive": archive,
        "num_reviews": {str(i): count for i, count in state.num_reviews.items()},
        "is_presence_known": is_presence_known,
        "joined": changes.joined,
        "left": changes.left,
        "moved": changes.moved,
        "children": {str(node_id): list(ids) for node_id, ids in changes.children.items()},
        "vanished": {str(node_id): into for node_id, into in changes.vanished.items()},
        "tree": tree_state,
    }, files


def state_from_json(
    state: JSON, files: Mapping[str, Tensors], tree: ParameterTree, projection: Projection | None
) -> ServerState:
    """Rebuild the state from what :func:`state_to_json` returned.

    Raises
    ------
    ValueError, KeyError, TypeError, AttributeError, IndexError
        If that cannot be.
    """
    number = state["round"]
    return ServerState(
        tree,
        Presence.from_state(state["is_presence_known"], files, tree.positions, number + 1),
        round=number,
        leaves={
            int(leaf_id): _leaf_from_json(case, files, f"held-{int(leaf_id)}", projection)
            for leaf_id, case in state["cases"].items()
        },
        archive={
            int(node_id): _leaf_from_json(case, {}, "held", None).memory
            for node_id, case in state["archive"].items()
        },
        num_reviews={int(node_id): count for node_id, count in state["num_reviews"].items()},
        asked=dict(state["asked"]),
        on_trial={
            client_id: OnTrial(node_id, num_trials, tuple(leaf_ids))
            for client_id, (node_id, num_trials, leaf_ids) in state["on_trial"].items()
        },
        set_aside=set(state["set_aside"]),
        changes=_changes_from_json(state, tree),
    )


def _changes_from_json(state: JSON, tree: ParameterTree) -> Changes:
    changes = Changes(joined=list(state["joined"]), left=list(state["left"]))
    if "moved" in state:
        changes.moved = dict(state["moved"])
        changes.children = {int(node_id): tuple(ids) for node_id, ids in state["children"].items()}
        changes.vanished = {int(node_id): into for node_id, into in state["vanished"].items()}
        return changes
    # A state of an older version: clients could be both, and given clusters were not noted.
    changes.joined = [client_id for client_id in changes.joined if client_id in tree]
    if not state["round"] and not tree.root.is_leaf:
        changes.children = {tree.root.id: tree.root.child_ids}
        changes.moved = {i: tree.position(i) for i in tree.client_ids if tree.position(i)}
    return changes


def _leaf_to_json(leaf: Leaf, name: str) -> tuple[JSON, dict[str, Tensors]]:
    phase, memory = leaf.phase, leaf.memory
    proposing = phase if isinstance(phase, Proposing) else None
    store: JSON = {"held": {}}
    files: dict[str, Tensors] = {}
    if leaf.store is not None:
        store, files = leaf.store.to_state(name)
    return {
        **store,
        "rounds_held": phase.rounds_held,
        "hold_ended": memory.hold_ended,
        "halves": phase.halves,
        "proposal": [list(group) for group in proposing.groups] if proposing else [],
        "proposed_in": proposing.since if proposing else 0,
        "losses": {i: [repr(loss) for loss in own] for i, own in leaf.losses.items()},
        "num_examined": memory.num_examined,
        "num_merged": memory.num_merged,
        "examined_at": memory.examined_at,
        "rounds_held_for_it": memory.rounds_held_for_it,
        "last_measured": {which: repr(float(v)) for which, v in memory.last_measured.items()},
        "past": [list(entry) for entry in memory.past],
        "usual": {which: repr(float(length)) for which, length in memory.usual.items()},
    }, files


def _leaf_from_json(
    state: JSON, files: Mapping[str, Tensors], name: str, projection: Projection | None
) -> Leaf:
    memory = LeafMemory(
        past=tuple(PastRound(*entry) for entry in state["past"]),
        # Not in states of older versions.
        usual={which: float(length) for which, length in state.get("usual", {}).items()},
        num_examined=state["num_examined"],
        examined_at=state["examined_at"],
        rounds_held_for_it=state["rounds_held_for_it"],
        last_measured={which: float(v) for which, v in state["last_measured"].items()},
        num_merged=state["num_merged"],
        hold_ended=state["hold_ended"],
    )
    return Leaf(
        phase=_phase_from_json(state),
        memory=memory,
        store=_store_from_json(state, files, name, projection),
    )


def _phase_from_json(state: JSON) -> Phase:
    rounds_held, halves = state["rounds_held"], state["halves"]
    if not rounds_held:
        return Training() if halves is None else Halving(halves=halves)
    if not state["proposal"]:
        return Collecting(rounds_held=rounds_held, halves=halves)
    return Proposing(
        rounds_held=rounds_held,
        halves=halves,
        groups=tuple(tuple(group) for group in state["proposal"]),
        since=state["proposed_in"],
        losses={i: tuple(map(float, own)) for i, own in state["losses"].items()},
    )


def _store_from_json(
    state: JSON, files: Mapping[str, Tensors], name: str, projection: Projection | None
) -> LeafStore | None:
    held = HeldReplies.from_state(state["held"], files, name)
    if "sums" not in state:
        return Kept(held) if held else None
    if projection is None:
        raise ValueError("there are sums of updates, but no sketches of them")
    return Summed.from_state(state, files, name, held, projection)
