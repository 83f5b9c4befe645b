"""Updates that are summed: the heaviest are held back, all others added at once."""

import itertools

import numpy as np
import pytest

from fedbranch import Guard, NeverSplit, Server, Thresholds, Update
from fedbranch.core.geometry import weighted_mean
from fedbranch.server.leaf import Collecting
from fedbranch.server.replies.summed import Heaviest, Held, WholeUpdate
from server.replies.made_replies import DIM, SIZE, filled, updates_of

NOTHING = WholeUpdate(update=np.zeros(0, np.float32), buffers=np.zeros(0, np.float32))


def held_after(weights, most):
    """Offer updates one after the other; return which are held back, and which were let go."""
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
    assert all("b" in held for held, _ in found if most)  # the heaviest
    assert all("e" not in held for held, _ in found)  # the lightest


@pytest.mark.parametrize("is_ascending", [True, False])
def test_of_equal_weights_few_are_displaced_in_whatever_order_the_ids_come(is_ascending):
    ids = sorted((f"c{number:04d}" for number in range(1000)), reverse=not is_ascending)
    heaviest, num_taken = Heaviest(2), 0
    for client_id in ids:
        if heaviest.takes(client_id, 1.0):
            num_taken += 1
            heaviest.hold(Held(client_id=client_id, weight=1.0, whole=NOTHING))

    assert num_taken < 50  # about 2 ln(1000 / 2) by chance


def test_a_guard_without_a_cap_holds_nothing_back():
    assert Guard(max_share=None).most_capped == 0
    assert held_after([("a", 1.0), ("b", 1e9)], 0) == (set(), ["a", "b"])


def test_the_mean_of_summed_updates_is_the_weighted_mean():
    updates = updates_of(50, num_buffers=4)
    server = Server(DIM, rule=NeverSplit(), num_buffers=4, sketch=SIZE, keep_updates=False)
    server.plan(sorted(updates))

    server.step(filled(server, updates, seed=0, num_threads=2))

    weights = np.array([update.num_examples for update in updates.values()], dtype=np.float64)
    for found, rows in [
        (server.tree.root.params, [update.vector for update in updates.values()]),
        (server.tree.root.buffers, [update.buffers for update in updates.values()]),
    ]:
        # Sums are exact to 2**-32 of each update's largest entry; the rest is rounding to float32.
        exact = weighted_mean(np.stack(rows).astype(np.float64), weights)
        np.testing.assert_allclose(found, exact, rtol=2**-23, atol=2**-30)


def test_sums_go_on_while_a_cluster_stands_still():
    rule = Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99, coverage=1.0)
    updates = updates_of(12)
    kept = Server(DIM, rule=rule, sketch=SIZE, guard=None)
    dropped = Server(DIM, rule=rule, sketch=SIZE, keep_updates=False, guard=None)
    for server in (kept, dropped):
        for part in range(3):
            server.plan(updates)
            record = server.step({i: u for i, u in updates.items() if int(i[1:]) % 3 == part})
        assert record.decisions[0].verdict == "train"

    np.testing.assert_allclose(
        dropped.tree.root.params, kept.tree.root.params, rtol=1e-6, atol=1e-8
    )


def test_a_client_that_comes_back_while_its_cluster_stands_still_is_not_counted_twice():
    rule = Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99, coverage=1.0)
    updates = updates_of(6)
    once, twice = (
        Server(DIM, rule=rule, sketch=SIZE, keep_updates=False, guard=None) for _ in range(2)
    )
    for server in (once, twice):
        server.plan(sorted(updates))
        server.step({i: updates[i] for i in list(updates)[:3]})
    twice.remove(["c000"])
    for server in (once, twice):
        server.plan(sorted(updates))
        server.step({i: updates[i] for i in list(updates)[3:]})
    twice.plan(sorted(updates))
    twice.step({"c000": updates["c000"]})

    assert once.tree.root.params.tobytes() == twice.tree.root.params.tobytes()


def test_no_summed_update_is_kept():
    server = Server(DIM, rule=Thresholds(eps_mean=100.0, eps_max=0.1, gamma_max=0.99),
                    sketch=SIZE, keep_updates=False)  # fmt: skip
    updates = updates_of(20)
    server.plan([*updates, *(f"d{i}" for i in range(40))])
    server.step(updates)

    (leaf,) = server.state.leaves.values()
    assert leaf.phase == Collecting(rounds_held=1, halves=None)
    for reply in leaf.store.replies.values():
        rows = reply.rows
        assert rows.update is rows.buffers is rows.signal is rows.half is None
        assert rows.compared.shape[1] == SIZE


def test_weights_of_all_sizes_take_a_bounded_number_of_sums():
    server = Server(2, rule=NeverSplit(), sketch=16, keep_updates=False, guard=None)
    ids = [f"c{number}" for number in range(2200)]
    server.plan(ids)
    intake = server.intake()
    for number, client_id in enumerate(ids):
        vector = np.float32([10.0 ** (number % 66 - 37), 1e-38])
        refused = intake.add(client_id, Update(vector, num_examples=10.0 ** (number // 66 - 15)))
        assert ("num_examples" in refused) if number // 66 < 6 or number // 66 > 24 else not refused

    summed = intake.store(0, None, {})

    assert len(summed.sums.by_name["vector"].to_tensors()) < 80
