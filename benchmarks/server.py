"""What the server costs at population scale, beside named peers and the hardware, in one run.

    python benchmarks/server.py cpu     similarities and splits, streams, ingest, populations
    python benchmarks/server.py gpu     a hundred thousand clients on one GPU

Every case runs in a process of its own, so that its peak memory is that of the case. In each,
what comes out is checked first; then all contestants take turns, each after the threads of
the one before have come to rest, and the best turn of each counts. The peers are NumPy with
SciPy, fastcluster (installed from the package index into a folder of its own) or scikit-learn,
and Flower's FedAvg; the limit is the bare matrix product of the same run.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from simulate import machine, say, synchronised

import fedbranch as fb
from fedbranch.core.projection import Projection

HERE = Path(__file__).parent
NUM_GROUPS = 10
REST_S = 0.2  # between turns
INGEST = {"ingest": 12, "ingest-few-arrays": 4, "ingest-many-arrays": 43}  # case -> arrays
CASES = {
    "cpu": ["S1", "S2", "S3", "stream", "clients", "parameters", *INGEST, "population", "crowd"],
    "gpu": ["G1", "G2"],
}
SIZES = {"S1": (1000, 50_000), "S2": (4000, 10_000), "S3": (10_000, 2000)}
SIZES_ON_GPU = {"G1": (100_000, 4096), "G2": (10_000, 50_000)}


def main() -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=CASES)
    parser.add_argument("--table", type=Path, help="print this result file as a table, no more")
    parser.add_argument("--only", nargs="*", help="cases such as S1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=HERE / ".peers", help="their folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)  # we, in a process of our own
    options = parser.parse_args()
    if options.table:
        print("| case | seconds | reached |\n|---|---|---|")
        print(*map(table_row, json.loads(options.table.read_text())["results"]), sep="\n")
        return
    if options.case:
        print(json.dumps(measured(options.case, options)))
        return
    report = {"machine": machine() | {"numpy": np.__version__}, "results": []}
    for case in options.only or CASES[options.machine]:
        say(f"measuring {case} ...")
        command = [sys.executable, __file__, options.machine, "--case", case]
        command += ["--repeats", str(options.repeats), "--peers", str(options.peers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  # ourselves
        result = json.loads(done.stdout.splitlines()[-1])
        report["results"].append(result)
        print_result(result)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if missed := [r["case"] for r in report["results"] if not all(reached(r).values())]:
        sys.exit(f"not reached in {', '.join(missed)}")


def measured(case: str, options: argparse.Namespace) -> dict:
    """Measure one case, in this process."""
    if case in SIZES:
        return {"case": case} | similarities_and_split(*SIZES[case], options)
    if case in SIZES_ON_GPU:
        return {"case": case} | on_gpu(*SIZES_ON_GPU[case], options.repeats)
    if case == "stream":
        return {"case": case} | stream(num_clients=100_000, dim=10_000, size=1024)
    if case in ("clients", "parameters"):
        return {"case": case} | growth(case, options.repeats)
    if case in INGEST:
        return {"case": case} | ingest_beside_flower(INGEST[case])
    return {"case": case} | (populations() if case == "population" else crowd())


# Similarities and split


def similarities_and_split(num_clients: int, dim: int, options: argparse.Namespace) -> dict:
    """Compare every two updates and cut, in memory, beside the bare product and peers."""
    updates, _ = planted(num_clients, dim)
    contestants: dict[str, Callable[[], object]] = {
        "bare product": lambda: updates @ updates.T,
        "fedbranch": lambda: fb.hierarchy_of(updates).bipartition(),
        "fedbranch, the matrix between": lambda: fb.bipartition(fb.cosine_similarity(updates)),
    } | peers(updates, options.peers)
    cuts = {name: cut_of(turn()) for name, turn in contestants.items() if name != "bare product"}
    if len(set(cuts.values())) > 1:
        sys.exit(f"the cuts differ: {[(name, len(cut)) for name, cut in cuts.items()]}")
    seconds = best_of_turns(contestants, options.repeats)
    tracemalloc.start()
    fb.hierarchy_of(updates).bipartition()
    fb.bipartition(fb.cosine_similarity(updates))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ours = seconds["fedbranch"]  # as the peers, from updates to the cut
    best_peer = min(s for name, s in seconds.items() if name.startswith("NumPy"))
    return {
        "about": f"{num_clients:,} clients x {dim:,} parameters, float32: similarities and split",
        "seconds": seconds,
        "times the bare product": ours / seconds["bare product"],
        "times faster than the best peer": best_peer / ours,
        "extra memory, in matrices": peak / (4 * num_clients**2),
        "must reach": {
            "times the bare product": ["at most", 1.15],
            "times faster than the best peer": ["at least", 1.4 if num_clients >= 10_000 else 1.0],
            "extra memory, in matrices": ["at most", 1.1],
        },
    }


def peers(updates: np.ndarray, folder: Path) -> dict[str, Callable[[], object]]:
    """Return what is used today: cosines with NumPy, and single linkage of a library."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform
    from sklearn.cluster import AgglomerativeClustering

    sys.path.append(str(installed("fastcluster==1.3.0", folder)))
    import fastcluster

    def distances() -> np.ndarray:
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
        return 1 - unit @ unit.T

    def condensed() -> np.ndarray:
        return squareform(distances(), checks=False)

    def by_scipy() -> np.ndarray:
        return fcluster(linkage(condensed(), "single"), 2, "maxclust")

    def by_fastcluster() -> np.ndarray:
        merges = fastcluster.linkage(condensed(), "single", preserve_input=False)
        return fcluster(merges, 2, "maxclust")

    def by_scikit_learn() -> np.ndarray:
        model = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="single")
        return model.fit_predict(distances())

    return {
        "NumPy + SciPy": by_scipy,
        "NumPy + fastcluster": by_fastcluster,
        "NumPy + scikit-learn": by_scikit_learn,
    }


def cut_of(found: object) -> frozenset[int]:
    """Return the rows on row 0's side."""
    if isinstance(found, fb.Bipartition):
        return frozenset(found.left_rows.tolist())
    return frozenset(np.flatnonzero(found == found[0]).tolist())


def installed(package: str, folder: Path) -> Path:
    """Install a peer into a folder of its own, once."""
    target = folder / package.split("==")[0]
    if not target.exists():
        say(f"installing {package} into {target} ...")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", target, package], check=True)  # noqa: S603  # the version named above
    return target


# Streams


def stream(num_clients: int, dim: int, size: int) -> dict:
    """Sketch updates as they come, keep none, and find the groups without the matrix."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((NUM_GROUPS, dim), dtype=np.float32)
    groups = np.arange(num_clients) % NUM_GROUPS
    projection = Projection(dim=dim, size=size)
    sketches = np.empty((num_clients, size), dtype=np.float32)
    seconds = {"bare product": 0.0, "sketches": 0.0, "hierarchy": 0.0}
    for start in range(0, num_clients, 1000):
        rows = slice(start, start + 1000)
        updates = centres[groups[rows]] + rng.standard_normal((1000, dim), dtype=np.float32)
        began = time.perf_counter()
        sketches[rows] = projection.of(updates)
        seconds["sketches"] += time.perf_counter() - began
    began = time.perf_counter()
    found = fb.hierarchy_of(sketches).groups(NUM_GROUPS)
    seconds["hierarchy"] = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not same_groups(found, groups):
        sys.exit("the planted groups were not found")
    began = time.perf_counter()
    half_product(sketches, 1024)
    seconds["bare product"] = time.perf_counter() - began
    ours = seconds["sketches"] + seconds["hierarchy"]
    return {
        "about": f"{num_clients:,} clients x {dim:,} parameters as a stream, sketched to {size}: "
        f"{NUM_GROUPS} planted groups found exactly",
        "seconds": seconds,
        "times the bare product": ours / seconds["bare product"],
        "peak GiB": peak / 2**30,
        "must reach": {
            "times the bare product": ["at most", 6],
            "peak GiB": ["at most", 6],
        },
    }


def half_product(updates: np.ndarray | torch.Tensor, num_rows: int) -> None:
    """Multiply every block of rows with itself and all rows before it: half of U @ U.T."""
    for start in range(0, len(updates), num_rows):
        updates[start : start + num_rows] @ updates[: start + num_rows].T


# Parts that are programs of their own as well


def ingest_beside_flower(num_arrays: int) -> dict:
    """Check, add up and sketch replies as they come, beside Flower's FedAvg."""
    import ingest

    found = ingest.measure(num_arrays)
    return {
        "about": f"{found['case']}: read, checked, added up and sketched to {found['sketch']} by "
        f"{found['threads']} threads",
        "seconds": {
            f"{name}, for each update": 1e-6 * us for name, us in found["us per update"].items()
        },
        "times FedAvg's updates per second": found["ratio"],
        "difference of the means": found["difference"],
        "must reach": {
            "times FedAvg's updates per second": ["at least", 5],
            "difference of the means": ["at most", 1e-6],
        },
    }


def populations() -> dict:
    """Play rounds, save and load with ever more known clients; as many take part in each case."""
    import population

    found = population.measure()
    smallest, largest = found["cases"][0], found["cases"][-1]
    what = {"a round": "round s", "a save": "save s", "a load": "load s"}
    ratios = {
        f"{name} at {largest['known']:,} known, times": largest[key] / smallest[key]
        for name, key in list(what.items())[:2]
    }
    return {
        "about": f"{found['active']:,} clients take part, of {smallest['known']:,} to "
        f"{largest['known']:,} known",
        "seconds": {
            f"{name}, {case['known']:,} known": case[key]
            for name, key in what.items()
            for case in found["cases"]
        },
        **ratios,
        "bytes per known client": largest["bytes per known client"],
        "must reach": {name: ["at most", 1.5] for name in ratios},
    }


def crowd() -> dict:
    """Play rounds in which a hundred thousand clients take part."""
    import crowd

    found = crowd.measure()
    return {
        "about": f"{found['clients']:,} clients x {found['params']:,} parameters take part in every "
        f"round of a server that keeps sketches of {crowd.SKETCH}: {crowd.NUM_GROUPS} planted groups "
        f"found exactly in round {len(found['rounds'])}",
        "seconds": {
            f"round {number}, {what}": one[key]
            for number, one in enumerate(found["rounds"], 1)
            for what, key in [("replies", "intake s"), ("step", "step s")]
        },
        "peak GiB": found["peak GiB"],
        "must reach": {"peak GiB": ["at most", 6]},
    }


# Growth


def growth(what: str, repeats: int) -> dict:
    """Fit the exponent with which the time grows."""
    if what == "clients":
        sizes = {m: (m, 1000) for m in (500, 1000, 2000, 4000, 8000, 16_000)}
        most = 2.1
    else:
        sizes = {d: (2000, d) for d in (2000, 4000, 8000, 16_000, 32_000, 64_000)}
        most = 1.05
    seconds = {}
    for size, (num_clients, dim) in sizes.items():
        updates, _ = planted(num_clients, dim)
        turn = {"fedbranch": lambda updates=updates: fb.hierarchy_of(updates).bipartition()}
        seconds[str(size)] = best_of_turns(turn, repeats)["fedbranch"]
    exponent = float(np.polyfit(np.log(list(sizes)), np.log(list(seconds.values())), 1)[0])
    about = {
        "clients": "500 to 16,000 clients x 1,000 parameters: similarities and split",
        "parameters": "2,000 clients x 2,000 to 64,000 parameters: similarities and split",
    }
    return {
        "about": about[what],
        "seconds": seconds,
        "fitted exponent": exponent,
        "must reach": {"fitted exponent": ["at most", most]},
    }


# On a GPU


def on_gpu(num_clients: int, dim: int, repeats: int) -> dict:
    """Compare every two updates and cut, without the matrix, beside the bare products."""
    torch.manual_seed(0)
    groups = torch.arange(num_clients, device="cuda") % NUM_GROUPS
    centres = torch.randn(NUM_GROUPS, dim, device="cuda")
    updates = torch.randn(num_clients, dim, device="cuda")
    updates += centres[groups]
    few = updates[:3000, :500]
    on_host = fb.hierarchy_of(few.cpu().numpy())
    blocks = fb.hierarchy_of(few, memory_bytes=2**22)
    np.testing.assert_allclose(blocks.similarities, on_host.similarities, atol=1e-5)
    if not same_groups(fb.hierarchy_of(updates).groups(NUM_GROUPS), groups.cpu().numpy()):
        sys.exit("the planted groups were not found")

    def product(precision: str) -> None:
        torch.set_float32_matmul_precision(precision)
        for start in range(0, num_clients, 10_000):
            updates[start : start + 10_000] @ updates.T
        torch.set_float32_matmul_precision("highest")

    seconds = best_of_turns(
        {
            "bare product, TF32": lambda: product("high"),
            "bare product, float32": lambda: product("highest"),
            "half of it, float32": lambda: half_product(updates, num_clients // 10),
            "fedbranch": lambda: fb.hierarchy_of(updates).bipartition(),
        },
        repeats,
        "cuda",
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fb.hierarchy_of(updates)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "about": f"{num_clients:,} clients x {dim:,} parameters on a GPU, float32: similarities and split; "
        f"{NUM_GROUPS} planted groups found exactly",
        "seconds": seconds,
        "times half the product": seconds["fedbranch"] / seconds["half of it, float32"],
        "fedbranch, seconds": seconds["fedbranch"],
        "extra GPU memory, GiB": peak / 2**30,
        "must reach": {"fedbranch, seconds": ["at most", 2]},
    }


# What they share


def planted(num_clients: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Make updates of ten groups, as long as their noise."""
    rng = np.random.default_rng(0)
    groups = np.arange(num_clients) % NUM_GROUPS
    updates = rng.standard_normal((num_clients, dim), dtype=np.float32)
    updates += rng.standard_normal((NUM_GROUPS, dim), dtype=np.float32)[groups]
    return updates, groups


def same_groups(found: np.ndarray, groups: np.ndarray) -> bool:
    """Return whether two groupings are the same except for their numbers."""
    pairs = set(zip(found.tolist(), groups.tolist(), strict=True))
    return len(pairs) == len(set(found.tolist())) == len(set(groups.tolist()))


def best_of_turns(
    contestants: dict[str, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[str, float]:
    """Let all take turns, after one that does not count: seconds of the best turn of each.

    In between they rest. NumPy, SciPy and PyTorch have threads of their own: after a product these
    wait for the next one for a while, and so take cores from the next contestant.
    """
    seconds = dict.fromkeys(contestants, float("inf"))
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            time.sleep(REST_S)
            began = synchronised(device)
            run()
            if turn:
                seconds[name] = min(seconds[name], synchronised(device) - began)
    return seconds


def reached(result: dict) -> dict[str, bool]:
    """Return of each target whether it was reached."""
    return {
        name: result[name] <= limit if relation == "at most" else result[name] >= limit
        for name, (relation, limit) in result["must reach"].items()
    }


def table_row(result: dict) -> str:
    """Write one case as a row of a Markdown table."""
    was_reached = reached(result)
    targets = "; ".join(
        f"{name} {result[name]:.3g} ({'' if was_reached[name] else 'missed: '}{relation} {limit})"
        for name, (relation, limit) in result["must reach"].items()
    )
    seconds = "; ".join(f"{name} {seconds:.3g}" for name, seconds in result["seconds"].items())
    return f"| {result['about']} | {seconds} | {targets} |"


def print_result(result: dict) -> None:
    """Print one case: seconds, ratios and what had to be reached."""
    print(f"\n{result['case']}: {result['about']}")
    for name, seconds in result["seconds"].items():
        print(f"  {name:34} {seconds:12.6f} s")
    was_reached = reached(result)
    for name, value in result.items():
        if name not in ("case", "about", "seconds", "must reach"):
            shown = f"{value:12.3g}" if isinstance(value, float) else value
            target = ""
            if name in was_reached:
                relation, limit = result["must reach"][name]
                target = f"  ({'' if was_reached[name] else 'NOT '}{relation} {limit})"
            print(f"  {name:34} {shown}{target}")
    sys.stdout.flush()


if __name__ == "__main__":
    # Inherited by the processes of the cases: as many threads as there are cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    main()
