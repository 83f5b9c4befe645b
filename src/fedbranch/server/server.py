"""The server: clustered federated learning as a state machine over rounds.

Every client has a position in the parameter tree. At a leaf it trains: it gets the leaf's
parameters, and its update is averaged into them. At an inner node it descends: it gets
that node's frozen parameters, and its update is compared with the cached ones to choose a
child. So newcomers, clients that were absent when their cluster split, and partial
participation need no code of their own.

A cluster's parameters move, or it splits, only by updates that were computed at exactly
those parameters; while a rule asks to hold, they stand still and updates are collected.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

import numpy as np

from fedbranch.core.geometry import to_numpy
from fedbranch.errors import DamagedFile, InvalidUpdate
from fedbranch.population import Presence
from fedbranch.protocol.client_ids import checked_ids, shown_id, some_of
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.rules import Rule
from fedbranch.server.examine import examine, proposed_trials
from fedbranch.server.leaf import Case, Outcome, usual_lengths
from fedbranch.server.options import OptionKeywords, ServerOptions, options_from
from fedbranch.server.records import RoundRecord
from fedbranch.server.replies.checks import Expected, check_losses
from fedbranch.server.replies.intake import Intake, Situation
from fedbranch.server.reviews import Reviews, compared_models, merged_model
from fedbranch.server.routing import descents
from fedbranch.storage.checkpoint import Tensors, read_checkpoint, write_checkpoint
from fedbranch.tree import Edge, EdgeCache, ParameterTree, read_only, restored_cache
from fedbranch.types import JSON, Aggregate, Array

__all__ = ["Server"]

EXAMINATIONS_TO_FORGET = 6  # how many a split that did not pay counts for


class Server:
    """Clustered federated learning's server side, for any training loop.

    Each round: :meth:`plan` says what every client is to train at, the caller lets the
    clients do so, and :meth:`step` takes the updates.

    Parameters
    ----------
    num_params
        Length of the parameter vector.
    options
        How it averages, compares, guards and keeps updates.
    num_buffers
        Length of the vector of values that are averaged but never compared.
    compare
        ``"update"``: clusters are found from the updates. ``"signal"``: from the signal
        that every reply then must carry.
    num_signal
        Length of that signal, if it is not that of the parameters.
    **keywords
        The fields of :class:`ServerOptions`, in place of those of ``options``.

    Examples
    --------
    Two clients that pull in opposite directions get a model each:

    >>> from fedbranch import Thresholds
    >>> server = Server(1, rule=Thresholds(eps_mean=0.1, eps_max=0.5, gamma_max=0.5))
    >>> optimum = {"a": +1.0, "b": -1.0}
    >>> for _ in range(20):
    ...     tasks = server.plan(["a", "b"])
    ...     updates = {i: np.float32([optimum[i]]) - task.params for i, task in tasks.items()}
    ...     record = server.step({i: Update(0.9 * u, num_examples=1) for i, u in updates.items() if u})
    >>> server.clusters
    {1: ['a'], 2: ['b']}
    >>> [round(float(leaf.params[0]), 3) for leaf in server.tree.leaves]
    [1.0, -1.0]
    """

    def __init__(
        self,
        num_params: int,
        *,
        options: ServerOptions | None = None,
        num_buffers: int = 0,
        compare: Literal["update", "signal"] = "update",
        num_signal: int | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        if compare not in ("update", "signal"):
            raise ValueError(f"compare is {compare!r}; it must be one of ('update', 'signal')")
        options = options_from(options, keywords)
        if num_signal is not None and (compare != "signal" or operator.index(num_signal) < 1):
            raise ValueError(
                f"num_signal is {num_signal} with compare={compare!r}; it must be at least 1, and "
                "is for compare='signal' only"
            )
        self.tree = ParameterTree(num_params, num_buffers, cache=options.cache)
        self.compare = compare
        self.num_signal = num_signal  # None: as many as parameters
        self.options = options
        self.projection = options.projection_for(self._expected.num_compared)
        self.options = replace(options, sketch=self.projection)
        self.round = 0  # completed rounds
        self._asked: dict[str, str] = {}  # client id -> base of its task in this round
        self._on_trial: dict[str, tuple[int, int, list[int]]] = {}  # client id -> node, number
        # of trials, and the leaves that they compare
        self._cases: dict[int, Case] = {}  # leaf -> what was collected there
        self._archive: dict[int, Case] = {}  # inner node -> what it remembers, if it is merged
        self._reviews = Reviews(options.rule)
        self._presence = Presence(self.tree.positions)
        self._set_aside: set[str] = set()  # clients whose last reply the guard set aside
        self._joined: list[str] = []
        self._left: list[str] = []
        # What happened to the tree since the last record.
        self._moved: dict[str, int] = {}
        self._children: dict[int, tuple[int, ...]] = {}
        self._vanished: list[int] = []

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> ids of the clients that train there."""
        return {leaf.id: self.tree.members(leaf.id) for leaf in self.tree.leaves}

    @property
    def awaited(self) -> list[str]:
        """Clients whose answers a holding cluster is waiting for: ask them first.

        They may be most of all that are known: :meth:`awaited_among` some is cheaper.
        """
        self._presence.count_out(self.round + 1)
        return sorted(
            client_id
            for node_id, case in self._cases.items()
            if case.rounds_held
            for client_id in case.lacking(self.tree.positions.members([node_id], away=False))
            if client_id not in self._set_aside
        )

    def awaited_among(self, client_ids: Iterable[str]) -> list[str]:
        """Give those of some clients whose answers a holding cluster is waiting for, sorted."""
        holding = {node_id: case for node_id, case in self._cases.items() if case.rounds_held}
        if not holding:
            return []
        self._presence.count_out(self.round + 1)
        there = self.tree.positions.among(list(client_ids), holding, away=False)
        return sorted(
            client_id
            for node_id, case in holding.items()
            for client_id in case.lacking(there[node_id])
            if client_id not in self._set_aside
        )

    # A round

    def plan(self, client_ids: Iterable[str]) -> dict[str, Task]:
        """Say what each of these clients is to train at in the coming round.

        Parameters
        ----------
        client_ids
            The clients that can take part. Those never seen before join at the root.

        Returns
        -------
        dict
            Client id -> task. A client that has already answered at the parameters of a
            holding cluster gets none.
        """
        tasks = {}
        task_at: dict[int, Task] = {}  # all clients at a node have the same task
        ids = checked_ids(client_ids)
        self._place_newcomers(self.tree.positions.missing(ids), self.tree.root.id)
        for client_id, node_id in zip(ids, self.tree.positions.of_all(ids), strict=True):
            assert node_id is not None
            if self._has_answered(client_id, node_id):
                continue
            task = task_at.get(node_id)
            if task is None:
                task = task_at[node_id] = self._task(node_id)
            self._asked[client_id] = task.base
            tasks[client_id] = task
        return tasks

    def _task(self, node_id: int) -> Task:
        node = self.tree[node_id]
        case = self._cases.get(node_id)
        return Task(
            node_id=node.id,
            params=read_only(node.params),
            buffers=read_only(node.buffers),
            base=node.base,
            purpose="train" if node.is_leaf else "route",
            halves=None if case is None else case.halves,
        )

    def trials(self, client_ids: Iterable[str]) -> dict[str, tuple[Trial, ...]]:
        """Say what each of these clients is to measure in the coming round, beside training.

        To be called after :meth:`plan`. Most clients in most rounds have nothing to measure. A
        driver whose clients cannot measure does not call this, and rules decide without.

        Parameters
        ----------
        client_ids
            The clients that can take part.

        Returns
        -------
        dict
            Client id -> models; the client's loss under each goes to :meth:`step`.
        """
        ids = set(self._known(client_ids))
        trials: dict[str, tuple[Trial, ...]] = {}
        for node_id, case in sorted(self._cases.items()):
            asked = case.lacking(ids & case.replies.keys())
            if asked and self.options.keep_updates:
                proposed = proposed_trials(
                    self.tree[node_id],
                    case,
                    aggregate=self.options.aggregate,
                    weighting=self.options.weighting,
                    guard=self.options.guard,
                )
                trials |= {i: proposed[i] for i in sorted(asked)}
                self._on_trial |= {i: (node_id, len(proposed[i]), []) for i in asked}
        for node_id in self._due_for_review():
            models = compared_models(self.tree, node_id)
            leaf_ids = [leaf.id for leaf in self.tree.leaves_below(node_id)]
            there = self.tree.positions.among(sorted(ids), leaf_ids)
            for client_id in (i for own in there.values() for i in own):
                if client_id not in trials:
                    trials[client_id] = models
                    self._on_trial[client_id] = (node_id, len(models), leaf_ids)
        return trials

    def intake(self) -> Intake:
        """Begin to take the replies of the coming round one by one, in any order.

        To be called after :meth:`plan`; the round is made of it by :meth:`step`. Until then the
        server must not be changed.

        Examples
        --------
        >>> server = Server(2)
        >>> tasks = server.plan(["a", "b"])
        >>> intake = server.intake()
        >>> intake.add("b", Update(np.float32([0, 2]), num_examples=1))
        >>> intake.add("a", Update(np.float32([1, np.nan]), num_examples=1))
        'the update contains NaN or infinity; lower the learning rate'
        >>> server.step(intake).decisions[0].measurements["num_answered"]
        1
        """
        return Intake(
            Situation(
                round=self.round + 1,
                expected=self._expected,
                tree=self.tree,
                asked=self._asked,
                cases=self._cases,
                set_aside=self._set_aside,
                guard=self.options.guard,
                weighting=self.options.weighting,
                projection=self.projection,
                keeps_updates=self.options.keep_updates,
            )
        )

    def step(
        self,
        updates: Mapping[str, Update] | Iterable[tuple[str, Update]] | UpdateBatch | Intake,
        losses: Mapping[str, Sequence[float]] | None = None,
    ) -> RoundRecord:
        """Take the clients' replies: train, route and split.

        Parameters
        ----------
        updates
            Client id -> update, or pairs of them in any order; or all of them as one batch; or
            what :meth:`intake` gave and has been filled.
        losses
            Client id -> its loss under each of the models that :meth:`trials` named.

        Returns
        -------
        RoundRecord
            What happened and why. A reply that cannot be used is refused by itself, with
            its reason there; the rest of the round is as if that client had been absent.
        """
        this_round = self.round + 1
        intake = updates if isinstance(updates, Intake) else self.intake()
        if not isinstance(updates, Intake):
            intake.add_all(updates)
        intake.check_still_fits(self.tree, this_round)
        with intake.closing():
            return self._step(intake, losses or {})

    def _step(self, intake: Intake, losses: Mapping[str, Sequence[float]]) -> RoundRecord:
        """Make the round of what was taken in."""
        this_round = self.round + 1
        gone = intake.gone()
        replies = {i: reply for i, reply in intake.replies.items() if i not in gone}
        at_leaves, routed, unroutable = descents(
            self.tree, replies, self.options.guard, self._set_aside
        )
        refused = gone | unroutable
        cases = {node_id: case.copy() for node_id, case in self._cases.items()}
        leaf_ids = self.tree.positions.of_all(list(at_leaves))
        leaf_of = {i: leaf for i, leaf in zip(at_leaves, leaf_ids, strict=True) if leaf is not None}
        for client_id, reply in at_leaves.items():
            cases.setdefault(leaf_of[client_id], Case()).replies[client_id] = reply
        for node_id, sums in intake.sums().items():
            cases.setdefault(node_id, Case()).sums = sums
        set_aside = self._guarded(cases)
        refused |= set_aside
        unusable: dict[str, str] = {}  # losses, by client id
        reviewed = self._sort_losses(losses, cases, unusable)
        arrivals = Counter(move.to_node for move in routed)
        answers = Counter(
            leaf_of[client_id] for client_id in at_leaves if client_id not in set_aside
        )
        aside = {i for i in intake.aside if i in self.tree}  # the others have left since
        still_aside = (self._set_aside - at_leaves.keys()) | set_aside.keys() | aside
        absent = self._absent(cases, still_aside)
        outcomes: list[Outcome] = []
        num_leaves = len(self.tree.leaves)
        for node_id, case in sorted(cases.items()):
            if not case.replies and not case.rounds_held:
                continue
            outcome = examine(
                self.tree[node_id],
                case,
                rule=self.options.rule,
                aggregate=self.options.aggregate,
                weighting=self.options.weighting,
                round=this_round,
                num_members=self.tree.num_members(node_id) - absent[node_id] + arrivals[node_id],
                num_new=answers[node_id],
                guard=self.options.guard,
                most_groups=self.options.most_clusters - num_leaves + 1,
                projection=self.projection,
            )
            outcomes.append(outcome)
            if outcome.decision.verdict == "split":
                num_leaves += len(outcome.decision.groups) - 1
        reviews = [
            self._reviews.decide(self.tree, node_id, this_round, of_node)
            for node_id, of_node in reviewed.items()
        ]
        edges = self._edges_of(outcomes, cases)

        # Until here nothing has changed: whoever raised, the round can be tried again.
        self.round = this_round
        self._cases = cases
        self._set_aside = still_aside
        self.place({move.client_id: move.to_node for move in routed})  # from the next round on
        for outcome in outcomes:
            self._carry_out(outcome, edges)
        for decision in reviews:
            num_done = self._reviews.num_done
            num_done[decision.node_id] = num_done.get(decision.node_id, 0) + 1
            if decision.verdict == "merge":
                self.merge_split(decision.node_id)
            self._forget_replies(list(decision.moves))
            self.place(decision.moves)
        record = RoundRecord(
            round=self.round,
            decisions=(*(outcome.decision for outcome in outcomes), *reviews),
            refused=dict(sorted((unusable | intake.refused | refused).items())),
            routed=routed,
            joined=tuple(sorted(self._joined)),
            left=tuple(sorted(self._left)),
            cluster_sizes={leaf.id: self.tree.num_members(leaf.id) for leaf in self.tree.leaves},
            children=dict(self._children),
            vanished=tuple(sorted(self._vanished)),
            moved=dict(sorted(self._moved.items())),
            metrics={i: reply.metrics for i, reply in replies.items() if i not in refused},
        )
        self._asked, self._on_trial, self._joined, self._left = {}, {}, [], []
        self._moved, self._children, self._vanished = {}, {}, []
        return record

    def _absent(self, cases: Mapping[int, Case], aside: Iterable[str]) -> Counter[int]:
        """Count the members of each case that nobody waits for and that have not answered."""
        self._presence.count_out(self.round + 1)
        positions = self.tree.positions
        absent: Counter[int] = Counter()
        for node_id, case in cases.items():
            absent[node_id] = positions.num_away(node_id)
            if absent[node_id]:
                absent[node_id] -= sum(map(positions.is_away, case.replies))
        for client_id in aside:
            node_id = self.tree.position(client_id)
            if node_id in cases and client_id not in cases[node_id].replies:
                absent[node_id] += not positions.is_away(client_id)
        return absent

    @property
    def _expected(self) -> Expected:
        return Expected(
            num_params=self.tree.num_params,
            num_buffers=self.tree.num_buffers,
            compares_signal=self.compare == "signal",
            max_examples=self.options.max_examples,
            num_signal=self.num_signal,
        )

    def _has_answered(self, client_id: str, node_id: int) -> bool:
        case = self._cases.get(node_id)
        return case is not None and client_id in case.replies

    def _guarded(self, cases: Mapping[int, Case]) -> dict[str, str]:
        """Take the replies out of the cases that the guard sets aside: client id -> why."""
        if self.options.guard is None:
            return {}
        found: dict[str, str] = {}
        for case in cases.values():
            # Who is too long of those that are not kept, has been found already.
            find = (
                self.options.guard.set_aside
                if self.options.keep_updates
                else self.options.guard.strangers
            )
            for client_id, reason in find(case.replies, self._set_aside).items():
                case.forget(client_id)
                found[client_id] = reason
        return found

    def _edges_of(
        self, outcomes: Sequence[Outcome], cases: Mapping[int, Case]
    ) -> dict[int, list[Edge]]:
        """Make what the edges of the splits will keep, by the node that is split."""
        edges: dict[int, list[Edge]] = {}
        try:
            for outcome in outcomes:
                decision = outcome.decision
                if decision.verdict == "split":
                    replies = cases[decision.node_id].replies
                    edges[decision.node_id] = self.tree.prepared_edges(
                        [
                            {i: replies[i].rows.compared[replies[i].row] for i in group}
                            for group in decision.groups
                        ]
                    )
        except BaseException:
            for edge in (edge for made in edges.values() for edge in made):
                edge.discard()
            raise
        return edges

    def _carry_out(self, outcome: Outcome, edges: Mapping[int, list[Edge]]) -> None:
        """Change the tree as a decision asks."""
        decision = outcome.decision
        node_id = decision.node_id
        case = self._cases[node_id]
        if decision.verdict == "split":
            # The mean is not added: the node keeps the very parameters at which the updates
            # on its edges were computed, and the children start from there.
            child_ids = self.tree.split(node_id, edges[node_id], in_round=self.round)
            self._children[node_id] = child_ids
            for child_id, group in zip(child_ids, decision.groups, strict=True):
                self._moved |= dict.fromkeys(group, child_id)
            del self._cases[node_id]
            # What was usual for all is so for each cluster, until it has trained by itself.
            usual = usual_lengths(case.replies.values()) or case.usual
            if usual:
                self._cases |= {child_id: Case(usual=usual) for child_id in child_ids}
            self._archive[node_id] = Case(num_merged=case.num_merged, past=case.past, usual=usual)
            return
        if outcome.params_step is not None:
            self.tree.advance(node_id, outcome.params_step, outcome.buffers_step)
        case.close(outcome, self.tree[node_id].version, self.round)

    def _sort_losses(
        self,
        losses: Mapping[str, Sequence[float]],
        cases: Mapping[int, Case],
        refused: dict[str, str],
    ) -> dict[int, dict[str, tuple[float, ...]]]:
        """Add losses to the cases they were asked for; give back those for reviews, by node."""
        reviewed: dict[int, dict[str, tuple[float, ...]]] = {
            node_id: {} for node_id in self._due_for_review()
        }
        if not isinstance(losses, Mapping):
            raise TypeError(
                f"losses is a {type(losses).__name__}; pass a mapping: client id -> its losses"
            )
        for client_id, measured in sorted(losses.items(), key=lambda pair: shown_id(pair[0])):
            try:
                if client_id not in self._on_trial:
                    raise InvalidUpdate("sent losses that nobody asked for")
                node_id, num_trials, leaf_ids = self._on_trial[client_id]
                checked = check_losses(measured, num_trials)
                present = [leaf.id for leaf in self.tree.leaves_below(node_id)]
                if leaf_ids and leaf_ids != present:
                    raise InvalidUpdate("sent losses for clusters that are there no longer")
            except InvalidUpdate as error:
                refused[shown_id(client_id)] = str(error)
                continue
            if node_id in reviewed:
                reviewed[node_id][client_id] = checked
            elif node_id in cases:
                cases[node_id].losses[client_id] = checked
        return {
            node_id: of_node
            for node_id, of_node in reviewed.items()
            if of_node or self._reviews.is_overdue(self.tree, node_id, self.round + 1)
        }

    def _due_for_review(self) -> list[int]:
        still = [node_id for node_id, case in self._cases.items() if case.rounds_held]
        return self._reviews.due(self.tree, self.round + 1, still)

    # Changes from outside

    def join(self, client_ids: Iterable[str], node_id: int = 0) -> None:
        """Let clients join before they are asked for anything.

        Parameters
        ----------
        client_ids
            Clients that are not known yet. Those that :meth:`plan` has never seen join by
            themselves; this is for clients that are there but not asked yet.
        node_id
            Where they stand at first; by default at the root.
        """
        ids = checked_ids(client_ids)
        missing = self.tree.positions.missing(ids)
        if len(missing) < len(ids):
            known = sorted(set(ids) - set(missing))
            raise ValueError(f"clients {some_of(known)} have already joined")
        self._place_newcomers(ids, self.tree[node_id].id)

    def _place_newcomers(self, client_ids: Iterable[str], node_id: int) -> None:
        in_order = sorted(client_ids)  # so that the order in which they are named changes nothing
        self.tree.positions.place_all(in_order, node_id)
        self._joined += in_order
        if node_id != self.tree.root.id:
            self._moved |= dict.fromkeys(in_order, node_id)

    def place(self, places: Mapping[str, int]) -> None:
        """Put clients at nodes, from wherever they stood: client id -> node."""
        for client_id, node_id in places.items():
            if self.tree.position(client_id) != self.tree[node_id].id:
                self.tree.place(client_id, node_id)
                self._moved[client_id] = node_id

    def mark_present(self, client_ids: Iterable[str]) -> None:
        """Say which of the known clients are there, whether or not they will be asked.

        For drivers whose clients vanish without leaving: no split waits for a client that was
        not there in this and the nine rounds before. It keeps its position, and counts as a
        member of its cluster again as soon as it is back.
        """
        self._presence.mark(self._known(client_ids), self.round + 1)

    def remove(self, client_ids: Iterable[str]) -> None:
        """Let clients leave. If one comes back it is a newcomer and finds its way down again."""
        ids = self._known(client_ids)
        self._forget_replies(ids)
        self.tree.positions.remove(ids)
        self._set_aside.difference_update(ids)
        self._left += ids
        for client_id in ids:
            self._moved.pop(client_id, None)

    def reroute(self, client_ids: Iterable[str]) -> None:
        """Send clients back to the root, to find their cluster anew."""
        root = self.tree.root
        if not root.is_leaf and not self.tree.can_route(root.id):
            raise ValueError("the clusters were given, not found; nobody can be routed to them")
        ids = self._known(client_ids)
        self._forget_replies(ids)
        self.place(dict.fromkeys(ids, root.id))

    def _known(self, client_ids: Iterable[str]) -> list[str]:
        ids = checked_ids(client_ids)
        unknown = self.tree.positions.missing(ids)
        if unknown:
            raise ValueError(
                f"clients {some_of(unknown)} are not known; they never joined or have left"
            )
        return ids

    def _forget_replies(self, client_ids: Sequence[str]) -> None:
        standing = self.tree.positions.of_all(client_ids)
        for client_id, node_id in zip(client_ids, standing, strict=True):
            assert node_id is not None
            if node_id in self._cases:
                self._cases[node_id].forget(client_id)
            self._asked.pop(client_id, None)
            self._on_trial.pop(client_id, None)

    def undo_split(self, node_id: int) -> None:
        """Make a split cluster one again, at the parameters it had when it was split."""
        below = [node.id for node in self.tree.subtree(node_id)]
        self._moved |= dict.fromkeys(self.tree.positions.members(below[1:]), node_id)
        self._vanished += below[1:]
        self.tree.undo_split(node_id)
        self._on_trial = {i: asked for i, asked in self._on_trial.items() if asked[0] not in below}
        if node_id in self._archive:
            self._cases[node_id] = self._archive[node_id]
        for gone_id in below:
            if gone_id != node_id:
                self._cases.pop(gone_id, None)
            self._archive.pop(gone_id, None)
            self._reviews.num_done.pop(gone_id, None)

    def merge_split(self, node_id: int) -> None:
        """Make a split cluster one again, at the mean of what its clusters have come to."""
        merged = merged_model(self.tree, node_id)
        self.undo_split(node_id)
        node = self.tree[node_id]
        self.tree.advance(node_id, merged.params - node.params, merged.buffers - node.buffers)
        # It has been examined before, and wrongly: the next time comes later.
        case = self._cases.setdefault(node_id, Case())
        case.num_merged += 1
        case.num_examined = EXAMINATIONS_TO_FORGET * case.num_merged
        case.examined_at = node.version

    def partition(
        self, groups: Mapping[str, Iterable[str]], params: Mapping[str, Array] | None = None
    ) -> dict[str, int]:
        """Start from given clusters instead of one: before the first round only.

        Parameters
        ----------
        groups
            Name -> ids of the clients that train together. An empty group is a cluster
            without clients.
        params
            Name -> where this cluster's parameters start, if not at the initial model.

        Returns
        -------
        dict
            Name -> leaf.

        Notes
        -----
        The clusters do not come from updates, so a client that is in none of them cannot
        be routed.
        """
        if self.round > 0 or len(self.tree) > 1:
            raise ValueError("the clusters can only be given before the first round")
        named = {name: checked_ids(client_ids) for name, client_ids in groups.items()}
        starts = {name: to_numpy(start) for name, start in (params or {}).items()}
        for name, start in starts.items():
            if name not in named:
                raise ValueError(f"params has {name!r}; the clusters are {list(named)}")
            if start.shape != (self.tree.num_params,) or not np.isfinite(start).all():
                raise ValueError(
                    f"params of {name!r} have shape {start.shape}; they must be "
                    f"{self.tree.num_params} finite numbers"
                )
        if len(named) == 1:
            leaf_ids: tuple[int, ...] = (self.tree.root.id,)
            self.tree.positions.place_all(next(iter(named.values())), self.tree.root.id)
        else:
            leaf_ids = self.tree.split(
                self.tree.root.id, [dict.fromkeys(client_ids) for client_ids in named.values()]
            )
            self._children[self.tree.root.id] = leaf_ids
            for leaf_id, client_ids in zip(leaf_ids, named.values(), strict=True):
                self._moved |= dict.fromkeys(client_ids, leaf_id)
        leaves = dict(zip(named, leaf_ids, strict=True))
        for name, start in starts.items():
            node = self.tree[leaves[name]]
            self.tree.advance(node.id, start.astype(np.float32) - node.params)
        return leaves

    # Files

    def save(self, folder: str | Path) -> None:
        """Write the whole state to a folder, replacing what was saved there.

        A rule or an aggregate that is not one of fedbranch's is only named in it.
        """
        write_checkpoint(Path(folder), "server", *self.to_state())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        rule: Rule | None = None,
        aggregate: Aggregate | None = None,
        cache: EdgeCache | None = None,
    ) -> Server:
        """Read a server that :meth:`save` wrote.

        Parameters
        ----------
        folder
            Where it was saved.
        rule, aggregate
            Needed if the saved server used its user's own.
        cache
            How edges keep updates from now on; by default as they did. What was on disk is used
            where it was saved, and what is new goes to ``edges`` in there.
        """
        state, files = read_checkpoint(Path(folder), "server")
        cache = restored_cache(state.get("tree"), given=cache, folder=Path(folder))
        return cls.from_state(state, files, rule=rule, aggregate=aggregate, cache=cache)

    def to_state(self) -> tuple[JSON, dict[str, Tensors]]:
        """Describe the server as JSON and tensors, for a checkpoint."""
        tree_state, files = self.tree.to_state()
        is_presence_known, of_presence = self._presence.to_state()
        files |= of_presence
        cases: JSON = {}
        for node_id, case in self._cases.items():
            cases[str(node_id)], held = case.to_state(f"held-{node_id}")
            files |= held
        archive = {str(node_id): case.to_state()[0] for node_id, case in self._archive.items()}
        state: JSON = {
            **self.options.to_state(),
            "compare": self.compare,
            "num_signal": self.num_signal,
            "set_aside": sorted(self._set_aside),
            "round": self.round,
            "asked": self._asked,
            "on_trial": {i: list(asked) for i, asked in self._on_trial.items()},
            "cases": cases,
            "archive": archive,
            "num_reviews": {str(i): count for i, count in self._reviews.num_done.items()},
            "is_presence_known": is_presence_known,
            "joined": self._joined,
            "left": self._left,
            "moved": self._moved,
            "children": {str(node_id): list(ids) for node_id, ids in self._children.items()},
            "vanished": self._vanished,
            "tree": tree_state,
        }
        return state, files

    @classmethod
    def from_state(
        cls,
        state: JSON,
        files: Mapping[str, Tensors],
        *,
        rule: Rule | None = None,
        aggregate: Aggregate | None = None,
        cache: EdgeCache | None = None,
    ) -> Server:
        """Rebuild a server from what :meth:`to_state` gave."""
        try:
            tree = ParameterTree.from_state(state["tree"], files, cache=cache)
            server = cls(
                tree.num_params,
                options=ServerOptions.from_state(
                    state, rule=rule, aggregate=aggregate, cache=tree.cache
                ),
                num_buffers=tree.num_buffers,
                compare=state["compare"],
                num_signal=state.get("num_signal"),  # not in states of older versions
            )
            num_compared = server._expected.num_compared
            if server.projection is not None:
                num_compared = server.projection.size
            for node in tree:
                if node.cached_updates and node.cached_updates.dim != num_compared:
                    raise ValueError(f"what node {node.id} has cached is not {num_compared} long")
            server.tree = tree
            server.round = state["round"]
            server._asked = dict(state["asked"])
            server._reviews.num_done = {int(i): n for i, n in state["num_reviews"].items()}
            server._presence = Presence.from_state(
                state["is_presence_known"], files, tree.positions, server.round + 1
            )
            server._set_aside = set(state["set_aside"])
            server._joined, server._left = list(state["joined"]), list(state["left"])
            # Not in states of older versions.
            server._moved = dict(state.get("moved", {}))
            server._children = {int(i): tuple(c) for i, c in state.get("children", {}).items()}
            server._vanished = list(state.get("vanished", []))
            server._on_trial = {i: (a, b, list(c)) for i, (a, b, c) in state["on_trial"].items()}
            server._archive = {
                int(node_id): Case.from_state(case, {})
                for node_id, case in state["archive"].items()
            }
            for node_id, case in state["cases"].items():
                name = f"held-{int(node_id)}"
                server._cases[int(node_id)] = Case.from_state(case, files, name, server.projection)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DamagedFile(f"the saved server contradicts itself: {error!r}") from error
        return server
