"""A round: what is to happen is decided first, and only then does anything change.

:func:`decide` is pure: it reads the state and the replies and returns a plan. Whatever a user's
rule or aggregate raises, nothing has changed. :func:`commit` alone changes the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedbranch.core.projection import Projection
from fedbranch.errors import InvalidUpdate
from fedbranch.protocol.client_ids import shown_id
from fedbranch.rules import Decision
from fedbranch.server.examine import Outcome, examine
from fedbranch.server.guard import usual_lengths
from fedbranch.server.leaf import Leaf, LeafMemory, phase_after
from fedbranch.server.options import ServerOptions
from fedbranch.server.records import RoundRecord, Routing
from fedbranch.server.replies.checks import check_losses
from fedbranch.server.replies.intake import Intake
from fedbranch.server.replies.store import LeafStore
from fedbranch.server.reviews import due_for_review, is_overdue, review
from fedbranch.server.routing import routes
from fedbranch.server.state import Changes, ServerState
from fedbranch.server.surgery import forget_replies, merge_split, place
from fedbranch.tree import Edge, ParameterTree

__all__ = ["PlannedSplit", "RoundPlan", "commit", "decide"]

Losses = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedSplit:
    """A leaf that becomes an inner node.

    Attributes
    ----------
    node_id, groups
        The leaf, and the clients of each child.
    store
        The replies of these clients, by which newcomers will be routed.
    remembered
        What the leaf remembers if the split is taken back.
    """

    node_id: int
    groups: tuple[tuple[str, ...], ...]
    store: LeafStore
    remembered: LeafMemory


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundPlan:
    """What is to happen in a round.

    Attributes
    ----------
    round
        Counted from 1.
    outcomes
        One for each leaf that was examined.
    splits
        Those of them that split.
    leaves
        Leaf -> its phase, memory and replies after the round; without those that split.
    reviews
        One decision for each split that was looked at again.
    routed
        The clients that go down.
    set_aside
        Clients whose last reply the guard has set aside.
    refused
        Client id -> why its reply, or its losses, are not used.
    metrics
        Client id -> what it reported, of the replies that are used.
    """

    round: int
    outcomes: tuple[Outcome, ...]
    splits: tuple[PlannedSplit, ...]
    leaves: Mapping[int, Leaf]
    reviews: tuple[Decision, ...]
    routed: tuple[Routing, ...]
    set_aside: frozenset[str]
    refused: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, float | None]]


def decide(
    state: ServerState,
    options: ServerOptions,
    projection: Projection | None,
    intake: Intake,
    losses: Mapping[str, Sequence[float]],
) -> RoundPlan:
    """Decide what happens in a round; nothing changes.

    Parameters
    ----------
    state, options, projection
        Of the server.
    intake
        The replies of the round.
    losses
        Client id -> its loss under each of the models that it was asked to measure.
    """
    tree, this_round = state.tree, state.round + 1
    replies = intake.replies
    at_node, refused = intake.by_node({*state.changes.gone, *state.changes.moved})
    at_leaf = {node_id: ids for node_id, ids in at_node.items() if tree[node_id].is_leaf}
    at_inner = {node_id: ids for node_id, ids in at_node.items() if node_id not in at_leaf}
    routed, unroutable = routes(tree, at_inner, replies, options.guard, state.set_aside)
    leaves = _with_replies(state, intake, at_leaf)
    aside_now = _set_aside(leaves, options, state.set_aside)
    refused |= unroutable | aside_now
    told = _sort_losses(state, options, losses)
    for leaf_id, own in told.of_leaves.items():
        if leaf_id in leaves:
            leaves[leaf_id] = leaves[leaf_id].with_losses(own)

    have_answered = {client_id for ids in at_leaf.values() for client_id in ids}
    set_aside = (state.set_aside - have_answered) | aside_now.keys()
    set_aside |= {client_id for client_id in intake.aside if client_id in tree}
    num_waited_for = _num_waited_for(state, leaves, set_aside, routed)
    num_leaves = len(tree.leaves)
    outcomes: list[Outcome] = []
    splits: list[PlannedSplit] = []
    for leaf_id, leaf in sorted(leaves.items()):
        if not leaf.stands_still and (leaf.store is None or not leaf.store.replies):
            continue
        outcome = examine(
            tree[leaf_id],
            leaf,
            options=options,
            projection=projection,
            this_round=this_round,
            num_members=num_waited_for[leaf_id],
            num_new=sum(client_id not in aside_now for client_id in at_leaf.get(leaf_id, ())),
            most_groups=options.most_clusters - num_leaves + 1,
        )
        outcomes.append(outcome)
        if outcome.decision.verdict == "split":
            splits.append(_planned_split(leaf, outcome.decision))
            del leaves[leaf_id]
            num_leaves += len(outcome.decision.groups) - 1
        else:
            leaves[leaf_id] = _leaf_after(leaf, outcome, tree[leaf_id].version)
    return RoundPlan(
        round=this_round,
        outcomes=tuple(outcomes),
        splits=tuple(splits),
        leaves=leaves,
        reviews=tuple(
            review(tree, options.rule, node_id, this_round, own)
            for node_id, own in told.of_reviews.items()
        ),
        routed=routed,
        set_aside=frozenset(set_aside),
        refused=dict(sorted((told.refused | intake.refused | refused).items())),
        metrics={i: replies[i].metrics for i in sorted(replies) if i not in refused},
    )


def _with_replies(
    state: ServerState, intake: Intake, at_leaf: Mapping[int, Sequence[str]]
) -> dict[int, Leaf]:
    """Return the leaves with what they have now: leaf -> leaf."""
    leaves = dict(state.leaves)
    for leaf_id in sorted({*leaves, *at_leaf}):
        leaf = leaves.get(leaf_id, Leaf())
        new = {client_id: intake.replies[client_id] for client_id in at_leaf.get(leaf_id, ())}
        leaves[leaf_id] = replace(leaf, store=intake.store(leaf_id, leaf.store, new))
    return leaves


def _set_aside(
    leaves: dict[int, Leaf], options: ServerOptions, already: Iterable[str]
) -> dict[str, str]:
    """Take the replies out of the leaves that the guard sets aside: client id -> why."""
    guard, found = options.guard, dict[str, str]()
    if guard is None:
        return found
    for leaf_id, leaf in leaves.items():
        if leaf.store is None:
            continue
        # Replies that are summed were judged by their lengths when they came in.
        find = guard.set_aside if options.keep_updates else guard.strangers
        own = find(leaf.store.replies, set(already))
        leaves[leaf_id] = leaf.without(own)
        found |= own
    return found


@dataclass(frozen=True)
class _SortedLosses:
    """Losses by what they were asked for.

    Attributes
    ----------
    of_leaves
        Leaf -> client id -> losses under its proposal's trials.
    of_reviews
        Inner node -> client id -> losses; of each split whose review takes place.
    refused
        Client id -> why its losses are not used.
    """

    of_leaves: Mapping[int, Losses]
    of_reviews: Mapping[int, Losses]
    refused: dict[str, str]


def _sort_losses(
    state: ServerState, options: ServerOptions, losses: Mapping[str, Sequence[float]]
) -> _SortedLosses:
    if not isinstance(losses, Mapping):
        raise TypeError(
            f"losses is a {type(losses).__name__}; pass a mapping: client id -> its losses"
        )
    tree, this_round = state.tree, state.round + 1
    due = due_for_review(tree, options.rule, state.num_reviews, this_round, state.standing_still)
    reviewed: dict[int, dict[str, tuple[float, ...]]] = {node_id: {} for node_id in due}
    of_leaves: dict[int, dict[str, tuple[float, ...]]] = {}
    refused: dict[str, str] = {}
    for client_id, measured in sorted(losses.items(), key=lambda pair: shown_id(pair[0])):
        try:
            if client_id not in state.on_trial:
                raise InvalidUpdate("sent losses, but was not asked for any")
            node_id, num_trials, leaf_ids = state.on_trial[client_id]
            checked = check_losses(measured, num_trials)
            present = tuple(leaf.id for leaf in tree.leaves_below(node_id))
            if leaf_ids and leaf_ids != present:
                raise InvalidUpdate("sent losses for clusters that no longer exist")
        except InvalidUpdate as error:
            refused[shown_id(client_id)] = str(error)
            continue
        home = reviewed[node_id] if node_id in reviewed else of_leaves.setdefault(node_id, {})
        home[client_id] = checked
    of_reviews = {
        node_id: own
        for node_id, own in reviewed.items()
        if own or is_overdue(tree, options.rule, state.num_reviews, node_id, this_round)
    }
    return _SortedLosses(of_leaves, of_reviews, refused)


def _num_waited_for(
    state: ServerState,
    leaves: Mapping[int, Leaf],
    set_aside: Iterable[str],
    routed: Iterable[Routing],
) -> dict[int, int]:
    """Count the clients of each leaf that have answered or can be waited for.

    These are its members and those that arrive, but for clients that are away or set aside and
    have not answered.
    """
    positions = state.tree.positions
    arrivals = Counter(move.to_node for move in routed)
    found: dict[int, int] = {}
    for leaf_id, leaf in leaves.items():
        found[leaf_id] = state.tree.num_members(leaf_id) + arrivals[leaf_id]
        num_away = positions.num_away(leaf_id)
        if num_away and leaf.store is not None:
            num_away -= sum(map(positions.is_away, leaf.store.replies))
        found[leaf_id] -= num_away
    for client_id in set_aside:
        node_id = state.tree.position(client_id)
        if node_id in leaves and not leaves[node_id].has_reply_of(client_id):
            found[node_id] -= not positions.is_away(client_id)
    return found


def _planned_split(leaf: Leaf, decision: Decision) -> PlannedSplit:
    assert leaf.store is not None, "a split is made from replies"
    # What was usual for all is so for each cluster, until it has trained by itself.
    usual = usual_lengths(list(leaf.store.replies.values())) or leaf.memory.usual
    return PlannedSplit(
        node_id=decision.node_id,
        groups=decision.groups,
        store=leaf.store,
        remembered=LeafMemory(
            num_merged=leaf.memory.num_merged, past=leaf.memory.past, usual=usual
        ),
    )


def _leaf_after(leaf: Leaf, outcome: Outcome, version: int) -> Leaf:
    """Return a leaf after a decision that does not split it."""
    decision = outcome.decision
    phase = phase_after(leaf, decision, decision.round)
    if decision.verdict == "hold":
        store = None if leaf.store is None else leaf.store.at_the_end_of(decision.round)
        return replace(leaf, phase=phase, store=store)
    if outcome.steps is not None:
        version += 1
    memory = leaf.memory.after_training(leaf.phase, decision, version, outcome.past_round)
    if outcome.past_round is not None and leaf.store is not None:
        memory = replace(memory, usual=usual_lengths(list(leaf.store.replies.values())))
    return Leaf(phase=phase, memory=memory)


def commit(state: ServerState, plan: RoundPlan) -> RoundRecord:
    """Change the state as a plan says, and return the record of the round.

    Raises
    ------
    CannotWrite
        If edges are kept on disk and cannot be written. Then nothing has changed.
    """
    edges = _edges_of(state.tree, plan.splits)
    state.round = plan.round
    state.leaves = dict(plan.leaves)
    state.set_aside = set(plan.set_aside)
    # These clients train, or go on down, from the next round on.
    place(state, {move.client_id: move.to_node for move in plan.routed})
    for split in plan.splits:
        _split(state, split, edges[split.node_id])
    for outcome in plan.outcomes:
        if outcome.steps is not None:
            state.tree.advance(outcome.decision.node_id, *outcome.steps)
    for decision in plan.reviews:
        state.num_reviews[decision.node_id] = state.num_reviews.get(decision.node_id, 0) + 1
        if decision.verdict == "merge":
            merge_split(state, decision.node_id)
        forget_replies(state, list(decision.moves))
        place(state, decision.moves)
    record = _record(state, plan)
    state.asked, state.on_trial, state.changes = {}, {}, Changes()
    state.presence.count_out(state.round + 1)
    return record


def _edges_of(tree: ParameterTree, splits: Iterable[PlannedSplit]) -> dict[int, list[Edge]]:
    """Make what the edges of the splits will keep, by the node that is split."""
    edges: dict[int, list[Edge]] = {}
    try:
        for split in splits:
            groups = []
            for group in split.groups:
                replies = {client_id: split.store.replies[client_id] for client_id in group}
                groups.append({i: one.rows.compared[one.row] for i, one in replies.items()})  # type: ignore[index]  # every store has what is compared
            edges[split.node_id] = tree.prepared_edges(groups)
    except BaseException:
        for edge in (edge for made in edges.values() for edge in made):
            edge.discard()
        raise
    return edges


def _split(state: ServerState, split: PlannedSplit, edges: list[Edge]) -> None:
    # The mean is not added: the node keeps the very parameters at which the updates on its edges
    # were computed, and the children start from there.
    child_ids = state.tree.split(split.node_id, edges, in_round=state.round)
    state.changes.children[split.node_id] = child_ids
    for child_id, group in zip(child_ids, split.groups, strict=True):
        state.changes.moved |= dict.fromkeys(group, child_id)
    state.archive[split.node_id] = split.remembered
    if split.remembered.usual:
        memory = LeafMemory(usual=split.remembered.usual)
        state.leaves |= {child_id: Leaf(memory=memory) for child_id in child_ids}


def _record(state: ServerState, plan: RoundPlan) -> RoundRecord:
    changes = state.changes
    return RoundRecord(
        round=plan.round,
        decisions=(*(outcome.decision for outcome in plan.outcomes), *plan.reviews),
        refused=plan.refused,
        routed=plan.routed,
        joined=tuple(sorted(changes.joined)),
        left=tuple(sorted(changes.left)),
        cluster_sizes={leaf.id: state.tree.num_members(leaf.id) for leaf in state.tree.leaves},
        children=dict(changes.children),
        vanished=dict(sorted(changes.vanished.items())),
        moved=dict(sorted(changes.moved.items())),
        metrics=plan.metrics,
    )
