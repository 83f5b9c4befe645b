"""How fast the simulator is, beside named peers and the practical limit, in one run.

    python benchmarks/simulate.py cpu --data DIR     W1, W2 and W3, on two cores
    python benchmarks/simulate.py gpu --data DIR     W4, W5 and W6, on one GPU

DIR holds ``mnist/`` (idx files) and ``cifar-10-batches-bin/`` in the sets' own formats. The
peers are installed from the package index into environments of their own. For every
workload equality is checked first; then all contestants take turns, and the best round of
each counts.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import workloads
from torch import nn
from workloads import Workload

import fedbranch as fb

PEERS = {
    "flower": ["flwr[simulation]==1.41.0"],
    "pfl": ["pfl==0.6.0"],
}
HERE = Path(__file__).parent

# Workload -> contestant -> how many times faster than it we must be.
TARGETS = {
    "W1": {"bare loop": 1.55, "flower": 1.35, "pfl": 1.18, "limit": 0.95},
    "W2": {"flower": 50, "pfl": 20},
    "W4": {"bare loop": 15},
    "W5": {"bare loop": 100},
    "W6": {"bare loop": 4},
}
# Of the mean update after two steps in float32. Training amplifies rounding: after 75 steps of
# W4 the reference with cuDNN and without it are as far from each other as we are from it.
TOLERANCE = 1e-4


def main() -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=["cpu", "gpu"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", type=Path, default=HERE / ".peers", help="their environments")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="workloads such as W1")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    options = parser.parse_args()
    measure = cpu if options.machine == "cpu" else gpu
    results = measure(options)
    report = {"machine": machine(), "results": results}
    print(json.dumps(report["machine"]))
    for result in results:
        print_table(result)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def cpu(options: argparse.Namespace) -> list[dict]:
    """Run W1, W2 and W3."""
    results = []
    for name, make, rounds in [("W1", workloads.w1, 3), ("W2", workloads.w2, 10)]:
        if options.only and name not in options.only:
            continue
        workload = make(options.data)
        difference = check_equality(workload, "cpu")
        contestants: dict[str, Callable[[], list[float]]] = {
            "fedbranch": lambda w=workload, r=rounds: simulated(w, r, "cpu"),
            "bare loop": lambda w=workload, r=rounds: bare_loop(w, min(r, 3), "cpu"),
            "limit": lambda w=workload: one_model(w, "cpu"),
        }
        with tempfile.TemporaryDirectory() as folder:
            for peer in PEERS:
                python = installed(peer, options.peers)
                contestants[peer] = lambda w=workload, p=peer, e=python, f=folder, r=rounds: (
                    peer_rounds(w, p, e, Path(f), min(r, 4))
                )
            results.append(contest(workload, contestants, options.repeats, difference))
    if not options.only or "W3" in options.only:
        results.append(known_clients())
    return results


def gpu(options: argparse.Namespace) -> list[dict]:
    """Run W4, W5 and W6."""
    results = []
    for name, make, rounds in [
        ("W4", workloads.w4, 8),
        ("W5", workloads.w5, 8),
        ("W6", workloads.w6, 8),
    ]:
        if options.only and name not in options.only:
            continue
        workload = make(options.data)
        difference = check_equality(workload, "cuda", num_clients=4)
        contestants = {
            "fedbranch": lambda w=workload, r=rounds: simulated(w, r, "cuda"),
            "fedbranch, bf16": lambda w=workload, r=rounds: simulated(w, r, "cuda", "bf16"),
            "bare loop": lambda w=workload: bare_loop(w, 1, "cuda", max_clients=20),
            "limit": lambda w=workload: one_model(w, "cuda"),
        }
        result = contest(workload, contestants, options.repeats, difference)
        if name == "W4":
            result["whole run"] = whole_run(
                workload,
                rounds=200,
                rule=fb.Thresholds(eps_mean=2.0, eps_max=1.0, gamma_max=0.4, min_rounds=50),
            )
        if name == "W5":
            result["whole run"] = whole_run(workload, rounds=300, rule=fb.NeverSplit())
        results.append(result)
    return results


def contest(
    workload: Workload,
    contestants: dict[str, Callable[[], list[float]]],
    repeats: int,
    difference: float,
) -> dict:
    """Let all take turns; the best round of each counts."""
    rounds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name, run in contestants.items():
            rounds[name] += run()
            say(f"{workload.name} {name}, turn {repeat + 1}: {min(rounds[name]):.4f} s/round")
    best = {name: min(times) for name, times in rounds.items()}
    return {
        "workload": workload.name,
        "about": workload.about,
        "data": workloads.checksum([c.train.x for c in workload.clients.values()]),
        "difference from the reference": difference,
        "seconds per round": {name: round(value, 5) for name, value in best.items()},
        "all rounds": {name: [round(t, 4) for t in times] for name, times in rounds.items()},
        "samples per second": round(workload.num_visits / best["fedbranch"]),
        "times faster than": {
            name: round(value / best["fedbranch"], 3)
            for name, value in best.items()
            if not name.startswith("fedbranch")
        },
        "must reach": TARGETS.get(workload.name, {}),
    }


# Contestants: each gives the seconds of its rounds


def simulated(workload: Workload, rounds: int, device: str, precision: str = "tf32") -> list[float]:
    """Time fedbranch; the first round, which sets everything up, does not count."""
    ends: list[float] = []

    def on_round(_: fb.Round) -> None:
        ends.append(time.perf_counter())

    fb.fedavg(
        workload.model(),
        workload.clients,
        rounds=rounds + 1,
        training=replace(workload.training, precision=precision),
        participation=workload.participation,
        evaluate_every=rounds + 1,
        device=device,
        on_round=on_round,
    )
    return list(np.diff(ends))


def bare_loop(
    workload: Workload, rounds: int, device: str, max_clients: int | None = None
) -> list[float]:
    """Time plain PyTorch: one client after the other, as one would write it.

    With ``max_clients`` only that many clients train, and the time is scaled up to all.
    """
    model = workload.model().to(device)
    start = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    data = [
        (torch.as_tensor(c.train.x, device=device), torch.as_tensor(c.train.y, device=device))
        for c in list(workload.clients.values())[:max_clients]
    ]
    sequential_round(workload, model, start, data[:1])  # warm up
    times = []
    for _ in range(rounds):
        began = synchronised(device)
        start = sequential_round(workload, model, start, data)
        times.append((synchronised(device) - began) * len(workload.clients) / len(data))
    return times


def sequential_round(
    workload: Workload, model: nn.Module, start: list[torch.Tensor], data: list
) -> list[torch.Tensor]:
    """Run one round of federated averaging."""
    training = workload.training
    params = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in start]
    for x, y in data:
        with torch.no_grad():
            for param, value in zip(params, start, strict=True):
                param.copy_(value)
        optimizer = torch.optim.SGD(params, lr=workload.learning_rate)
        num_steps = 0
        while num_steps < training.num_steps(len(x)):
            for rows in torch.randperm(len(x), device=x.device).split(training.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                num_steps += 1
        with torch.no_grad():
            for sum_, param in zip(total, params, strict=True):
                sum_ += param / len(data)
    return total


def one_model(workload: Workload, device: str) -> list[float]:
    """Time the practical limit: one model, large batches, the same number of samples."""
    model = workload.model().to(device)
    x = torch.as_tensor(np.concatenate([c.train.x for c in workload.clients.values()]))
    y = torch.as_tensor(np.concatenate([c.train.y for c in workload.clients.values()]))
    x, y = x.to(device), y.to(device)
    if x.ndim == 4:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    batch = {"W1": 400}.get(workload.name, 20 * workload.training.batch_size)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=workload.learning_rate
    )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True

    def visit(num_samples: int) -> None:
        num_seen = 0
        while num_seen < num_samples:
            for rows in torch.randperm(len(x), device=x.device).split(batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                num_seen += len(rows)
                if num_seen >= num_samples:
                    break

    visit(2 * batch)  # warm up
    began = synchronised(device)
    visit(workload.num_visits)
    seconds = synchronised(device) - began
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return [seconds]


def peer_rounds(
    workload: Workload, peer: str, python: Path, folder: Path, rounds: int
) -> list[float]:
    """Time a peer in its own environment; its start-up and first round do not count."""
    sizes = [len(client.train.x) for client in workload.clients.values()]
    np.savez(
        folder / "clients.npz",
        x=np.concatenate([client.train.x for client in workload.clients.values()]),
        y=np.concatenate([client.train.y for client in workload.clients.values()]),
        sizes=np.array(sizes),
    )
    params = [p.detach().numpy() for p in workload.model().parameters()]
    np.savez(folder / "initial.npz", **{f"p{i}": param for i, param in enumerate(params)})
    numbers = {
        "model": {"W1": "cnn", "W2": "mlp"}[workload.name],
        "rounds": rounds + 1,
        "learning_rate": workload.learning_rate,
        "batch_size": workload.training.batch_size,
        "epochs": workload.training.epochs,
        "num_clients": len(sizes),
    }
    (folder / "workload.json").write_text(json.dumps(numbers))
    result = folder / f"{peer}.json"
    command = [python, HERE / "peers" / f"{peer}_peer.py", folder, result]
    subprocess.run(command, check=True, capture_output=True, timeout=1200)  # noqa: S603  # our own script
    measured = json.loads(result.read_text())
    seconds: list[float] = measured["seconds_per_round"]
    return seconds[1:]


def installed(peer: str, folder: Path) -> Path:
    """Install a peer into an environment of its own, once."""
    python = folder / peer / "bin" / "python"
    if not python.exists():
        say(f"installing {peer} into {folder / peer} ...")
        subprocess.run([sys.executable, "-m", "venv", folder / peer], check=True)  # noqa: S603  # our own interpreter
        torch_version = torch.__version__.split("+")[0]
        packages = [f"torch=={torch_version}", *PEERS[peer]]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)  # noqa: S603  # the versions named above
    return python


# Whole runs and special questions


def whole_run(workload: Workload, *, rounds: int, rule: fb.Rule) -> dict:
    """Time a complete run of clustered federated learning, set-up and evaluation included."""
    began = time.perf_counter()
    run = fb.simulate(
        workload.model(),
        workload.clients,
        rule=rule,
        rounds=rounds,
        training=workload.training,
        evaluate_every=5,
        device="cuda",
    )
    seconds = time.perf_counter() - began
    groups = [{workload.clients[i].group for i in ids} for ids in run.clusters.values()]
    return {
        "rounds": rounds,
        "seconds": round(seconds, 2),
        "splits in rounds": [
            entry.record.round for entry in run.history
            for decision in entry.record.decisions if decision.verdict == "split"
        ],
        "clusters": [len(ids) for ids in run.clusters.values()],
        "true groups in each": [len(group) for group in groups],
        "mean": {name: round(value, 4) for name, value in run.overall_mean.items()},
        "worst client": {
            name: round(min(client[name] or 0.0 for client in run.evaluation.values()), 4)
            for name in (["accuracy"] if run.evaluation else [])
        },
        "peak GPU memory, GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def known_clients() -> dict:
    """Measure W3: what a round costs if ten times as many clients are known."""
    context = multiprocessing.get_context("spawn")
    measured: dict[int, list[tuple[float, float]]] = {1_000: [], 10_000: []}
    for _ in range(3):
        for num_known, values in measured.items():
            with context.Pool(1) as pool:  # memory is best measured in a fresh process
                values.append(pool.apply(_rounds_with_many_known, (num_known,)))
    seconds = {known: min(value for value, _ in values) for known, values in measured.items()}
    grown = {known: min(value for _, value in values) for known, values in measured.items()}
    say(f"W3: {seconds} s/round, memory grown by {grown} MiB over 20 rounds")
    return {
        "workload": "W3",
        "about": "100 clients in a round, of 1,000 and of 10,000 known; digits MLP",
        "seconds per round": {f"{known} known": round(s, 5) for known, s in seconds.items()},
        "memory grown over 20 rounds, MiB": {f"{k} known": round(g, 2) for k, g in grown.items()},
        "ratio": round(seconds[10_000] / seconds[1_000], 3),
        "must reach": {"ratio at most": 1.5},
    }


def _rounds_with_many_known(num_known: int) -> tuple[float, float]:
    workload = workloads.w3(num_known)
    ends: list[float] = []
    peaks: list[int] = []

    def on_round(_: fb.Round) -> None:
        ends.append(time.perf_counter())
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    fb.fedavg(
        workload.model(),
        workload.clients,
        rounds=24,
        training=workload.training,
        participation=workload.participation,
        evaluate_every=24,
        device="cpu",
        on_round=on_round,
    )
    return float(np.median(np.diff(ends)[3:])), (peaks[-1] - peaks[3]) / 1024


def check_equality(workload: Workload, device: str, num_clients: int | None = None) -> float:
    """Compare two steps with the readable reference; stop if it is another result."""
    clients = dict(list(workload.clients.items())[:num_clients])
    training = replace(workload.training, epochs=None, steps=2, precision="float32")
    after = {}
    for engine in ("auto", "reference"):
        run = fb.fedavg(
            workload.model(), clients, rounds=1, training=training, device=device, engine=engine
        )
        after[engine] = run.tree.root.params
        if engine == "auto":
            say(f"{workload.name}: engine {run.engine.name} ({run.engine.reason})")
    scale = float(np.linalg.norm(after["reference"]))
    difference = float(np.linalg.norm(after["auto"] - after["reference"])) / scale
    if not difference < TOLERANCE:
        sys.exit(f"{workload.name} differs from the reference by {difference:.2e}: not timed")
    return difference


# Printing


def synchronised(device: str) -> float:
    """Return the time when the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def machine() -> dict:
    """Describe where this was measured."""
    about = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedbranch": fb.__version__,
    }
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


def processor() -> str:
    """Name the processor and its widest vectors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def print_table(result: dict) -> None:
    """Print one workload: seconds, ratios and what had to be reached."""
    print(f"\n{result['workload']}: {result['about']}")
    ratios, targets = result.get("times faster than", {}), result["must reach"]
    for name, seconds in result["seconds per round"].items():
        ratio = f"{ratios[name]:9.2f} x" if name in ratios else " " * 11
        target = f"  must reach {targets[name]}" if name in targets else ""
        print(f"  {name:18} {seconds:10.4f} s/round {ratio}{target}")
    for name, value in result.items():
        if name not in ("workload", "about", "seconds per round", "times faster than",
                        "must reach", "all rounds", "data"):  # fmt: skip
            print(f"  {name}: {value}")


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
