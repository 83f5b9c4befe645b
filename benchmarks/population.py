"""What a round, a save and a load cost where many clients are known and few take part.

    python benchmarks/population.py [--rounds 40] [--known 10000 100000 1000000]

1,000 clients take part in every round, drawn anew, and all of them move a small model of 100
parameters. The driver marks the present clients, and the state is saved after every round. Beside
the times stand their ratios to those of the smallest population. A round is planning, trials and
the step, without what the clients do. Times are medians; the mean of the saves includes those
that write all positions once in a while.
"""

import argparse
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import fedbranch as fb

NUM_ACTIVE, NUM_PARAMS = 1000, 100
NUM_KNOWN = (10_000, 100_000, 1_000_000)
ROUNDS = 40
COMPARED = ("round s", "save s", "mean save s", "load s", "bytes per known client")


def measure(num_known: Sequence[int] = NUM_KNOWN, rounds: int = ROUNDS) -> dict:
    """Measure populations of these sizes, the smallest first.

    Returns
    -------
    dict
        ``"cases"``: for each size the seconds of joining, a round, a save and a load, bytes on
        disk, and bytes in memory of a loaded server, also while it loads, per known client;
        ``"ratios"``: the same divided by those of the first.
    """
    cases = [measure_one(number, rounds) for number in num_known]
    ratios = [
        {"known": case["known"], **{name: case[name] / cases[0][name] for name in COMPARED}}
        for case in cases
    ]
    return {"active": NUM_ACTIVE, "params": NUM_PARAMS, "rounds": rounds, "cases": cases} | {
        "ratios": ratios
    }


def measure_one(num_known: int, rounds: int) -> dict:
    """Measure one population."""
    ids = [f"client-{number:08d}" for number in range(num_known)]
    rng = np.random.default_rng(0)
    server = fb.Server(NUM_PARAMS, rule=fb.NeverSplit())
    began = time.perf_counter()
    server.join(ids)
    join_s = time.perf_counter() - began
    play(server, ids[:NUM_ACTIVE], rng)  # in which every client joins, and is seen
    round_s, save_s = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server.save(folder)
        for _ in range(rounds):
            rows = rng.choice(num_known, NUM_ACTIVE, replace=False)
            round_s.append(play(server, [ids[row] for row in rows], rng))
            began = time.perf_counter()
            server.save(folder)
            save_s.append(time.perf_counter() - began)
        load_s = min(load(folder) for _ in range(3))
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        tracemalloc.start()
        loaded = fb.Server.load(folder)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(loaded.tree.positions) == num_known
    assert loaded.round == server.round
    return {
        "known": num_known,
        "join s": join_s,
        "round s": statistics.median(round_s),
        "save s": statistics.median(save_s),
        "mean save s": statistics.mean(save_s),
        "load s": load_s,
        "bytes on disk": num_bytes,
        "bytes per known client": kept / num_known,
        "peak bytes per known client": peak / num_known,
    }


def play(server: fb.Server, asked: list[str], rng: np.random.Generator) -> float:
    """Play one round; give the seconds that it takes the server."""
    vectors = rng.normal(size=(NUM_ACTIVE, NUM_PARAMS)).astype(np.float32)
    began = time.perf_counter()
    server.mark_present(asked)
    tasks = server.plan(asked)
    server.trials(asked)
    planned = time.perf_counter()
    replies = {i: fb.Update(v, num_examples=1) for i, v in zip(tasks, vectors, strict=True)}
    answered = time.perf_counter()
    server.step(replies)
    return time.perf_counter() - answered + planned - began


def load(folder: Path) -> float:
    """Measure the seconds that loading takes."""
    began = time.perf_counter()
    fb.Server.load(folder)
    return time.perf_counter() - began


def table(measured: dict) -> str:
    """Write what was measured as a Markdown table."""
    lines = [
        "| known clients | joining, s | a round, ms | a save, ms (mean) | a load, s | on disk, MB "
        "| memory, bytes per client (while loading) |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, ratio in zip(measured["cases"], measured["ratios"], strict=True):
        lines.append(
            f"| {case['known']:,} | {case['join s']:.2f} "
            f"| {1e3 * case['round s']:.1f} ({ratio['round s']:.2f} x) "
            f"| {1e3 * case['save s']:.1f} ({ratio['save s']:.2f} x); "
            f"{1e3 * case['mean save s']:.1f} ({ratio['mean save s']:.2f} x) "
            f"| {case['load s']:.3f} | {case['bytes on disk'] / 1e6:.1f} "
            f"| {case['bytes per known client']:.0f} "
            f"({case['peak bytes per known client']:.0f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--known", type=int, nargs="+", default=list(NUM_KNOWN))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    print(table(measure(arguments.known, arguments.rounds)))


if __name__ == "__main__":
    main()
