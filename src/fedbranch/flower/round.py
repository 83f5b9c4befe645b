"""The state of a running federation, and the steps of its round between Flower's hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedbranch.flower.arrays import Layout
from fedbranch.flower.asking import Asked, ask_to_evaluate, ask_to_train
from fedbranch.flower.exchange import exchange
from fedbranch.flower.federation import Federation, Keys
from fedbranch.flower.logs import log, log_record
from fedbranch.flower.receiving import receive_metrics, receive_updates
from fedbranch.flower.reply_content import Answer
from fedbranch.flower.result import ClusteredResult
from fedbranch.flower.run_folder import metrics_from_json, metrics_to_json, open_run
from fedbranch.flower.trials import Trials
from fedbranch.protocol.plain_text import one_line
from fedbranch.protocol.tasks import Task
from fedbranch.runs import Evaluation, Round, RunFolder, mean_by_metric
from fedbranch.server.options import ServerOptions
from fedbranch.server.records import RoundRecord
from fedbranch.server.server import Server
from fedbranch.types import JSON

__all__ = ["RunningFederation"]

# A round without any client to ask would otherwise be over at once.
SECONDS_TO_WAIT_FOR_OTHERS = 60.0
# A late reply at older parameters is only refused. Its reason is worth this number of rounds.
ROUNDS_TO_WAIT_FOR_A_REASON = 2


@dataclass
class RunningFederation:
    """A federation between its start and its end.

    Attributes
    ----------
    federation
        The server and the connected nodes.
    result
        What the user gets in the end; it grows with every round.
    folder
        The run folder, if there is one.
    loss_key
        The metric that is the loss; None: it is found by its name.
    trials
        The losses that clients are asked for in this round.
    asked
        The messages of the present step of this round.
    late
        Messages of earlier rounds to train that may still be answered.
    record
        What the server did in this round; None before it has.
    evaluation
        Client id -> the metrics of its evaluation in this round.
    not_evaluated
        Client id -> why its evaluation in this round cannot be used.
    """

    federation: Federation
    result: ClusteredResult
    folder: RunFolder | None
    loss_key: str | None
    trials: Trials
    asked: list[Asked] = field(default_factory=list)
    late: list[Asked] = field(default_factory=list)
    record: RoundRecord | None = None
    evaluation: Evaluation = field(default_factory=dict)
    not_evaluated: dict[str, str] = field(default_factory=dict)
    _has_asked_for_loss_key: bool = False
    _has_new_names: bool = True  # the file has other names, or may have

    @classmethod
    def begin(
        cls,
        layout: Layout,
        options: ServerOptions,
        keys: Keys,
        *,
        num_rounds: int,
        timeout_s: float,
        seed: int,
        loss_key: str | None,
        checkpoint_dir: Path | None,
        resume: bool,
    ) -> RunningFederation:
        """Set up the server, or load it with everything that was before."""
        server = Server(layout.num_params, num_buffers=layout.num_buffers, options=options)
        folder = None
        history: list[Round] = []
        names: dict[str, str] = {}
        if checkpoint_dir is not None:
            about: JSON = {
                "driver": "flower",
                "method": "cfl",
                "rounds": num_rounds,
                "seed": seed,
                **server.options.describe(),
                "model": layout.describe(),
                "clients": [],  # they are not known before they connect
            }
            folder, layout = open_run(checkpoint_dir, about, layout, resume=resume)
            try:
                if folder.has_state:
                    server = Server.load(
                        folder.path / "state",
                        rule=options.rule,
                        aggregate=options.aggregate,
                        cache=options.cache,
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
        federation = Federation(server, layout, keys, timeout_s)
        return cls(federation, result, folder, loss_key, Trials(federation))

    @property
    def server(self) -> Server:
        """The server, which plans and decides."""
        return self.federation.server

    # Nodes

    def present(self, grid: Grid, num_needed: int) -> list[str]:
        """Wait for enough nodes, tell the server which clients are there, and return these.

        Raises
        ------
        FederationStalled
            If too few nodes connect within the timeout.
        """
        server, federation = self.server, self.federation
        present = federation.gather(grid, num_needed)
        server.join(server.tree.positions.missing(present))
        server.mark_present(present)
        self.result.node_ids.update(federation.roster.node_ids)
        names = self.result.names
        new = {i: name for i, name in federation.roster.names.items() if names.get(i) != name}
        names.update(new)
        self._has_new_names |= bool(new)
        return present

    # Training

    def forget_messages(self) -> None:
        """Begin a round, in which no client has been asked for anything yet."""
        self.asked, self.trials = [], Trials(self.federation)

    def ask_to_train(
        self,
        grid: Grid,
        client_ids: Sequence[str],
        this_round: int,
        config: ConfigRecord,
        *,
        with_trials: bool,
        with_halves: bool,
    ) -> None:
        """Write the messages of the server's plan for these clients.

        Parameters
        ----------
        grid
            Flower's way to the nodes.
        client_ids
            The clients that were drawn, all of them connected.
        this_round
            The number of the round.
        config
            What client apps find in their configuration.
        with_trials
            Clients can be asked to evaluate models that the rule considers.
        with_halves
            Clients can be asked for half updates.
        """
        tasks = self._plan(client_ids, with_trials=with_trials)
        if not tasks and not self.trials.models:
            # All clients that are there have answered a holding cluster. Others may be coming.
            awaited = self.server.awaited()
            if awaited:
                limit_s = min(self.federation.timeout_s, SECONDS_TO_WAIT_FOR_OTHERS)
                arrived = self.federation.wait_for_any(grid, awaited, limit_s)
                tasks = self._plan(arrived, with_trials=with_trials)
        self.asked = ask_to_train(
            self.federation, tasks, this_round, config, with_halves=with_halves
        )

    def _plan(self, client_ids: Collection[str], *, with_trials: bool) -> dict[str, Task]:
        """Plan the tasks of these clients, and their trials if there may be any."""
        tasks = self.server.plan(client_ids)
        models = self.server.trials(client_ids) if with_trials else {}
        self.trials = Trials(self.federation, models, self.loss_key)
        return tasks

    def take_updates(self, replies: Iterable[Message]) -> list[Answer]:
        """Let the server make its round of the replies, and return the answers that it used."""
        received = receive_updates(self.federation, [*self.late, *self.asked], replies)
        losses = self.trials.losses
        self._log_losses(len(losses))
        self.record = self.server.step(received.intake, losses=losses)
        self.late = [one for one in received.unanswered if self._is_worth_waiting_for(one)]
        log_record(self.record)
        return [received.answers[client_id] for client_id in self.record.metrics]

    def _log_losses(self, num_complete: int) -> None:
        if self.trials.models:
            num_asked = len(self.trials.models)
            log.info("\ttrials: %d of %d nodes sent their losses", num_complete, num_asked)
        if self.trials.unclear is not None and not self._has_asked_for_loss_key:
            self._has_asked_for_loss_key = True
            log.warning(
                "\tan evaluation has no clear loss: its metrics are %s; name one with loss_key=... "
                "(%r now), or the rule decides without losses",
                self.trials.unclear[:10],
                self.loss_key,
            )

    def _is_worth_waiting_for(self, late: Asked) -> bool:
        """Return whether a late reply could be used, or refused with a reason that is still news.

        This limits the messages that are remembered; the server judges the replies.
        """
        position = self.server.tree[self.server.tree.position(late.client_id)]
        return (
            late.model.base == position.base
            or late.round > self.server.round - ROUNDS_TO_WAIT_FOR_A_REASON
        )

    # Evaluation

    def ask_to_evaluate(
        self, client_ids: Iterable[str], this_round: int, config: ConfigRecord
    ) -> None:
        """Write a message to each of these clients, to evaluate the model of its position."""
        self.asked = ask_to_evaluate(self.federation, client_ids, this_round, config)

    def take_evaluations(self, replies: Iterable[Message]) -> list[Answer]:
        """Read the replies, and return the answers that could be read."""
        evaluated = receive_metrics(self.federation, self.asked, replies)
        for client_id, reason in evaluated.refused.items():
            log.warning("\tevaluate: without %s: %s", client_id, reason)
            self.not_evaluated[client_id] = one_line(f"evaluation: {reason}")
        answers = evaluated.answers
        if self.asked:
            log.info("\tevaluate: %d of %d nodes answered", len(answers), len(self.asked))
        self.evaluation = {i: one.reported.finite_scalars for i, one in answers.items()}
        return list(answers.values())

    # Messages

    def exchange_training(
        self, grid: Grid, messages: Iterable[Message], this_round: int, trial_config: ConfigRecord
    ) -> Iterator[Message]:
        """Send messages to train, and the trials beside them; return the replies to the former.

        Parameters
        ----------
        grid
            Flower's way to the nodes.
        messages
            Those of :meth:`ask_to_train`, of which a subclass of the strategy may have dropped
            or replaced some. A node without its message gets no trials either.
        this_round
            The number of the round.
        trial_config
            What client apps find in their configuration in trials.
        """
        wanted = list(messages)
        kept = {message.metadata.dst_node_id for message in wanted}
        spared = {one.node_id for one in self.asked} - kept
        trials = self.trials.messages(this_round, trial_config, spared=spared)
        late = [one.message for one in self.late]
        return self.trials.without(self.exchange(grid, wanted, late=late, trials=trials))

    def exchange(
        self,
        grid: Grid,
        messages: Iterable[Message],
        *,
        late: Sequence[Message] = (),
        trials: Sequence[Message] = (),
    ) -> Iterator[Message]:
        """Send the messages of a step, and return the replies as they come."""
        # A subclass of the strategy may have dropped messages, or replaced them.
        by_node = {message.metadata.dst_node_id: message for message in messages}
        self.asked = [
            replace(one, message=by_node[one.node_id])
            for one in self.asked
            if one.node_id in by_node
        ]
        return exchange(
            grid,
            [*(one.message for one in self.asked), *trials],
            self.federation.timeout_s,
            still_there=lambda: self.federation.still_there(grid),
            late=late,
        )

    # The end of a round, and of the run

    def close_round(self, this_round: int) -> None:
        """Write the round into the history, and the state into the run folder."""
        assert self.record is not None, "the server has made no round"
        refused = self.not_evaluated | self.trials.refused | dict(self.record.refused)
        entry = Round(
            record=replace(self.record, refused=dict(sorted(refused.items()))),
            evaluation=self.evaluation,
            aggregated={
                stage: metrics_to_json(by_round[this_round])
                for stage, by_round in _by_stage(self.result).items()
                if this_round in by_round
            },
        )
        self.result.history.append(entry)
        if self.folder is not None:
            if self._has_new_names:
                self.folder.save_names(self.result.names)
                self._has_new_names = False
            self.folder.append(entry)
            self.folder.save_server(self.server)
        self.record, self.evaluation, self.not_evaluated = None, {}, {}

    def finish(self) -> None:
        """Mark the run folder as complete."""
        if self.folder is not None:
            evaluation = self.folder.final_evaluation()
            self.folder.finish(
                {
                    "rounds": self.server.round,
                    "clusters": {str(leaf): ids for leaf, ids in self.server.clusters.items()},
                    "mean": mean_by_metric(evaluation, list(evaluation)),
                }
            )

    def close(self) -> None:
        """Let go of the run folder, so that another process may write there."""
        if self.folder is not None:
            self.folder.close()


def _by_stage(result: ClusteredResult) -> dict[str, dict[int, MetricRecord]]:
    """Return the metrics of a result under the names that the history has for them."""
    return {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
