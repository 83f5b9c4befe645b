"""The check of a driver: it runs rounds of a server as a plain loop does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedbranch.core.geometry import to_numpy, weighted_mean
from fedbranch.rules import Decision, Evidence, NeverSplit, Thresholds
from fedbranch.server.guard import Guard
from fedbranch.server.options import ServerOptions
from fedbranch.server.records import RoundRecord
from fedbranch.server.server import Server
from fedbranch.testing.contract import Contract, shortened
from fedbranch.testing.tiny_clients import TinyClients
from fedbranch.tree import ParameterTree, Sketched
from fedbranch.types import Array, Vector

__all__ = ["Driver", "check_driver", "plain_loop"]

# For drivers that do not promise the same bytes: by how much numbers may differ.
ROUNDING = 1e-4
MODEL_ROUNDING = 5e-3  # of parameters and buffers, after rounds in which rounding grows
PARTS = ("halves", "trials")
SPLITS = Thresholds(eps_mean=0.3, eps_max=0.5, gamma_max=0.5, min_cluster_size=3)
SPLIT_ROUNDS, NEWCOMER_IN = 14, 11


class Driver(Protocol):
    """Runs a federation: asks a server, lets clients do it, and hands back their replies.

    The contract, which :func:`check_driver` checks:

    - In every round it asks all clients that are present, as
      :meth:`fedbranch.testing.TinyClients.present` lists them. It hands each its task
      (:meth:`fedbranch.Server.plan`) and its trials (:meth:`fedbranch.Server.trials`).
    - All replies of a round go to one :meth:`fedbranch.Server.step`, also replies that the
      server will refuse. A client without a usable reply costs only itself.
    - A task with ``halves`` is answered with half updates, a trial with a loss.
    - All options reach the server.
    - A client may join in any round. One that is gone is not asked any more; whether the driver
      also removes it from the server is its own choice.
    """

    def __call__(
        self, clients: TinyClients, rounds: int, options: ServerOptions
    ) -> tuple[Sequence[RoundRecord], ParameterTree]:
        """Run some rounds.

        Parameters
        ----------
        clients
            The clients, and the seed of the run.
        rounds
            Number of rounds.
        options
            The options of the server.

        Returns
        -------
        tuple
            The record of every round, and the server's tree after the last.
        """
        ...


def plain_loop(
    clients: TinyClients, rounds: int, options: ServerOptions
) -> tuple[list[RoundRecord], ParameterTree]:
    """Run rounds in the shortest loop that keeps the contract: the reference for drivers."""
    server = Server(clients.num_params, num_buffers=clients.num_buffers, options=options)
    history = []
    for number in range(1, rounds + 1):
        present = clients.present(number)
        server.remove(set(server.tree.client_ids) - set(present))
        tasks = server.plan(present)
        trials = server.trials(present)
        updates = {i: clients.update(i, task, number) for i, task in tasks.items()}
        measured = {i: clients.losses(i, own) for i, own in trials.items()}
        losses = {i: own for i, own in measured.items() if own is not None}
        history.append(server.step(updates, losses))
    return history, server.tree


def check_driver(run: Driver, *, same_bytes: bool = True, without: Collection[str] = ()) -> None:
    """Check that a driver keeps the contract of :class:`fedbranch.testing.Driver`.

    Parameters
    ----------
    run
        The driver.
    same_bytes
        Whether it promises the same bytes as :func:`fedbranch.testing.plain_loop`. False: the
        same decisions, and models that are equal except for rounding.
    without
        What its clients cannot do, of ``"halves"`` and ``"trials"``.

    Raises
    ------
    AssertionError
        With the first clause of the contract that does not hold.

    Examples
    --------
    >>> from fedbranch.testing import plain_loop
    >>> check_driver(plain_loop)
    """
    unknown = set(without) - set(PARTS)
    if unknown:
        raise ValueError(f"without names {sorted(unknown)}; the parts are {list(PARTS)}")
    check = _Check(run, same_bytes)
    check.check_rounds()
    check.check_leavers()
    check.check_broken_client()
    check.check_options()
    check.check_limits()
    if "trials" not in without:
        check.check_questions(asks_halves=False)
        if "halves" not in without:
            check.check_questions(asks_halves=True)
    elif "halves" not in without:
        check.check_questions(asks_halves=True, asks_losses=False)


class _Check:
    def __init__(self, run: Driver, same_bytes: bool) -> None:
        self._run = run
        self._same_bytes = same_bytes
        shown = getattr(run, "__name__", None) or shortened(run)
        self._contract = Contract("fedbranch.testing.Driver", shown)

    def check_rounds(self) -> None:
        """Compare rounds with those of a plain loop: training, a split, and a newcomer."""
        newcomer = "partition-0006"
        clients = TinyClients(7, has_buffers=True, joins={newcomer: NEWCOMER_IN})
        options = ServerOptions(rule=SPLITS)
        history, tree = self._played(clients, SPLIT_ROUNDS, options)
        expected, right = plain_loop(clients, SPLIT_ROUNDS, options)
        assert len(right.leaves) > 1, "the clients of the check are split"
        assert right[right.position(newcomer)].is_leaf, "the newcomer of the check is routed"
        for found, own in zip(history, expected, strict=True):
            for name in ("decisions", "routed", "refused", "joined", "metrics", "children"):
                a, b = getattr(found, name), getattr(own, name)
                if name == "decisions" and not self._same_bytes:
                    a, b = ([(d.node_id, d.verdict, d.groups) for d in one] for one in (a, b))
                elif name in ("routed", "metrics") and not self._same_bytes:
                    a, b = _ids_in(a), _ids_in(b)
                if a != b:
                    raise self._contract.broken(
                        "rounds are those of a plain loop over Server.plan and Server.step",
                        f"round {own.round}: {name} is {shortened(a)}; the loop has {shortened(b)}",
                        "ask all clients present, train with the seeds that TinyClients uses, and "
                        "hand over replies as they are",
                    )
        self._check_same_tree(tree, right)

    def check_leavers(self) -> None:
        """Check that a client that is gone is not asked, and that the others go on."""
        gone, leaves = "partition-0001", 3
        clients = TinyClients(4, leaves={gone: leaves})
        history, _ = self._played(clients, 4, ServerOptions(rule=NeverSplit()))
        for record in history:
            answered = sorted(record.metrics)
            if answered != clients.present(record.round):
                raise self._contract.broken(
                    "in every round all clients that are present are asked, and no others",
                    f"round {record.round}: {answered} answered, present are "
                    f"{clients.present(record.round)}; {gone!r} left in round {leaves}",
                    "look anew in each round which clients are present",
                )

    def check_broken_client(self) -> None:
        """Check that a client whose update is not finite is refused, and costs only itself."""
        bad = "partition-0002"
        options = ServerOptions(rule=NeverSplit(), guard=None)
        history, tree = self._played(TinyClients(4, broken=[bad]), 3, options)
        for record in history:
            if not record.refused.get(bad):
                raise self._contract.broken(
                    "replies that the server will refuse are handed to it, too",
                    f"round {record.round}: {bad!r} sent an update that is not finite; refused are "
                    f"{dict(record.refused)}",
                    "pass all replies to Server.step and let it judge",
                )
        absent = TinyClients(4, joins={bad: 99})
        _, right = plain_loop(absent, 3, options)
        self._check_same_tree(tree, right, without=bad)

    def check_options(self) -> None:
        """Check that options reach the server, by what a rule and the tree see."""
        rule = _SplittingAll()
        cache = Sketched(size=17, seed=5)
        options = ServerOptions(
            rule=rule, weighting="equal", guard=None, cache=cache, sketch=16, keep_updates=False
        )
        clients = TinyClients(4)
        history, tree = self._played(clients, 2, options)
        if not rule.seen:
            raise self._option_lost("rule", "it was never asked", rule)
        seen = rule.seen[0]
        weights = to_numpy(seen.weights)
        if not np.allclose(weights, weights[0]):
            raise self._option_lost("weighting", f"weights are {weights.tolist()}", "equal")
        size = None if seen.projection is None else seen.projection.size
        if size != 16:
            raise self._option_lost("sketch", f"sketches of size {size}", 16)
        if seen.can_measure:
            raise self._option_lost("keep_updates", "the server keeps updates", False)
        if tree.cache != cache:
            raise self._option_lost("cache", f"the tree has {tree.cache!r}", cache)
        if len(tree.leaves) != len(clients.ids):
            reason = history[0].decisions[0].reason
            found = f"{len(tree.leaves)} leaves after a split into {len(clients.ids)}: {reason}"
            raise self._option_lost("guard", found, None)

    def check_limits(self) -> None:
        """Check the options that limit or replace what a server does."""
        clients, rule, guard = TinyClients(4), _SplittingAll(), Guard(max_clusters=2)
        sizes = {i: len(client.train.x) for i, client in clients.data.items()}
        largest = max(sizes, key=sizes.__getitem__)
        aggregate = _StandingStill()
        most = float(sizes[largest] - 1)
        options = ServerOptions(rule=rule, guard=guard, aggregate=aggregate, max_examples=most)
        history, tree = self._played(clients, 2, options)
        if not aggregate.num_calls or tree.root.params.any():
            found = f"called {aggregate.num_calls} times; the model moved"
            raise self._option_lost("aggregate", found, aggregate)
        if len(tree.leaves) > 2:
            raise self._option_lost("guard", f"{len(tree.leaves)} clusters", guard)
        if not all(largest in record.refused for record in history):
            found = f"refused are {dict(history[0].refused)}; {largest!r} has {most + 1:g} examples"
            raise self._option_lost("max_examples", found, most)
        weights = to_numpy(rule.seen[0].weights).astype(np.float64)
        shares = np.array([sizes[i] for i in rule.seen[0].client_ids], dtype=np.float64)
        if not np.allclose(weights / weights.sum(), shares / shares.sum(), rtol=1e-5):
            found = f"weights are {weights.tolist()} for {shares.tolist()} examples"
            raise self._option_lost("weighting", found, "examples")

    def check_questions(self, *, asks_halves: bool, asks_losses: bool = True) -> None:
        """Check that clients answer half updates and trials, as in a plain loop."""
        clients = TinyClients(4)
        rule, reference = (_Asking(asks_halves, asks_losses) for _ in range(2))
        guard = None
        history, tree = self._played(clients, 4, ServerOptions(rule=rule, guard=guard))
        _, right = plain_loop(clients, 4, ServerOptions(rule=reference, guard=guard))
        if asks_halves:
            own, expected = rule.seen[1], reference.seen[1]
            if own.halved_rows != expected.halved_rows:
                sent = [own.client_ids[row] for row in own.halved_rows]
                raise self._contract.broken(
                    "a task with halves is answered with half updates",
                    f"half updates of {sent}; all of {list(expected.client_ids)} can train on "
                    "halves",
                    "pass task.halves to the client, and its half_difference to the server",
                )
            self._check_near("half differences", own.half_differences, expected.half_differences)
        if asks_losses:
            own, expected = rule.seen[2], reference.seen[2]
            counts = {i: len(losses) for i, losses in own.losses.items()}
            if counts != {i: len(losses) for i, losses in expected.losses.items()}:
                raise self._contract.broken(
                    "a trial is answered with a loss",
                    f"numbers of losses by client {counts} in round {own.round} of "
                    f"{[record.round for record in history]}; asked were "
                    f"{ {i: len(losses) for i, losses in expected.losses.items()} }",
                    "call Server.trials after Server.plan, and pass the losses to Server.step",
                )
            for client_id, losses in expected.losses.items():
                what = f"losses of {client_id!r}"
                self._check_near(what, np.array(own.losses[client_id]), np.array(losses))
        self._check_same_tree(tree, right, is_exact=False)

    # Comparisons

    def _played(
        self, clients: TinyClients, rounds: int, options: ServerOptions
    ) -> tuple[Sequence[RoundRecord], ParameterTree]:
        with self._contract.answering("run(clients, rounds, options)"):
            history, tree = self._run(clients, rounds, options)
        numbers = [record.round for record in history]
        if numbers != list(range(1, rounds + 1)):
            raise self._contract.broken(
                "run returns the record of every round",
                f"asked for {rounds} rounds, got the records of {numbers}",
                "return what Server.step returned, round after round",
            )
        return history, tree

    def _check_same_tree(
        self,
        tree: ParameterTree,
        right: ParameterTree,
        *,
        without: str = "",
        is_exact: bool = True,
    ) -> None:
        found, expected = _tree_of(tree, without), _tree_of(right, without)
        if [leaf.member_ids for leaf in found] != [leaf.member_ids for leaf in expected]:
            raise self._contract.broken(
                "clusters are those of a plain loop",
                f"{[leaf.member_ids for leaf in found]}; the loop has "
                f"{[leaf.member_ids for leaf in expected]}",
                "compare the records, round by round",
            )
        for own, leaf in zip(found, expected, strict=True):
            for name in ("params", "buffers"):
                a, b = getattr(own, name), getattr(leaf, name)
                same = self._same_bytes and is_exact
                is_equal = np.array_equal(a, b) if same else np.allclose(a, b, atol=MODEL_ROUNDING)
                if not is_equal:
                    off = np.abs(a - b).max() if a.shape == b.shape else np.inf
                    raise self._contract.broken(
                        "models are those of a plain loop"
                        + (", to the byte" if same else ", except for rounding"),
                        f"{name} of the cluster of {leaf.member_ids} differ by up to {off:.3g}",
                        "use the seeds of TinyClients.update, or same_bytes=False",
                    )

    def _check_near(self, what: str, found: Array | None, expected: Array | None) -> None:
        assert expected is not None
        own = None if found is None else to_numpy(found)
        if own is None or not np.allclose(own, to_numpy(expected), rtol=1e-3, atol=ROUNDING):
            raise self._contract.broken(
                "half updates and losses are those that the clients computed",
                f"{what}: {shortened(own)}; a plain loop has {shortened(to_numpy(expected))}",
                "let clients answer the tasks and trials that the server made",
            )

    def _option_lost(self, name: str, found: str, value: object) -> AssertionError:
        return self._contract.broken(
            "all options reach the server",
            f"{name}={value!r} did not: {found}",
            "pass the ServerOptions whole: Server(num_params, options=options)",
        )


class _LeafSeen(NamedTuple):
    member_ids: list[str]
    params: Vector
    buffers: Vector


def _tree_of(tree: ParameterTree, without: str) -> list[_LeafSeen]:
    """Return the leaves in the order of their clients."""
    leaves = [
        _LeafSeen([i for i in tree.members(n.id) if i != without], n.params, n.buffers)
        for n in tree.leaves
    ]
    return sorted(leaves, key=lambda leaf: leaf.member_ids)


def _ids_in(shown: Any) -> list[str]:
    """Return the client ids of metrics, or of routings."""
    return sorted(getattr(one, "client_id", one) for one in shown)


# Rules and aggregates that remember what they see


class _StandingStill:
    """An aggregate that lets models stand still."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, updates: Array, weights: Array) -> Array:
        self.num_calls += 1
        zero: Array = 0 * weighted_mean(updates, weights)
        return zero


class _SplittingAll:
    """A rule that gives every client a cluster of its own."""

    def __init__(self) -> None:
        self.seen: list[Evidence] = []

    def examine(self, evidence: Evidence) -> Decision:
        self.seen.append(evidence)
        groups = tuple((client_id,) for client_id in evidence.client_ids)
        can_split = len(groups) > 1
        return Decision(
            node_id=evidence.node_id,
            round=evidence.round,
            verdict="split" if can_split else "train",
            reason="every client by itself",
            groups=groups if can_split else (),
        )


class _Asking:
    """A rule that asks for half updates, then for losses, and then splits as it proposed."""

    def __init__(self, asks_halves: bool, asks_losses: bool) -> None:
        self.seen: list[Evidence] = []
        self._asks_halves = asks_halves
        self._asks_losses = asks_losses

    def examine(self, evidence: Evidence) -> Decision:
        self.seen.append(evidence)
        ids = evidence.client_ids
        answer: dict[str, Any] = {"verdict": "train"}
        if evidence.round == 1 and self._asks_halves:
            answer = {"verdict": "train", "asks": "halves"}
        elif evidence.round == 2 and self._asks_losses:
            answer = {"verdict": "hold", "asks": "losses", "groups": (ids[::2], ids[1::2])}
        elif evidence.proposal:
            answer = {"verdict": "split", "groups": evidence.proposal}
        return Decision(
            node_id=evidence.node_id, round=evidence.round, reason="as in the script", **answer
        )
