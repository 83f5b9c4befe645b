"""Words that a client writes: rows of an embedding that moved, and rows that did not."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from studies.privacy_audit.inversion import with_most_zeros
from studies.privacy_audit.writers import DIM, NUM_WORDS
from studies.privacy_audit.zero_patterns import zero_groups

__all__ = ["NUM_GUESSES", "from_known_texts", "from_rows", "most_frequent"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

NUM_GUESSES = 20  # for each client
ZERO_BOUND = 1e-5  # of the largest; smaller values are rounding errors


def most_frequent(public: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the most frequent words: the guess for all clients without looking."""
    return np.argsort(-public.mean(0), kind="stable")[:NUM_GUESSES]


def from_rows(seen: Numbers, public: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Guess the words with the embedding rows that moved most.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params).
    public
        The words that other people use, shape (people, words).

    Returns
    -------
    NDArray
        Shape (clients, NUM_GUESSES). Where fewer rows moved, frequent words fill the guess.
    """
    values = np.abs(with_most_zeros(seen))
    rows = values[:, : NUM_WORDS * DIM].reshape(len(seen), NUM_WORDS, DIM).sum(2)
    used = rows > ZERO_BOUND * rows.max(1, keepdims=True)
    return np.stack([_filled(row, moved, public) for row, moved in zip(rows, used, strict=True)])


def from_known_texts(
    seen: Numbers,
    known_seen: Numbers,
    known_words: NDArray[np.bool_],
    public: NDArray[np.bool_],
) -> NDArray[np.intp]:
    """Guess words with the help of clients with known texts; the places of words are secret.

    Numbers that move together over many clients belong to one word. The word of such a group
    is the one that those known clients use in which the group moved. Where there are no
    zeros, words are guessed from the angles to the known clients.

    Parameters
    ----------
    seen, known_seen
        Shapes (clients, num_hidden), (known clients, num_hidden), hidden by one transform.
    known_words
        Shape (known clients, words).
    public
        The words that other people use, shape (people, words).
    """
    values = with_most_zeros(np.concatenate([known_seen, seen]))
    groups = zero_groups(values, least=DIM // 2)
    if NUM_WORDS // 2 <= len(groups) <= 2 * NUM_WORDS:
        return _from_groups(values, groups, known_words, public)
    return _from_angles(seen, known_seen, known_words, public)


def _from_groups(
    values: Numbers,
    groups: list[NDArray[np.intp]],
    known_words: NDArray[np.bool_],
    public: NDArray[np.bool_],
) -> NDArray[np.intp]:
    """Name each group by the known clients; the first rows of the values are theirs."""
    num_known = len(known_words)
    floor = ZERO_BOUND * np.abs(values).max(1)
    used = np.stack([np.abs(values[:, places]).max(1) > floor for places in groups], axis=1)
    ours, theirs = used[:num_known].T, known_words.T
    different = (ours[:, None] != theirs[None]).sum(2)
    groups_of, names = linear_sum_assignment(different)
    # A group that fits no word exactly, or several, may be misnamed: it counts less.
    trust = np.zeros(NUM_WORDS)
    trust[names] = 1 / (1 + different[groups_of, names]) + ours[groups_of].mean(1)
    marks = np.zeros((len(values) - num_known, NUM_WORDS), bool)
    marks[:, names] = used[num_known:, groups_of]
    return np.stack([_filled(trust, row, public) for row in marks])


def _from_angles(
    seen: Numbers, known_seen: Numbers, known_words: NDArray[np.bool_], public: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Regress words on inner products with the known clients' updates."""
    scale = np.linalg.norm(known_seen, axis=1).mean()
    products = known_seen @ known_seen.T / scale**2
    weights = np.linalg.solve(
        products + 0.1 * np.eye(len(products)), known_seen @ seen.T / scale**2
    )
    frequency = public.mean(0)
    scores = frequency + weights.T @ (known_words - frequency)
    return np.argsort(-scores, axis=1, kind="stable")[:, :NUM_GUESSES]


def _filled(score: Numbers, used: NDArray[np.bool_], public: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the used words of the highest scores, then frequent ones."""
    first = np.flatnonzero(used)[np.argsort(-score[used], kind="stable")][:NUM_GUESSES]
    others = np.argsort(-public.mean(0), kind="stable")
    return np.concatenate([first, others[~np.isin(others, first)]])[:NUM_GUESSES]
