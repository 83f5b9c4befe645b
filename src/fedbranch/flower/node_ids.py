"""The client id of a Flower node, which it keeps over restarts.

In a deployment every SuperNode signs its requests with its private key, and the SuperLink
reports the public key: the client id is the fingerprint of that key. Nothing in a reply changes
it. Flower's simulation engine has no keys; there the client is its partition.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

__all__ = ["NodeInfo", "Roster", "client_id_of_key", "identify"]

# Two keys with the same first 128 bits of their SHA-256 cannot be found.
FINGERPRINT_DIGITS = 32
LONGEST_KEY_BYTES = 10_000  # far above any real key; every key that is read stays in the cache
LONGEST_NAME = 100
LIKE_AN_ID = re.compile("(key|node|partition)-")
SIMULATED_KEY_BYTES = 32  # the simulation engine gives its nodes random bytes for a key


class NodeInfo(Protocol):
    """The description of a node by Flower's grid."""

    node_id: int
    public_key: bytes
    registered_at: str
    last_activated_at: str
    name: str


@dataclass(frozen=True)
class Roster:
    """The nodes that are connected now.

    Attributes
    ----------
    node_ids
        Client id -> Flower's id of its node.
    refused
        Client id -> why no node is accepted for it.
    sessions
        Node id -> the time since which it has been connected without a break.
    partitions
        Node id -> its partition, in a simulation.
    names
        Client id -> the name under which its node was registered, if any. For people only. A
        name that could be mistaken is left out: one that several nodes have, that looks like a
        client id, or that cannot be printed.
    """

    node_ids: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    sessions: dict[int, str] = field(default_factory=dict)
    partitions: dict[int, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


@lru_cache(maxsize=100_000)  # the same keys are asked about in every round
def client_id_of_key(public_key: bytes) -> str:
    """Return the client id of the SuperNode with this public key, in PEM or as OpenSSH writes it.

    It is the beginning of the SHA-256 of the key in DER, as also
    ``openssl pkey -pubin -in KEY.pem -outform DER | sha256sum`` prints it.

    Examples
    --------
    >>> client_id_of_key(
    ...     b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
    ... )
    'key-9408457aefd071cec127c1f985399308'
    """
    load = load_pem_public_key if b"-----BEGIN" in public_key else load_ssh_public_key
    try:
        key = load(public_key.strip())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"not a public key: {public_key[:40]!r}: {error}") from None
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return f"key-{hashlib.sha256(der).hexdigest()[:FINGERPRINT_DIGITS]}"


def identify(nodes: Iterable[NodeInfo], before: Roster | None = None) -> Roster:
    """Find out which clients the nodes are.

    Two nodes with one key, or one node with two keys, are refused: none of them is asked.

    Parameters
    ----------
    nodes
        The nodes that are connected now.
    before
        The roster of the last look.

    Examples
    --------
    >>> from fedbranch.flower.testing import FakeNode
    >>> identify([FakeNode(node_id=7), FakeNode(node_id=8)]).node_ids
    {'node-7': 7, 'node-8': 8}
    """
    listed = list(nodes)
    with_key = [node for node in listed if _has_key(node)]
    partitions = dict(before.partitions) if before is not None else {}
    named = list(_without_keys([n for n in listed if not _has_key(n)], partitions).items())
    claims: dict[str, set[int]] = defaultdict(set)  # client id -> nodes that claim it
    claimed_by: dict[int, set[str]] = defaultdict(set)
    node_ids: dict[str, int] = {}
    refused: dict[str, str] = {}
    for node in with_key:
        if len(node.public_key) > LONGEST_KEY_BYTES:
            refused[f"node-{node.node_id}"] = f"a public key of {len(node.public_key):,} bytes"
            continue
        try:
            named.append((client_id_of_key(node.public_key), node))
        except ValueError as error:
            refused[f"node-{node.node_id}"] = str(error)
    for client_id, node in named:
        claims[client_id].add(node.node_id)
        claimed_by[node.node_id].add(client_id)
    for client_id, claimants in sorted(claims.items()):
        node_id = min(claimants)
        if len(claimants) > 1:
            refused[client_id] = f"one key on several nodes: {sorted(claimants)}"
        elif len(claimed_by[node_id]) > 1:
            refused[client_id] = f"node {node_id} has several keys: {sorted(claimed_by[node_id])}"
        else:
            node_ids[client_id] = node_id
    return Roster(
        node_ids,
        refused,
        sessions={node.node_id: node.last_activated_at for node in listed},
        partitions=partitions,
        names=_names({i: node.name for i, node in named if i in node_ids}),
    )


def _names(given: dict[str, str]) -> dict[str, str]:
    """Keep the names that can be printed and that cannot be mistaken for another client."""
    count = Counter(name.strip().casefold() for name in given.values())
    return {
        client_id: name
        for client_id, name in given.items()
        if 0 < len(name) <= LONGEST_NAME
        and name.isprintable()
        and count[name.strip().casefold()] == 1
        and not LIKE_AN_ID.match(name.strip().casefold())
    }


def _has_key(node: NodeInfo) -> bool:
    return node.public_key.lstrip().startswith(b"-----BEGIN")


def _without_keys(nodes: list[NodeInfo], partitions: dict[int, int]) -> dict[str, NodeInfo]:
    """Name nodes without keys by their partition, or else by Flower's own id.

    The simulation engine registers its nodes in the order of their partitions, and gives them
    new random ids in every run. The partitions are added to ``partitions``, by node id, so that no
    node moves up when another one is gone.
    """
    times = {node.registered_at for node in nodes}
    are_simulated = all(len(node.public_key) == SIMULATED_KEY_BYTES for node in nodes)
    if not are_simulated or len(times) < len(nodes):
        return {f"node-{node.node_id}": node for node in nodes}
    for node in sorted(nodes, key=lambda node: node.registered_at):
        partitions.setdefault(node.node_id, len(partitions))
    return {f"partition-{partitions[node.node_id]:04d}": node for node in nodes}
