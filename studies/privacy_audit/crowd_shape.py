"""The shape of the cloud of all updates of one run, which no orthonormal transform changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.linear_model import RidgeCV

from studies.privacy_audit.victims import NUM_CLASSES, NUM_PIXELS, Digits

__all__ = ["images_by_shape", "labels_by_shape"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

NUM_DIRECTIONS = 40  # of the cloud; further ones are shorter and left out
NUM_TURNING_STEPS = 30
NUM_NAMING_STARTS = 60


def labels_by_shape(
    seen: Numbers, expected: Sequence[Numbers], public: Digits, *, seed: int
) -> NDArray[np.int64]:
    """Recognise the labels by the shape of the cloud of all seen updates.

    Updates of the same label lie together. The server finds ten clumps. It names them so that
    the lengths of their middles, and the angles between these, are those that it expects.

    Parameters
    ----------
    seen
        Shape (clients, num_hidden), of one record each, all hidden by the same transform.
    expected
        The gradients of the public records, each of shape (public, num_params): at the
        model's parameters, if the server knows them; else at several models that it draws.

    Returns
    -------
    NDArray
        Shape (clients,).
    """
    rng = np.random.default_rng(seed)
    scores = _scores(seen)
    clumps = _clumps(scores, seed)
    shapes = [_shape(rows, public.labels) for rows in expected]
    if len(expected) > 1:
        spread = np.std(shapes, axis=0)
    else:
        parts = np.array_split(rng.permutation(len(public)), 4)
        spread = np.std([_shape(expected[0][p], public.labels[p]) for p in parts], axis=0) / 2
    middle = np.mean(shapes, axis=0)
    names = _named(_shape(scores, clumps), middle, spread + 1e-3 * np.abs(middle).max(), rng)
    return names[clumps].astype(np.int64)


def images_by_shape(
    seen: Numbers,
    labels: NDArray[np.int64],
    expected: Numbers,
    public: Digits,
    *,
    seed: int,
    num_starts: int,
) -> Numbers:
    """Turn the cloud of seen updates onto the expected one, label by label, and read images.

    Parameters
    ----------
    seen, labels
        Of all clients; the labels come from :func:`labels_by_shape`.
    expected
        The gradients of the public records, shape (public, num_params).
    num_starts
        The number of random starts. The one after which the clouds are nearest is used.

    Returns
    -------
    NDArray
        Shape (clients, 64).
    """
    rng = np.random.default_rng(seed)
    scores, theirs = _scores(seen), _scores(expected)
    tried = [_turned(scores, labels, theirs, public, rng) for _ in range(num_starts)]
    turned = min(tried, key=lambda attempt: attempt[1])[0]
    images = np.zeros((len(seen), NUM_PIXELS))
    for label in np.unique(labels):
        rows, others = labels == label, public.labels == label
        reader = RidgeCV(np.geomspace(0.01, 1000, 11)).fit(theirs[others], public.images[others])
        images[rows] = reader.predict(turned[rows])
    return images


def _scores(vectors: Numbers) -> Numbers:
    """Describe rows in their NUM_DIRECTIONS principal coordinates; lengths and angles stay."""
    rows = vectors.astype(np.float64)
    squares, directions = np.linalg.eigh(rows @ rows.T)
    most = slice(-1, -NUM_DIRECTIONS - 1, -1)
    return np.asarray(directions[:, most] * np.sqrt(np.maximum(squares[most], 0)))


def _clumps(scores: Numbers, seed: int) -> NDArray[np.intp]:
    directions = scores[:, : NUM_CLASSES + 2]
    directions = directions / np.linalg.norm(directions, axis=1)[:, None]
    found = KMeans(NUM_CLASSES, n_init=10, random_state=seed % 2**32).fit_predict(directions)
    return np.asarray(found, np.intp)


def _shape(vectors: Numbers, labels: NDArray[np.integer[Any]]) -> Numbers:
    """Compute inner products of the middles of all classes, and below them mean lengths.

    Returns
    -------
    NDArray
        Shape (NUM_CLASSES + 1, NUM_CLASSES).
    """
    vectors = vectors.astype(np.float64)
    middles = np.stack([vectors[labels == label].mean(0) for label in range(NUM_CLASSES)])
    products: Numbers = middles @ middles.T
    lengths = np.linalg.norm(vectors, axis=1)
    lengths_of = [lengths[labels == label].mean() for label in range(NUM_CLASSES)]
    return np.concatenate([products, [lengths_of]])


def _named(
    ours: Numbers, theirs: Numbers, spread: Numbers, rng: np.random.Generator
) -> NDArray[np.intp]:
    """Return the names of our rows under which the two shapes differ least.

    Starts at random names and swaps two as long as that helps.
    """
    swaps = np.array(
        [_swapped(np.arange(NUM_CLASSES), i, j) for i in range(NUM_CLASSES) for j in range(i)]
    )
    best, least = np.arange(NUM_CLASSES), np.inf
    for _ in range(NUM_NAMING_STARTS):
        order, now = rng.permutation(NUM_CLASSES), np.inf  # which of ours has name 0, 1, ...
        while True:
            orders = order[swaps]
            products = ours[:-1][orders[:, :, None], orders[:, None, :]]
            lengths = ours[-1][orders][:, None, :]
            seen = np.concatenate([products, lengths], axis=1)
            values = (((seen - theirs) / spread) ** 2).sum((1, 2))
            if values.min() >= now:
                break
            order, now = orders[values.argmin()], values.min()
        if now < least:
            best, least = order, now
    return np.argsort(best)


def _swapped(order: NDArray[np.intp], i: int, j: int) -> NDArray[np.intp]:
    order[[i, j]] = order[[j, i]]
    return order


def _turned(
    scores: Numbers,
    labels: NDArray[np.int64],
    theirs: Numbers,
    public: Digits,
    rng: np.random.Generator,
) -> tuple[Numbers, float]:
    """Turn our scores onto theirs: first the middles of the classes, then point by point.

    The middles leave most directions open; there the start is random. Returns the turned
    scores, and how far our points are from theirs in the end.
    """
    present = np.unique(labels)
    ours_middles = np.stack([scores[labels == label].mean(0) for label in present])
    their_middles = np.stack([theirs[public.labels == label].mean(0) for label in present])
    anywhere = 1e-9 * rng.normal(size=(scores.shape[1], theirs.shape[1]))
    turn = _best_turn(ours_middles.T @ their_middles + anywhere)
    distance = np.inf
    for _ in range(NUM_TURNING_STEPS):
        turned = scores @ turn
        partners = np.zeros_like(turned)
        for label in present:
            rows, others = labels == label, theirs[public.labels == label]
            products = turned[rows] @ others.T
            distances = (turned[rows] ** 2).sum(1)[:, None] + (others**2).sum(1) - 2 * products
            weights = np.exp(-(distances - distances.min(1, keepdims=True)) / distances.std())
            partners[rows] = (weights / weights.sum(1, keepdims=True)) @ others
        turn = _best_turn(scores.T @ partners)
        distance = float(((scores @ turn - partners) ** 2).sum())
    return np.asarray(scores @ turn), distance


def _best_turn(products: Numbers) -> Numbers:
    """Compute the orthonormal matrix that turns one set of points onto another, row by row."""
    left, _, right = np.linalg.svd(products)
    return np.asarray(left @ right)
