"""Which words a client writes: the rows of an embedding that did not move, and those that did.

The texts are synthetic: words of some topics, some frequent and some rare. Every client takes
one step on a few short sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedbranch.data import Examples
from fedbranch.privacy.audit.inversion import with_most_zeros
from fedbranch.privacy.audit.reuse import zero_groups
from fedbranch.protocol.tasks import Task
from fedbranch.training.client import local_update
from fedbranch.training.local_training import LocalTraining, sgd
from fedbranch.training.model_state import ModelState

__all__ = [
    "NUM_GUESSES",
    "Writers",
    "from_known_texts",
    "from_rows",
    "most_frequent",
    "public_words",
]

Numbers: TypeAlias = NDArray[np.floating[Any]]

NUM_WORDS = 300
DIM = 8
NUM_TOPICS = 10
TOPIC_WEIGHT = 10.0  # how much more frequent a topic's words are in its texts
FLATNESS = 10.0  # the word of rank r is as frequent as 1 / (r + 10)
NUM_SENTENCES = 4
SENTENCE_LENGTH = 10
NUM_GUESSES = 20


@dataclass(frozen=True, eq=False)
class Writers:
    """Clients with texts.

    Attributes
    ----------
    updates
        Shape (clients, num_params), float32. The embedding comes first, row by row.
    has_word
        Shape (clients, words): which words each of them uses.
    """

    updates: Numbers
    has_word: NDArray[np.bool_]

    @classmethod
    def training(cls, num_clients: int, seed: int) -> Writers:
        """Draw texts and let the reference client train on them for one step."""
        rng = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Embedding(NUM_WORDS, DIM), _Mean(), nn.Linear(DIM, NUM_TOPICS))
        initial = ModelState.of(model)
        task = Task(
            node_id=0,
            params=np.zeros(len(initial.params), np.float32),
            buffers=np.zeros(0, np.float32),
            base="",
            purpose="train",
        )
        training = LocalTraining(optimizer=sgd(0.1), steps=1, batch_size=NUM_SENTENCES)
        texts, topics = _texts(num_clients, rng)
        updates = [
            local_update(
                model,
                initial,
                task,
                Examples(text, np.full(NUM_SENTENCES, topic)),
                training,
                seed=0,
            )
            for text, topic in zip(texts, topics, strict=True)
        ]
        return cls(np.stack([np.asarray(update.vector) for update in updates]), _has_word(texts))


def public_words(num_people: int, seed: int) -> NDArray[np.bool_]:
    """Draw which words other people use, of whom the server may know everything."""
    return _has_word(_texts(num_people, np.random.default_rng(seed))[0])


def _texts(
    num_clients: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw texts of shape (clients, sentences, words), and everybody's topic."""
    frequency = 1 / (np.arange(NUM_WORDS) + FLATNESS)
    # Which words belong to a topic is public: it does not depend on the seed.
    topic_of = np.random.default_rng(0).integers(0, NUM_TOPICS, NUM_WORDS)
    topics = rng.integers(0, NUM_TOPICS, num_clients)
    texts = np.empty((num_clients, NUM_SENTENCES, SENTENCE_LENGTH), np.int64)
    for client, topic in enumerate(topics):
        weights = frequency * np.where(topic_of == topic, TOPIC_WEIGHT, 1.0)
        texts[client] = rng.choice(NUM_WORDS, texts.shape[1:], p=weights / weights.sum())
    return texts, topics


def _has_word(texts: NDArray[np.int64]) -> NDArray[np.bool_]:
    marks = np.zeros((len(texts), NUM_WORDS), bool)
    np.put_along_axis(marks, texts.reshape(len(texts), -1), True, axis=1)
    return marks


class _Mean(nn.Module):
    """The mean over a sentence's words."""

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded.mean(1)


def most_frequent(public: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Guess the same words for everybody: what the server knows without looking."""
    return np.argsort(-public.mean(0), kind="stable")[:NUM_GUESSES]


def from_rows(seen: Numbers, public: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Guess the words whose rows of the embedding moved most.

    Parameters
    ----------
    seen
        Shape (clients, at least num_params).
    public
        Which words other people use, shape (people, words).

    Returns
    -------
    NDArray
        Shape (clients, NUM_GUESSES). Where fewer rows moved, frequent words fill the guess.
    """
    values = np.abs(with_most_zeros(seen))
    rows = values[:, : NUM_WORDS * DIM].reshape(len(seen), NUM_WORDS, DIM).sum(2)
    used = rows > 1e-5 * rows.max(1, keepdims=True)
    return np.stack([_filled(row, moved, public) for row, moved in zip(rows, used, strict=True)])


def from_known_texts(
    seen: Numbers,
    known_seen: Numbers,
    known_words: NDArray[np.bool_],
    public: NDArray[np.bool_],
) -> NDArray[np.intp]:
    """Guess words from what clients with known texts sent; the places of words are not known.

    Numbers that move together over many clients belong to one word. Its name is the word that
    those of the known clients use in whose updates the group moved. Where there are no zeros,
    words are guessed from the angles to the known clients.

    Parameters
    ----------
    seen, known_seen
        Shapes (clients, num_hidden), (known clients, num_hidden), hidden by one transform.
    known_words
        Shape (known clients, words).
    """
    values = with_most_zeros(np.concatenate([known_seen, seen]))
    groups = zero_groups(values, least=DIM // 2)
    if NUM_WORDS // 2 <= len(groups) <= 2 * NUM_WORDS:
        floor = 1e-5 * np.abs(values).max(1)
        used = np.stack([np.abs(values[:, places]).max(1) > floor for places in groups], axis=1)
        ours, theirs = used[: len(known_seen)].T, known_words.T
        different = (ours[:, None] != theirs[None]).sum(2)
        groups_of, names = linear_sum_assignment(different)
        # Of groups that fit no word exactly, or several, nobody knows the name: they count less.
        trust = np.zeros(NUM_WORDS)
        trust[names] = 1 / (1 + different[groups_of, names]) + ours[groups_of].mean(1)
        marks = np.zeros((len(seen), NUM_WORDS), bool)
        marks[:, names] = used[len(known_seen) :, groups_of]
        return np.stack([_filled(trust, row, public) for row in marks])
    scale = np.linalg.norm(known_seen, axis=1).mean()
    products = known_seen @ known_seen.T / scale**2
    weights = np.linalg.solve(
        products + 0.1 * np.eye(len(products)), known_seen @ seen.T / scale**2
    )
    frequency = public.mean(0)
    scores = frequency + weights.T @ (known_words - frequency)
    return np.argsort(-scores, axis=1, kind="stable")[:, :NUM_GUESSES]


def _filled(score: Numbers, used: NDArray[np.bool_], public: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Take the used words of the highest scores, then frequent ones."""
    first = np.flatnonzero(used)[np.argsort(-score[used], kind="stable")][:NUM_GUESSES]
    others = np.argsort(-public.mean(0), kind="stable")
    return np.concatenate([first, others[~np.isin(others, first)]])[:NUM_GUESSES]
