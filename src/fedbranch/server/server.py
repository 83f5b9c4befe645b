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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

from fedbranch.errors import DamagedFile
from fedbranch.protocol.client_ids import checked_ids, some_of
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.rules import Rule
from fedbranch.server.leaf import Leaf
from fedbranch.server.options import OptionKeywords, ServerOptions, options_from
from fedbranch.server.records import RoundRecord
from fedbranch.server.replies.checks import Expected
from fedbranch.server.replies.intake import Intake
from fedbranch.server.replies.situation import Situation
from fedbranch.server.reviews import due_for_review
from fedbranch.server.round import commit, decide
from fedbranch.server.state import OnTrial, ServerState, state_from_json, state_to_json
from fedbranch.server.surgery import (
    forget_replies,
    known,
    merge_split,
    partition,
    place,
    place_newcomers,
    remove,
    undo_split,
)
from fedbranch.server.trials import compared_models, proposed_trials
from fedbranch.storage.checkpoint import Tensors, read_checkpoint, write_checkpoint
from fedbranch.tree import EdgeCache, ParameterTree, read_only, restored_cache
from fedbranch.types import JSON, Aggregate, Array

__all__ = ["Server"]


class Server:
    """Clustered federated learning's server side, for any training loop.

    Each round: :meth:`plan` returns a task for every client, the caller lets the clients work on
    them, and :meth:`step` takes the updates.

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

    >>> import numpy as np
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
        self.compare = compare
        self.num_signal = num_signal  # None: as many as parameters
        self.options = options
        self.state = ServerState.of(ParameterTree(num_params, num_buffers, cache=options.cache))
        self.projection = options.projection_for(self.expected.num_compared)
        self.options = replace(options, sketch=self.projection)

    @property
    def tree(self) -> ParameterTree:
        """The clusters with their models, and where every client stands."""
        return self.state.tree

    @property
    def round(self) -> int:
        """How many rounds are complete."""
        return self.state.round

    @property
    def expected(self) -> Expected:
        """What every reply must fit."""
        return Expected(
            num_params=self.tree.num_params,
            num_buffers=self.tree.num_buffers,
            compares_signal=self.compare == "signal",
            max_examples=self.options.max_examples,
            num_signal=self.num_signal,
        )

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> ids of the clients that train there."""
        return {leaf.id: self.tree.members(leaf.id) for leaf in self.tree.leaves}

    def awaited(self, among: Iterable[str] | None = None) -> list[str]:
        """List the clients whose answers a leaf that stands still waits for: ask them first.

        Parameters
        ----------
        among
            Look at these clients only, which is cheaper where many are known.
        """
        holding = self.state.standing_still
        if not holding:
            return []
        positions = self.tree.positions
        if among is None:
            there = {leaf_id: positions.members([leaf_id], away=False) for leaf_id in holding}
        else:
            there = positions.among(list(among), holding, away=False)
        return sorted(
            client_id
            for leaf_id, leaf in holding.items()
            for client_id in leaf.lacking(there[leaf_id])
            if client_id not in self.state.set_aside
        )

    # A round

    def plan(self, client_ids: Iterable[str]) -> dict[str, Task]:
        """Return what each of these clients is to train at in the coming round.

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
        positions = self.tree.positions
        place_newcomers(self.state, positions.missing(ids), self.tree.root.id)
        for client_id, node_id in zip(ids, positions.of_all(ids), strict=True):
            assert node_id is not None
            leaf = self.state.leaves.get(node_id)
            if leaf is not None and leaf.has_reply_of(client_id):
                continue
            task = task_at.get(node_id)
            if task is None:
                task = task_at[node_id] = self._task(node_id, leaf)
            self.state.asked[client_id] = task.base
            tasks[client_id] = task
        return tasks

    def _task(self, node_id: int, leaf: Leaf | None) -> Task:
        node = self.tree[node_id]
        return Task(
            node_id=node.id,
            params=read_only(node.params),
            buffers=read_only(node.buffers),
            base=node.base,
            purpose="train" if node.is_leaf else "route",
            halves=None if leaf is None else leaf.phase.halves,
        )

    def trials(self, client_ids: Iterable[str]) -> dict[str, tuple[Trial, ...]]:
        """Return what each of these clients is to measure in the coming round, beside training.

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
        state = self.state
        ids = set(known(state, client_ids))
        trials: dict[str, tuple[Trial, ...]] = {}
        for leaf_id, leaf in sorted(state.leaves.items()):
            if leaf.store is None or not leaf.store.can_measure:
                continue
            asked = leaf.lacking(ids & leaf.store.replies.keys())
            if asked:
                proposed = proposed_trials(self.tree[leaf_id], leaf, self.options)
                trials |= {i: proposed[i] for i in sorted(asked)}
                state.on_trial |= {i: OnTrial(leaf_id, len(proposed[i]), ()) for i in asked}
        for node_id in due_for_review(
            self.tree, self.options.rule, state.num_reviews, self.round + 1, state.standing_still
        ):
            models = compared_models(self.tree, node_id)
            leaf_ids = tuple(leaf.id for leaf in self.tree.leaves_below(node_id))
            there = self.tree.positions.among(sorted(ids), leaf_ids)
            for client_id in (i for own in there.values() for i in own):
                if client_id not in trials:
                    trials[client_id] = models
                    state.on_trial[client_id] = OnTrial(node_id, len(models), leaf_ids)
        return trials

    def intake(self) -> Intake:
        """Begin to take the replies of the coming round one by one, in any order.

        To be called after :meth:`plan`; the round is made of it by :meth:`step`. Until then the
        server must not be changed.

        Examples
        --------
        >>> import numpy as np
        >>> server = Server(2)
        >>> tasks = server.plan(["a", "b"])
        >>> intake = server.intake()
        >>> intake.add("b", Update(np.float32([0, 2]), num_examples=1))
        >>> intake.add("a", Update(np.float32([1, np.nan]), num_examples=1))
        'the update contains NaN or infinity; lower the learning rate'
        >>> server.step(intake).decisions[0].measurements["num_answered"]
        1
        """
        state = self.state
        return Intake(
            Situation(
                round=self.round + 1,
                expected=self.expected,
                tree=self.tree,
                asked=state.asked,
                leaves=state.leaves,
                set_aside=state.set_aside,
                options=self.options,
                projection=self.projection,
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
            plan = decide(self.state, self.options, self.projection, intake, losses or {})
            return commit(self.state, plan)

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
            there = sorted(set(ids) - set(missing))
            raise ValueError(f"clients {some_of(there)} have already joined")
        place_newcomers(self.state, ids, self.tree[node_id].id)

    def place(self, places: Mapping[str, int]) -> None:
        """Put known clients at nodes, from wherever they stood: client id -> node."""
        ids = known(self.state, places)
        for node_id in places.values():
            self.tree[node_id]  # raises if there is none, before anything is changed
        present = dict(zip(ids, self.tree.positions.of_all(ids), strict=True))
        forget_replies(self.state, [i for i in ids if present[i] != places[i]])
        place(self.state, places)

    def mark_present(self, client_ids: Iterable[str]) -> None:
        """Note which of the known clients are connected, whether or not they will be asked.

        For drivers whose clients vanish without leaving: no split waits for a client that was
        not there in this and the nine rounds before. It keeps its position, and counts as a
        member of its cluster again as soon as it is back.
        """
        self.state.presence.mark(known(self.state, client_ids), self.round + 1)

    def remove(self, client_ids: Iterable[str]) -> None:
        """Let clients leave. If one comes back it is a newcomer and finds its way down again."""
        remove(self.state, client_ids)

    def reroute(self, client_ids: Iterable[str]) -> None:
        """Send clients back to the root, to find their cluster anew."""
        root = self.tree.root
        if not root.is_leaf and not self.tree.can_route(root.id):
            raise ValueError("the clusters were given, not found; no client can be routed to them")
        ids = known(self.state, client_ids)
        forget_replies(self.state, ids)
        place(self.state, dict.fromkeys(ids, root.id))

    def undo_split(self, node_id: int) -> None:
        """Make a split cluster one again, at the parameters it had when it was split."""
        undo_split(self.state, node_id)

    def merge_split(self, node_id: int) -> None:
        """Make a split cluster one again, at the mean of the models of its clusters."""
        merge_split(self.state, node_id)

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
        return partition(self.state, groups, params)

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
        state, files = state_to_json(self.state)
        about: JSON = {
            **self.options.to_state(),
            "compare": self.compare,
            "num_signal": self.num_signal,
        }
        return about | state, files

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
            num_compared = server.expected.num_compared
            if server.projection is not None:
                num_compared = server.projection.size
            for node in tree:
                if node.cached_updates and node.cached_updates.dim != num_compared:
                    raise ValueError(f"what node {node.id} has cached is not {num_compared} long")
            server.state = state_from_json(state, files, tree, server.projection)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DamagedFile(f"the saved server contradicts itself: {error!r}") from error
        return server
