"""Which updates are held back until it is known what each client counts for."""

import itertools

import numpy as np
import pytest

from fedbranch import Guard
from fedbranch.server.replies.summed import Heaviest, Held, WholeUpdate

NOTHING = WholeUpdate(update=np.zeros(0, np.float32), buffers=np.zeros(0, np.float32))


def held_after(weights, most):
    """Offer updates one after the other; return who is held back, and who was let go."""
    heaviest, light = Heaviest(most), []
    for client_id, weight in weights:
        if not heaviest.takes(client_id, weight):
            light.append(client_id)
            continue
        lighter = heaviest.hold(Held(client_id=client_id, weight=weight, whole=NOTHING))
        if lighter is not None:
            light.append(lighter.client_id)
    return {one.client_id for one in heaviest}, light


@pytest.mark.parametrize("seed", range(200))
def test_only_the_heaviest_few_can_be_capped(seed):
    rng = np.random.default_rng(seed)
    guard = Guard(max_share=float(rng.choice([0.5, 0.25, 0.2, 1 / 3, 1, rng.uniform(0.02, 1)])))
    num_clients = int(rng.integers(1, 60))
    weights = 2 ** rng.uniform(-8, 8, num_clients) if seed % 2 else rng.integers(1, 4, num_clients)
    named = {f"c{number:02d}": float(weight) for number, weight in enumerate(weights)}

    held, _ = held_after(named.items(), guard.most_capped)

    counted = guard.weights(np.array(list(named.values())))
    capped = {i for i, count in zip(named, counted.tolist(), strict=True) if count != named[i]}
    assert capped <= held
    assert len(held) <= guard.most_capped


@pytest.mark.parametrize("most", range(5))
def test_the_order_does_not_change_which_are_held_back(most):
    weights = [("a", 2.0), ("b", 3.0), ("c", 2.0), ("d", 2.0), ("e", 1.0)]

    found = [held_after(order, most) for order in itertools.permutations(weights)]

    assert len({frozenset(held) for held, _ in found}) == 1
    assert all(held | set(light) == set("abcde") for held, light in found)
    assert all(len(held) == most == 5 - len(light) for held, light in found)
    assert found[0][0] == set("bacd"[:most])  # of equal weights the smaller ids


def test_a_guard_without_a_cap_holds_nothing_back():
    assert Guard(max_share=None).most_capped == 0
    assert held_after([("a", 1.0), ("b", 1e9)], 0) == (set(), ["a", "b"])
