"""Clients with texts, for attacks on words.

The texts are synthetic: words of some topics, some frequent and some rare. Each client takes
one step on a few short sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbranch import LocalTraining, Task, sgd
from fedbranch.data import Examples
from fedbranch.training.client import local_update
from fedbranch.training.model_state import ModelState

__all__ = ["DIM", "NUM_WORDS", "Writers", "public_words"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

NUM_WORDS = 300
DIM = 8
NUM_TOPICS = 10
TOPIC_WEIGHT = 10.0  # how much more frequent a topic's words are in its texts
FLATNESS = 10.0  # the word of rank r is as frequent as 1 / (r + 10)
NUM_SENTENCES = 4
SENTENCE_LENGTH = 10


@dataclass(frozen=True, eq=False)
class Writers:
    """Clients with texts.

    Attributes
    ----------
    updates
        Shape (clients, num_params), float32. The embedding comes first, row by row.
    has_word
        Shape (clients, words): the words that each client uses.
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
    """Draw the words that other people use, shape (people, words). The server knows them."""
    return _has_word(_texts(num_people, np.random.default_rng(seed))[0])


def _texts(
    num_clients: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw texts of shape (clients, sentences, words), and each client's topic."""
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
