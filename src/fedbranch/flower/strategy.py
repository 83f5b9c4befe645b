"""The strategy: Flower's round, with a model for every cluster.

It translates between Flower's messages and :class:`fedbranch.Server`, which decides.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbranch.errors import FederationStalled
from fedbranch.flower.arrays import Layout
from fedbranch.flower.exchange import exchange
from fedbranch.flower.federation import Answer, Asked, Federation, Keys
from fedbranch.flower.logs import log, log_record, log_result, shown
from fedbranch.flower.replies import merged, weighted_mean_of_metrics
from fedbranch.flower.result import ClusteredResult
from fedbranch.flower.run_folder import metrics_from_json, metrics_to_json, open_run
from fedbranch.flower.trials import Trials
from fedbranch.protocol.plain_text import one_line
from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.server.options import OptionKeywords, ServerOptions, options_from
from fedbranch.server.records import RoundRecord
from fedbranch.server.server import Server
from fedbranch.training.client_sampling import draw_clients
from fedbranch.training.seeds import stream_seed
from fedbranch.types import JSON

__all__ = ["ClusteredStrategy"]

# A round in which nobody is left to ask would otherwise be over at once.
SECONDS_TO_WAIT_FOR_OTHERS = 60.0

MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]


@dataclass
class _Running:
    """A federation between its start and its end."""

    federation: Federation
    result: ClusteredResult
    folder: RunFolder | None
    trials: Trials  # of this round
    asked: list[Asked] = field(default_factory=list)
    late: list[Asked] = field(default_factory=list)  # asked to train in earlier rounds
    record: RoundRecord | None = None  # of the round that is under way
    without: dict[str, str] = field(default_factory=dict)  # client id -> why no evaluation
    has_asked_for_loss_key: bool = False
    has_new_names: bool = True  # nobody has compared them with the file
    evaluation: Evaluation = field(default_factory=dict)

    @property
    def server(self) -> Server:
        return self.federation.server


class ClusteredStrategy(Strategy):
    """Clustered federated learning as a Flower strategy: a drop-in for ``FedAvg``.

    Client apps need no change. Every node trains and evaluates the model of its own position
    in the parameter tree; :class:`fedbranch.Server` decides what splits.

    Parameters
    ----------
    fraction_train, fraction_evaluate
        The share of the connected nodes that is asked in a round.
    min_train_nodes, min_evaluate_nodes
        How many are asked at least.
    min_available_nodes
        How many must be connected for a round to begin.
    weighted_by_key
        Where a client's reply says its number of examples.
    arrayrecord_key, configrecord_key
        Where in a message the model and the configuration are.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        Map the replies' records, without arrays, and the weight's key to one record. By
        default the weighted mean of every metric. Called for all clients together and for
        each cluster.
    options
        How the server averages, compares, guards and keeps updates; see
        :class:`fedbranch.ServerOptions`. Clients are also asked to evaluate models that the rule
        considers, unless ``fraction_evaluate`` is 0. With ``keep_updates=False`` a few threads
        add replies up as they come.
    loss_key
        Which metric of an evaluation is the loss; lower is better. By default the one that is
        called so, such as ``loss``, ``eval_loss`` or ``test-loss``.
    half_updates
        Ask client apps for half updates; see :mod:`fedbranch.flower.half_updates`. For apps that know
        of them: others get an entry in their configuration that they do not expect.
    seed
        Which nodes are drawn follows from it and the round.
    buffers
        Names of the arrays that are averaged but never compared. By default whole numbers
        and what PyTorch's normalisation layers keep beside their parameters.
    checkpoint_dir
        The run folder, where the whole state is after every round. It is on the machine on
        which the server app runs; better give an absolute path.
    resume
        Go on with the run in the folder, if there is one. Its initial model is the one that
        it began with.
    **keywords
        The fields of :class:`fedbranch.ServerOptions`, such as ``rule``, ``guard`` or ``sketch``,
        in place of those of ``options``.

    Examples
    --------
    In a server app, where ``FedAvg(fraction_train=0.5)`` was::

        strategy = ClusteredStrategy(fraction_train=0.5)
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=50)
        result.clusters  # leaf -> client ids
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregation | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregation | None = None,
        *,
        options: ServerOptions | None = None,
        loss_key: str | None = None,
        half_updates: bool = False,
        seed: int = 0,
        buffers: Collection[str] | None = None,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        self.fraction_train = fraction_train
        self.fraction_evaluate = fraction_evaluate
        self.min_train_nodes = min_train_nodes
        self.min_evaluate_nodes = min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or weighted_mean_of_metrics
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or weighted_mean_of_metrics
        self.options = options_from(options, keywords)
        self.loss_key = loss_key
        self.half_updates = half_updates
        self.seed = seed
        self.buffers = buffers
        self.checkpoint_dir = (
            None if checkpoint_dir is None else Path(checkpoint_dir).expanduser().absolute()
        )
        self.resume = resume
        self._running: _Running | None = None
        for name in ("fraction_train", "fraction_evaluate"):
            value = getattr(self, name)
            is_number = isinstance(value, Real)  # NaN of a Decimal cannot even be compared
            if not is_number or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}; it must be in [0, 1]")
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            value = getattr(self, name)
            is_number = isinstance(value, Real)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; it must be at least 0")
        if resume and checkpoint_dir is None:
            raise ValueError("resume=True without a checkpoint_dir; say where the run is")

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> Rule: %s", self.options.rule)
        log.info("\t├──> Against hostile clients: %s", self.options.guard or "nothing")
        if self.options.sketch is not None:
            log.info(
                "\t├──> Updates: compared by sketches (%s), %s",
                self.options.sketch,
                "and kept until the round is decided" if self.options.keep_updates else "not kept",
            )
        log.info(
            "\t├──> Sampling: train %.2f (at least %d), evaluate %.2f (at least %d), of at least "
            "%d nodes; seed %d",
            self.fraction_train,
            self.min_train_nodes,
            self.fraction_evaluate,
            self.min_evaluate_nodes,
            self.min_available_nodes,
            self.seed,
        )
        log.info(
            "\t├──> Keys in records: weight '%s', arrays '%s', config '%s'",
            self.weighted_by_key,
            self.arrayrecord_key,
            self.configrecord_key,
        )
        log.info("\t└──> Run folder: %s", self.checkpoint_dir or "none, so nothing is saved")

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> ClusteredResult:
        """Run the federation.

        Parameters
        ----------
        grid
            Flower's way to the nodes.
        initial_arrays
            The initial model, or what :func:`fedbranch.flower.hidden_arrays` gives if the
            server is not to know it.
        num_rounds
            Up to which round.
        timeout
            Seconds that a round waits for training, and again for evaluation. Whoever takes
            longer is left out of that round.
        train_config, evaluate_config
            Sent to the client apps, with ``server-round``.
        evaluate_fn
            Maps a round and a model to metrics. Called with the initial model, and after
            every round once for each leaf. Not with hidden arrays.

        Returns
        -------
        ClusteredResult

        Raises
        ------
        FederationStalled
            If too few nodes are connected for as long as ``timeout``. What was trained
            before is in the run folder.
        """
        if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout is {timeout}; it must be a positive number of seconds")
        if evaluate_fn is not None and Layout.of(initial_arrays, self.buffers).is_hidden:
            raise ValueError(
                "evaluate_fn is given, but the arrays are hidden: the server has no model that it "
                "could evaluate. Leave it out; the clients' own evaluations are in the result"
            )
        log.info("Starting %s:", type(self).__name__)
        self.summary()
        began = time.monotonic()
        running = self._running = self._begin(initial_arrays, num_rounds, timeout)
        try:
            if running.server.round:
                log.info("Going on after round %d", running.server.round)
            if evaluate_fn is not None:
                metrics = evaluate_fn(0, running.result.layout.initial_record)
                if metrics is not None:
                    running.result.evaluate_metrics_serverapp[0] = metrics
            for number in range(running.server.round + 1, num_rounds + 1):
                log.info("[ROUND %d/%d]", number, num_rounds)
                self._play_round(
                    number,
                    grid,
                    ConfigRecord() if train_config is None else train_config,
                    ConfigRecord() if evaluate_config is None else evaluate_config,
                    evaluate_fn,
                )
            self._finish()
        finally:
            if running.folder is not None:
                running.folder.close()
        log.info("Finished in %.1f s", time.monotonic() - began)
        log_result(running.result)
        return running.result

    def _play_round(
        self,
        number: int,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        """Train, evaluate, and write down what came of it."""
        running = self._started()
        result, root = running.result, running.server.tree.root
        tasks = list(self.configure_train(number, result.arrays, train_config, grid))
        kept = {message.metadata.dst_node_id for message in tasks}
        spared = {one.node_id for one in running.asked} - kept  # a subclass's wish
        trials = running.trials.messages(number, evaluate_config, spared=spared)
        replies = self._exchange(grid, tasks, late=running.late, trials=trials)
        _, metrics = self.aggregate_train(number, running.trials.without(replies))
        result.arrays = result.arrays_at(root.id)  # what the server has is what counts
        if metrics is not None:
            log.info("\ttrain: %s", shown(metrics))
            result.train_metrics_clientapp[number] = metrics

        messages = self.configure_evaluate(number, result.arrays, evaluate_config, grid)
        metrics = self.aggregate_evaluate(number, self._exchange(grid, messages))
        if metrics is not None:
            log.info("\tevaluate: %s", shown(metrics))
            result.evaluate_metrics_clientapp[number] = metrics
        metrics = None if evaluate_fn is None else self._evaluate_leaves(number, evaluate_fn)
        if metrics is not None:
            log.info("\tserver: %s", shown(metrics))
            result.evaluate_metrics_serverapp[number] = metrics
        self._close_round(number)

    def _begin(self, initial_arrays: ArrayRecord, num_rounds: int, timeout: float) -> _Running:
        """Set up the server, or load it with everything that was before."""
        layout = Layout.of(initial_arrays, self.buffers)
        server = Server(
            layout.num_params,
            num_buffers=layout.num_buffers,
            options=self.options,
        )
        folder = None
        history: list[Round] = []
        names: dict[str, str] = {}
        if self.checkpoint_dir is not None:
            about: JSON = {
                "driver": "flower",
                "method": "cfl",
                "rounds": num_rounds,
                "seed": self.seed,
                **server.options.describe(),
                "model": layout.describe(),
                "clients": [],  # nobody knows them before they come
            }
            folder, layout = open_run(self.checkpoint_dir, about, layout, resume=self.resume)
            try:
                if folder.has_state:
                    server = Server.load(
                        folder.path / "state",
                        rule=self.options.rule,
                        aggregate=self.options.aggregate,
                        cache=self.options.cache,
                    )
                folder.set_rounds(max(num_rounds, server.round), num_done=server.round)
                folder.truncate_history(server.round)
                history, names = folder.history(), folder.names
            except Exception:
                folder.close()
                raise
        result = ClusteredResult(tree=server.tree, layout=layout, history=history, names=names)
        result.arrays = result.arrays_at(server.tree.root.id)
        for entry in history:
            for stage, by_round in _by_stage(result).items():
                if stage in entry.aggregated:
                    by_round[entry.record.round] = metrics_from_json(entry.aggregated[stage])
        keys = Keys(
            weight=self.weighted_by_key, arrays=self.arrayrecord_key, config=self.configrecord_key
        )
        federation = Federation(server, layout, keys, timeout)
        return _Running(federation, result, folder, Trials(federation))

    def _exchange(
        self,
        grid: Grid,
        messages: Iterable[Message],
        late: Iterable[Asked] = (),
        trials: Iterable[Message] = (),
    ) -> Iterable[Message]:
        """Send what a step configured, and trials beside it; give the replies."""
        running = self._started()
        # A subclass may have dropped messages, or have put others in their place.
        by_node = {message.metadata.dst_node_id: message for message in messages}
        running.asked = [
            replace(one, message=by_node[one.node_id])
            for one in running.asked
            if one.node_id in by_node
        ]
        return exchange(
            grid,
            [*(one.message for one in running.asked), *trials],
            running.federation.timeout_s,
            still_there=lambda: running.federation.still_there(grid),
            late=[one.message for one in late],
        )

    def _started(self) -> _Running:
        if self._running is None:
            raise RuntimeError(
                f"{type(self).__name__} has not been started: call its own start(). The round of "
                "another strategy around it would know one model only"
            )
        return self._running

    # The steps of a round, under Flower's names

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 -- every node gets the model of its position
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Ask nodes to train, each the model of its position."""
        running = self._started()
        running.asked, running.trials = [], Trials(running.federation)
        if self.fraction_train > 0:
            server = running.server
            present, num_asked = self._present(grid, self.fraction_train, self.min_train_nodes)
            seed = stream_seed(self.seed, server_round)
            awaited = server.awaited(present)
            drawn = draw_clients(present, num_asked, seed, first=awaited)
            tasks = server.plan(drawn)
            running.trials = self._trials(drawn)
            still_awaited = server.awaited()
            if not tasks and not running.trials.models and still_awaited:
                # A standing cluster has heard all that are there. Others may be on their way.
                limit_s = min(running.federation.timeout_s, SECONDS_TO_WAIT_FOR_OTHERS)
                late_comers = running.federation.wait_for_any(grid, still_awaited, limit_s)
                tasks = server.plan(late_comers)
                running.trials = self._trials(late_comers)
            # Twice the time: a late reply is of use if its cluster stands still meanwhile.
            ttl_s = 2 * running.federation.timeout_s
            halves = {
                task.node_id: task.halves for task in tasks.values() if task.halves is not None
            }
            running.asked = running.federation.ask(
                tasks,
                server_round,
                config,
                message_type=MessageType.TRAIN,
                ttl_s=ttl_s,
                halves=halves if self.half_updates else None,
            )
            log.info("\ttrain: %d of %d nodes are asked", len(tasks), len(present))
        return [one.message for one in running.asked]

    def _trials(self, client_ids: Iterable[str]) -> Trials:
        """Find out whose losses the server wants to know, if clients evaluate at all."""
        running = self._started()
        models = running.server.trials(client_ids) if self.fraction_evaluate > 0 else {}
        return Trials(running.federation, models, self.loss_key)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002 -- the server counts for itself
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the updates to the server, which trains, routes and splits.

        Returns
        -------
        tuple
            The model at the root, and the clients' metrics: of all, and of each cluster.
        """
        running = self._started()
        asked = [*running.late, *running.asked]
        federation = running.federation
        receive = (
            federation.receive_updates
            if running.server.options.keep_updates
            else federation.fold_updates
        )
        received, updates = receive(asked, replies)
        losses = running.trials.losses
        self._log_losses(len(losses))
        record = running.record = running.server.step(updates, losses=losses)
        running.late = [one for one in received.unanswered if self._may_be_used(one)]
        log_record(record)
        used = [received.answers[client_id] for client_id in record.metrics]
        return (
            running.result.arrays_at(running.server.tree.root.id),
            self._aggregated(used, self.train_metrics_aggr_fn),
        )

    def _log_losses(self, num_complete: int) -> None:
        running = self._started()
        trials = running.trials
        if trials.models:
            num_asked = len(trials.models)
            log.info("\ttrials: %d of %d nodes sent their losses", num_complete, num_asked)
        if trials.unclear is not None and not running.has_asked_for_loss_key:
            running.has_asked_for_loss_key = True
            log.warning(
                "\tan evaluation has no clear loss: its metrics are %s; name one with loss_key=... "
                "(%r now), or the rule decides without losses",
                trials.unclear[:10],
                self.loss_key,
            )

    def _may_be_used(self, late: Asked) -> bool:
        """Whether an answer would be of use, or at least worth to be refused with a reason."""
        server = self._started().server
        position = server.tree[server.tree.position(late.client_id)]
        return late.base == position.base or late.round > server.round - 2

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 -- every node gets the model of its position
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Ask nodes to evaluate, each the model of its position."""
        running = self._started()
        running.asked = []
        if self.fraction_evaluate > 0:
            try:
                present, num_asked = self._present(
                    grid, self.fraction_evaluate, self.min_evaluate_nodes
                )
            except FederationStalled as error:  # what was trained in this round is not to be lost
                log.warning("\tnot evaluated: %s", error)
                return []
            running.asked = running.federation.ask(
                draw_clients(present, num_asked, stream_seed(self.seed, server_round, "evaluate")),
                server_round,
                config,
                message_type=MessageType.EVALUATE,
                ttl_s=running.federation.timeout_s,
            )
        return [one.message for one in running.asked]

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002 -- the server counts for itself
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """Average the clients' metrics: over all, and over each cluster."""
        running = self._started()
        received = running.federation.receive_metrics(running.asked, replies)
        for client_id, reason in received.refused.items():
            log.warning("\tevaluate: without %s: %s", client_id, reason)
            running.without[client_id] = one_line(f"evaluation: {reason}")
        if running.asked:
            num_answers = len(received.answers)
            log.info("\tevaluate: %d of %d nodes answered", num_answers, len(running.asked))
        answers = dict(sorted(received.answers.items()))
        running.evaluation = {i: answer.reported.finite_scalars for i, answer in answers.items()}
        return self._aggregated(list(answers.values()), self.evaluate_metrics_aggr_fn)

    def _present(self, grid: Grid, fraction: float, at_least: int) -> tuple[list[str], int]:
        """Wait until there are enough nodes; give their clients, and how many to ask."""
        running = self._started()
        server, federation = running.server, running.federation
        present = federation.gather(grid, max(self.min_available_nodes, at_least, 1))
        server.join(server.tree.positions.missing(present))
        server.mark_present(present)
        running.result.node_ids.update(federation.roster.node_ids)
        names = running.result.names
        new = {i: name for i, name in federation.roster.names.items() if names.get(i) != name}
        names.update(new)
        running.has_new_names |= bool(new)
        return present, max(int(len(present) * fraction), at_least)

    def _aggregated(
        self, answers: list[Answer], aggregation: MetricsAggregation
    ) -> MetricRecord | None:
        """Aggregate metrics over all clients and, beside that, over each leaf."""
        if not answers:
            return None
        at_leaves: dict[int, list[RecordDict]] = defaultdict(list)
        for answer in answers:
            if answer.asked.is_at_leaf:
                at_leaves[answer.asked.position].append(answer.reported.content)
        overall = aggregation([one.reported.content for one in answers], self.weighted_by_key)
        return merged(
            overall,
            {
                leaf: aggregation(contents, self.weighted_by_key)
                for leaf, contents in sorted(at_leaves.items())
            },
        )

    def _evaluate_leaves(
        self, server_round: int, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> MetricRecord | None:
        """Evaluate every leaf here; the mean counts leaves by their clients."""
        running = self._started()
        measured = {}
        for leaf in running.server.tree.leaves:
            metrics = evaluate_fn(server_round, running.result.arrays_at(leaf.id))
            if metrics is not None:
                measured[leaf.id] = metrics
        if not measured:
            return None
        contents = [
            RecordDict(
                {
                    "metrics": metrics,
                    "weight": MetricRecord({"": max(1, running.server.tree.num_members(leaf))}),
                }
            )
            for leaf, metrics in measured.items()
        ]
        return merged(weighted_mean_of_metrics(contents, ""), measured)

    def _close_round(self, server_round: int) -> None:
        """Write the round into the history, and the state to the run folder."""
        running = self._started()
        assert running.record is not None
        refused = running.without | running.trials.refused | dict(running.record.refused)
        entry = Round(
            record=replace(running.record, refused=dict(sorted(refused.items()))),
            evaluation=running.evaluation,
            aggregated={
                stage: metrics_to_json(by_round[server_round])
                for stage, by_round in _by_stage(running.result).items()
                if server_round in by_round
            },
        )
        running.result.history.append(entry)
        if running.folder is not None:
            if running.has_new_names:
                running.folder.save_names(running.result.names)
                running.has_new_names = False
            running.folder.append(entry)
            running.folder.save_server(running.server)
        running.record, running.evaluation, running.without = None, {}, {}

    def _finish(self) -> None:
        """Mark the run folder as complete."""
        running = self._started()
        if running.folder is not None:
            evaluation = running.folder.final_evaluation()
            running.folder.finish(
                {
                    "rounds": running.server.round,
                    "clusters": {str(leaf): ids for leaf, ids in running.server.clusters.items()},
                    "mean": mean_by_metric(evaluation, list(evaluation)),
                }
            )


def _by_stage(result: ClusteredResult) -> dict[str, dict[int, MetricRecord]]:
    """Name the metrics of a result as the history does."""
    return {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
