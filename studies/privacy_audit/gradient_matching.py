"""Images by optimisation: seek records with gradients that look like what was seen.

Deep leakage from gradients, with the cosine as the distance and total variation as the prior;
the labels are sought with the images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from studies.privacy_audit.candidates import nearest_rows
from studies.privacy_audit.victims import NUM_CLASSES, NUM_PIXELS, Digits, Network

__all__ = ["Found", "matched", "matched_by_angles", "matched_by_values"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

SMOOTHNESS_WEIGHT = 1e-4
STEP_SIZE = 0.05  # Adam's; small, since some starts are near already


class Found(NamedTuple):
    """The records that were found for each client."""

    images: Numbers  # (clients, records, 64)
    labels: NDArray[np.int64]  # (clients, records)


def matched(
    network: Network, seen: Numbers, *, per_client: int, num_steps: int, seed: int
) -> Found:
    """Seek records with a mean gradient in the direction of the seen vector.

    Parameters
    ----------
    network
        The model, at the parameters that the server assumes.
    seen
        Shape (clients, at least num_params).
    """
    targets = torch.from_numpy(seen[:, : network.num_params].astype(np.float32))
    return _sought(
        network, lambda gradients: 1 - torch.cosine_similarity(gradients, targets, dim=1),
        _noise(len(seen), per_client, seed), None, num_steps,
    )  # fmt: skip


def matched_by_values(network: Network, seen: Numbers, public: Digits, *, num_steps: int) -> Found:
    """Seek one record with a gradient that has the seen values, in any order.

    The search starts at the public record with the nearest values, and with its label.
    """
    num_params = network.num_params
    values = np.sort(seen.astype(np.float32), axis=1)
    # A transform that pads has a few more numbers than the model: the values are resampled.
    places = np.linspace(0, values.shape[1] - 1, num_params).round().astype(np.intp)
    values = values[:, places]
    nearest = nearest_rows(values, np.sort(network.gradients_of(public), axis=1))
    targets = torch.from_numpy(values)
    starts = torch.from_numpy(public.images[nearest])[:, None, :]
    labels = torch.from_numpy(public.labels[nearest])[:, None]
    return _sought(
        network, lambda gradients: (gradients.sort(1).values - targets).square().sum(1),
        starts, labels, num_steps,
    )  # fmt: skip


def matched_by_angles(
    network: Network, seen: Numbers, known_seen: Numbers, known: Digits, *, num_steps: int
) -> Found:
    """Seek one record with a gradient at the seen angles to those of known clients.

    No orthonormal transform changes inner products. The server must know the model and some
    clients' records, and sees what these clients sent. The search starts at the combination of
    known images that fits best, with the label of the known client at the smallest angle.
    """
    known_gradients = torch.from_numpy(network.gradients_of(known).astype(np.float32))
    products = torch.from_numpy((seen @ known_seen.T).astype(np.float32))
    # All directions in which known gradients differ count alike, or the longest would hide
    # the others.
    left, sizes, _ = torch.linalg.svd(known_gradients @ known_gradients.T)
    scale = (left / (sizes + 1e-3 * sizes[0]).sqrt()) @ left.T
    whitened = known_gradients.T @ scale
    targets = products @ scale
    shares = torch.linalg.solve(
        known_gradients @ known_gradients.T + 1e-2 * sizes.mean() * torch.eye(len(known)),
        products.T,
    ).T
    starts = (shares @ torch.from_numpy(known.images)).clamp(0, 1)
    lengths = known_gradients.norm(dim=1)
    labels = torch.from_numpy(known.labels)[(products / lengths).argmax(1)]
    return _sought(
        network, lambda gradients: 1 - torch.cosine_similarity(gradients @ whitened, targets, dim=1),
        starts[:, None, :], labels[:, None], num_steps,
    )  # fmt: skip


def _noise(num_clients: int, per_client: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # All clients get the same start: a result does not depend on the other attacked clients.
    start = torch.rand(1, per_client, NUM_PIXELS, generator=generator)
    return start.repeat(num_clients, 1, 1)


def _sought(
    network: Network,
    distance: Callable[[Tensor], Tensor],
    starts: Tensor,
    labels: Tensor | None,
    num_steps: int,
) -> Found:
    """Descend from the starts, and return the best records on the way for each client."""
    num_clients, per_client, _ = starts.shape
    images = starts.clone().requires_grad_()
    scores = torch.zeros(num_clients, per_client, NUM_CLASSES)
    if labels is None:
        scores += 0.01 * torch.eye(NUM_CLASSES)[torch.arange(per_client) % NUM_CLASSES]
    else:
        scores.scatter_(2, labels[:, :, None], 10.0)
    scores.requires_grad_()
    optimizer = torch.optim.Adam([images, scores], lr=STEP_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    least = torch.full((num_clients,), torch.inf)
    best_images, best_scores = images.detach().clone(), scores.detach().clone()
    for _ in range(num_steps):
        optimizer.zero_grad()
        gradients = network.gradients(images.flatten(0, 1), scores.flatten(0, 1).softmax(1))
        distances = distance(gradients.view(num_clients, per_client, -1).mean(1))
        better = distances.detach() < least
        least = torch.where(better, distances.detach(), least)
        best_images[better] = images.detach()[better]
        best_scores[better] = scores.detach()[better]
        objective = distances.sum() + SMOOTHNESS_WEIGHT * _total_variation(images)
        objective.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return Found(best_images.numpy(), best_scores.argmax(2).numpy())


def _total_variation(images: Tensor) -> Tensor:
    squares = images.reshape(*images.shape[:-1], 8, 8)
    return squares.diff(dim=-1).abs().sum() + squares.diff(dim=-2).abs().sum()
