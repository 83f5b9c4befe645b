"""Trials as Flower messages: client apps evaluate models that the server only considers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedbranch.flower.asking import write_content
from fedbranch.flower.federation import Federation
from fedbranch.flower.half_updates import HALF_KEY, HALVES_KEY
from fedbranch.flower.logs import log
from fedbranch.flower.metrics import loss_in
from fedbranch.flower.reply_content import read_reported
from fedbranch.protocol.plain_text import one_line
from fedbranch.protocol.tasks import Trial

__all__ = ["AskedTrial", "Trials"]


@dataclass(frozen=True, kw_only=True)
class AskedTrial:
    """A message that asks a client for its loss under one model."""

    client_id: str
    number: int  # of the trial, among those of its client
    message: Message

    @property
    def node_id(self) -> int:
        """Flower's id of the client's node."""
        return self.message.metadata.dst_node_id


@dataclass
class Trials:
    """The losses that clients are asked for in a round, and those that have come.

    Attributes
    ----------
    federation
        The federation; all these clients are connected.
    models
        Client id -> the models under which it is asked to measure its loss.
    loss_key
        The metric that is the loss; None: it is found by its name.
    unclear
        The names of the metrics in a reply without a clear loss; None if every loss was clear.
    refused
        Client id -> why one of its replies has no loss.
    """

    federation: Federation
    models: Mapping[str, tuple[Trial, ...]] = field(default_factory=dict)
    loss_key: str | None = None
    unclear: list[str] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    _asked: list[AskedTrial] = field(default_factory=list)
    _measured: dict[str, dict[int, float]] = field(default_factory=dict)

    def messages(
        self, this_round: int, config: ConfigRecord, *, spared: Collection[int] = ()
    ) -> list[Message]:
        """Write a message for every trial, except to nodes that are spared.

        Messages about one model have the same record, which Flower then stores once.
        """
        records: dict[tuple[int, int, str], RecordDict] = {}
        for client_id, trials in self.models.items():
            for number, trial in enumerate(trials):
                # All models live as long as this object, so their addresses tell them apart.
                model = trial.params.ctypes.data, trial.buffers.ctypes.data, trial.on
                if model not in records:
                    records[model] = self._content(trial, this_round, config)
                message = Message(
                    content=records[model],
                    message_type=MessageType.EVALUATE,
                    dst_node_id=self.federation.roster.node_ids[client_id],
                    ttl=self.federation.timeout_s,
                    group_id=str(this_round),
                )
                one = AskedTrial(client_id=client_id, number=number, message=message)
                if one.node_id not in spared:
                    self._asked.append(one)
        return [one.message for one in self._asked]

    def _content(self, trial: Trial, this_round: int, config: ConfigRecord) -> RecordDict:
        arrays = self.federation.layout.arrays_at(trial.params, trial.buffers)
        more: dict[str, int | str] = {}
        if trial.halves is not None:
            more = {HALVES_KEY: trial.halves, HALF_KEY: trial.on.removesuffix(" half")}
        return write_content(self.federation, arrays, this_round, config, more)

    def without(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Pass on the replies to other messages; keep the losses in the replies to trials."""
        waiting = {one.message.metadata.message_id: one for one in self._asked}
        trial_ids = set(waiting)
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            if message_id not in trial_ids:
                yield reply
            elif message_id in waiting and (
                waiting[message_id].node_id == reply.metadata.src_node_id
            ):
                self._keep(waiting.pop(message_id), reply)
            else:
                log.warning("\tignored a second loss under one model, or one of another node")

    def _keep(self, one: AskedTrial, reply: Message) -> None:
        try:
            metrics = read_reported(self.federation, reply).scalars
        except Exception as error:  # objects from outside may fail in ways of their own
            self.refused[one.client_id] = one_line(f"no loss: {error}")
            log.warning("\tno loss from %s: %s", one.client_id, one_line(str(error)))
            return
        loss = loss_in(metrics, self.loss_key)
        if loss is None:
            self.unclear = sorted(metrics)
        else:
            self._measured.setdefault(one.client_id, {})[one.number] = loss

    @property
    def losses(self) -> dict[str, list[float]]:
        """Client id -> its losses, for the clients that have sent all of theirs."""
        return {
            client_id: [of_client[number] for number in range(len(self.models[client_id]))]
            for client_id, of_client in sorted(self._measured.items())
            if len(of_client) == len(self.models[client_id])
        }
