"""The server's part in the key agreement: it passes on the messages between the nodes.

It sees signed public keys, sealed envelopes and confirmations, none of which reveals the secret.
The members trust nothing that it says; it can only prevent an agreement.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbranch.errors import FederationStalled, NotConfirmed
from fedbranch.flower.exchange import exchange
from fedbranch.flower.hidden.agreement_node import AGREED, MESSAGE_TYPE, NONE, RECORD, TAKEN
from fedbranch.flower.logs import log
from fedbranch.flower.node_ids import NodeInfo
from fedbranch.protocol.plain_text import one_line

__all__ = ["Agreed", "agree"]

SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Agreed:
    """The nodes that share a secret now, as far as the server knows.

    Attributes
    ----------
    fingerprint
        The name of the secret, for ``hidden_arrays``; it reveals nothing about it.
    roster
        The name of the roster that these nodes have in common.
    members
        Node id -> the fingerprint of the node's identity.
    refused
        Node id -> why it has no secret.
    sessions
        Node id -> the time since which it has been connected, for all nodes that were asked.
    """

    fingerprint: str = ""
    roster: str = ""
    members: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    sessions: dict[int, str] = field(default_factory=dict)


def agree(
    grid: Grid, min_nodes: int = 2, timeout: float = 600, *, before: Agreed | None = None
) -> Agreed:
    """Let the nodes agree on a secret, by passing on their messages to each other.

    Parameters
    ----------
    grid
        Flower's way to the nodes.
    min_nodes
        The least number of nodes that must have the secret in the end, of all that are connected
        when it begins. Members themselves demand that more than half of their roster has it.
    timeout
        Seconds that it may take if all answer. A node that is silent for a quarter of them is
        left out, and another one is asked to draw the secret.
    before
        An earlier agreement. Only nodes that connected since, for the first time or again, are
        asked. They get the same secret from a member that has it.

    Returns
    -------
    Agreed

    Raises
    ------
    FederationStalled
        If too few nodes are connected for that long.
    NotConfirmed
        If too few of them have the secret in the end; the message names every refusal.

    Examples
    --------
    ::

        agreed = agree(grid, min_nodes=10)
        arrays = hidden_arrays(model, fingerprint=agreed.fingerprint)
    """
    nodes = _gather(grid, min_nodes, timeout)
    sessions = {node.node_id: node.last_activated_at for node in nodes}
    earlier = Agreed() if before is None else before
    new = [i for i, since in sessions.items() if earlier.sessions.get(i) != since]
    if before is not None and not new:
        return before
    relay = _Relay(grid, timeout)
    relay.ask({node_id: {"step": "card"} for node_id in new})
    relay.leave_out_the_odd(earlier.roster)
    still_there = earlier.members.keys() & sessions.keys() - set(new)
    relay.remember({i: earlier.members[i] for i in still_there}, earlier)
    relay.spread()
    if relay.of_state(AGREED) and relay.of_state(TAKEN, NONE):
        relay.spread()  # some may have been left behind with another secret
    agreed = relay.outcome(earlier, {i: sessions[i] for i in new})
    for node_id in set(agreed.refused) & set(new):
        log.warning("\tnode %d has no secret: %s", node_id, agreed.refused[node_id])
    if len(agreed.members) < min_nodes:
        reasons = "; ".join(f"node {i}: {reason}" for i, reason in agreed.refused.items())
        raise NotConfirmed(
            f"{len(agreed.members)} nodes of {len(nodes)} have agreed on a secret, and "
            f"{min_nodes} are needed: {reasons}"
        )
    log.info("\t%d nodes share the secret %s", len(agreed.members), agreed.fingerprint)
    return agreed


def _gather(grid: Grid, num_needed: int, timeout: float) -> list[NodeInfo]:
    """Wait for enough nodes."""
    until = time.monotonic() + timeout
    while True:
        nodes: list[NodeInfo] = list(grid.get_nodes())
        if len(nodes) >= max(num_needed, 1):
            return nodes
        if time.monotonic() > until:
            raise FederationStalled(
                f"{len(nodes)} nodes are connected and {num_needed} are needed to agree on a "
                f"secret; no others connected within {timeout:g} s. Start more nodes"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


@dataclass
class _Said:
    """The statement of a node about itself."""

    member: str
    roster: str
    state: str
    card: bytes = b""
    confirmation: bytes = b""
    secret: str = ""
    envelopes: dict[str, bytes] = field(default_factory=dict)  # member -> envelope to pass on

    @classmethod
    def of(cls, record: ConfigRecord) -> _Said:
        """Read the statement of a node, which may be anything."""

        def words(name: str) -> list[str]:
            value = record.get(name, [])
            return [str(word) for word in (value if isinstance(value, list) else [value])]

        def blobs(name: str) -> list[bytes]:
            value = record.get(name, [])
            listed = value if isinstance(value, list) else [value]
            return [blob for blob in listed if isinstance(blob, bytes)]

        return cls(
            member="".join(words("member")),
            roster="".join(words("roster")),
            state="".join(words("state")),
            card=b"".join(blobs("card")),
            confirmation=b"".join(blobs("confirmation")),
            secret="".join(words("secret")),
            envelopes=dict(zip(words("members"), blobs("envelopes"), strict=True)),
        )


class _Relay:
    """Carries messages between nodes, and remembers the last statement of each."""

    def __init__(self, grid: Grid, timeout_s: float) -> None:
        self.grid = grid
        # Cards, a sealer, envelopes, confirmations: a silent node leaves time for the other steps.
        self.step_s = timeout_s / 4
        self.said: dict[int, _Said] = {}
        self.refused: dict[int, str] = {}

    def ask(self, questions: Mapping[int, Mapping[str, str | list[bytes]]]) -> None:
        """Send a message to each of these nodes, and keep their statements."""
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord(dict(question))}),
                node_id,
                MESSAGE_TYPE,
                ttl=self.step_s,
            )
            for node_id, question in questions.items()
        ]
        replies = exchange(
            self.grid,
            messages,
            self.step_s,
            still_there=lambda: set(self.grid.get_node_ids()),
        )
        waiting = {m.metadata.dst_node_id: m for m in messages}
        nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        for reply in replies:
            node_id = nodes[reply.metadata.reply_to_message_id]
            waiting.pop(node_id, None)
            try:
                self._take_down(node_id, reply)
            except Exception as error:  # objects from outside may fail in ways of their own
                self.refused[node_id] = one_line(str(error))
        for node_id in waiting:
            self.refused[node_id] = "no answer in time"

    def _take_down(self, node_id: int, reply: Message) -> None:
        self.refused.pop(node_id, None)
        if reply.has_error():
            raise ValueError(" ".join((reply.error.reason or "no reason given").split()))
        said = _Said.of(reply.content.config_records[RECORD])
        if node_id in self.said:
            said.card = said.card or self.said[node_id].card
        self.said[node_id] = said

    def of_state(self, *states: str) -> list[int]:
        """Return the nodes in one of these states, in the order of their fingerprints."""
        found = [i for i, said in self.said.items() if said.state in states]
        return sorted(found, key=lambda node_id: self.said[node_id].member)

    def leave_out(self, node_id: int, reason: str) -> None:
        """Stop asking a node."""
        del self.said[node_id]
        self.refused[node_id] = reason

    def leave_out_the_odd(self, roster: str) -> None:
        """Leave out nodes that would make all fail: with another roster, or one identity twice."""
        rosters = Counter(said.roster for said in self.said.values())
        members = Counter(said.member for said in self.said.values())
        usual = roster or max(rosters, key=lambda one: (rosters[one], one), default="")
        for node_id, said in list(self.said.items()):
            if said.roster != usual:
                self.leave_out(node_id, f"it has another roster, {said.roster[:16]}, than most")
            elif members[said.member] > 1:
                self.leave_out(node_id, f"several nodes have the identity {said.member[:16]}")

    def remember(self, members: Mapping[int, str], earlier: Agreed) -> None:
        """Count members that had the secret before, without asking them."""
        for node_id, member in members.items():
            known = _Said(member, earlier.roster, AGREED, secret=earlier.fingerprint)
            self.said.setdefault(node_id, known)

    def spread(self) -> None:
        """Let one member seal the secret to all members without it, and let all confirm it."""
        has_agreed = bool(self.of_state(AGREED))
        lacking = self.of_state(NONE, TAKEN) if has_agreed else self.of_state(NONE)
        if has_agreed and not lacking:
            return
        # A member that has the secret passes it on; without one, the lowest fingerprint draws it.
        for sealer in [*self.of_state(AGREED), *self.of_state(TAKEN), *self.of_state(NONE)]:
            others = [i for i in lacking if i != sealer and i in self.said]
            cards = [self.said[i].card for i in others]
            self.ask({sealer: {"step": "seal", "cards": cards}})
            if sealer not in self.refused:
                break
            if sealer in self.of_state(NONE):  # the next one may draw a secret without its card
                self.leave_out(sealer, self.refused[sealer])
        else:
            return
        envelopes = self.said[sealer].envelopes
        addressed = {i: envelopes.get(self.said[i].member) for i in others}
        self.ask(
            {i: {"step": "open", "envelopes": [e]} for i, e in addressed.items() if e is not None}
        )
        if not has_agreed:
            holders = self.of_state(TAKEN, AGREED)
            confirmations = [self.said[i].confirmation for i in holders]
            self.ask({i: {"step": "check", "confirmations": confirmations} for i in holders})

    def outcome(self, earlier: Agreed, asked: Mapping[int, str]) -> Agreed:
        """Return the nodes that share the secret now, with those of the earlier agreement."""
        agreed = self.of_state(AGREED)
        names = Counter((self.said[i].secret, self.said[i].roster) for i in agreed)
        secret, roster = max(names, key=lambda name: (names[name], name), default=("", ""))
        members = {i: m for i, m in earlier.members.items() if i not in asked}
        return Agreed(
            fingerprint=secret,
            roster=roster,
            members=members | {i: self.said[i].member for i in agreed},
            refused={i: w for i, w in earlier.refused.items() if i not in asked} | self.why_not(),
            sessions={**earlier.sessions, **asked},
        )

    def why_not(self) -> dict[int, str]:
        """Return the nodes without a secret, each with the reason."""
        left = dict.fromkeys(self.of_state(NONE), "it was shown no envelope")
        left |= dict.fromkeys(self.of_state(TAKEN), "too few members confirmed its secret")
        agreed = self.of_state(AGREED)
        return left | {i: why for i, why in self.refused.items() if i not in agreed}
