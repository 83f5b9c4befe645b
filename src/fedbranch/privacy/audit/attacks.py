"""Every attack on every transform: what the server knows, tries and gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedbranch.privacy.audit import candidates, inversion, labels, matching, pairs, reuse, words
from fedbranch.privacy.audit.measures import Measured, of_hits, pooled
from fedbranch.privacy.audit.scene import BATCH, NOISE, NUM_KNOWN, Scene, with_noise
from fedbranch.privacy.audit.victims import NUM_CLASSES, Network
from fedbranch.privacy.audit.views import View, seen_apart, seen_together

__all__ = ["ATTACKS", "Attack", "in_many_scenes"]

Goal: TypeAlias = Literal["image", "label", "record", "client", "words"]


def in_many_scenes(run: Callable[[Scene, View], Measured]) -> Callable[[Scene, View], Measured]:
    """Measure in several scenes: what the model gives away depends on the model."""

    def run_in_all(scene: Scene, view: View) -> Measured:
        return pooled([run(each, view) for each in (scene, *scene.others)])

    return run_in_all


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes
    ----------
    key
        Its name in the results.
    title
        Its name for people.
    tries
        In a few words, what the server does.
    goal
        What it is after.
    knows
        What the server knows beside what it sees, the task and public data.
    run
        Gives what it gets under one transform.
    """

    key: str
    title: str
    tries: str
    goal: Goal
    knows: str
    run: Callable[[Scene, View], Measured]


def _dense(scene: Scene, view: View) -> Measured:
    return scene.judged_images(inversion.inverted(scene.one(view)))


def _dense_of_eight(scene: Scene, view: View) -> Measured:
    return scene.judged_images(inversion.inverted(scene.eight(view), BATCH), BATCH)


def _matched(model: Literal["known", "guessed"]) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        network = scene.network if model == "known" else scene.shadows[0]
        found = matching.matched(
            network, scene.one(view)[: scene.sizes.sought],
            per_client=1, num_steps=scene.sizes.steps, seed=scene.place("start"),
        )  # fmt: skip
        return scene.judged_images(found.images)

    return run


def _matched_eight(scene: Scene, view: View) -> Measured:
    found = matching.matched(
        scene.network, scene.eight(view)[: scene.sizes.sought],
        per_client=BATCH, num_steps=scene.sizes.steps, seed=scene.place("start"),
    )  # fmt: skip
    return scene.judged_images(found.images, BATCH)


def _values_fitted(scene: Scene, view: View) -> Measured:
    seen = scene.one(view)[: scene.sizes.sought]
    steps = scene.sizes.steps // 3
    found = matching.matched_by_values(scene.network, seen, scene.public, num_steps=steps)
    return scene.judged_images(found.images)


def _cosines_image(scene: Scene, view: View) -> Measured:
    return scene.judged_images(inversion.inverted(inversion.behind_the_cosines(scene.one(view))))


def _cosines_label(scene: Scene, view: View) -> Measured:
    values = inversion.behind_the_cosines(scene.one(view))
    return scene.judged_labels(labels.from_largest_errors(values))


def _signs(scene: Scene, view: View) -> Measured:
    return scene.judged_labels(labels.from_signs(scene.one(view)))


def _signs_of_eight(scene: Scene, view: View) -> Measured:
    guessed = labels.from_signs(scene.eight(view))
    held = scene.held.labels[: BATCH * len(guessed)].reshape(-1, BATCH)
    chance = np.mean([len(np.unique(row)) for row in held]) / NUM_CLASSES
    return of_hits((held == guessed[:, None]).any(1), float(chance))


def _value_statistics(model: Literal["known", "guessed"]) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        networks = [scene.network] if model == "known" else scene.shadows[:4]
        # The server practises on the public records, with secrets of its own.
        seed = scene.place("practice")
        practice = [
            seen_together(view, network.gradients_of(scene.public), seed + number)
            for number, network in enumerate(networks)
        ]
        guessed = labels.from_value_statistics(scene.one(view), practice, scene.public)
        return scene.judged_labels(guessed)

    return run


def _norm(scene: Scene, view: View) -> Measured:
    return scene.judged_records(candidates.by_norm(scene.one(view), scene.expected))


def _norm_of_eight(scene: Scene, view: View) -> Measured:
    expected = scene.network.gradients_of(scene.batches.digits, BATCH)
    return scene.judged_records(candidates.by_norm(scene.eight(view), expected))


def _norm_in_noise(*, corrected: bool) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        noise = NOISE if corrected else 0.0
        seen = scene.noisy(view)[: scene.sizes.victims]
        return scene.judged_records(candidates.by_norm(seen, scene.expected, noise))

    return run


def _norm_in_much_noise(scene: Scene, view: View) -> Measured:
    seen = scene.noisy(view, multiplier=0.1)[: scene.sizes.victims]
    noise = 0.1 * scene.network.num_params**0.5
    return scene.judged_records(candidates.by_norm(seen, scene.expected, noise))


def _loss(scene: Scene, view: View) -> Measured:  # noqa: ARG001 -- no transform changes it
    num_victims = scene.sizes.victims
    expected = scene.network.losses_of(scene.held[:num_victims])
    return scene.judged_records(candidates.by_loss(scene.crowd.losses[:num_victims], expected))


def _values(scene: Scene, view: View) -> Measured:
    return scene.judged_records(candidates.by_values(scene.one(view), scene.expected))


def _values_of_eight(scene: Scene, view: View) -> Measured:
    expected = scene.network.gradients_of(scene.batches.digits, BATCH)
    return scene.judged_records(candidates.by_values(scene.eight(view), expected))


def _values_in_noise(scene: Scene, view: View) -> Measured:
    seen = scene.noisy(view)[: scene.sizes.victims]
    return scene.judged_records(candidates.by_values(seen, scene.expected))


def _places_in_noise(scene: Scene, view: View) -> Measured:
    seen = scene.noisy(view, multiplier=0.1)[: scene.sizes.victims]
    return scene.judged_records(candidates.by_place(seen, scene.expected))


def _pixel_counts(scene: Scene, view: View) -> Measured:
    images = scene.held.images[: scene.sizes.victims]
    return scene.judged_records(candidates.by_pixel_counts(scene.one(view), images))


def _angles_of_eight(scene: Scene, view: View) -> Measured:
    seen = seen_together(view, scene.batches.gradients, scene.place("eight together"))
    expected = scene.side_by_side(scene.batches.digits, BATCH)
    order = np.random.default_rng(scene.place("order")).permutation(len(seen))
    return scene.judged_records(order[candidates.by_angles(seen, expected[order])])


def _angles(
    model: Literal["known", "guessed"],
    noise: Literal["none", "10 %"] | float = "none",
) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        num_victims = scene.sizes.victims
        if noise == "none":
            seen = scene.together(view)[:num_victims]
        else:
            seen = scene.noisy(view, None if noise == "10 %" else noise)[:num_victims]
        expected = scene.expected
        if model == "guessed":
            expected = scene.side_by_side(scene.held[:num_victims])
        order = np.random.default_rng(scene.place("order")).permutation(num_victims)
        return scene.judged_records(order[candidates.by_angles(seen, expected[order])])

    return run


def _pairs(num_pairs: int) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        num_victims = scene.sizes.victims
        seen, plain = scene.together(view), scene.crowd.gradients
        known = slice(num_victims, num_victims + num_pairs)
        found = pairs.revealed(seen[:num_victims], seen[known], plain[known])
        return scene.judged_images(inversion.inverted(found))

    return run


def _known_labels(multiplier: float | None = None) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        seen = scene.together(view) if multiplier is None else scene.noisy(view, multiplier)
        num_victims, labels_held = scene.sizes.victims, scene.held.labels
        known = slice(num_victims, num_victims + NUM_KNOWN)
        return scene.judged_labels(
            pairs.labels_of_the_nearest(seen[:num_victims], seen[known], labels_held[known])
        )

    return run


def _blended(scene: Scene, view: View) -> Measured:
    num_victims, seen = scene.sizes.victims, scene.together(view)
    known = slice(num_victims, num_victims + NUM_KNOWN)
    images = pairs.blended(seen[:num_victims], seen[known], scene.held.images[known])
    return scene.judged_images(images[:, None, :])


def _known_records(scene: Scene, view: View) -> Measured:
    num_victims, seen = scene.sizes.victims, scene.together(view)
    known = slice(num_victims, num_victims + NUM_KNOWN)
    found = matching.matched_by_angles(
        scene.network, seen[: scene.sizes.sought], seen[known], scene.held[known],
        num_steps=scene.sizes.steps,
    )  # fmt: skip
    return scene.judged_images(found.images)


def _linked(scene: Scene, view: View) -> Measured:
    second = seen_together(view, scene.second_round.gradients, scene.place("together"))
    return scene.judged_records(reuse.linked(scene.together(view)[: len(second)], second))


def _pixels(scene: Scene, view: View) -> Measured:
    images = reuse.images_from_zeros(scene.together(view), scene.public)
    return scene.judged_images(images[: scene.sizes.victims, None, :])


def _shape_image(scene: Scene, view: View) -> Measured:
    seen, expected = scene.together(view), scene.network.gradients_of(scene.public)
    found = reuse.labels_by_shape(seen, [expected], scene.public, seed=scene.place("clumps"))
    images = reuse.images_by_shape(
        seen, found, expected, scene.public,
        seed=scene.place("turns"), num_starts=scene.sizes.tries,
    )  # fmt: skip
    return scene.judged_images(images[: scene.sizes.victims, None, :])


def _shape_label(
    model: Literal["known", "guessed"], multiplier: float = 0.0
) -> Callable[[Scene, View], Measured]:
    def run(scene: Scene, view: View) -> Measured:
        # All clients of a label are named right or wrong together: what is judged is the names.
        held, hits = scene.held[: scene.sizes.crowd], []
        for number in range(scene.sizes.tries):
            network = Network.drawn(scene.place(f"model {number}"))
            believed = [network] if model == "known" else scene.shadows[:8]
            rng = np.random.default_rng(scene.place(f"noise {number}"))
            sent = with_noise(network.gradients_of(held), multiplier, rng)
            # The server expects noise where there is some.
            expected = [
                with_noise(each.gradients_of(scene.public), multiplier, rng) for each in believed
            ]
            found = reuse.labels_by_shape(
                seen_together(view, sent, scene.place(f"run {number}")), expected,
                scene.public, seed=scene.place("clumps"),
            )  # fmt: skip
            right = found == held.labels
            hits += [right[held.labels == label].mean() > 0.5 for label in range(NUM_CLASSES)]
        return of_hits(np.array(hits), 1 / NUM_CLASSES)

    return run


def _rows_of_words(scene: Scene, view: View) -> Measured:
    seen = seen_apart(view, scene.writers.updates, scene.place("texts"))
    return _judged_words(scene, words.from_rows(seen, scene.public_words), 0)


def _known_texts(scene: Scene, view: View) -> Measured:
    seen, num_known = seen_together(view, scene.writers.updates, scene.place("texts")), 50
    guessed = words.from_known_texts(
        seen[num_known:], seen[:num_known], scene.writers.has_word[:num_known], scene.public_words
    )
    return _judged_words(scene, guessed, num_known)


def _judged_words(scene: Scene, guessed: NDArray[np.intp], first: int) -> Measured:
    has_word = scene.writers.has_word[first:]
    by_frequency = has_word[:, words.most_frequent(scene.public_words)].mean()
    return of_hits(np.take_along_axis(has_word, guessed, axis=1), float(by_frequency))


MODEL = "the model"
CANDIDATES = "the candidates"

ATTACKS: tuple[Attack, ...] = (
    Attack("dense", "dense layer inverted, 1 record",
           "divides weight gradients by bias gradients", "image", "", _dense),
    Attack("dense-8", "dense layer inverted, 8 records",
           "takes the quotients that look most like images", "image", "", _dense_of_eight),
    Attack("matching", "gradient matching, 1 record",
           "seeks an image with this gradient", "image", MODEL, _matched("known")),
    Attack("matching-8", "gradient matching, 8 records",
           "seeks eight images with this mean gradient", "image", MODEL, _matched_eight),
    Attack("matching-guessed", "gradient matching, 1 record",
           "seeks an image with this gradient under a guessed model", "image", "", _matched("guessed")),
    Attack("values-fitted", "sorted values fitted",
           "seeks an image whose gradient has these values", "image", MODEL, _values_fitted),
    Attack("cosines", "inverse cosine transform",
           "undoes the public part, then inverts the layer", "image", "", _cosines_image),
    Attack("cosines-label", "inverse cosine transform",
           "undoes the public part, takes the largest error", "label", "", _cosines_label),
    Attack("signs", "label from signs, 1 record",
           "the one negative bias gradient", "label", "", _signs),
    Attack("signs-8", "label from signs, 8 records",
           "names one label that the client holds", "label", "", _signs_of_eight),
    Attack("statistics", "label from value statistics",
           "learns what each label's values look like", "label", MODEL, in_many_scenes(_value_statistics("known"))),
    Attack("statistics-guessed", "label from value statistics",
           "learns them from guessed models", "label", "", in_many_scenes(_value_statistics("guessed"))),
    Attack("norm", "candidate by norm, 1 record",
           "compares lengths", "record", f"{MODEL}, {CANDIDATES}", _norm),
    Attack("norm-8", "candidate by norm, 8 records",
           "compares lengths", "record", f"{MODEL}, {CANDIDATES}", _norm_of_eight),
    Attack("norm-noise-naive", "candidate by norm, noise of 10 % ignored",
           "compares lengths, and ignores the noise", "record", f"{MODEL}, {CANDIDATES}",
           in_many_scenes(_norm_in_noise(corrected=False))),
    Attack("norm-noise", "candidate by norm, noise of 10 % taken out",
           "takes the noise's share out of the length", "record", f"{MODEL}, {CANDIDATES}",
           in_many_scenes(_norm_in_noise(corrected=True))),
    Attack("norm-much-noise", "candidate by norm, noise multiplier 0.1",
           "takes the noise's share out of the length", "record", f"{MODEL}, {CANDIDATES}",
           in_many_scenes(_norm_in_much_noise)),
    Attack("values", "candidate by values, 1 record",
           "compares sorted values", "record", f"{MODEL}, {CANDIDATES}", _values),
    Attack("values-8", "candidate by values, 8 records",
           "compares sorted values", "record", f"{MODEL}, {CANDIDATES}", _values_of_eight),
    Attack("values-noise", "candidate by values, noise of 10 %",
           "compares sorted values", "record", f"{MODEL}, {CANDIDATES}", in_many_scenes(_values_in_noise)),
    Attack("pixel-counts", "candidate by values, 1 record",
           "counts pixels of each brightness", "record", CANDIDATES, _pixel_counts),
    Attack("loss", "candidate by reported loss",
           "compares the training loss sent along", "record", f"{MODEL}, {CANDIDATES}", _loss),
    Attack("places-much-noise", "candidate by place and value, noise multiplier 0.1",
           "takes the nearest candidate", "record", f"{MODEL}, {CANDIDATES}", in_many_scenes(_places_in_noise)),
    Attack("angles", "candidates by angles",
           "matches all clients at once by their angles", "record", f"{MODEL}, {CANDIDATES}",
           in_many_scenes(_angles("known"))),
    Attack("angles-noise", "candidates by angles, noise of 10 %",
           "matches all clients at once by their angles", "record",
           f"{MODEL}, {CANDIDATES}", in_many_scenes(_angles("known", "10 %"))),
    Attack("angles-much-noise", "candidates by angles, noise multiplier 0.1",
           "matches all clients at once by their angles", "record",
           f"{MODEL}, {CANDIDATES}", in_many_scenes(_angles("known", 0.1))),
    Attack("angles-most-noise", "candidates by angles, noise multiplier 1",
           "matches all clients at once by their angles", "record",
           f"{MODEL}, {CANDIDATES}", in_many_scenes(_angles("known", 1.0))),
    Attack("angles-guessed", "candidates by angles",
           "matches by the angles under guessed models", "record", CANDIDATES,
           in_many_scenes(_angles("guessed"))),
    Attack("angles-8", "candidates by angles, 8 records",
           "matches by the angles under guessed models", "record", CANDIDATES,
           in_many_scenes(_angles_of_eight)),
    *(
        Attack(f"pairs-{number}", f"known pairs: {number}", "solves for the transform", "image",
               f"{number} other plain update{'s' if number > 1 else ''}", _pairs(number))
        for number in (1, 8, 64, 512)
    ),
    Attack("known-labels", "angles to 64 known clients",
           "takes the label of the nearest", "label", "64 other clients' labels", in_many_scenes(_known_labels())),
    Attack("known-labels-noise", "angles to 64 known clients, noise multiplier 0.1",
           "takes the label of the nearest", "label", "64 other clients' labels",
           in_many_scenes(_known_labels(0.1))),
    Attack("blended", "angles to 64 known clients",
           "blends their images", "image", "64 other clients' records", _blended),
    Attack("known-records", "angles to 64 known clients",
           "seeks an image with these angles", "image", f"{MODEL}, 64 other clients' records",
           _known_records),
    Attack("linked", "rounds linked", "finds a nameless client again in the next round",
           "client", "", _linked),
    Attack("pixels", "zero patterns of pixels",
           "groups weights that are zero together in many updates", "image", "", _pixels),
    Attack("shape", "shape of the crowd",
           "ten clumps, named by their lengths and angles", "label", MODEL, _shape_label("known")),
    Attack("shape-image", "shape of the crowd",
           "turns an expected cloud onto the seen one", "image", MODEL, _shape_image),
    Attack("shape-noise", "shape of the crowd, noise multiplier 0.1",
           "ten clumps, named by their lengths and angles", "label", MODEL,
           _shape_label("known", 0.1)),
    Attack("shape-most-noise", "shape of the crowd, noise multiplier 1",
           "ten clumps, named by their lengths and angles", "label", MODEL,
           _shape_label("known", 1.0)),
    Attack("shape-guessed", "shape of the crowd",
           "ten clumps, named with guessed models", "label", "", _shape_label("guessed")),
    Attack("words", "zero rows of an embedding, 1 update",
           "the words whose rows moved", "words", "", _rows_of_words),
    Attack("known-texts", "zero patterns of an embedding",
           "groups numbers that move together, names them", "words", "50 other clients' texts",
           _known_texts),
)  # fmt: skip
