"""Differences that go straight into the sums are as if they had been evaluated first."""

import math
import random

import numpy as np
import pytest

from fedbranch import AutoRule, Guard, NeverSplit, Server, Thresholds
from fedbranch.core.exact_sum.raw_updates import Differences
from fedbranch.protocol.tasks import UpdateBatch
from server.replies.made_replies import (
    DIM,
    SIZE,
    state_of,
)


def some_replies(server, tasks, seed, num_buffers):
    """Return replies of many kinds, some of them unusable: client id -> its columns."""
    rng = np.random.default_rng(seed)
    replies = {}
    for number, (client_id, task) in enumerate(tasks.items()):
        scale = 0.1 * 3.0 ** rng.integers(-2, 3) * (40 if rng.random() < 0.05 else 1)
        vector = (scale * rng.normal(size=DIM)).astype(np.float32)
        buffers = rng.normal(size=num_buffers).astype(np.float32)
        weight, base, metrics = float(rng.integers(1, 60)), task.base, {"loss": 0.5}
        match rng.integers(0, 30):
            case 0:
                vector[number] = [np.nan, np.inf, 3e38, 1e30][number % 4]
            case 1:
                vector[:] = 0
            case 2:
                weight = [0.5, 1e6, 1001, -1, math.inf, "many"][number % 6]
            case 3:
                base = "another"
            case 4:
                metrics = [{"loss": math.nan}, {"loss": "low"}, {"\x1b": 1.0}, None][number % 4]
            case 5:
                buffers[:1] = [np.nan, 9e30, 1e30][number % 3]
            case 6:
                client_id = f"stranger-{number}"
            case 7:
                vector *= 1e-13
        replies[client_id] = (vector, buffers, weight, base, metrics)
    return replies


def as_batch(replies, num_buffers, *, is_difference):
    """Stack replies in a batch, as vectors or as differences in two pieces each."""
    columns = list(zip(*replies.values(), strict=True))
    vectors = np.stack(columns[0])
    if is_difference:
        pieces = [
            b"head" + part.tobytes() for vector in vectors for part in (vector[:7], vector[7:])
        ]
        vectors = Differences(pieces, [4, 4], [7, DIM - 7], np.zeros(DIM, np.float32))
    return UpdateBatch(
        client_ids=list(replies),
        vectors=vectors,
        buffers=np.stack(columns[1]) if num_buffers else None,
        num_examples=columns[2],
        bases=columns[3],
        metrics=columns[4],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("guard", [Guard(), None, Guard(max_share=0.05, clipped_length=None)])
@pytest.mark.parametrize("num_buffers", [0, 3])
def test_differences_are_summed_to_the_same_bits_as_evaluated_updates(seed, guard, num_buffers):
    pytest.importorskip("numba", reason="there is no machine code without Numba")
    results = []
    weighting = "equal" if seed == 5 else "examples"
    for is_difference in (False, True):
        server = Server(
            DIM,
            rule=AutoRule() if seed % 2 else Thresholds(eps_mean=9.0, eps_max=1e-6, gamma_max=0.9),
            sketch=SIZE,
            keep_updates=False,
            num_buffers=num_buffers,
            guard=guard,
            weighting=weighting,
        )
        records, order = [], random.Random(seed)
        for number in range(4):
            tasks = server.plan([f"c{i:03}" for i in range(60)])
            replies = list(some_replies(server, tasks, (seed, number), num_buffers).items())
            if is_difference:
                order.shuffle(replies)
            intake = server.intake()
            step = 7 if is_difference else len(replies)
            for start in range(0, len(replies), step):
                some = dict(replies[start : start + step])
                intake.add_batch(as_batch(some, num_buffers, is_difference=is_difference))
            records.append(server.step(intake))
        results.append((records, state_of(server)))

    (records, state), (others, other) = results
    assert records == others
    assert state == other
    assert any(record.refused for record in records)
    assert all(record.metrics for record in records)


@pytest.mark.parametrize("guard", [None, Guard()])
def test_a_batch_without_a_usable_reply_leaves_no_trace(guard):
    pytest.importorskip("numba", reason="there is no machine code without Numba")
    states = []
    for is_there in (False, True):
        server = Server(DIM, rule=NeverSplit(), sketch=SIZE, keep_updates=False, guard=guard)
        (task,) = server.plan(["a"]).values()
        intake = server.intake()
        if is_there:
            nothing = np.full(DIM, np.nan, np.float32)
            reply = (nothing, np.zeros(0, np.float32), 1.0, task.base, {})
            refused = intake.add_batch(as_batch({"a": reply}, 0, is_difference=True))
            assert "NaN" in refused["a"]
        server.step(intake)
        states.append(state_of(server))

    assert states[0] == states[1]
