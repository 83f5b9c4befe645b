"""Clients and a curious server, drawn from a seed: what is attacked, and how guesses are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedbranch.training.seeds import stream_seed
from studies.privacy_audit.measures import Measured, judge_hits, judge_images
from studies.privacy_audit.victims import (
    LEARNING_RATE,
    NUM_CLASSES,
    NUM_PIXELS,
    Digits,
    Network,
    Victims,
    split_digits,
)
from studies.privacy_audit.views import View, seen_apart, seen_together
from studies.privacy_audit.writers import Writers, public_words

__all__ = ["BATCH", "NOISE", "NUM_KNOWN", "Scene", "Sizes", "with_noise"]

Numbers: TypeAlias = NDArray[np.floating[Any]]

BATCH = 8  # records of a client that has several
NOISE = 0.1  # length of the noise, as a share of the update's
NUM_KNOWN = 64  # clients with data that the server may know
NUM_GUESSED_MODELS = 16
NUM_PUBLIC_WRITERS = 2000


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
        Clients with records that are sought by optimisation.
    steps
        Of each optimisation.
    crowd
        Clients of one record each in one run, with one transform.
    writers
        Clients with texts.
    tries
        For attacks that depend on luck: the number of scenes, or of starts.
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
        """Return sizes for a quick look: the same attacks on fewer clients."""
        return cls(victims=50, batches=20, sought=12, steps=200, crowd=600, writers=150, tries=2)


@dataclass(frozen=True)
class Scene:
    """Clients and a server, drawn from a seed. All parts are computed once.

    The names passed to :meth:`seed_for` determine the draws: changing one changes the committed
    results.
    """

    seed: int
    sizes: Sizes

    def seed_for(self, name: str) -> int:
        """Derive the seed for one use."""
        return stream_seed(self.seed, name)

    @cached_property
    def other_scenes(self) -> list[Scene]:
        """Smaller scenes with other digits, models and secrets, to try again."""
        sizes = replace(self.sizes, crowd=self.sizes.victims + NUM_KNOWN)
        return [Scene(self.seed_for(f"scene {n}"), sizes) for n in range(1, self.sizes.tries)]

    @cached_property
    def _digits(self) -> tuple[Digits, Digits]:
        return split_digits(self.seed)

    @property
    def held(self) -> Digits:
        """The clients' digits."""
        return self._digits[0]

    @property
    def public(self) -> Digits:
        """Digits of other people, which the server has."""
        return self._digits[1]

    @cached_property
    def network(self) -> Network:
        """The model θ0."""
        return Network.drawn(self.seed_for("model"))

    @cached_property
    def guessed_models(self) -> list[Network]:
        """Models drawn by a server that does not know θ0."""
        return [Network.drawn(self.seed_for(f"shadow {n}")) for n in range(NUM_GUESSED_MODELS)]

    @cached_property
    def crowd(self) -> Victims:
        """Clients of one record each; the first ``sizes.victims`` are attacked."""
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
    def writers(self) -> Writers:
        """Clients with texts."""
        return Writers.training(self.sizes.writers, self.seed_for("texts"))

    @cached_property
    def public_words(self) -> NDArray[np.bool_]:
        """The words that other people use, shape (people, words)."""
        return public_words(NUM_PUBLIC_WRITERS, self.seed_for("public texts"))

    def seen_of_one(self, view: View) -> Numbers:
        """Return what the server sees of the attacked clients, each in a run of its own."""
        return seen_apart(view, self.crowd.gradients[: self.sizes.victims], self.seed_for("one"))

    def seen_of_eight(self, view: View) -> Numbers:
        """Return what the server sees of clients of eight records, each in a run of its own."""
        return seen_apart(view, self.batches.gradients, self.seed_for("eight"))

    def seen_of_all(self, view: View) -> Numbers:
        """Return what the server sees of all clients of one run."""
        return seen_together(view, self.crowd.gradients, self.seed_for("together"))

    def seen_with_noise(self, view: View, multiplier: float | None = None) -> Numbers:
        """Return what the server sees of all clients of one run that add noise first.

        Parameters
        ----------
        multiplier
            See :func:`with_noise`. None: the noise of each update is a tenth as long as the
            update.
        """
        plain, rng = self.crowd.gradients, np.random.default_rng(self.seed_for("noise"))
        if multiplier is None:
            scale = NOISE * np.linalg.norm(plain, axis=1, keepdims=True) / plain.shape[1] ** 0.5
            noisy = (plain + scale * rng.normal(size=plain.shape)).astype(np.float32)
        else:
            noisy = with_noise(plain, multiplier, rng)
        return seen_together(view, noisy, self.seed_for("noisy"))

    @cached_property
    def candidate_gradients(self) -> Numbers:
        """What the attacked clients' records would send: the candidates."""
        return self.network.gradients_of(self.held[: self.sizes.victims])

    def guessed_gradients(self, records: Digits, per_client: int = 1) -> Numbers:
        """Return gradients under all guessed models, side by side.

        Inner products of the rows are means over the models.
        """
        of_models = [model.gradients_of(records, per_client) for model in self.guessed_models]
        return np.asarray(np.hstack(of_models) / len(of_models) ** 0.5)

    def judge_images(self, guessed: Numbers, per_client: int = 1) -> Measured:
        """Judge guesses of shape (clients, guesses, 64) for the first clients."""
        images = self.held.images[: len(guessed) * per_client]
        shape = (len(guessed), per_client, NUM_PIXELS)
        return judge_images(guessed, images.reshape(shape), self.public.images.mean(0))

    def judge_labels(self, guessed: NDArray[np.int64]) -> Measured:
        """Judge one label for each of the first clients."""
        return judge_hits(guessed == self.held.labels[: len(guessed)], 1 / NUM_CLASSES)

    def judge_records(self, guessed: NDArray[np.intp]) -> Measured:
        """Judge one candidate for each client; the right one has the client's own position."""
        return judge_hits(guessed == np.arange(len(guessed)), 1 / len(guessed))


def with_noise(vectors: Numbers, multiplier: float, rng: np.random.Generator) -> Numbers:
    """Add noise with a standard deviation of ``multiplier`` times the median length.

    This is the Gaussian mechanism, with the median length as the bound to which updates are
    clipped.
    """
    scale = multiplier * np.median(np.linalg.norm(vectors, axis=1))
    return np.asarray(vectors + scale * rng.normal(size=vectors.shape), np.float32)
