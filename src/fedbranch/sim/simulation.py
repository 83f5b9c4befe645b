"""A simulation: the server and the simulated clients, round after round."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from torch import nn

from fedbranch.data import ClientData
from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.server.options import (
    NOT_IN_OLDER_RUNS,
    OptionKeywords,
    ServerOptions,
    options_from,
)
from fedbranch.server.server import Server
from fedbranch.sim.clients import BeforeSend, Population, only_finite
from fedbranch.sim.engines.choice import EngineChoice, EngineName
from fedbranch.sim.ensemble import Ensemble
from fedbranch.sim.release_counts import Releases
from fedbranch.training.client import evaluate
from fedbranch.training.local_training import LocalTraining
from fedbranch.tree import ParameterTree
from fedbranch.types import JSON

if TYPE_CHECKING:  # it needs cryptography, which only those who want privacy have
    from fedbranch.privacy import Privacy

__all__ = ["Run", "Settings", "simulate"]

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


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A finished simulation.

    Attributes
    ----------
    server
        As it was after the last round.
    path
        The run folder, if one was asked for.
    evaluation
        Client id -> metrics on its held-out data under its model, at the end.
    """

    server: Server
    path: Path | None
    evaluation: Evaluation
    _rounds: list[Round]  # empty if they are in the folder
    _population: Population

    def __repr__(self) -> str:
        sizes = " + ".join(str(len(ids)) for ids in self.clusters.values())
        return f"<Run: {self.server.round} rounds, clusters of {sizes} clients, path {self.path}>"

    @cached_property
    def history(self) -> list[Round]:
        """Every round, with its decisions and evaluation; read from the run folder if there is one.

        A long run with many clients would otherwise fill the memory with it.
        """
        return self._rounds if self.path is None else RunFolder(self.path).history()

    @property
    def engine(self) -> EngineChoice:
        """What trained the clients, and why."""
        return self._population.engine_choice

    @property
    def tree(self) -> ParameterTree:
        """The parameter tree."""
        return self.server.tree

    @property
    def clusters(self) -> dict[int, list[str]]:
        """Leaf -> ids of its clients."""
        return self.server.clusters

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
        """Give a copy of the model at a tree node, in evaluation mode.

        Also if the server knows hidden models only: who simulates is a member.
        """
        return self._population.model_at(self.tree[node_id])

    def epsilons(self, delta: float) -> dict[str, float]:
        """Say what the noise is worth to every client after all that it has sent.

        Parameters
        ----------
        delta
            The probability with which the promise may fail; far below 1 / number of clients.

        Returns
        -------
        dict
            Client id -> ε of (ε, δ)-differential privacy: an update counts once, a reply on
            halves twice; 0 for who has sent nothing.
        """
        population = self._population
        privacy = population.privacy
        if privacy is None or privacy.noise is None:
            raise ValueError(
                "the run had no noise, and without it there is no epsilon; pass "
                "privacy=Privacy(secret, noise=Noise(clip=..., multiplier=...))"
            )
        counts = {i: population.releases.by_client[i] for i in population.clients}
        worth = {n: privacy.noise.epsilon(n, delta) for n in set(counts.values())}
        return {client_id: worth[count] for client_id, count in counts.items()}

    # The models on a client's path: from the one for all to its own

    def path_of(self, client_id: str) -> list[int]:
        """Give the ids of the nodes from the root to a client's position."""
        return [node.id for node in self.tree.path(self.tree.position(client_id))]

    def evaluation_on_path(
        self, part: Literal["validation", "test"] = "test"
    ) -> dict[str, dict[int, dict[str, float | None]]]:
        """Measure every client under every model on its path.

        Parameters
        ----------
        part
            On which of its examples. A client without validation examples is measured on
            its test examples.

        Returns
        -------
        dict
            Client id -> node id, from the root on -> metrics. Clients without such examples
            are left out.
        """
        paths = {i: self.path_of(i) for i in self.tree.client_ids}
        measured: dict[str, dict[int, dict[str, float | None]]] = {}
        for depth in range(max(map(len, paths.values()), default=0)):
            at = {i: self.tree[path[depth]] for i, path in paths.items() if depth < len(path)}
            on_part = self._population.measured(at, "held_out" if part == "validation" else "test")
            for client_id, metrics in on_part.items():
                measured.setdefault(client_id, {})[at[client_id].id] = metrics
        return measured

    def best_on_path(self) -> dict[str, int]:
        """Client id -> the node on its path with the smallest loss on its validation examples.

        Of equally good ones the most specific. Without validation examples the test examples
        decide, and then no longer judge the choice fairly; without those, too, a client keeps
        its own position.
        """
        best = {client_id: self.tree.position(client_id) for client_id in self.tree.client_ids}
        for client_id, by_node in self.evaluation_on_path("validation").items():
            losses = {
                node_id: math.inf if metrics["loss"] is None else metrics["loss"]
                for node_id, metrics in by_node.items()
            }
            # From its own position to the root: of equal ones the first is taken.
            best[client_id] = min(reversed(losses), key=losses.__getitem__)
        return best

    def ensemble(self, client_id: str, node_ids: Iterable[int] | None = None) -> nn.Module:
        """Join the models on a client's path into one, in evaluation mode; for classifiers.

        Parameters
        ----------
        client_id
            Whose path.
        node_ids
            Whose models, if not those of all nodes on the path.

        Returns
        -------
        Module
            Maps inputs to the logarithm of the mean of the models' probabilities.
        """
        chosen = self.path_of(client_id) if node_ids is None else list(node_ids)
        return Ensemble([self.model_at(node_id) for node_id in chosen]).eval()

    def ensemble_evaluation(self) -> Evaluation:
        """Client id -> metrics on its test examples under the ensemble of its path."""
        evaluation: dict[str, dict[str, float | None]] = {}
        population = self._population
        for node in self.tree:
            tests = {i: population.clients[i].test for i in self.tree.members(node.id)}
            if any(test is not None for test in tests.values()):
                ensemble = self.ensemble(next(iter(tests)))  # they share their path
            for client_id, test in tests.items():
                if test is not None:
                    measured = evaluate(ensemble, test, population.training)
                    evaluation[client_id] = only_finite(measured)
        return dict(sorted(evaluation.items()))


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
    before_round: Callable[[Server, Population, list[str]], None] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Run:
    """Run clustered federated learning over clients on this machine.

    Parameters
    ----------
    model
        Any module; its present parameters are the initial model. It is not changed.
    clients
        Client id -> data.
    options
        How the server averages, compares, guards and keeps updates; see
        :class:`fedbranch.ServerOptions`.
    rounds
        How many.
    training
        How clients train; by default 3 epochs of SGD with learning rate 0.1, batches of 20.
    seed
        All randomness follows from it, the round and the client.
    participation
        The share of the clients present that is asked in a round, in (0, 1].
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
    engine
        What trains the clients: ``"vectorised"``, all at once as one stack of models;
        ``"workers"``, in processes on the CPU; ``"reference"``, one after the other;
        ``"auto"``, the fastest by a rule that depends on the model, the batch size and the
        device only. What cannot do it falls back to the next; see ``run.engine``.
    num_workers
        For the workers; by default one for each core. It changes no bit of the result.
    before_send
        What clients do to their replies before they send them, such as compression, noise for
        privacy, or an attack: called with the client's id, the round and its
        :class:`fedbranch.Update`, whose arrays are NumPy's with any engine; gives the update
        that the server gets. A reply on halves has a ``half_difference`` that belongs to its
        ``vector``: the updates of the two halves are their sum and difference. Called in this
        process, client after client in the order of their ids. What it remembers from one
        round to another is lost when a run is resumed.
    privacy
        What clients do so that the server learns less: a :class:`fedbranch.privacy.Privacy`.
        Its noise comes before ``before_send``, its transform and sketch after it, so that the
        server, its checkpoints and ``aggregate`` see hidden numbers only. In a simulation the
        noise, too, follows from ``seed``.
    on_round
        Called after every round, also with the rounds that a resumed run has behind it.
    method
        A name for what is run.
    start
        Called with the server before the first round, for example to give it clusters; says
        for clients at which node they stand when they join, if not at the root.
    before_round
        Called with the server, the clients, and the ids of those about to be asked.
    **keywords
        The fields of :class:`fedbranch.ServerOptions`, such as ``rule``, ``guard`` or ``sketch``,
        in place of those of ``options``.

    Returns
    -------
    Run

    Notes
    -----
    Ctrl-C is Python's ``KeyboardInterrupt``, as in any other function: the round is abandoned,
    the workers end, and a note on the exception says how to go on. No signal handlers are
    installed, since what a signal means is for the program to say that calls this: the run
    folder is whole and the workers end also if the process is killed without warning. A
    program that wants to unwind on SIGTERM as on Ctrl-C says so itself, with
    ``signal.signal(signal.SIGTERM, signal.default_int_handler)``.
    """
    _check_settings(rounds, participation, evaluate_every, checkpoint_every)
    options = options_from(options, keywords)
    training = training if training is not None else LocalTraining(epochs=3)
    population = Population(
        model,
        clients,
        training,
        seed=seed,
        device=device,
        engine=_engine_of(folder, engine) if resume else engine,
        num_workers=num_workers,
        before_send=before_send,
        privacy=privacy,
    )
    log.info("engine: %s (%s)", population.engine_choice.name, population.engine_choice.reason)
    with ExitStack() as at_the_end:
        at_the_end.enter_context(_saying_how_to_go_on(folder))
        at_the_end.callback(population.close)
        server = population.server_for(options)
        home = start(server) if start is not None else {}
        run_folder: RunFolder | None = None
        rounds_so_far: list[Round] = []  # without a folder
        evaluation: Evaluation = {}
        if folder is not None:
            description: JSON = {
                "method": method,
                "rounds": rounds,
                "participation": participation,
                "evaluate_every": evaluate_every,
                **server.options.describe(),
                "engine": population.engine_choice.name,
                "engine_reason": population.engine_choice.reason,
                "about": about,
                **population.describe(),
            }
            # That the engine was chosen before is another reason.
            run_folder = RunFolder.open(
                folder,
                description,
                resume=resume,
                may_differ={"engine_reason"},
                may_be_missing=NOT_IN_OLDER_RUNS,
            )
            at_the_end.callback(run_folder.close)
            if run_folder.has_state:
                server = Server.load(
                    run_folder.path / "state",
                    rule=options.rule,
                    aggregate=options.aggregate,
                    cache=options.cache,
                )
            run_folder.truncate_history(server.round)
            if privacy is not None and privacy.noise is not None:
                population.releases = Releases(run_folder.path / "releases.jsonl")
                population.releases.go_on_after(server.round)
            for entry in run_folder.history():
                evaluation = entry.evaluation or evaluation
                if on_round is not None:
                    on_round(entry)

        while server.round < rounds:
            number = server.round + 1
            asked = population.gather(server, number, participation=participation, home=home)
            if before_round is not None:
                before_round(server, population, asked)
            tasks = server.plan(asked)
            trials = server.trials(asked)
            record = server.step(
                population.updates(tasks, number), losses=population.losses(trials)
            )
            is_due = number % evaluate_every == 0 or number == rounds
            entry = Round(
                record=record,
                num_visits=population.num_visits(tasks),
                evaluation=population.evaluation(server.tree) if is_due else {},
            )
            evaluation = entry.evaluation or evaluation
            if run_folder is None:
                rounds_so_far.append(entry)
            else:
                run_folder.append(entry)
                if number % checkpoint_every == 0 or number == rounds:
                    population.releases.sync()  # before the state that they belong to
                    run_folder.save_server(server)
            if on_round is not None:
                on_round(entry)

        path = None if run_folder is None else run_folder.path
        run = Run(server, path, evaluation, rounds_so_far, population)
        if run_folder is not None:
            run_folder.finish(
                {
                    "rounds": rounds,
                    "clusters": {str(leaf): ids for leaf, ids in run.clusters.items()},
                    "mean": run.overall_mean,
                }
            )
        return run


@contextmanager
def _saying_how_to_go_on(folder: str | Path | None) -> Iterator[None]:
    """Add a line to an interruption that has left a run to go on with."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if folder is not None and (Path(folder) / "run.json").exists():
            interruption.add_note(
                f"The run in {folder} can go on: call simulate as before, with resume=True"
            )
        raise


def _engine_of(folder: str | Path | None, asked: EngineName) -> EngineName:
    """Keep the engine that a run began with."""
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
