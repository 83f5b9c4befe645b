"""What the server learns because many updates are hidden by the same transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import KMeans
from sklearn.linear_model import RidgeCV

from fedbranch.privacy.audit.victims import NUM_CLASSES, NUM_PIXELS, Digits

__all__ = ["images_by_shape", "images_from_zeros", "labels_by_shape", "linked", "zero_groups"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

SAME_ZEROS = 0.9  # the least share of updates with either that have both, used or zero
LEVELS = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 0.9])
NUM_DIRECTIONS = 40
NUM_TURNS = 30
NUM_STARTS = 60


def linked(first: Numbers, second: Numbers) -> NDArray[np.intp]:
    """Say which update of a round is of the same client as which of another, without names."""
    ours, theirs = (rows / np.linalg.norm(rows, axis=1)[:, None] for rows in (first, second))
    return np.asarray((ours @ theirs.T).argmax(1))


def zero_groups(seen: Numbers, least: int) -> list[NDArray[np.intp]]:
    """Group the places that are zero in the same updates, if at least so many are.

    Weights that belong to one pixel, or to one word, are zero for every client that lacks it:
    in whichever order they come, they are recognised as a group. Places that are never zero,
    or always, belong to no group.
    """
    used = (np.abs(seen) > 1e-7 * np.abs(seen).max(1, keepdims=True)).astype(np.float32)
    share = used.mean(0)
    places = np.flatnonzero((share > 0) & (share < 1 - 1e-3))
    alike = np.ones((len(places), len(places)), bool)
    for marks in (used[:, places], 1 - used[:, places]):
        both = marks.T @ marks
        counts = np.diag(both)
        alike &= both >= SAME_ZEROS * (counts[:, None] + counts[None, :] - both)
    num_groups, group_of = connected_components(csr_array(alike))
    sizes = np.bincount(group_of, minlength=num_groups)
    return [places[group_of == group] for group in np.flatnonzero(sizes >= least)]


def images_from_zeros(seen: Numbers, public: Digits) -> Numbers:
    """Group the weights of every pixel, name the groups by what digits look like, and read.

    Needs neither the model nor the transform, only that the places are the same in all rows.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params), of one record each.

    Returns
    -------
    NDArray
        Shape (clients, 64). The mean image, if there are no groups.
    """
    groups = zero_groups(seen, least=8)
    if not NUM_PIXELS // 2 <= len(groups) <= NUM_PIXELS:
        return np.tile(public.images.mean(0), (len(seen), 1))
    # In a group, all are a unit's bias gradient times the pixel: their size says how bright.
    sizes = np.stack([np.abs(seen[:, places]).mean(1) for places in groups], axis=1)
    brightness = sizes / sizes.max(1, keepdims=True)
    columns = np.zeros((len(seen), NUM_PIXELS))
    columns[:, : len(groups)] = brightness
    images = np.zeros_like(columns)
    images[:, _pixels_of(columns, public.images)] = columns
    return images


def _pixels_of(columns: Numbers, public: Numbers) -> NDArray[np.intp]:
    """Say which pixel every column is: by how bright it is, and which are bright together."""
    profiles, together = [], []
    for rows in (columns, public.astype(np.float64)):
        above = [(rows > level + 1e-4).mean(0) for level in LEVELS]
        profiles.append(np.column_stack([*above, rows.mean(0), rows.std(0)]))
        together.append(np.cov((rows > 1e-4).T.astype(np.float64)) + np.cov(rows.T))
    distances = ((profiles[0][:, None] - profiles[1][None]) ** 2).sum(2)
    start = linear_sum_assignment(distances)[1]
    options = {
        "P0": np.eye(NUM_PIXELS)[start],
        "maximize": True,
        "maxiter": 200,
        "rng": np.random.default_rng(0),  # nothing is drawn, but SciPy would look at NumPy's own
    }
    result = quadratic_assignment(*together, method="faq", options=options)
    return np.asarray(result.col_ind, np.intp)


def labels_by_shape(
    seen: Numbers, expected: Sequence[Numbers], public: Digits, *, seed: int
) -> NDArray[np.int64]:
    """Recognise the labels by the shape of the cloud of all seen updates.

    Updates of the same label lie together. The server finds ten clumps and names them so that
    the lengths of their middles, and the angles between these, are those that it expects: no
    orthonormal transform changes them.

    Parameters
    ----------
    seen
        Shape (clients, num_hidden), of one record each, all hidden by the same transform.
    expected
        The gradients of the public records, each of shape (public, num_params): at the
        model's parameters, if the server knows them; else at several that it draws itself.

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
        Of all clients, from :func:`labels_by_shape`.
    expected
        The gradients of the public records, shape (public, num_params).
    num_starts
        Of as many starts, that is taken from which the clouds come nearest.

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
    """Describe rows in as many coordinates as matter; lengths and angles stay."""
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
    """Inner products of the middles of all classes, and on the diagonal the mean length too."""
    vectors = vectors.astype(np.float64)
    middles = np.stack([vectors[labels == label].mean(0) for label in range(NUM_CLASSES)])
    products: Numbers = middles @ middles.T
    lengths = np.linalg.norm(vectors, axis=1)
    lengths_of = [lengths[labels == label].mean() for label in range(NUM_CLASSES)]
    return np.concatenate([products, [lengths_of]])


def _named(
    ours: Numbers, theirs: Numbers, spread: Numbers, rng: np.random.Generator
) -> NDArray[np.intp]:
    """Give the names of our rows under which the two shapes differ least: swap while it helps."""
    swaps = np.array(
        [_swapped(np.arange(NUM_CLASSES), i, j) for i in range(NUM_CLASSES) for j in range(i)]
    )
    best, least = np.arange(NUM_CLASSES), np.inf
    for _ in range(NUM_STARTS):
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

    The middles leave most directions open; there it starts somewhere. Also gives how far our
    points are from theirs in the end.
    """
    present = np.unique(labels)
    ours_middles = np.stack([scores[labels == label].mean(0) for label in present])
    their_middles = np.stack([theirs[public.labels == label].mean(0) for label in present])
    anywhere = 1e-9 * rng.normal(size=(scores.shape[1], theirs.shape[1]))
    turn = _best_turn(ours_middles.T @ their_middles + anywhere)
    distance = np.inf
    for _ in range(NUM_TURNS):
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
    """Give the orthonormal matrix that turns one set of points onto another, row by row."""
    left, _, right = np.linalg.svd(products)
    return np.asarray(left @ right)
