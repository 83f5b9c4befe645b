"""A hundred thousand clients in every round of one server, until their groups are found.

    python benchmarks/crowd.py [--clients 100000] [--params 10000]

Ten groups pull in directions of their own, with noise as long as the pull. The server is
``Server(sketch=1024, keep_updates=False)`` with the default rule: in the first round it trains, in
the second it is sent half updates and splits, in the third all clients that were not compared are
routed. Then every group must be a cluster of its own, exactly. Times are without what clients do.
"""

import argparse
import resource
import sys
import time

import numpy as np

import fedbranch as fb

NUM_GROUPS, SKETCH, AT_ONCE, ROUNDS = 10, 1024, 1000, 3


def measure(num_clients: int = 100_000, dim: int = 10_000) -> dict:
    """Play the rounds.

    Returns
    -------
    dict
        ``"rounds"``: for each the seconds of taking the replies in and of the step, and how many
        clusters there are then; ``"peak GiB"``: of the process.
    """
    rng = np.random.default_rng(0)
    pulls = rng.standard_normal((NUM_GROUPS, dim), dtype=np.float32)
    ids = [f"client-{number:06d}" for number in range(num_clients)]
    groups = np.arange(num_clients) % NUM_GROUPS
    server = fb.Server(dim, sketch=SKETCH, keep_updates=False)
    rounds = []
    for _ in range(ROUNDS):
        tasks = server.plan(ids)
        intake = server.intake()
        intake_s = 0.0
        for start in range(0, num_clients, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            batch = replies(ids[some], pulls[groups[some]], tasks, rng)
            began = time.perf_counter()
            refused = intake.add_batch(batch)
            intake_s += time.perf_counter() - began
            if refused:
                sys.exit(f"refused: {refused}")
        began = time.perf_counter()
        server.step(intake)
        step_s = time.perf_counter() - began
        rounds.append({"intake s": intake_s, "step s": step_s, "clusters": len(server.clusters)})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {frozenset(client_ids) for client_ids in server.clusters.values()}
    planted = {frozenset(ids[group::NUM_GROUPS]) for group in range(NUM_GROUPS)}
    if found != planted:
        sys.exit(f"the groups were not found: clusters of {sorted(map(len, found))}")
    return {"clients": num_clients, "params": dim, "rounds": rounds, "peak GiB": peak / 2**30}


def replies(
    client_ids: list[str], pulls: np.ndarray, tasks: dict[str, fb.Task], rng: np.random.Generator
) -> fb.UpdateBatch:
    """Answer as clients do: towards what pulls them, and with half differences if asked."""
    own = [tasks[client_id] for client_id in client_ids]
    noise = rng.standard_normal(pulls.shape, dtype=np.float32)
    halves = None
    if own[0].halves is not None:
        halves = rng.standard_normal(pulls.shape, dtype=np.float32)
    return fb.UpdateBatch(
        client_ids=client_ids,
        vectors=pulls - np.stack([task.params for task in own]) + noise,
        half_differences=halves,
        num_examples=[10] * len(own),
        bases=[task.base for task in own],
        metrics=[{}] * len(own),
    )


def main() -> None:
    """Print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--params", type=int, default=10_000)
    arguments = parser.parse_args()
    measured = measure(arguments.clients, arguments.params)
    for number, one in enumerate(measured["rounds"], 1):
        print(
            f"round {number}: replies taken in in {one['intake s']:.2f} s, step {one['step s']:.2f} s, "
            f"{one['clusters']} clusters"
        )
    print(f"the {NUM_GROUPS} groups were found exactly; peak {measured['peak GiB']:.2f} GiB")


if __name__ == "__main__":
    main()
