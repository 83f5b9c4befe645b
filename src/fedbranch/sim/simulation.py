"""A simulation: the server and the simulated clients, round after round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from torch import nn

from fedbranch.data import ClientData
from fedbranch.runs import Evaluation, Round, RunFolder
from fedbranch.server.options import (
    NOT_IN_OLDER_RUNS,
    OptionKeywords,
    ServerOptions,
    options_from,
)
from fedbranch.server.server import Server
from fedbranch.sim.clients import BeforeSend, SimulatedClients
from fedbranch.sim.engines.choice import EngineName
from fedbranch.sim.release_counts import Releases
from fedbranch.sim.run import Run
from fedbranch.training.local_training import LocalTraining
from fedbranch.types import JSON

if TYPE_CHECKING:  # it needs cryptography, an optional dependency
    from fedbranch.privacy import Privacy

__all__ = ["Settings", "simulate"]

log = logging.getLogger("fedbranch")


class Settings(OptionKeywords, total=False):
    """The keywords of :func:`simulate` that all methods share."""

    options: ServerOptions | None
    rounds: int
    training: LocalTraining | None
    seed: int
    participation: float
    evaluate_every: int
    checkpoint_every: int
    folder: str | Path | None
    resume: bool
    about: JSON | None
    device: str
    engine: EngineName
    num_workers: int | None
    before_send: BeforeSend | None
    privacy: Privacy | None
    on_round: Callable[[Round], None] | None


def simulate(
    model: nn.Module,
    clients: Mapping[str, ClientData],
    *,
    options: ServerOptions | None = None,
    rounds: int,
    training: LocalTraining | None = None,
    seed: int = 0,
    participation: float = 1.0,
    evaluate_every: int = 1,
    checkpoint_every: int = 10,
    folder: str | Path | None = None,
    resume: bool = False,
    about: JSON | None = None,
    device: str = "auto",
    engine: EngineName = "auto",
    num_workers: int | None = None,
    before_send: BeforeSend | None = None,
    privacy: Privacy | None = None,
    on_round: Callable[[Round], None] | None = None,
    method: str = "cfl",
    start: Callable[[Server], Mapping[str, int]] | None = None,
    before_round: Callable[[Server, SimulatedClients, list[str]], None] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Run:
    """Run clustered federated learning over clients on this machine.

    Parameters
    ----------
    model
        Any module. Its current parameters are the initial model. It is not changed.
    clients
        Client id -> data.
    options
        How the server averages, compares, guards and keeps updates; see
        :class:`fedbranch.ServerOptions`.
    rounds
        Number of rounds.
    training
        How clients train; by default 3 epochs of SGD with learning rate 0.1, batches of 20.
    seed
        All randomness follows from it, the round and the client.
    participation
        The share of the clients present that is asked in a round, in (0, 1].
    evaluate_every
        Number of rounds between evaluations. In one, every client is measured on its test
        examples. The last round always has one.
    checkpoint_every
        Number of rounds between checkpoints of the server. The last round always has one.
    folder
        The run folder; None writes nothing.
    resume
        Resume the run in the folder, if there is one, from its last checkpoint. The result is the
        same to the bit as without the interruption.
    about
        Anything, as JSON, to be kept in ``run.json``.
    device
        ``"auto"``: a GPU if there is one. Otherwise a name that torch knows.
    engine
        What trains the clients. ``"vectorised"``: all at once, as one stack of models.
        ``"workers"``: in processes on the CPU. ``"reference"``: one after the other.
        ``"auto"``: the fastest, by a rule that depends on the model, the batch size and the
        device only. An engine that cannot train these clients is replaced by the next one;
        ``run.engine`` has the reason.
    num_workers
        Number of processes of the workers; by default one for each core. It changes no bit of the
        result.
    before_send
        What clients do to their replies before they send them, such as compression, noise for
        privacy, or an attack. It is called with the client's id, the round and its
        :class:`fedbranch.Update`, and returns the update that the server receives. The arrays
        are NumPy's with any engine. A reply on halves has a ``half_difference`` that belongs to
        its ``vector``: the updates of the two halves are their sum and difference. The calls
        are made in this process, in the order of the client ids. Its own memory of earlier
        rounds is lost when a run is resumed.
    privacy
        What clients do so that the server learns less: a :class:`fedbranch.privacy.Privacy`.
        Its noise comes before ``before_send``, its transform and sketch after it, so that the
        server, its checkpoints and ``aggregate`` see hidden numbers only. In a simulation the
        noise, too, follows from ``seed``.
    on_round
        Called after every round, and with every earlier round of a resumed run.
    method
        The name of the method in the run folder.
    start
        Called with the server before the first round, for example to partition it into given
        clusters. Returns client id -> the node at which the client joins, for clients that do
        not join at the root.
    before_round
        Called with the server, the simulated clients, and the ids of the clients about to be
        asked.
    **keywords
        The fields of :class:`fedbranch.ServerOptions`, such as ``rule``, ``guard`` or ``sketch``,
        in place of those of ``options``.

    Returns
    -------
    Run

    Notes
    -----
    Ctrl-C raises ``KeyboardInterrupt``, as in any other function: the round is abandoned, the
    workers end, and a note on the exception says how to resume. No signal handlers are installed;
    the calling program decides what a signal means. If the process is killed without warning,
    the run folder is still whole, and the workers still end. For SIGTERM to act as Ctrl-C, call
    ``signal.signal(signal.SIGTERM, signal.default_int_handler)``.
    """
    _check_settings(rounds, participation, evaluate_every, checkpoint_every)
    options = options_from(options, keywords)
    simulated = SimulatedClients(
        model,
        clients,
        training if training is not None else LocalTraining(epochs=3),
        seed=seed,
        device=device,
        engine=_engine_of(folder, engine) if resume else engine,
        num_workers=num_workers,
        before_send=before_send,
        privacy=privacy,
    )
    log.info("engine: %s (%s)", simulated.engine_choice.name, simulated.engine_choice.reason)
    with ExitStack() as at_the_end:
        at_the_end.enter_context(_noting_how_to_resume(folder))
        at_the_end.callback(simulated.close)
        server = simulated.server_for(options)
        home = start(server) if start is not None else {}
        run_folder: RunFolder | None = None
        if folder is not None:
            description: JSON = {
                "method": method,
                "rounds": rounds,
                "participation": participation,
                "evaluate_every": evaluate_every,
                **server.options.describe(),
                "engine": simulated.engine_choice.name,
                "engine_reason": simulated.engine_choice.reason,
                "about": about,
                **simulated.describe(),
            }
            run_folder = RunFolder.open(
                folder,
                description,
                resume=resume,
                may_differ={"engine_reason"},  # a resumed run was told its engine
                may_be_missing=NOT_IN_OLDER_RUNS,
            )
            at_the_end.callback(run_folder.close)
            server = _server_in(run_folder, server, options)
            if privacy is not None and privacy.noise is not None:
                simulated.releases = Releases(run_folder.path / "releases.jsonl")
                simulated.releases.go_on_after(server.round)
        simulation = _Simulation(
            server=server,
            clients=simulated,
            home=home,
            rounds=rounds,
            participation=participation,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            before_round=before_round,
            on_round=on_round,
            folder=run_folder,
        )
        return simulation.run()


@dataclass(kw_only=True)
class _Simulation:
    """The loop over rounds: between the first round to play and the last."""

    server: Server
    clients: SimulatedClients
    home: Mapping[str, int]
    rounds: int
    participation: float
    evaluate_every: int
    checkpoint_every: int
    before_round: Callable[[Server, SimulatedClients, list[str]], None] | None
    on_round: Callable[[Round], None] | None
    folder: RunFolder | None
    history: list[Round] = field(default_factory=list)  # empty if there is a folder
    evaluation: Evaluation = field(default_factory=dict)  # the last one

    def run(self) -> Run:
        """Play all rounds that are missing."""
        if self.folder is not None:
            for entry in self.folder.history():
                self._after_round(entry)
        while self.server.round < self.rounds:
            entry = self._play_round()
            self._record(entry)
            self._after_round(entry)
        path = None if self.folder is None else self.folder.path
        run = Run(self.server, path, self.evaluation, self.history, self.clients)
        if self.folder is not None:
            self.folder.finish(
                {
                    "rounds": self.rounds,
                    "clusters": {str(leaf): ids for leaf, ids in run.clusters.items()},
                    "mean": run.overall_mean,
                }
            )
        return run

    def _play_round(self) -> Round:
        """Ask clients, take their replies, and evaluate all clients if it is time to."""
        server, clients = self.server, self.clients
        number = server.round + 1
        asked = clients.gather(server, number, participation=self.participation, home=self.home)
        if self.before_round is not None:
            self.before_round(server, clients, asked)
        tasks = server.plan(asked)
        trials = server.trials(asked)
        record = server.step(clients.updates(tasks, number), losses=clients.losses(trials))
        is_due = number % self.evaluate_every == 0 or number == self.rounds
        return Round(
            record=record,
            num_visits=clients.num_visits(tasks),
            evaluation=clients.evaluation(server.tree) if is_due else {},
        )

    def _record(self, entry: Round) -> None:
        """Write a round to the folder, and the server if it is time to; or keep it in memory."""
        if self.folder is None:
            self.history.append(entry)
            return
        self.folder.append(entry)
        number = entry.record.round
        if number % self.checkpoint_every == 0 or number == self.rounds:
            self.clients.releases.sync()  # before the state that they belong to
            self.folder.save_server(self.server)

    def _after_round(self, entry: Round) -> None:
        self.evaluation = entry.evaluation or self.evaluation
        if self.on_round is not None:
            self.on_round(entry)


def _server_in(folder: RunFolder, fresh: Server, options: ServerOptions) -> Server:
    """Load the server that was saved in a run folder, or return the fresh one."""
    server = fresh
    if folder.has_state:
        server = Server.load(
            folder.path / "state",
            rule=options.rule,
            aggregate=options.aggregate,
            cache=options.cache,
        )
    folder.truncate_history(server.round)
    return server


@contextmanager
def _noting_how_to_resume(folder: str | Path | None) -> Iterator[None]:
    """Add a note to an interruption, if the run folder can be resumed."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if folder is not None and (Path(folder) / "run.json").exists():
            interruption.add_note(
                f"The run in {folder} can go on: call simulate as before, with resume=True"
            )
        raise


def _engine_of(folder: str | Path | None, asked: EngineName) -> EngineName:
    """Return the engine that the run in a folder began with, or the one that is asked for."""
    if folder is None or asked != "auto" or not (Path(folder) / "run.json").exists():
        return asked
    began_with: EngineName = RunFolder(folder).about.get("engine", asked)
    return began_with


def _check_settings(
    rounds: int, participation: float, evaluate_every: int, checkpoint_every: int
) -> None:
    for name, value in [
        ("rounds", rounds),
        ("evaluate_every", evaluate_every),
        ("checkpoint_every", checkpoint_every),
    ]:
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not 0 < participation <= 1:
        raise ValueError(f"participation is {participation}; it must be in (0, 1]")
