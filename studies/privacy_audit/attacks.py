"""The catalogue of attacks: what the server knows, what it tries, and what it is after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from studies.privacy_audit import attempts

__all__ = ["ATTACKS", "Attack", "Goal"]

Goal: TypeAlias = Literal["image", "label", "record", "client", "words"]


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes
    ----------
    key
        Its name in the results.
    title
        Its name in the table.
    tries
        What the server does, in a few words.
    goal
        What the server is after.
    knows
        What the server knows beside what it sees, the task and public data.
    attempt
        Measures the attack in a scene, under one transform.
    """

    key: str
    title: str
    tries: str
    goal: Goal
    knows: str
    attempt: attempts.Attempt


MODEL = "the model"
CANDIDATES = "the candidates"

ATTACKS: tuple[Attack, ...] = (
    Attack("dense", "dense layer inverted, 1 record",
           "divides weight gradients by bias gradients",
           "image", "", attempts.invert_one),
    Attack("dense-8", "dense layer inverted, 8 records",
           "takes the quotients that look most like images",
           "image", "", attempts.invert_eight),
    Attack("matching", "gradient matching, 1 record",
           "seeks an image with this gradient",
           "image", MODEL, attempts.match_gradients_of_one("known")),
    Attack("matching-8", "gradient matching, 8 records",
           "seeks eight images with this mean gradient",
           "image", MODEL, attempts.match_gradients_of_eight),
    Attack("matching-guessed", "gradient matching, 1 record",
           "seeks an image with this gradient under a guessed model",
           "image", "", attempts.match_gradients_of_one("guessed")),
    Attack("values-fitted", "sorted values fitted",
           "seeks an image with these gradient values",
           "image", MODEL, attempts.fit_values),
    Attack("cosines", "inverse cosine transform",
           "undoes the public part, then inverts the layer",
           "image", "", attempts.image_behind_cosines),
    Attack("cosines-label", "inverse cosine transform",
           "undoes the public part, takes the largest error",
           "label", "", attempts.label_behind_cosines),
    Attack("signs", "label from signs, 1 record",
           "the one negative bias gradient",
           "label", "", attempts.label_from_signs),
    Attack("signs-8", "label from signs, 8 records",
           "names one label that the client holds",
           "label", "", attempts.label_of_eight_from_signs),
    Attack("statistics", "label from value statistics",
           "learns what each label's values look like",
           "label", MODEL, attempts.in_all_scenes(attempts.label_from_statistics("known"))),
    Attack("statistics-guessed", "label from value statistics",
           "learns them from guessed models",
           "label", "", attempts.in_all_scenes(attempts.label_from_statistics("guessed"))),
    Attack("norm", "candidate by norm, 1 record",
           "compares lengths",
           "record", f"{MODEL}, {CANDIDATES}", attempts.candidate_by_norm),
    Attack("norm-8", "candidate by norm, 8 records",
           "compares lengths",
           "record", f"{MODEL}, {CANDIDATES}", attempts.candidate_of_eight_by_norm),
    Attack("norm-noise-naive", "candidate by norm, noise of 10 % ignored",
           "compares lengths, and ignores the noise",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidate_by_norm_in_noise(corrected=False))),
    Attack("norm-noise", "candidate by norm, noise of 10 % taken out",
           "takes the noise's share out of the length",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidate_by_norm_in_noise(corrected=True))),
    Attack("norm-much-noise", "candidate by norm, noise multiplier 0.1",
           "takes the noise's share out of the length",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidate_by_norm_in_much_noise)),
    Attack("values", "candidate by values, 1 record",
           "compares sorted values",
           "record", f"{MODEL}, {CANDIDATES}", attempts.candidate_by_values),
    Attack("values-8", "candidate by values, 8 records",
           "compares sorted values",
           "record", f"{MODEL}, {CANDIDATES}", attempts.candidate_of_eight_by_values),
    Attack("values-noise", "candidate by values, noise of 10 %",
           "compares sorted values",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidate_by_values_in_noise)),
    Attack("pixel-counts", "candidate by values, 1 record",
           "counts pixels of each brightness",
           "record", CANDIDATES, attempts.candidate_by_pixel_counts),
    Attack("loss", "candidate by reported loss",
           "compares the training loss sent along",
           "record", f"{MODEL}, {CANDIDATES}", attempts.candidate_by_loss),
    Attack("places-much-noise", "candidate by place and value, noise multiplier 0.1",
           "takes the nearest candidate",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidate_by_place_in_noise)),
    Attack("angles", "candidates by angles",
           "matches all clients at once by their angles",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidates_by_angles("known"))),
    Attack("angles-noise", "candidates by angles, noise of 10 %",
           "matches all clients at once by their angles",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidates_by_angles("known", "10 %"))),
    Attack("angles-much-noise", "candidates by angles, noise multiplier 0.1",
           "matches all clients at once by their angles",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidates_by_angles("known", 0.1))),
    Attack("angles-most-noise", "candidates by angles, noise multiplier 1",
           "matches all clients at once by their angles",
           "record", f"{MODEL}, {CANDIDATES}",
           attempts.in_all_scenes(attempts.candidates_by_angles("known", 1.0))),
    Attack("angles-guessed", "candidates by angles",
           "matches by the angles under guessed models",
           "record", CANDIDATES, attempts.in_all_scenes(attempts.candidates_by_angles("guessed"))),
    Attack("angles-8", "candidates by angles, 8 records",
           "matches by the angles under guessed models",
           "record", CANDIDATES, attempts.in_all_scenes(attempts.candidates_of_eight_by_angles)),
    *(
        Attack(f"pairs-{number}", f"known pairs: {number}",
               "solves for the transform", "image",
               f"{number} other plain update{'s' if number > 1 else ''}",
               attempts.images_from_pairs(number))
        for number in (1, 8, 64, 512)
    ),
    Attack("known-labels", "angles to 64 known clients",
           "takes the label of the nearest",
           "label", "64 other clients' labels",
           attempts.in_all_scenes(attempts.label_of_the_nearest())),
    Attack("known-labels-noise", "angles to 64 known clients, noise multiplier 0.1",
           "takes the label of the nearest",
           "label", "64 other clients' labels",
           attempts.in_all_scenes(attempts.label_of_the_nearest(0.1))),
    Attack("blended", "angles to 64 known clients",
           "blends their images",
           "image", "64 other clients' records", attempts.image_by_blending),
    Attack("known-records", "angles to 64 known clients",
           "seeks an image with these angles",
           "image", f"{MODEL}, 64 other clients' records", attempts.image_by_angles),
    Attack("linked", "rounds linked",
           "finds a nameless client again in the next round",
           "client", "", attempts.clients_by_link),
    Attack("pixels", "zero patterns of pixels",
           "groups weights that are zero together in many updates",
           "image", "", attempts.images_from_zeros),
    Attack("shape", "shape of the crowd",
           "ten clumps, named by their lengths and angles",
           "label", MODEL, attempts.labels_by_shape("known")),
    Attack("shape-image", "shape of the crowd",
           "turns an expected cloud onto the seen one",
           "image", MODEL, attempts.images_by_shape),
    Attack("shape-noise", "shape of the crowd, noise multiplier 0.1",
           "ten clumps, named by their lengths and angles",
           "label", MODEL, attempts.labels_by_shape("known", 0.1)),
    Attack("shape-most-noise", "shape of the crowd, noise multiplier 1",
           "ten clumps, named by their lengths and angles",
           "label", MODEL, attempts.labels_by_shape("known", 1.0)),
    Attack("shape-guessed", "shape of the crowd",
           "ten clumps, named with guessed models",
           "label", "", attempts.labels_by_shape("guessed")),
    Attack("words", "zero rows of an embedding, 1 update",
           "takes the words with rows that moved",
           "words", "", attempts.words_from_rows),
    Attack("known-texts", "zero patterns of an embedding",
           "groups numbers that move together, names them",
           "words", "50 other clients' texts", attempts.words_from_known_texts),
)  # fmt: skip
