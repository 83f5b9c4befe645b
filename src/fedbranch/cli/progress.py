"""What a run prints to stderr: a progress bar, and the memory that it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedbranch.cli.experiment import Experiment
from fedbranch.runs import Round

__all__ = ["peak_memory", "progress"]


@contextmanager
def progress(
    experiment: Experiment, after_round: Callable[[], None]
) -> Iterator[Callable[[str, Round], None]]:
    """Show one bar for each method on a terminal, and nothing elsewhere.

    Parameters
    ----------
    experiment
        Has the methods and the number of rounds.
    after_round
        Called after every round.

    Yields
    ------
    Callable
        To be called with the name of a method and each of its rounds.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        TextColumn("round {task.completed}/{task.total}"),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        tasks = {
            method: bars.add_task(method, total=experiment.rounds, start=False, news="")
            for method in experiment.methods
        }

        last_ends: dict[str, float] = {}

        def on_round(method: str, entry: Round) -> None:
            task = tasks[method]
            if entry.record.round == 1:
                bars.start_task(task)
            num_clusters = len(entry.record.cluster_sizes)
            news = f"{num_clusters} cluster{'s' if num_clusters != 1 else ''}"
            now = time.perf_counter()
            if method in last_ends and entry.num_visits is not None:
                rate = entry.num_visits / max(now - last_ends[method], 1e-9)
                news += f", {rate:,.0f} samples/s"
            last_ends[method] = now
            bars.update(task, completed=entry.record.round, news=news)
            after_round()

        yield on_round


def peak_memory() -> str:
    """Return the peak memory of this process, of its largest worker and on the GPU, as text."""
    if sys.platform == "win32":
        return "peak memory unknown"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    own, worker = (
        resource.getrusage(processes).ru_maxrss * unit / 2**20
        for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    if sys.platform == "linux":
        # On Linux the number above includes the memory of the process that started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        own = int(status.split("VmHWM:")[1].split()[0]) / 2**10
    parts = [f"peak memory {own:,.0f} MiB"]
    if worker:
        parts.append(f"{worker:,.0f} MiB in the largest worker")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.append(f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB on the GPU")
    return ", ".join(parts)
