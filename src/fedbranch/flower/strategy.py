"""The strategy in place of ``FedAvg``: Flower's round, with a model for every cluster.

It translates between Flower's messages and :class:`fedbranch.Server`, which decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from numbers import Real
from pathlib import Path
from typing import TypeAlias, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbranch.errors import FederationStalled
from fedbranch.flower.arrays import Layout
from fedbranch.flower.federation import Keys
from fedbranch.flower.logs import log, log_result, shown
from fedbranch.flower.metrics import (
    MetricsAggregation,
    aggregate_by_leaf,
    mean_over_leaves,
    weighted_mean_of_metrics,
)
from fedbranch.flower.reply_content import Answer
from fedbranch.flower.result import ClusteredResult
from fedbranch.flower.round import RunningFederation
from fedbranch.server.options import OptionKeywords, ServerOptions, options_from
from fedbranch.training.client_sampling import draw_clients
from fedbranch.training.seeds import stream_seed

__all__ = ["ClusteredStrategy"]

EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


class ClusteredStrategy(Strategy):
    """Clustered federated learning as a Flower strategy: a drop-in for ``FedAvg``.

    Client apps need no change. Every node trains and evaluates the model of its own position
    in the parameter tree; :class:`fedbranch.Server` decides what splits.

    Parameters
    ----------
    fraction_train, fraction_evaluate
        The share of the connected nodes that is asked in a round.
    min_train_nodes, min_evaluate_nodes
        The least number of nodes that is asked in a round.
    min_available_nodes
        The least number of connected nodes with which a round begins.
    weighted_by_key
        The metric of a reply that is its number of examples.
    arrayrecord_key, configrecord_key
        The names of the model and of the configuration in a message.
    train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        Map the replies' records, without arrays, and the weight's key to one record. By
        default the weighted mean of every metric. Called for all clients together and for
        each cluster.
    options
        All options of the server as one object, a :class:`fedbranch.ServerOptions`.
    loss_key
        The metric of an evaluation that is the loss; lower is better. By default it is found by
        its name, such as ``loss``, ``eval_loss`` or ``test-loss``.
    half_updates
        Ask client apps for half updates; see :mod:`fedbranch.flower.half_updates`. Apps that do
        not know of them find an entry in their configuration that they do not expect.
    seed
        Which nodes are drawn follows from it and the round.
    buffers
        Names of the arrays that are averaged but never compared. By default whole numbers
        and what PyTorch's normalisation layers keep beside their parameters.
    checkpoint_dir
        The run folder; after every round it holds the whole state. It is on the machine on which
        the server app runs, so an absolute path is best.
    resume
        Go on with the run in the folder, if there is one. Its initial model is the one that
        it began with.
    **keywords
        The server's options one by one, in place of those in ``options``:

        - ``rule``: decides when clusters split; by default :class:`fedbranch.AutoRule`. Clients
          are also asked to evaluate models that it considers, unless ``fraction_evaluate`` is 0.
        - ``weighting``: ``"examples"`` or ``"equal"``.
        - ``aggregate``: makes one update of many, such as :func:`fedbranch.core.robust.median`;
          by default the weighted mean.
        - ``max_examples``: a reply that claims more is refused.
        - ``guard``: a :class:`fedbranch.Guard` against hostile clients, or None.
        - ``cache``: how updates are kept for newcomers, such as :class:`fedbranch.OnDisk`.
        - ``sketch``: compare sketches of this size instead of whole updates.
        - ``keep_updates``: False, with sketches: a few threads add replies up as they come, and
          none is kept.

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
        self._running: RunningFederation | None = None
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
            raise ValueError("resume=True without a checkpoint_dir; name the folder of the run")

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
        evaluate_fn: EvaluateFn | None = None,
    ) -> ClusteredResult:
        """Run the federation.

        Parameters
        ----------
        grid
            Flower's way to the nodes.
        initial_arrays
            The initial model, or the arrays of :func:`fedbranch.flower.hidden_arrays` if the
            server is not to know it.
        num_rounds
            The number of the last round.
        timeout
            Seconds that a round waits for training, and again for evaluation. A client that
            takes longer is left out of that round.
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
        layout = Layout.of(initial_arrays, self.buffers)
        if evaluate_fn is not None and layout.is_hidden:
            raise ValueError(
                "evaluate_fn is given, but the arrays are hidden: the server has no model that it "
                "could evaluate. Leave it out; the clients' own evaluations are in the result"
            )
        log.info("Starting %s:", type(self).__name__)
        self.summary()
        began = time.monotonic()
        running = self._running = RunningFederation.begin(
            layout,
            self.options,
            Keys(
                weight=self.weighted_by_key,
                arrays=self.arrayrecord_key,
                config=self.configrecord_key,
            ),
            num_rounds=num_rounds,
            timeout_s=timeout,
            seed=self.seed,
            loss_key=self.loss_key,
            checkpoint_dir=self.checkpoint_dir,
            resume=self.resume,
        )
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
            running.finish()
        finally:
            running.close()
        log.info("Finished in %.1f s", time.monotonic() - began)
        log_result(running.result)
        return running.result

    def _play_round(
        self,
        number: int,
        grid: Grid,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        """Train, evaluate, and write the round into the history."""
        running = self._started()
        result, root = running.result, running.server.tree.root
        messages = self.configure_train(number, result.arrays, train_config, grid)
        replies = running.exchange_training(grid, messages, number, evaluate_config)
        _, metrics = self.aggregate_train(number, replies)
        result.arrays = result.arrays_at(root.id)  # the server's model, whatever a subclass returns
        if metrics is not None:
            log.info("\ttrain: %s", shown(metrics))
            result.train_metrics_clientapp[number] = metrics

        messages = self.configure_evaluate(number, result.arrays, evaluate_config, grid)
        metrics = self.aggregate_evaluate(number, running.exchange(grid, messages))
        if metrics is not None:
            log.info("\tevaluate: %s", shown(metrics))
            result.evaluate_metrics_clientapp[number] = metrics
        metrics = None if evaluate_fn is None else self._evaluate_leaves(number, evaluate_fn)
        if metrics is not None:
            log.info("\tserver: %s", shown(metrics))
            result.evaluate_metrics_serverapp[number] = metrics
        running.close_round(number)

    def _started(self) -> RunningFederation:
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
        running.forget_messages()
        if self.fraction_train > 0:
            present, num_asked = self._present(grid, self.fraction_train, self.min_train_nodes)
            drawn = draw_clients(
                present,
                num_asked,
                stream_seed(self.seed, server_round),
                first=running.server.awaited(present),
            )
            running.ask_to_train(
                grid,
                drawn,
                server_round,
                config,
                with_trials=self.fraction_evaluate > 0,
                with_halves=self.half_updates,
            )
            log.info("\ttrain: %d of %d nodes are asked", len(running.asked), len(present))
        return [one.message for one in running.asked]

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
        used = running.take_updates(replies)
        root = running.server.tree.root
        return running.result.arrays_at(root.id), self._aggregated(used, self.train_metrics_aggr_fn)

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
            except FederationStalled as error:  # the training of this round is not to be lost
                log.warning("\tnot evaluated: %s", error)
                return []
            seed = stream_seed(self.seed, server_round, "evaluate")
            running.ask_to_evaluate(draw_clients(present, num_asked, seed), server_round, config)
        return [one.message for one in running.asked]

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002 -- the server counts for itself
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """Average the clients' metrics: over all, and over each cluster."""
        answers = self._started().take_evaluations(replies)
        return self._aggregated(answers, self.evaluate_metrics_aggr_fn)

    def _present(self, grid: Grid, fraction: float, at_least: int) -> tuple[list[str], int]:
        """Wait for enough nodes; return their clients, and the number of clients to ask."""
        num_needed = max(self.min_available_nodes, at_least, 1)
        present = self._started().present(grid, num_needed)
        return present, max(int(len(present) * fraction), at_least)

    def _aggregated(
        self, answers: list[Answer], aggregation: MetricsAggregation
    ) -> MetricRecord | None:
        """Aggregate metrics over all clients and, beside that, over each leaf."""
        contents = [(answer.leaf, answer.reported.content) for answer in answers]
        return aggregate_by_leaf(contents, aggregation, self.weighted_by_key)

    def _evaluate_leaves(self, server_round: int, evaluate_fn: EvaluateFn) -> MetricRecord | None:
        """Evaluate the model of every leaf in this process."""
        running = self._started()
        tree, measured = running.server.tree, {}
        for leaf in tree.leaves:
            metrics = evaluate_fn(server_round, running.result.arrays_at(leaf.id))
            if metrics is not None:
                measured[leaf.id] = metrics
        return mean_over_leaves(measured, {leaf: tree.num_members(leaf) for leaf in measured})
