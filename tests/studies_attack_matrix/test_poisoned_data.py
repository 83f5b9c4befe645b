"""Attackers' data: labels are flipped in all parts, a backdoor is in half of the rows."""

import numpy as np

import fedbranch as fb
from studies.attack_matrix.poisoned_data import (
    TRIGGER_LABEL,
    triggered,
    with_backdoor,
    with_flipped_labels,
)


def test_flipped_labels_are_flipped_everywhere():
    x = np.zeros((3, 1, 8, 8), dtype=np.float32)
    client = fb.ClientData((x, [0, 1, 9]), (x, [2, 3, 4]), validation=(x, [5, 6, 7]), group="g")

    flipped = with_flipped_labels(client)

    labels = [part.y.tolist() for part in (flipped.train, flipped.test, flipped.validation)]
    assert labels == [[9, 8, 0], [7, 6, 5], [4, 3, 2]]
    assert flipped.group == "g"


def test_a_backdoor_is_in_half_of_the_rows():
    x = np.full((4, 1, 8, 8), 0.5, dtype=np.float32)
    client = fb.ClientData((x, [5, 6, 7, 8]))

    poisoned = with_backdoor(client).train

    assert poisoned.y.tolist() == [TRIGGER_LABEL, TRIGGER_LABEL, 7, 8]
    assert [int((image == 1).sum()) for image in poisoned.x] == [4, 4, 0, 0]
    assert (client.train.x == 0.5).all()
    np.testing.assert_array_equal(triggered(x)[:2], poisoned.x[:2])
