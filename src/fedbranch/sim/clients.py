"""The simulated clients: which are asked in a round, their replies, and how good their models are."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import nn

from fedbranch.core.geometry import to_numpy
from fedbranch.data import ClientData, PartName
from fedbranch.errors import ClientFailed
from fedbranch.protocol.tasks import Task, Trial, Update, UpdateBatch
from fedbranch.server.options import ServerOptions
from fedbranch.server.server import Server
from fedbranch.sim.attendance import Attendance
from fedbranch.sim.description import describe_clients
from fedbranch.sim.engines.choice import EngineName, start_engine
from fedbranch.sim.engines.engine import Engine
from fedbranch.sim.engines.reference import Reference
from fedbranch.sim.hidden import Hiding, Revealing, check_is_privacy
from fedbranch.sim.release_counts import Releases
from fedbranch.training.client_sampling import draw_clients
from fedbranch.training.half_split import Halves, half_rows, halves_seed
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.training.seeds import stream_seed
from fedbranch.tree import Node, ParameterTree
from fedbranch.types import JSON, Vector

if TYPE_CHECKING:  # it needs cryptography, an optional dependency
    from fedbranch.privacy import Privacy
    from fedbranch.privacy.noise import Noise

__all__ = ["BeforeSend", "SimulatedClients", "chosen_device", "only_finite"]

FEWEST_HIDDEN = 16  # parameters; fewer can be mixed in few ways only

BeforeSend: TypeAlias = Callable[[str, int, Update], Update]


class SimulatedClients:
    """All clients of a simulation, and the engine that trains them.

    Parameters
    ----------
    model
        Its current parameters are the initial model. It is not changed.
    clients
        Client id -> data.
    training
        How they train.
    seed
        All randomness follows from it, the round and the client.
    device
        Where they train; see :func:`fedbranch.simulate`.
    engine, num_workers
        What trains them; see :func:`fedbranch.simulate`.
    before_send
        What they do to their replies; see :func:`fedbranch.simulate`.
    privacy
        What they hide from the server; see :func:`fedbranch.simulate`. The tree is then in
        hidden coordinates; the clients, and all that is measured here, know the way back.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Mapping[str, ClientData],
        training: LocalTraining,
        *,
        seed: int,
        device: str,
        engine: EngineName = "auto",
        num_workers: int | None = None,
        before_send: BeforeSend | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        check_is_privacy(privacy)
        if not isinstance(clients, Mapping):
            raise TypeError(
                f"clients is a {type(clients).__name__}; pass a dict: {{'a': ClientData(...), ...}}"
            )
        for client_id, client in clients.items():
            if not isinstance(client, ClientData):
                raise TypeError(
                    f"client {client_id!r} is a {type(client).__name__}; pass "
                    "ClientData(train=(x, y), test=(x_test, y_test))"
                )
        if not clients:
            raise ValueError("clients is empty; pass at least one client: {'a': ClientData(...)}")
        self.clients = dict(sorted(clients.items()))  # so that their order changes nothing
        self.training = training
        self.seed = seed
        self.before_send = before_send
        self.model = copy.deepcopy(model).to(chosen_device(device))
        self.initial = ModelState.of(self.model)
        self.privacy = privacy
        self._noise = None if privacy is None else privacy.noise
        self.releases = Releases()
        self._hiding: Hiding | None = None
        if privacy is not None:
            _check_privacy(privacy, self.initial, training)
            self._hiding = Hiding(privacy, self.model)
        own, self.engine_choice = start_engine(
            engine,
            self.model,
            self.initial,
            self.clients,
            training,
            seed=seed,
            num_workers=num_workers,
        )
        self.engine = self._at_hidden_models(own)
        self._attendance = Attendance(self.clients)

    def server_for(self, options: ServerOptions) -> Server:
        """Make a server that fits what these clients send."""
        hiding = self._hiding
        num_signal = None if hiding is None else hiding.num_signal
        by_signal = self.training.send_gradient or num_signal is not None
        return Server(
            self.initial.params.numel() if hiding is None else hiding.num_params,
            num_buffers=self.initial.buffers.numel() if hiding is None else hiding.num_buffers,
            options=options,
            compare="signal" if by_signal else "update",
            num_signal=num_signal,
        )

    def _at_hidden_models(self, engine: Engine) -> Engine:
        return engine if self._hiding is None else Revealing(engine, self._hiding)

    def gather(
        self,
        server: Server,
        this_round: int,
        *,
        participation: float,
        home: Mapping[str, int],
    ) -> list[str]:
        """Let clients leave and join, and draw the clients to be asked in a round.

        Clients that a holding cluster waits for are drawn first. Newcomers stand at their
        home node, or at the root.
        """
        present = self._attendance.update(this_round, server, home)
        num_asked = max(1, round(participation * len(present)))
        seed = stream_seed(self.seed, this_round)
        return draw_clients(present, num_asked, seed, first=server.awaited(present))

    def updates(
        self, tasks: Mapping[str, Task], this_round: int
    ) -> UpdateBatch | Mapping[str, Update]:
        """Let every client with a task train and reply."""
        seeds = {i: stream_seed(self.seed, this_round, i) for i in tasks}
        replies = self.engine.updates(tasks, seeds) if tasks else {}
        if self._noise is not None:
            own = self._one_by_one(replies, tasks)
            replies = self._with_noise(self._noise, own, this_round)
        if self.before_send is not None:
            own = self._one_by_one(replies, tasks)
            replies = {i: self.before_send(i, this_round, own[i]) for i in sorted(own)}
        if self._hiding is None:
            return replies
        if isinstance(replies, UpdateBatch):
            return self._hiding.hidden_batch(replies)
        return {i: _hidden_reply(self._hiding, i, update) for i, update in replies.items()}

    def _one_by_one(
        self, batch: UpdateBatch | Mapping[str, Update], tasks: Mapping[str, Task]
    ) -> Mapping[str, Update]:
        """Split a batch into replies as each client would send its own."""
        if not isinstance(batch, UpdateBatch):
            return batch
        vectors = to_numpy(batch.vectors)
        buffers, signals, half_differences = (
            [None] * len(batch) if column is None else to_numpy(column)
            for column in (batch.buffers, batch.signals, batch.half_differences)
        )
        return {
            client_id: Update(
                vector=vectors[row],
                num_examples=batch.num_examples[row],
                metrics=batch.metrics[row],
                buffers=buffers[row],
                base=batch.bases[row],
                signal=signals[row],
                # Not decided by the numbers: the difference of two halves may be zero, and noise
                # must cover whether it is.
                half_difference=None
                if self._halves(client_id, tasks[client_id]) is None
                else half_differences[row],
            )
            for row, client_id in enumerate(batch.client_ids)
        }

    def _halves(self, client_id: str, task: Task) -> Halves | None:
        """Return the halves that a client trains on, by public facts only; None for all rows."""
        if task.halves is None:
            return None
        num_rows = len(self.clients[client_id].train.x)
        return half_rows(num_rows, halves_seed(self.seed, client_id), task.halves)

    def _with_noise(
        self, noise: Noise, replies: Mapping[str, Update], this_round: int
    ) -> dict[str, Update]:
        """Add noise to everything in the replies that depends on the clients' data."""
        noisy = {}
        for client_id, update in replies.items():
            rng = np.random.default_rng(stream_seed(self.seed, "noise", this_round, client_id))
            noisy[client_id] = noise.applied(update, rng)
        self.releases.add({i: noise.num_releases(update) for i, update in noisy.items()})
        return noisy

    def losses(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, tuple[float, ...]]:
        """Let every client measure its loss under the models that the server wants to try.

        A client without the examples for it is left out. With noise no client answers, because
        the noise does not cover losses.
        """
        if self._noise is not None:
            return {}
        asked = {client_id: own for client_id, own in trials.items() if own}
        return self.engine.losses(asked) if asked else {}

    def num_visits(self, tasks: Mapping[str, Task]) -> int:
        """Count the examples that clients see when they train."""
        num_visits = 0
        for client_id, task in tasks.items():
            halves = self._halves(client_id, task)
            if halves is None:
                num_visits += self.training.num_visits(len(self.clients[client_id].train.x))
            else:
                num_visits += sum(self.training.on_a_half.num_visits(len(own)) for own in halves)
        return num_visits

    def evaluation(self, tree: ParameterTree) -> dict[str, dict[str, float | None]]:
        """Measure every client on its held-out data, under the model of its position."""
        return self.measured({i: tree[tree.position(i)] for i in tree.client_ids}, "test")

    def measured(
        self, at: Mapping[str, Node], part: PartName
    ) -> dict[str, dict[str, float | None]]:
        """Measure clients on a part of their data, each under the model of a node.

        Clients without such data are left out.
        """
        measured = self.engine.measure(at, part) if at else {}
        return {client_id: only_finite(measured[client_id]) for client_id in sorted(measured)}

    def training_losses(self, node: Node, client_ids: Iterable[str]) -> dict[str, float]:
        """Measure the model at a tree node on clients' training data."""
        measured = self.engine.measure(dict.fromkeys(client_ids, node), "train")
        return {client_id: values["loss"] for client_id, values in measured.items()}

    def load(self, node: Node) -> None:
        """Load the parameters of a tree node into the model."""
        self.initial.moved_by(*self._plain(node)).load_into(self.model)

    def _plain(self, node: Node) -> tuple[Vector, Vector]:
        if self._hiding is None:
            return node.params, node.buffers
        return self._hiding.revealed(node.params, node.buffers)

    def close(self) -> None:
        """End all other processes; what is measured later is measured in this one."""
        self.engine.close()
        if self.engine.name == "workers":  # they would start again when something is measured
            own = Reference(self.model, self.initial, self.clients, self.training, seed=self.seed)
            self.engine = self._at_hidden_models(own)

    def model_at(self, node: Node) -> nn.Module:
        """Return a copy of the model at a tree node, in evaluation mode."""
        self.load(node)
        return copy.deepcopy(self.model).eval()

    def describe(self) -> JSON:
        """Return everything that the clients' results depend on, for the run folder."""
        return describe_clients(
            self.clients,
            model=self.model,
            initial=self.initial,
            training=self.training,
            seed=self.seed,
            before_send=self.before_send,
            privacy=self.privacy,
        )


def chosen_device(device: str) -> torch.device:
    """Resolve ``"auto"``: a GPU if there is one."""
    if device != "auto":
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def only_finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace numbers that JSON cannot hold by None."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _hidden_reply(hiding: Hiding, client_id: str, update: object) -> Update:
    if not isinstance(update, Update):
        return update  # type: ignore[return-value]  # from before_send; the server refuses it
    try:
        return hiding.hidden(update)
    except (TypeError, ValueError) as error:
        raise ClientFailed(f"client {client_id!r} could not hide its reply: {error}") from error


def _check_privacy(privacy: Privacy, initial: ModelState, training: LocalTraining) -> None:
    """Refuse noise that would not cover everything clients send; warn of tiny models."""
    num_params = initial.params.numel()
    if privacy.transform is not None and num_params < FEWEST_HIDDEN:
        warnings.warn(
            f"a model of {num_params} numbers is hardly hidden by a {privacy.transform}: there are "
            "few ways to mix them, and the server can try them; take a larger model, or noise",
            RuntimeWarning,
            stacklevel=4,  # the caller of simulate
        )
    if privacy.noise is None:
        return
    if initial.buffers.numel():
        raise ValueError(
            f"the model has {initial.buffers.numel()} buffers, such as BatchNorm statistics, which "
            "no noise covers; take a model without, for example with GroupNorm, or noise=None"
        )
    if training.send_gradient:
        raise ValueError(
            "send_gradient sends a second vector about the same data, which no noise covers; "
            "compare updates, or take noise=None"
        )
