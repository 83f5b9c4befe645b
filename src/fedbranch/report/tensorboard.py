"""Write runs as TensorBoard's event files.

Every cluster has a folder of its own, so that TensorBoard draws the clusters over each other
under the name of their metric::

    DIR/RUN/            all clients: metrics, the number of clusters, the reasons of splits
    DIR/RUN/cluster-N/  the clients of a cluster: metrics, norms, gap
    DIR/RUN/plain-FL/   the run without clusters beside it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedbranch.errors import FedbranchError
from fedbranch.types import JSON

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["write_events"]

NORMS = {
    "mean": "norm/mean update",
    "max": "norm/longest update",
    "gap": "separation/gap",
    "cross": "separation/cross-similarity",
}


def write_events(facts: JSON, folder: Path) -> list[Path]:
    """Write event files for every run.

    Parameters
    ----------
    facts
        What :func:`fedbranch.report.facts.facts.read_facts` returned.
    folder
        Where each run gets a folder, which must not exist yet.

    Returns
    -------
    list of Path
        The runs' folders.

    Raises
    ------
    FedbranchError
        If TensorBoard is not installed, or a run's folder is there already.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401  # it needs the package of the same name
    except ImportError as error:
        raise FedbranchError(
            "event files need tensorboard; install it with: pip install 'fedbranch[tensorboard]'"
        ) from error
    paths = [folder / run["name"] for run in facts["runs"]]
    for path in paths:
        if path.exists():  # two event files in one folder would be drawn as one zigzag
            raise FedbranchError(f"{path} is already there; remove it, or choose another folder")
    for path, run in zip(paths, facts["runs"], strict=True):
        _write_run(run, path)
    return paths


def _write_run(run: JSON, folder: Path) -> None:
    series = run["series"]
    rounds: list[int] = series["rounds"]
    with _writer(folder) as writer:
        for name, values in series["overall"].items():
            _write_line(writer, name, rounds, values)
        _write_line(writer, "clusters", rounds, series["num_clusters"])
        for decision in run["decisions"]:
            if decision["verdict"] in ("split", "merge"):
                text = f"node {decision['node']} {decision['title']}: {decision['reason']}"
                number = decision["round"]
                text = text.encode(errors="replace").decode()
                writer.add_text("splits", text, number, walltime=number)
    node_ids = {int(n) for of in [*series["nodes"].values(), run["norms"]] for n in of}
    for node_id in sorted(node_ids):
        with _writer(folder / f"cluster-{node_id}") as writer:
            for name, by_node in series["nodes"].items():
                line = by_node.get(str(node_id))
                if line is not None:
                    _write_line(writer, name, rounds[line["first"] :], line["mean"])
            norms = run["norms"].get(str(node_id))
            if norms is not None:
                for key, tag in NORMS.items():
                    _write_line(writer, tag, norms["rounds"], norms[key])
    if series["plain"] is not None:
        with _writer(folder / "plain-FL") as writer:
            for name, by_node in series["plain"]["nodes"].items():
                _write_line(writer, name, series["plain"]["rounds"], by_node["0"])


@contextmanager
def _writer(folder: Path) -> Iterator[SummaryWriter]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    try:
        yield writer
    finally:
        writer.close()


def _write_line(
    writer: SummaryWriter, tag: str, rounds: Sequence[int], values: Iterable[float | None]
) -> None:
    # The round is the time, too: when the file was written says nothing about the run.
    tag = tag.encode(errors="replace").decode()  # half a surrogate pair cannot be encoded
    for number, value in zip(rounds, values, strict=False):
        if value is not None:
            writer.add_scalar(tag, value, number, walltime=number)
