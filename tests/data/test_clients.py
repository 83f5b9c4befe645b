"""One client's data."""

import numpy as np
import pytest

from fedbranch import ClientData

X = np.arange(200, dtype=np.float32).reshape(100, 2)
Y = np.arange(100) % 10


def test_clients_come_and_go():
    client = ClientData((X, Y), joins=3, leaves=5)

    assert [client.takes_part(number) for number in range(1, 7)] == [0, 0, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="joins is 3 and leaves 3"):
        ClientData((X, Y), joins=3, leaves=3)


def test_decisions_are_made_on_validation_examples_or_else_on_test_examples():
    train, test, validation = (X, Y), (X[:5], Y[:5]), (X[5:7], Y[5:7])

    assert ClientData(train).held_out is None
    assert len(ClientData(train, test).held_out.x) == 5
    assert len(ClientData(train, test, validation=validation).held_out.x) == 2
    with pytest.raises(ValueError, match="validation has no examples"):
        ClientData(train, validation=(X[:0], Y[:0]))
