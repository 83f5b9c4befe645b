"""The attacked clients send what the closed forms say; the server has none of their digits."""

import numpy as np
import pytest
import torch
from torch import nn

from studies.privacy_audit.victims import Digits, Network, Victims, layers, split_digits
from studies.privacy_audit.writers import DIM, NUM_WORDS, Writers


@pytest.mark.parametrize("per_client", [1, 8])
def test_gradients_in_closed_form_are_what_clients_send(per_client):
    held, _ = split_digits(0)
    network = Network.drawn(1)

    victims = Victims.training(network, held[:16], per_client)

    np.testing.assert_allclose(
        victims.gradients, network.gradients_of(held[:16], per_client), atol=2e-6
    )
    np.testing.assert_allclose(victims.losses, network.losses_of(held[:16], per_client), atol=1e-5)


def test_gradients_in_closed_form_are_those_of_autograd():
    held, _ = split_digits(0)
    network = Network.drawn(1)
    params = network.params.clone().requires_grad_()
    weights, biases, last_weights, last_biases = layers(params)
    hidden = torch.tanh(torch.from_numpy(held.images[:1]) @ weights.T + biases)
    outputs = hidden @ last_weights.T + last_biases
    nn.functional.cross_entropy(outputs, torch.from_numpy(held.labels[:1])).backward()

    np.testing.assert_allclose(network.gradients_of(held[:1])[0], params.grad, atol=1e-6)


def test_the_server_has_no_digit_of_a_client():
    held, public = split_digits(0)

    assert len(held) + len(public) == 1797
    assert not {i.tobytes() for i in held.images} & {i.tobytes() for i in public.images}


def test_digits_are_cut_like_arrays():
    digits = Digits(np.zeros((4, 64), np.float32), np.arange(4))

    assert list(digits[1:3].labels) == [1, 2]
    assert len(digits) == 4


def test_a_writer_moves_the_rows_of_its_words_only():
    writers = Writers.training(3, seed=0)
    rows = writers.updates[:, : NUM_WORDS * DIM].reshape(3, NUM_WORDS, DIM)

    np.testing.assert_array_equal(np.abs(rows).max(2) > 0, writers.has_word)
