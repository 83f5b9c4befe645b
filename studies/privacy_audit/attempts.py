"""The attempts: each attack on the clients of a scene, under one view.

An attempt takes a scene and a view. It attacks what the server sees and returns what it got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from studies.privacy_audit import (
    candidates,
    crowd_shape,
    gradient_matching,
    inversion,
    known_clients,
    labels,
    linking,
    words,
    zero_patterns,
)
from studies.privacy_audit.measures import Measured, judge_hits, pool
from studies.privacy_audit.scene import BATCH, NOISE, NUM_KNOWN, Scene, with_noise
from studies.privacy_audit.victims import NUM_CLASSES, Network
from studies.privacy_audit.views import View, seen_apart, seen_together

__all__ = [
    "Attempt",
    "Knowledge",
    "candidate_by_loss",
    "candidate_by_norm",
    "candidate_by_norm_in_much_noise",
    "candidate_by_norm_in_noise",
    "candidate_by_pixel_counts",
    "candidate_by_place_in_noise",
    "candidate_by_values",
    "candidate_by_values_in_noise",
    "candidate_of_eight_by_norm",
    "candidate_of_eight_by_values",
    "candidates_by_angles",
    "candidates_of_eight_by_angles",
    "clients_by_link",
    "fit_values",
    "image_behind_cosines",
    "image_by_angles",
    "image_by_blending",
    "images_by_shape",
    "images_from_pairs",
    "images_from_zeros",
    "in_all_scenes",
    "invert_eight",
    "invert_one",
    "label_behind_cosines",
    "label_from_signs",
    "label_from_statistics",
    "label_of_eight_from_signs",
    "label_of_the_nearest",
    "labels_by_shape",
    "match_gradients_of_eight",
    "match_gradients_of_one",
    "words_from_known_texts",
    "words_from_rows",
]

Attempt: TypeAlias = Callable[[Scene, View], Measured]
Knowledge: TypeAlias = Literal["known", "guessed"]

NUM_KNOWN_WRITERS = 50


def in_all_scenes(attempt: Attempt) -> Attempt:
    """Pool over the scene and its other scenes: what a model gives away depends on the model."""

    def run_in_all(scene: Scene, view: View) -> Measured:
        return pool([attempt(each, view) for each in (scene, *scene.other_scenes)])

    return run_in_all


def invert_one(scene: Scene, view: View) -> Measured:
    """Invert the dense layer of clients with one record."""
    return scene.judge_images(inversion.inverted(scene.seen_of_one(view)))


def invert_eight(scene: Scene, view: View) -> Measured:
    """Invert the dense layer of clients with eight records."""
    return scene.judge_images(inversion.inverted(scene.seen_of_eight(view), BATCH), BATCH)


def match_gradients_of_one(model: Knowledge) -> Attempt:
    """Seek one image with the seen gradient, under the true model or a guessed one."""

    def run(scene: Scene, view: View) -> Measured:
        network = scene.network if model == "known" else scene.guessed_models[0]
        found = gradient_matching.matched(
            network, scene.seen_of_one(view)[: scene.sizes.sought],
            per_client=1, num_steps=scene.sizes.steps, seed=scene.seed_for("start"),
        )  # fmt: skip
        return scene.judge_images(found.images)

    return run


def match_gradients_of_eight(scene: Scene, view: View) -> Measured:
    """Seek eight images with the seen mean gradient."""
    found = gradient_matching.matched(
        scene.network, scene.seen_of_eight(view)[: scene.sizes.sought],
        per_client=BATCH, num_steps=scene.sizes.steps, seed=scene.seed_for("start"),
    )  # fmt: skip
    return scene.judge_images(found.images, BATCH)


def fit_values(scene: Scene, view: View) -> Measured:
    """Seek an image with a gradient that has the seen values in any order."""
    seen = scene.seen_of_one(view)[: scene.sizes.sought]
    steps = scene.sizes.steps // 3
    found = gradient_matching.matched_by_values(scene.network, seen, scene.public, num_steps=steps)
    return scene.judge_images(found.images)


def image_behind_cosines(scene: Scene, view: View) -> Measured:
    """Undo the public cosine transform, then invert the dense layer."""
    values = inversion.behind_the_cosines(scene.seen_of_one(view))
    return scene.judge_images(inversion.inverted(values))


def label_behind_cosines(scene: Scene, view: View) -> Measured:
    """Undo the public cosine transform, then take the largest error."""
    values = inversion.behind_the_cosines(scene.seen_of_one(view))
    return scene.judge_labels(labels.from_largest_errors(values))


def label_from_signs(scene: Scene, view: View) -> Measured:
    """Guess the label of clients with one record from signs."""
    return scene.judge_labels(labels.from_signs(scene.seen_of_one(view)))


def label_of_eight_from_signs(scene: Scene, view: View) -> Measured:
    """Guess a label that a client with eight records holds; any of its labels is right."""
    guessed = labels.from_signs(scene.seen_of_eight(view))
    held = scene.held.labels[: BATCH * len(guessed)].reshape(-1, BATCH)
    chance = np.mean([len(np.unique(row)) for row in held]) / NUM_CLASSES
    return judge_hits((held == guessed[:, None]).any(1), float(chance))


def label_from_statistics(model: Knowledge) -> Attempt:
    """Guess labels from value statistics of the true model or of guessed ones."""

    def run(scene: Scene, view: View) -> Measured:
        networks = [scene.network] if model == "known" else scene.guessed_models[:4]
        # The server practises on the public records, with secrets of its own.
        seed = scene.seed_for("practice")
        practice = [
            seen_together(view, network.gradients_of(scene.public), seed + number)
            for number, network in enumerate(networks)
        ]
        guessed = labels.from_value_statistics(scene.seen_of_one(view), practice, scene.public)
        return scene.judge_labels(guessed)

    return run


def candidate_by_norm(scene: Scene, view: View) -> Measured:
    """Compare lengths of updates from one record."""
    return scene.judge_records(
        candidates.by_norm(scene.seen_of_one(view), scene.candidate_gradients)
    )


def candidate_of_eight_by_norm(scene: Scene, view: View) -> Measured:
    """Compare lengths of updates from eight records."""
    expected = scene.network.gradients_of(scene.batches.digits, BATCH)
    return scene.judge_records(candidates.by_norm(scene.seen_of_eight(view), expected))


def candidate_by_norm_in_noise(*, corrected: bool) -> Attempt:
    """Compare lengths under noise of 10 %, with or without taking it out."""

    def run(scene: Scene, view: View) -> Measured:
        noise = NOISE if corrected else 0.0
        seen = scene.seen_with_noise(view)[: scene.sizes.victims]
        return scene.judge_records(candidates.by_norm(seen, scene.candidate_gradients, noise))

    return run


def candidate_by_norm_in_much_noise(scene: Scene, view: View) -> Measured:
    """Compare lengths under a noise multiplier of 0.1, and take the noise out."""
    seen = scene.seen_with_noise(view, multiplier=0.1)[: scene.sizes.victims]
    noise = 0.1 * scene.network.num_params**0.5
    return scene.judge_records(candidates.by_norm(seen, scene.candidate_gradients, noise))


def candidate_by_loss(scene: Scene, view: View) -> Measured:  # noqa: ARG001 -- no transform changes it
    """Compare reported losses."""
    num_victims = scene.sizes.victims
    expected = scene.network.losses_of(scene.held[:num_victims])
    return scene.judge_records(candidates.by_loss(scene.crowd.losses[:num_victims], expected))


def candidate_by_values(scene: Scene, view: View) -> Measured:
    """Compare sorted values of updates from one record."""
    return scene.judge_records(
        candidates.by_values(scene.seen_of_one(view), scene.candidate_gradients)
    )


def candidate_of_eight_by_values(scene: Scene, view: View) -> Measured:
    """Compare sorted values of updates from eight records."""
    expected = scene.network.gradients_of(scene.batches.digits, BATCH)
    return scene.judge_records(candidates.by_values(scene.seen_of_eight(view), expected))


def candidate_by_values_in_noise(scene: Scene, view: View) -> Measured:
    """Compare sorted values under noise of 10 %."""
    seen = scene.seen_with_noise(view)[: scene.sizes.victims]
    return scene.judge_records(candidates.by_values(seen, scene.candidate_gradients))


def candidate_by_place_in_noise(scene: Scene, view: View) -> Measured:
    """Compare number by number, under a noise multiplier of 0.1."""
    seen = scene.seen_with_noise(view, multiplier=0.1)[: scene.sizes.victims]
    return scene.judge_records(candidates.by_place(seen, scene.candidate_gradients))


def candidate_by_pixel_counts(scene: Scene, view: View) -> Measured:
    """Compare the numbers of pixels of each brightness."""
    images = scene.held.images[: scene.sizes.victims]
    return scene.judge_records(candidates.by_pixel_counts(scene.seen_of_one(view), images))


def candidates_of_eight_by_angles(scene: Scene, view: View) -> Measured:
    """Match clients with eight records by their angles under guessed models."""
    seen = seen_together(view, scene.batches.gradients, scene.seed_for("eight together"))
    expected = scene.guessed_gradients(scene.batches.digits, BATCH)
    order = np.random.default_rng(scene.seed_for("order")).permutation(len(seen))
    return scene.judge_records(order[candidates.by_angles(seen, expected[order])])


def candidates_by_angles(
    model: Knowledge,
    noise: Literal["none", "10 %"] | float = "none",
) -> Attempt:
    """Match all clients by their angles.

    ``noise`` is "none", "10 %" of an update's length, or a noise multiplier.
    """

    def run(scene: Scene, view: View) -> Measured:
        num_victims = scene.sizes.victims
        if noise == "none":
            seen = scene.seen_of_all(view)[:num_victims]
        else:
            seen = scene.seen_with_noise(view, None if noise == "10 %" else noise)[:num_victims]
        expected = scene.candidate_gradients
        if model == "guessed":
            expected = scene.guessed_gradients(scene.held[:num_victims])
        order = np.random.default_rng(scene.seed_for("order")).permutation(num_victims)
        return scene.judge_records(order[candidates.by_angles(seen, expected[order])])

    return run


def images_from_pairs(num_pairs: int) -> Attempt:
    """Undo the transform from plain updates of ``num_pairs`` other clients."""

    def run(scene: Scene, view: View) -> Measured:
        num_victims = scene.sizes.victims
        seen, plain = scene.seen_of_all(view), scene.crowd.gradients
        known = slice(num_victims, num_victims + num_pairs)
        found = known_clients.revealed(seen[:num_victims], seen[known], plain[known])
        return scene.judge_images(inversion.inverted(found))

    return run


def label_of_the_nearest(multiplier: float | None = None) -> Attempt:
    """Guess the label of the nearest known client; under noise if there is a multiplier."""

    def run(scene: Scene, view: View) -> Measured:
        if multiplier is None:
            seen = scene.seen_of_all(view)
        else:
            seen = scene.seen_with_noise(view, multiplier)
        num_victims, labels_held = scene.sizes.victims, scene.held.labels
        known = slice(num_victims, num_victims + NUM_KNOWN)
        return scene.judge_labels(
            known_clients.labels_of_the_nearest(seen[:num_victims], seen[known], labels_held[known])
        )

    return run


def image_by_blending(scene: Scene, view: View) -> Measured:
    """Blend the images of known clients."""
    num_victims, seen = scene.sizes.victims, scene.seen_of_all(view)
    known = slice(num_victims, num_victims + NUM_KNOWN)
    images = known_clients.blended(seen[:num_victims], seen[known], scene.held.images[known])
    return scene.judge_images(images[:, None, :])


def image_by_angles(scene: Scene, view: View) -> Measured:
    """Seek an image with a gradient at the seen angles to known clients."""
    num_victims, seen = scene.sizes.victims, scene.seen_of_all(view)
    known = slice(num_victims, num_victims + NUM_KNOWN)
    found = gradient_matching.matched_by_angles(
        scene.network, seen[: scene.sizes.sought], seen[known], scene.held[known],
        num_steps=scene.sizes.steps,
    )  # fmt: skip
    return scene.judge_images(found.images)


def clients_by_link(scene: Scene, view: View) -> Measured:
    """Find each client again in the next round."""
    second = seen_together(view, scene.second_round.gradients, scene.seed_for("together"))
    return scene.judge_records(linking.linked(scene.seen_of_all(view)[: len(second)], second))


def images_from_zeros(scene: Scene, view: View) -> Measured:
    """Group the weights of each pixel, and read the images."""
    images = zero_patterns.images_from_zeros(scene.seen_of_all(view), scene.public)
    return scene.judge_images(images[: scene.sizes.victims, None, :])


def images_by_shape(scene: Scene, view: View) -> Measured:
    """Turn the expected cloud of updates onto the seen one, and read the images."""
    seen, expected = scene.seen_of_all(view), scene.network.gradients_of(scene.public)
    found = crowd_shape.labels_by_shape(
        seen, [expected], scene.public, seed=scene.seed_for("clumps")
    )
    images = crowd_shape.images_by_shape(
        seen, found, expected, scene.public,
        seed=scene.seed_for("turns"), num_starts=scene.sizes.tries,
    )  # fmt: skip
    return scene.judge_images(images[: scene.sizes.victims, None, :])


def labels_by_shape(model: Knowledge, multiplier: float = 0.0) -> Attempt:
    """Name ten clumps of the crowd, under the true model or with guessed ones."""

    def run(scene: Scene, view: View) -> Measured:
        # All clients of a clump get one name, so names are judged and not clients.
        held, hits = scene.held[: scene.sizes.crowd], []
        for number in range(scene.sizes.tries):
            network = Network.drawn(scene.seed_for(f"model {number}"))
            believed = [network] if model == "known" else scene.guessed_models[:8]
            rng = np.random.default_rng(scene.seed_for(f"noise {number}"))
            sent = with_noise(network.gradients_of(held), multiplier, rng)
            # The server expects noise where there is some.
            expected = [
                with_noise(each.gradients_of(scene.public), multiplier, rng) for each in believed
            ]
            found = crowd_shape.labels_by_shape(
                seen_together(view, sent, scene.seed_for(f"run {number}")), expected,
                scene.public, seed=scene.seed_for("clumps"),
            )  # fmt: skip
            right = found == held.labels
            hits += [right[held.labels == label].mean() > 0.5 for label in range(NUM_CLASSES)]
        return judge_hits(np.array(hits), 1 / NUM_CLASSES)

    return run


def words_from_rows(scene: Scene, view: View) -> Measured:
    """Guess words from the embedding rows that moved."""
    seen = seen_apart(view, scene.writers.updates, scene.seed_for("texts"))
    return _judged_words(scene, words.from_rows(seen, scene.public_words), 0)


def words_from_known_texts(scene: Scene, view: View) -> Measured:
    """Guess words with the help of clients with known texts."""
    seen, num_known = (
        seen_together(view, scene.writers.updates, scene.seed_for("texts")),
        NUM_KNOWN_WRITERS,
    )
    guessed = words.from_known_texts(
        seen[num_known:], seen[:num_known], scene.writers.has_word[:num_known], scene.public_words
    )
    return _judged_words(scene, guessed, num_known)


def _judged_words(scene: Scene, guessed: NDArray[np.intp], first: int) -> Measured:
    has_word = scene.writers.has_word[first:]
    by_frequency = has_word[:, words.most_frequent(scene.public_words)].mean()
    return judge_hits(np.take_along_axis(has_word, guessed, axis=1), float(by_frequency))
