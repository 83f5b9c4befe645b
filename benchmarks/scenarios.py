"""How often AutoRule decides right on drawn problems it has never seen, beside other methods.

    python benchmarks/scenarios.py --data-dir DEST [--seeds 0 1 2] [--jobs 2] [--out FILE]

Every family of problems.py is drawn once for each seed: data set, model, learning rate, sizes,
epochs, optimiser and number of clients are random. On each problem run, with the same clients
and seeds: plain FL; AutoRule() as it is; the oracle, which knows the groups; IFCA, which is told
their number; and the paper's thresholds, set with hindsight from the norms of the plain FL run
on that very problem. On label-skewed problems also AutoRule(only_conflicts=True).

Seeds below 1000 are for development. The committed results are of seeds that had not been run
while the rule was made.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as there are cores

import torch
from problems import FAMILIES, Problem, draw
from sklearn.metrics import adjusted_rand_score

import fedbranch as fb
from fedbranch.sim import Run

ROUNDS = 50
# The oracle gains something if its mean accuracy is higher than plain FL's by two points, and by
# more than chance could do.
LEAST_GAIN = 0.02
# Held-out accuracies are shares of some dozens of rows. A client counts as worse off if it lost
# more than this many standard errors of such a share.
STANDARD_ERRORS = 3.0


def studied(family: str, seed: int, data_dir: Path | None, device: str) -> dict[str, Any]:
    """Run all methods on one problem."""
    began = time.perf_counter()
    problem = draw(family, seed, data_dir)
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "training": problem.training,
        "seed": seed,
        "participation": problem.participation,
        "device": _chosen(device, problem),
    }
    at_end = {**settings, "evaluate_every": ROUNDS}
    with_model = (problem.model, problem.clients)
    plain = fb.fedavg(*with_model, **at_end)
    auto = fb.simulate(*with_model, rule=fb.AutoRule(), **settings)
    result: dict[str, Any] = {
        "family": family,
        "kind": problem.kind,
        "seed": seed,
        "drawn": problem.drawn,
        "num_groups": problem.num_groups,
        "test rows": sum(len(c.test.y) for c in problem.clients.values() if c.test is not None),
        "plain FL": _outcome(plain, problem),
        "AutoRule": _outcome(auto, problem)
        | _compared(auto, plain, problem)
        | {
            "accuracy of the best model on the path": _accuracy(_best_on_path(auto)),
            "accuracy of the path's ensemble": _accuracy(auto.ensemble_evaluation()),
        },
    }
    if problem.kind == "incongruent":
        result["oracle"] = _outcome(fb.oracle(*with_model, **at_end), problem)
        result["IFCA"] = _outcome(
            fb.ifca(*with_model, num_clusters=problem.num_groups, **at_end), problem
        )
        tuned = _thresholds_with_hindsight(plain)
        result["thresholds"] = _outcome(fb.simulate(*with_model, rule=tuned, **at_end), problem) | {
            "eps_mean": tuned.eps_mean,
            "eps_max": tuned.eps_max,
        }
    if problem.kind == "label skew":
        strict = fb.simulate(*with_model, rule=fb.AutoRule(only_conflicts=True), **at_end)
        result["only_conflicts"] = _outcome(strict, problem)
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def _chosen(device: str, problem: Problem) -> str:
    """Take a GPU, if there is one, for convolutions only: the others are too small for it."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and problem.drawn["model"] == "cnn" else "cpu"


def _outcome(run: Run, problem: Problem) -> dict[str, Any]:
    ids = sorted(problem.clients)
    found = [run.tree.position(client_id) for client_id in ids]
    changed = [0] + [
        entry.record.round
        for entry in run.history
        if any(d.verdict in ("split", "merge") for d in entry.record.decisions)
        or entry.record.routed
    ]
    return {
        "accuracy": _accuracy(run.evaluation),
        "clusters": len(set(found)),
        "ARI": round(adjusted_rand_score([problem.groups[i] for i in ids], found), 4),
        "rounds to the final clusters": changed[-1],
    }


def _compared(auto: Run, plain: Run, problem: Problem) -> dict[str, Any]:
    """Compare with plain FL: client by client, and on the way."""
    changes, errors = {}, {}
    for client_id, metrics in plain.evaluation.items():
        before, after = metrics["accuracy"], auto.evaluation[client_id]["accuracy"]
        test = problem.clients[client_id].test
        assert before is not None
        assert after is not None
        assert test is not None
        changes[client_id] = after - before
        share = min(max((before + after) / 2, 0.05), 0.95)
        errors[client_id] = math.sqrt(2 * share * (1 - share) / len(test.y))
    worse = [i for i, change in changes.items() if change < -STANDARD_ERRORS * errors[i]]
    goal = _accuracy(plain.evaluation)
    sent = _megabytes(auto)
    reached = next(
        (n for n, entry in enumerate(auto.history) if _accuracy(entry.evaluation) >= goal), None
    )
    return {
        "splits": [d.round for entry in auto.history for d in entry.record.splits],
        "merges": sum(
            d.verdict == "merge" for entry in auto.history for d in entry.record.decisions
        ),
        "worst change of a client": round(min(changes.values()), 4),
        "clients worse off": len(worse),
        "rounds to plain FL's accuracy": None if reached is None else reached + 1,
        "megabytes to plain FL's accuracy": None if reached is None else sum(sent[: reached + 1]),
        "megabytes of plain FL": sum(_megabytes(plain)),
        "megabytes": sum(sent),
    }


def _megabytes(run: Run) -> list[float]:
    """Count what goes over the wire in each round, models as float32.

    A client that trains gets a model and sends an update; one that was asked for half updates
    sends two; one that measures gets the models that it measures.
    """
    model = 4 * run.tree.num_params / 2**20
    asked_halves: set[int] = set()  # leaves
    asked_losses: dict[int, int] = {}  # leaf -> clients that measure in the next round
    sent = []
    for entry in run.history:
        record = entry.record
        total = 2.0 * len(record.metrics)
        for decision in record.decisions:
            node, answered = decision.node_id, decision.measurements.get("num_answered", 0.0)
            if decision.verdict in ("keep", "merge"):
                total += 2 * answered
                continue
            if node in asked_losses:
                total += 4 * asked_losses.pop(node)
            elif node in asked_halves and decision.measurements.get("num_groups"):
                total += answered
            if decision.asks == "losses":
                asked_losses[node] = sum(map(len, decision.groups))
            if decision.verdict != "hold":
                asked_halves.discard(node)
            if decision.asks == "halves":
                asked_halves.add(node)
        sent.append(round(total * model, 3))
    return sent


def _thresholds_with_hindsight(plain: Run) -> fb.Thresholds:
    """Set the paper's thresholds between the norms that the plain run ended with."""
    norms = [entry.record.decisions[0].measurements for entry in plain.history[ROUNDS // 2 :]]
    return fb.Thresholds(
        eps_mean=1.5 * median(m["mean_norm"] for m in norms) or 1e-9,
        eps_max=0.7 * median(m["max_norm"] for m in norms) or 1e-9,
        gamma_max=0.5,
        min_rounds=5,
    )


def _best_on_path(run: Run) -> dict[str, Mapping[str, float | None]]:
    on_path = run.evaluation_on_path("test")
    return {i: on_path[i][node] for i, node in run.best_on_path().items()}


def _accuracy(evaluation: Mapping[str, Mapping[str, float | None]]) -> float:
    values = [metrics["accuracy"] for metrics in evaluation.values()]
    return round(fmean(value for value in values if value is not None), 4)


def summary(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count what the goals speak of."""
    done = list(results)
    incongruent = [r for r in done if r["kind"] == "incongruent"]
    gaining = [
        r for r in incongruent if r["oracle"]["accuracy"] - r["plain FL"]["accuracy"] > LEAST_GAIN
    ]
    found = [r for r in gaining if r["AutoRule"]["ARI"] == 1]
    congruent = [r for r in done if r["kind"] == "congruent"]
    skewed = [r for r in done if r["kind"] == "label skew"]

    def mean(method: str, of: list[Mapping[str, Any]], name: str = "accuracy") -> float | None:
        return round(fmean(r[method][name] for r in of), 4) if of else None

    reached = [r["AutoRule"]["rounds to plain FL's accuracy"] for r in gaining]
    return {
        "problems": len(done),
        "incongruent": len(incongruent),
        "incongruent where the oracle gains": len(gaining),
        "exact recovery there": len(found),
        "exact recovery there by IFCA, told k": sum(r["IFCA"]["ARI"] == 1 for r in gaining),
        "exact recovery there by thresholds": sum(r["thresholds"]["ARI"] == 1 for r in gaining),
        "median rounds to the final clusters": median(
            [r["AutoRule"]["rounds to the final clusters"] for r in found] or [math.nan]
        ),
        "false splits among the congruent": sum(r["AutoRule"]["clusters"] > 1 for r in congruent),
        "congruent": len(congruent),
        "label-skewed": len(skewed),
        "label-skewed that were split": sum(r["AutoRule"]["clusters"] > 1 for r in skewed),
        "label-skewed that were split under only_conflicts": sum(
            r["only_conflicts"]["clusters"] > 1 for r in skewed
        ),
        "clients": sum(r["drawn"]["num_clients"] for r in done),
        "clients worse off than under plain FL": sum(
            r["AutoRule"]["clients worse off"] for r in done
        ),
        "mean accuracy where the oracle gains": {
            method: mean(method, gaining)
            for method in ("plain FL", "thresholds", "IFCA", "AutoRule", "oracle")
        }
        | {
            "AutoRule, best model on the path": mean(
                "AutoRule", gaining, "accuracy of the best model on the path"
            ),
            "AutoRule, ensemble of the path": mean(
                "AutoRule", gaining, "accuracy of the path's ensemble"
            ),
        },
        "median rounds to plain FL's final accuracy": median(
            [rounds for rounds in reached if rounds is not None] or [math.nan]
        ),
        "median share of plain FL's megabytes until then": round(
            median(
                [
                    r["AutoRule"]["megabytes to plain FL's accuracy"]
                    / r["AutoRule"]["megabytes of plain FL"]
                    for r in gaining
                    if r["AutoRule"]["megabytes to plain FL's accuracy"] is not None
                ]
                or [math.nan]
            ),
            3,
        ),
    }


def _oracle_gains(result: Mapping[str, Any]) -> bool:
    plain, oracle = result["plain FL"]["accuracy"], result["oracle"]["accuracy"]
    share = min(max((plain + oracle) / 2, 0.05), 0.95)
    error = math.sqrt(2 * share * (1 - share) / result["test rows"])
    return bool(oracle - plain > max(LEAST_GAIN, STANDARD_ERRORS * error))


def line(result: Mapping[str, Any]) -> str:
    """Describe how a problem went, in one line."""
    auto, drawn = result["AutoRule"], result["drawn"]
    others = " ".join(
        f"{name} {result[name]['accuracy']:.2f}/{result[name]['ARI']:.2f}"
        for name in ("oracle", "IFCA", "thresholds", "only_conflicts")
        if name in result
    )
    return (
        f"{result['family'][:32]:32} {result['seed']:5} {drawn['data']:7} {drawn['model']:8} "
        f"{drawn['optimizer']:8} {drawn['learning_rate']:<7g} {drawn['epochs']:2} x {drawn['rows']:4} "
        f"k {result['num_groups']}: FL {result['plain FL']['accuracy']:.2f} AutoRule "
        f"{auto['accuracy']:.2f}/{auto['ARI']:.2f} in {auto['rounds to the final clusters']:2} "
        f"({auto['clusters']} clusters, splits {auto['splits']}, worse {auto['clients worse off']}) "
        f"{others} [{result['seconds']} s]"
    )


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Write one line of Markdown for each family: exact recoveries, rounds, mean accuracies."""
    by_family: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_family.setdefault(result["family"], []).append(result)
    methods = ("plain FL", "thresholds", "IFCA", "AutoRule", "oracle")
    lines = [
        "| problem | clusters found | rounds | " + " | ".join(methods) + " |",
        "|---|---|---|" + "---|" * len(methods),
    ]
    for family, drawn in by_family.items():
        if drawn[0]["kind"] == "incongruent":
            exact = sum(r["AutoRule"]["ARI"] == 1 for r in drawn)
            found = f"exactly in {exact} of {len(drawn)}"
        else:
            found = ", ".join(str(r["AutoRule"]["clusters"]) for r in drawn)
        split = [r["AutoRule"] for r in drawn if r["AutoRule"]["clusters"] > 1]
        rounds = ", ".join(str(auto["rounds to the final clusters"]) for auto in split) or "-"
        accuracies = [
            f"{fmean(r[method]['accuracy'] for r in drawn):.2f}" if method in drawn[0] else "-"
            for method in methods
        ]
        lines.append(f"| {family} | {found} | {rounds} | " + " | ".join(accuracies) + " |")
    return "\n".join(lines)


def _work(job: tuple[str, int, Path | None, str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    family, seed, data_dir, device = job
    return studied(family, seed, data_dir, device)


def run_all(
    jobs: list[tuple[str, int, Path | None, str]],
    num_processes: int,
    on_result: Callable[[dict[str, Any]], None],
) -> None:
    """Study the problems in processes of their own, results as they come."""
    if num_processes == 1:
        for job in jobs:
            on_result(_work(job))
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, maxtasksperchild=4) as pool:
        for result in pool.imap_unordered(_work, jobs):
            on_result(result)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="where MNIST and Fashion-MNIST are")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of such a file, and stop")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text())["problems"]))
        return
    jobs = [
        (family, seed, arguments.data_dir, arguments.device)
        for seed in arguments.seeds
        for family in arguments.families
    ]
    results: list[dict[str, Any]] = []

    def on_result(result: dict[str, Any]) -> None:
        results.append(result)
        print(f"{len(results):3}/{len(jobs)} {line(result)}", flush=True)
        if arguments.out is not None:
            _write(arguments.out, results, len(jobs))

    run_all(jobs, arguments.jobs, on_result)
    print(json.dumps(summary(results), indent=2))


def _write(path: Path, results: list[dict[str, Any]], num_jobs: int) -> None:
    ordered = sorted(results, key=lambda r: (list(FAMILIES).index(r["family"]), r["seed"]))
    seeds = " ".join(str(seed) for seed in sorted({r["seed"] for r in results}))
    report = {
        "command": f"python benchmarks/scenarios.py --data-dir DEST --seeds {seeds}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "rounds": ROUNDS,
        "complete": len(results) == num_jobs,
        "summary": summary(results),
        "problems": ordered,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
