"""Clients and a curious server, drawn from a seed: what is attacked, and what is judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedbranch.privacy.audit import words
from fedbranch.privacy.audit.measures import Measured, of_hits, of_images
from fedbranch.privacy.audit.victims import (
    LEARNING_RATE,
    NUM_CLASSES,
    NUM_PIXELS,
    Digits,
    Network,
    Victims,
    split_digits,
)
from fedbranch.privacy.audit.views import View, seen_apart, seen_together
from fedbranch.training.seeds import stream_seed

__all__ = ["BATCH", "NOISE", "NUM_KNOWN", "Scene", "Sizes", "with_noise"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

BATCH = 8  # records of a client that has several
NOISE = 0.1  # of an update's length
NUM_KNOWN = 64  # clients whose data the server may know


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes
    ----------
    victims
        Clients of one record each; also the number of candidates.
    batches
        Clients of eight records each; also the number of candidates.
    sought
        Clients whose records are sought by optimisation.
    steps
        Of every optimisation.
    crowd
        Clients of one record each whose updates are hidden by the same transform.
    writers
        Clients with texts.
    tries
        How often attacks are tried that depend on luck: in as many scenes, or
        from as many starts.
    """

    victims: int = 100
    batches: int = 50
    sought: int = 30
    steps: int = 1000
    crowd: int = 898
    writers: int = 300
    tries: int = 5

    @classmethod
    def quick(cls) -> Sizes:
        """Give sizes for a look: the same attacks on fewer clients."""
        return cls(victims=50, batches=20, sought=12, steps=200, crowd=600, writers=150, tries=2)


@dataclass(frozen=True)
class Scene:
    """Clients and a server, drawn from a seed; everything is computed once."""

    seed: int
    sizes: Sizes

    def place(self, name: str) -> int:
        """Give the seed for one use."""
        return stream_seed(self.seed, name)

    @cached_property
    def others(self) -> list[Scene]:
        """Give smaller scenes with other digits, models and secrets, to try again."""
        sizes = replace(self.sizes, crowd=self.sizes.victims + NUM_KNOWN)
        return [Scene(self.place(f"scene {n}"), sizes) for n in range(1, self.sizes.tries)]

    @cached_property
    def _digits(self) -> tuple[Digits, Digits]:
        return split_digits(self.seed)

    @property
    def held(self) -> Digits:
        """What clients hold."""
        return self._digits[0]

    @property
    def public(self) -> Digits:
        """Digits of other people, which the server may use as it likes."""
        return self._digits[1]

    @cached_property
    def network(self) -> Network:
        """The model θ0."""
        return Network.drawn(self.place("model"))

    @cached_property
    def shadows(self) -> list[Network]:
        """Models that a server draws which does not know θ0."""
        return [Network.drawn(self.place(f"shadow {number}")) for number in range(16)]

    @cached_property
    def crowd(self) -> Victims:
        """Clients of one record each; the first ones are attacked."""
        return Victims.training(self.network, self.held[: self.sizes.crowd])

    @cached_property
    def batches(self) -> Victims:
        """Clients of eight records each."""
        return Victims.training(self.network, self.held[: BATCH * self.sizes.batches], BATCH)

    @cached_property
    def second_round(self) -> Victims:
        """The attacked clients in the next round, after a step of the mean update."""
        step = -LEARNING_RATE * self.crowd.gradients[: self.sizes.victims].mean(0)
        moved = Network(self.network.params + torch.from_numpy(step.astype(np.float32)))
        return Victims.training(moved, self.held[: self.sizes.victims])

    @cached_property
    def writers(self) -> words.Writers:
        """Clients with texts."""
        return words.Writers.training(self.sizes.writers, self.place("texts"))

    @cached_property
    def public_words(self) -> NDArray[np.bool_]:
        """Which words other people use."""
        return words.public_words(2000, self.place("public texts"))

    def one(self, view: View) -> Numbers:
        """Give what the server sees of the attacked clients, each in a run of its own."""
        return seen_apart(view, self.crowd.gradients[: self.sizes.victims], self.place("one"))

    def eight(self, view: View) -> Numbers:
        """Give the same for clients of eight records."""
        return seen_apart(view, self.batches.gradients, self.place("eight"))

    def together(self, view: View) -> Numbers:
        """Give what it sees of all clients of one run."""
        return seen_together(view, self.crowd.gradients, self.place("together"))

    def noisy(self, view: View, multiplier: float | None = None) -> Numbers:
        """Give what it sees of all clients of one run, which add noise before they hide.

        The noise is a tenth of an update as a whole; or see :func:`with_noise`.
        """
        plain, rng = self.crowd.gradients, np.random.default_rng(self.place("noise"))
        if multiplier is None:
            scale = NOISE * np.linalg.norm(plain, axis=1, keepdims=True) / plain.shape[1] ** 0.5
            noisy = (plain + scale * rng.normal(size=plain.shape)).astype(np.float32)
        else:
            noisy = with_noise(plain, multiplier, rng)
        return seen_together(view, noisy, self.place("noisy"))

    @cached_property
    def expected(self) -> Numbers:
        """What the attacked clients' records would send: the candidates."""
        return self.network.gradients_of(self.held[: self.sizes.victims])

    def side_by_side(self, records: Digits, per_client: int = 1) -> Numbers:
        """Give what clients send under many guessed models: inner products are means over these."""
        shadows = [shadow.gradients_of(records, per_client) for shadow in self.shadows]
        return np.asarray(np.hstack(shadows) / len(shadows) ** 0.5)

    def judged_images(self, guessed: Numbers, per_client: int = 1) -> Measured:
        """Judge guesses of shape (clients, guesses, 64) for the first clients."""
        images = self.held.images[: len(guessed) * per_client]
        shape = (len(guessed), per_client, NUM_PIXELS)
        return of_images(guessed, images.reshape(shape), self.public.images.mean(0))

    def judged_labels(self, guessed: NDArray[np.int64]) -> Measured:
        """Judge one label for each of the first clients."""
        return of_hits(guessed == self.held.labels[: len(guessed)], 1 / NUM_CLASSES)

    def judged_records(self, guessed: NDArray[np.intp]) -> Measured:
        """Judge which candidate each client is, where each is the one in its own place."""
        return of_hits(guessed == np.arange(len(guessed)), 1 / len(guessed))


def with_noise(vectors: Numbers, multiplier: float, rng: np.random.Generator) -> Numbers:
    """Add noise to every number: the multiplier times the usual length of a vector.

    This is the Gaussian mechanism, with that length as the bound to which updates are clipped.
    """
    scale = multiplier * np.median(np.linalg.norm(vectors, axis=1))
    return np.asarray(vectors + scale * rng.normal(size=vectors.shape), np.float32)
