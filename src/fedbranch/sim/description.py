"""Simulated clients as a run folder describes them: everything that their results depend on."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from fedbranch.data import ClientData
from fedbranch.training.local_training import LocalTraining
from fedbranch.training.model_state import ModelState
from fedbranch.types import JSON

if TYPE_CHECKING:  # it needs cryptography, an optional dependency
    from fedbranch.privacy import Privacy

__all__ = ["describe_clients"]


def describe_clients(
    clients: Mapping[str, ClientData],
    *,
    model: nn.Module,
    initial: ModelState,
    training: LocalTraining,
    seed: int,
    before_send: Callable[..., object] | None,
    privacy: Privacy | None,
) -> JSON:
    """Describe clients as JSON, with digests in the place of data and models.

    Parameters
    ----------
    clients
        Client id -> data.
    model, initial
        The module, and its initial parameters.
    training, seed, before_send, privacy
        As for :func:`fedbranch.simulate`.
    """
    return {
        # First, since the digests below depend on the secret.
        "privacy": None if privacy is None else privacy.describe(),
        "seed": seed,
        "training": training.describe(model),
        "num_params": initial.params.numel(),
        "initial_model": _public_digest(privacy, "initial model", initial.digest()),
        "before_send": None if before_send is None else _name_of(before_send),
        "clients": [
            {
                "id": client_id,
                "group": client.group,
                "num_train": len(client.train.x),
                "num_test": 0 if client.test is None else len(client.test.x),
                # Only where there are any: older run folders do not have this number.
                **(
                    {}
                    if client.validation is None
                    else {"num_validation": len(client.validation.x)}
                ),
                "data": _public_digest(privacy, f"data of {client_id}", _digest(client)),
                "joins": client.joins,
                "leaves": client.leaves,
            }
            for client_id, client in clients.items()
        ],
    }


def _public_digest(privacy: Privacy | None, what: str, digest: str) -> str:
    """Return the digest that others may see.

    With privacy it is keyed by the secret. Without the secret, guesses at the data cannot be
    tested on it, and it does not even show whether two clients have the same data.
    """
    if privacy is None:
        return digest
    key = privacy.secret.derived("digest")
    return hmac.digest(key, f"{what}: {digest}".encode(), "sha256").hex()


def _digest(client: ClientData) -> str:
    """Hash the bytes of a client's data."""
    digest = hashlib.sha256()
    for name in ("train", "test", "validation"):
        examples = getattr(client, name)
        if name == "validation" and examples is not None:
            digest.update(name.encode())  # a client may have these without test examples
        for array in examples or ():
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
