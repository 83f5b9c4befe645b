"""The plain engine: one client after the other, every round, until all rounds are done."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import nn

from fedbranch.checkpoint import JSON
from fedbranch.client import LocalTraining, ModelState, evaluate, local_update, stream_seed
from fedbranch.core.geometry import weighted_mean
from fedbranch.data import ClientData, Examples
from fedbranch.errors import ClientFailed, UnusableRun
from fedbranch.examination import Aggregate, Weighting
from fedbranch.rules import Rule, rule_to_state
from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.server import Server
from fedbranch.tree import Node, ParameterTree

__all__ = ["Run", "Settings", "chosen_device", "simulate", "state_at"]


class Settings(TypedDict, total=False):
    """The keywords of :func:`simulate` that all methods share."""

    rounds: int
    training: LocalTraining
    seed: int
    participation: float
    weighting: Weighting
    aggregate: Aggregate
    evaluate_every: int
    checkpoint_every: int
    folder: str | Path | None
    resume: bool
    about: JSON | None
    device: str
    on_round: Callable[[Round], None] | None


@dataclass(frozen=True, eq=False)
class Run:
    """A finished simulation.

    Attributes
    ----------
    server
        As it was after the last round.
    history
        Every round, with its decisions and evaluation.
    path
        The run folder, if one was asked for.
    """

    server: Server
    history: list[Round]
    path: Path | None
    _model: nn.Module = field(repr=False)
    _initial: ModelState = field(repr=False)

    @property
    def tree(self) -> ParameterTree:
        """The parameter tree."""
        return self.server.tree

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> ids of its clients."""
        return self.server.clusters

    @property
    def evaluation(self) -> Evaluation:
        """Client id -> metrics on its held-out data under its model, at the end."""
        return next((entry.evaluation for entry in reversed(self.history) if entry.evaluation), {})

    @property
    def cluster_means(self) -> dict[int, dict[str, float]]:
        """Leaf -> metrics at the end, averaged over its clients."""
        return {leaf: mean_by_metric(self.evaluation, ids) for leaf, ids in self.clusters.items()}

    @property
    def overall_mean(self) -> dict[str, float]:
        """Metrics at the end, averaged over all clients."""
        return mean_by_metric(self.evaluation, list(self.evaluation))

    def model(self, client_id: str) -> nn.Module:
        """Give a copy of the model that a client ended with."""
        return self.model_at(self.tree.position(client_id))

    def model_at(self, node_id: int) -> nn.Module:
        """Give a copy of the model at a tree node, in evaluation mode."""
        model = copy.deepcopy(self._model)
        state_at(self.tree[node_id], self._initial).load_into(model)
        return model.eval()


def simulate(
    model: nn.Module,
    clients: Mapping[str, ClientData],
    *,
    rule: Rule,
    rounds: int,
    training: LocalTraining | None = None,
    seed: int = 0,
    participation: float = 1.0,
    weighting: Weighting = "examples",
    aggregate: Aggregate = weighted_mean,
    evaluate_every: int = 1,
    checkpoint_every: int = 10,
    folder: str | Path | None = None,
    resume: bool = False,
    about: JSON | None = None,
    device: str = "auto",
    on_round: Callable[[Round], None] | None = None,
    method: str = "cfl",
    start: Callable[[Server], Mapping[str, int]] | None = None,
    before_round: Callable[[Server, list[str]], None] | None = None,
) -> Run:
    """Run clustered federated learning over clients on this machine.

    Parameters
    ----------
    model
        Any module; its present parameters are the initial model. It is not changed.
    clients
        Client id -> data.
    rule
        Decides when clusters split.
    rounds
        How many.
    training
        How clients train; by default 3 epochs of SGD with learning rate 0.1, batches of 20.
    seed
        All randomness follows from it, the round and the client.
    participation
        The share of the clients present that is asked in a round, in (0, 1].
    weighting, aggregate
        How updates are averaged; see :class:`fedbranch.Server`.
    evaluate_every
        Evaluate every client on its held-out data after each so many rounds and at the end.
    checkpoint_every
        Save the server after each so many rounds and at the end.
    folder
        Where to keep the run; without it nothing is written.
    resume
        Go on with the run in the folder, if there is one, from where it was saved last. The
        result is the same to the bit as without the interruption.
    about
        Anything to remember in ``run.json``.
    device
        ``"auto"``: a GPU if there is one. Otherwise a name that torch knows.
    on_round
        Called after every round, also with the rounds that a resumed run has behind it.
    method
        A name for what is run.
    start
        Called with the server before the first round, for example to give it clusters; says
        for clients at which node they stand when they join, if not at the root.
    before_round
        Called with the server and the ids of the clients about to be asked.

    Returns
    -------
    Run
    """
    training = training if training is not None else LocalTraining(epochs=3)
    clients = dict(sorted(clients.items()))  # so that their order changes nothing
    _check_settings(clients, rounds, participation, evaluate_every, checkpoint_every)
    work_model = copy.deepcopy(model).to(chosen_device(device))
    initial = ModelState.of(work_model)
    server = Server(
        initial.params.numel(),
        num_buffers=initial.buffers.numel(),
        rule=rule,
        weighting=weighting,
        compare="signal" if training.send_gradient else "update",
        aggregate=aggregate,
    )
    run_folder, history = None, []
    if folder is not None:
        description: JSON = {
            "method": method,
            "seed": seed,
            "rounds": rounds,
            "participation": participation,
            "weighting": weighting,
            "rule": rule_to_state(rule),
            "evaluate_every": evaluate_every,
            "training": training.describe(),
            "num_params": initial.params.numel(),
            "initial_model": initial.digest(),
            "about": about,
            "clients": _describe(clients),
        }
        run_folder = _open_folder(Path(folder), description, resume)
        if run_folder.has_state:
            server = Server.load(run_folder.path / "state", rule=rule, aggregate=aggregate)
        run_folder.truncate_history(server.round)
        history = run_folder.history()
    home: Mapping[str, int] = {}
    if start is not None:
        # On resume the saved server has been through this; only the homes are needed again.
        home = start(server if server.round == 0 else _like(server))
    for entry in history:
        if on_round is not None:
            on_round(entry)

    while server.round < rounds:
        this_round = server.round + 1
        present = [i for i, client in clients.items() if client.takes_part(this_round)]
        server.remove([i for i in server.tree.client_ids if _has_left(clients[i], this_round)])
        for client_id in present:
            if client_id not in server.tree:
                server.join([client_id], home.get(client_id, server.tree.root.id))
        asked = _sample(present, server.awaited, participation, stream_seed(seed, this_round))
        if before_round is not None:
            before_round(server, asked)
        updates = {}
        for client_id, task in server.plan(asked).items():
            data = clients[client_id].train
            with _naming(client_id, data, "trained"):
                updates[client_id] = local_update(
                    work_model,
                    initial,
                    task,
                    data,
                    training,
                    seed=stream_seed(seed, this_round, client_id),
                )
        record = server.step(updates)
        is_due = this_round % evaluate_every == 0 or this_round == rounds
        entry = Round(
            record=record,
            evaluation=_evaluate_all(server.tree, work_model, initial, clients, training)
            if is_due
            else {},
        )
        history.append(entry)
        if run_folder is not None:
            run_folder.append(entry)
            if this_round % checkpoint_every == 0 or this_round == rounds:
                run_folder.save_server(server)
        if on_round is not None:
            on_round(entry)

    run = Run(server, history, None if run_folder is None else run_folder.path, work_model, initial)
    if run_folder is not None:
        run_folder.finish(
            {
                "rounds": rounds,
                "clusters": {str(leaf): ids for leaf, ids in run.clusters.items()},
                "mean": run.overall_mean,
            }
        )
    return run


def _evaluate_all(
    tree: ParameterTree,
    model: nn.Module,
    initial: ModelState,
    clients: Mapping[str, ClientData],
    training: LocalTraining,
) -> dict[str, dict[str, float | None]]:
    """Measure every client on its held-out data, under the model of its position."""
    evaluation: dict[str, dict[str, float | None]] = {}
    for node in tree:
        members = [(i, clients[i].test) for i in tree.members(node.id)]
        state_at(node, initial).load_into(model)
        for client_id, test in members:
            if test is not None:
                with _naming(client_id, test, "evaluated"):
                    measured = evaluate(model, test, training)
                evaluation[client_id] = {
                    name: value if np.isfinite(value) else None for name, value in measured.items()
                }
    return dict(sorted(evaluation.items()))


def state_at(node: Node, initial: ModelState) -> ModelState:
    """Give the model's state at a tree node."""
    return initial.moved_by(node.params, node.buffers)


@contextmanager
def _naming(client_id: str, data: Examples, what: str) -> Iterator[None]:
    """Say whose model or data raised, and what they were."""
    try:
        yield
    except Exception as error:
        x, y = data
        raise ClientFailed(
            f"client {client_id!r} could not be {what}: {error}; its inputs are {x.dtype} of shape "
            f"{x.shape}, its targets {y.dtype} of shape {y.shape}"
        ) from error


def _sample(present: list[str], awaited: list[str], participation: float, seed: int) -> list[str]:
    """Draw the clients of a round; those that a holding cluster waits for come first."""
    num_asked = max(1, round(participation * len(present)))
    if num_asked >= len(present):
        return present
    shuffled = [present[i] for i in np.random.default_rng(seed).permutation(len(present))]
    first = set(awaited)
    shuffled.sort(key=lambda client_id: client_id not in first)  # stable
    chosen = set(shuffled[:num_asked])
    return [client_id for client_id in present if client_id in chosen]


def _has_left(client: ClientData, this_round: int) -> bool:
    return client.leaves is not None and this_round >= client.leaves


def _open_folder(path: Path, description: JSON, resume: bool) -> RunFolder:
    if not (resume and (path / "run.json").exists()):
        return RunFolder.create(path, description)
    run_folder = RunFolder(path)
    run_folder.clear_leftovers()
    as_saved: JSON = json.loads(json.dumps(description))
    for name, value in as_saved.items():
        if run_folder.about.get(name) != value:
            raise UnusableRun(
                f"{path} cannot be resumed: its {name} is not the one given now; "
                "resume with the same settings and clients, or choose another folder"
            )
    return run_folder


def _describe(clients: Mapping[str, ClientData]) -> list[JSON]:
    return [
        {
            "id": client_id,
            "group": client.group,
            "num_train": len(client.train.x),
            "num_test": 0 if client.test is None else len(client.test.x),
            "data": _digest(client),
            "joins": client.joins,
            "leaves": client.leaves,
        }
        for client_id, client in clients.items()
    ]


def _digest(client: ClientData) -> str:
    """Name a client's data by a hash of their bytes."""
    digest = hashlib.sha256()
    for examples in (client.train, client.test):
        for array in examples or ():
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _like(server: Server) -> Server:
    """Make a fresh server of the same shape."""
    return Server(server.tree.num_params, num_buffers=server.tree.num_buffers, rule=server.rule)


def chosen_device(device: str) -> torch.device:
    """Resolve ``"auto"``."""
    if device != "auto":
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _check_settings(
    clients: Mapping[str, ClientData],
    rounds: int,
    participation: float,
    evaluate_every: int,
    checkpoint_every: int,
) -> None:
    if not clients:
        raise ValueError("clients is empty; pass at least one client: {'a': ClientData(...)}")
    for name, value in [
        ("rounds", rounds),
        ("evaluate_every", evaluate_every),
        ("checkpoint_every", checkpoint_every),
    ]:
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not 0 < participation <= 1:
        raise ValueError(f"participation is {participation}; it must be in (0, 1]")
