"""The run folder: the contract between training and reporting.

::

    RUN/
      run.json        what was run: method, seed, rounds, settings, clients
      history.jsonl   one line for each round: what was decided, refused, measured
      releases.jsonl  with noise: how often every client sent something
      state/          the server, as saved last; the run goes on from here
      summary.json    written when the run is complete
      initial/        the initial model, in the folder of a federation
      names.json      what people call its clients, where they call them something
      lock            held by the process that writes, empty
      baselines/NAME/ run folders of the methods that it is compared with
      report.html     the page about it, if it was made; no program reads it

Nothing in it depends on the clock. The same seed gives the same bytes, on the same machine with
the same number of threads. Every file, and every line of the history and of the releases, holds
its own SHA-256, so that damage is noticed and named.
"""

from __future__ import annotations

import json
import reprlib
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import IO

from fedbranch.errors import DamagedFile, UnusableRun, UsingPreviousState
from fedbranch.server.older_records import OlderRecords
from fedbranch.server.records import RoundRecord
from fedbranch.server.server import Server
from fedbranch.storage.atomic import append_line, make_folder, replace_file, sync
from fedbranch.storage.checkpoint import (
    Generation,
    clear_leftovers,
    go_back,
    has_checkpoint,
    has_previous,
    peek,
    previous_state_warning,
    read_checkpoint,
    read_generation,
)
from fedbranch.storage.sealed_json import read_sealed, seal, unseal
from fedbranch.tree import ParameterTree, restored_cache
from fedbranch.types import JSON

if sys.platform != "win32":
    import fcntl

__all__ = [
    "Aggregates",
    "Evaluation",
    "Round",
    "RunFolder",
    "mean_by_metric",
    "next_free_folder",
]

SCHEMA = 3
OLDER_SCHEMA = 2  # its records do not name the nodes and clients that changed
LEFTOVERS = {"run.json.tmp", "lock"}  # of a run that a crash stopped before it began

Evaluation = Mapping[str, Mapping[str, float | None]]  # client id -> metric -> value
Aggregates = Mapping[str, Mapping[str, float | list[float | None] | None]]


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of the history: what happened, and how good the models were after it.

    Attributes
    ----------
    record
        What the server did.
    num_visits
        Examples that the clients saw in training, each as often as it was seen; None if only
        the clients know.
    evaluation
        Client id -> metrics on its held-out data.
    aggregated
        The means of the clients' metrics that a federation's strategy computed: ``"train"``,
        ``"evaluate"`` and ``"server"`` -> metrics.
    """

    record: RoundRecord
    num_visits: int | None = None
    evaluation: Evaluation = field(default_factory=dict)
    aggregated: Aggregates = field(default_factory=dict)

    def to_json(self) -> JSON:
        """Return the round as one line of the history."""
        return {
            **self.record.to_json(),
            "num_visits": self.num_visits,
            "evaluation": self.evaluation,
            "aggregated": self.aggregated,
        }

    @classmethod
    def from_json(cls, line: JSON) -> Round:
        """Rebuild a round from its line."""
        evaluation = {
            client_id: dict(metrics.items()) for client_id, metrics in line["evaluation"].items()
        }
        return cls(
            record=RoundRecord.from_json(line),
            num_visits=line["num_visits"],
            evaluation=evaluation,
            aggregated={stage: dict(m.items()) for stage, m in line["aggregated"].items()},
        )


class RunFolder:
    """A run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[bytes] | None = None
        try:
            self.about = _read_json(self.path / "run.json", "run")
            if self.about["schema"] not in (OLDER_SCHEMA, SCHEMA):
                raise UnusableRun(
                    f"{self.path} has schema {self.about['schema']!r}; this version of fedbranch "
                    f"reads {OLDER_SCHEMA} and {SCHEMA}"
                )
            self.method: str = self.about["method"]
            self.groups: dict[str, str | None] = {  # client id -> true group, where known
                str(client["id"]): client["group"] for client in self.about["clients"]
            }
        except (FileNotFoundError, NotADirectoryError):
            raise UnusableRun(f"{self.path} is not a run folder: it has no run.json") from None
        except (KeyError, TypeError) as error:
            raise DamagedFile(f"{self.path / 'run.json'} cannot be read: {error!r}") from error

    @classmethod
    def create(cls, path: str | Path, about: JSON) -> RunFolder:
        """Start a run in a folder that is empty or not there yet."""
        folder = Path(path)
        if folder.exists() and (
            not folder.is_dir() or {entry.name for entry in folder.iterdir()} - LEFTOVERS
        ):
            has_run = (folder / "run.json").exists()
            hint = "resume it (resume=True), or choose" if has_run else "choose"
            raise UnusableRun(f"{folder} already holds something; {hint} another folder")
        make_folder(folder)
        _write_json(folder / "run.json", "run", {"schema": SCHEMA, **about})
        return cls(folder)

    @classmethod
    def open(
        cls,
        path: str | Path,
        about: JSON,
        *,
        resume: bool,
        may_differ: Collection[str] = (),
        may_be_missing: Collection[str] = (),
    ) -> RunFolder:
        """Start a run, or go on with one that describes the very same run, to write into it.

        No other process can do so until it is closed. If the state that was saved last is
        damaged, or the history up to it, the run goes back to the state saved before.

        A folder of schema 2 goes on as one: its new records name what its older ones do not.

        Parameters
        ----------
        path
            The folder.
        about
            Everything on which the result depends.
        resume
            Go on with the run in the folder if there is one.
        may_differ
            Names in ``about`` that do not have to be as they were.
        may_be_missing
            Names in ``about`` that are not compared where an older folder lacks them.

        Warns
        -----
        UsingPreviousState
            If the run goes back.

        Raises
        ------
        UnusableRun
            If the folder is taken, or holds another run.
        DamagedFile
            If the run cannot go on from anything that was saved.
        """
        if not (resume and (Path(path) / "run.json").exists()):
            folder = cls.create(path, about)
            folder._take_lock()
            return folder
        folder = cls(path)
        folder._take_lock()
        try:
            folder.clear_leftovers()
            folder._insist_on(about, {*may_differ, *set(may_be_missing).difference(folder.about)})
            folder._settle_on_a_state()
        except BaseException:
            folder.close()
            raise
        return folder

    def _insist_on(self, about: JSON, may_differ: Collection[str]) -> None:
        as_saved: JSON = json.loads(json.dumps(about))
        for name, value in as_saved.items():
            if name not in may_differ and self.about.get(name) != value:
                saved, given = reprlib.repr(self.about.get(name)), reprlib.repr(value)
                raise UnusableRun(
                    f"{self.path} cannot be resumed: its {name} is not the one given now "
                    f"({saved} was saved, {given} given); resume with the same settings and "
                    "clients, or choose another folder"
                )

    def _settle_on_a_state(self) -> None:
        """Make the newest state that the run can go on from the current one."""
        folder = self.path / "state"
        if not self.has_state:
            if self.is_complete:
                raise DamagedFile(f"{folder} is missing, but rounds have been done")
            return
        try:
            self._check_state("current")
            return
        except DamagedFile as error:
            damage = error
        if not has_previous(folder):
            raise damage
        try:
            state = self._check_state("previous")
        except DamagedFile as error:
            raise DamagedFile(f"{damage}; and of the state before it: {error}") from error
        # It is complete no longer, and the damaged state must not become the previous one.
        (self.path / "summary.json").unlink(missing_ok=True)
        go_back(folder, "server")
        warnings.warn(previous_state_warning(folder, state, damage), stacklevel=4)

    def _check_state(self, generation: Generation) -> JSON:
        """Read a state and the history that led to it; raise DamagedFile if one is damaged."""
        state, _ = read_generation(self.path / "state", "server", generation)
        self._lines(_round_of(state))
        return state

    def _take_lock(self) -> None:
        """Lock the folder against other processes until it is closed or this process ends."""
        if sys.platform == "win32":  # which has no such locks
            return
        self._lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UnusableRun(
                f"another process is writing into {self.path}; end it, or wait for its end"
            ) from None

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def baselines(self) -> dict[str, RunFolder]:
        """Name -> run of each method that this run is compared with."""
        found = sorted((self.path / "baselines").glob("*/run.json"))
        return {path.parent.name: RunFolder(path.parent) for path in found}

    # Training writes

    def clear_leftovers(self) -> None:
        """Remove the temporary files that a crash left behind."""
        for name in (
            "run.json",
            "history.jsonl",
            "releases.jsonl",
            "summary.json",
            "names.json",
            "report.html",
        ):
            (self.path / f"{name}.tmp").unlink(missing_ok=True)
        if self.has_state:
            clear_leftovers(self.path / "state")

    @property
    def has_state(self) -> bool:
        """Return whether a server has been saved."""
        return has_checkpoint(self.path / "state")

    def append(self, entry: Round) -> None:
        """Add a round to the history."""
        append_line(self._history_path, seal(entry.to_json()))

    def save_server(self, server: Server) -> None:
        """Save the server, after the history up to its round is on disk."""
        if self._history_path.exists():
            sync(self._history_path)
        server.save(self.path / "state")

    def truncate_history(self, num_rounds: int) -> None:
        """Drop the rounds after a number of them, as if they had not happened."""
        content = b"".join(line + b"\n" for line in self._lines(num_rounds))
        if not self._history_path.exists() or self._history_path.read_bytes() != content:
            replace_file(self._history_path, content)

    def set_rounds(self, rounds: int, *, num_done: int) -> None:
        """Change the number of rounds of a run of which ``num_done`` are done."""
        if num_done < rounds:
            (self.path / "summary.json").unlink(missing_ok=True)
        if rounds != self.about.get("rounds"):
            self.about["rounds"] = rounds
            _write_json(self.path / "run.json", "run", self.about)

    def finish(self, summary: JSON) -> None:
        """Mark the run as complete."""
        _write_json(self.path / "summary.json", "summary", summary)

    def save_names(self, names: Mapping[str, str]) -> None:
        """Write what people call the clients, if that has changed."""
        if names != self.names:
            _write_json(self.path / "names.json", "names", {"names": dict(names)})

    # Reporting reads

    def history(self, num_rounds: int | None = None) -> list[Round]:
        """Read all rounds, or the first ``num_rounds``.

        A last line without its end is the trace of a crash. It does not count, unless the saved
        server has done its round: then it is damage.
        """
        # The state is read first: a run that goes on writes the history before the state.
        state = peek(self.path / "state", "server") if self.has_state else None
        num_done = 0 if state is None else _round_of(state)
        lines = self._raw_lines()
        if len(lines) < num_done:
            raise self._too_short(len(lines), num_done)
        older = self._older_records() if self.about["schema"] == OLDER_SCHEMA else None
        return [self._parsed(line, n, older) for n, line in enumerate(lines[:num_rounds], start=1)]

    def _older_records(self) -> OlderRecords:
        """Return what completes the records of an older folder."""
        try:
            with warnings.catch_warnings():  # damage is named where the state itself is read
                warnings.simplefilter("ignore", UsingPreviousState)
                return OlderRecords(*self.saved_tree())
        except (DamagedFile, UnusableRun):
            return OlderRecords()

    def _raw_lines(self) -> list[bytes]:
        try:
            return self._history_path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DamagedFile(f"{self._history_path} cannot be read: {error.strerror}") from error

    def _lines(self, num_rounds: int) -> list[bytes]:
        """Return the lines of the first rounds; raise DamagedFile if one is missing or damaged."""
        lines = self._raw_lines()[:num_rounds]
        older = OlderRecords() if self.about["schema"] == OLDER_SCHEMA else None
        for number, line in enumerate(lines, start=1):
            self._parsed(line, number, older)
        if len(lines) < num_rounds:
            raise self._too_short(len(lines), num_rounds)
        return lines

    def _too_short(self, num_lines: int, num_rounds: int) -> DamagedFile:
        return DamagedFile(
            f"{self._history_path} has {num_lines} of the {num_rounds} rounds that the saved "
            "server has done"
        )

    def _parsed(self, line: bytes, number: int, older: OlderRecords | None) -> Round:
        try:
            record = unseal(line)
            entry = Round.from_json(record if older is None else older.complete(record))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(
                f"{self._history_path} line {number} cannot be read: {error!r}"
            ) from error
        if entry.record.round != number:
            raise DamagedFile(f"{self._history_path} line {number} is round {entry.record.round}")
        return entry

    @property
    def is_complete(self) -> bool:
        """Return whether the run has ended."""
        return (self.path / "summary.json").exists()

    @property
    def how_to_go_on(self) -> str:
        """The command, or the call, that continues the run."""
        if self.about.get("driver") == "flower":
            return "continue with: start its server app again, with resume=True"
        return f"continue with: fedbranch resume {self.path}"

    @property
    def summary(self) -> JSON:
        """The result of the run: rounds, clusters, mean metrics."""
        try:
            return _read_json(self.path / "summary.json", "summary")
        except FileNotFoundError:
            raise UnusableRun(f"{self.path} is not complete; {self.how_to_go_on}") from None

    @property
    def names(self) -> dict[str, str]:
        """Client id -> what people call it, where they call it something else."""
        path = self.path / "names.json"
        if not path.exists():
            return {}
        try:
            names: JSON = _read_json(path, "names")["names"]
            return {str(client_id): str(name) for client_id, name in names.items()}
        except (KeyError, AttributeError) as error:
            raise DamagedFile(f"{path} cannot be read: {error!r}") from error

    def tree(self) -> ParameterTree:
        """Load the parameter tree as it was saved last."""
        return self.saved_tree()[0]

    def saved_tree(self) -> tuple[ParameterTree, int]:
        """Load the parameter tree as it was saved last, and the number of its last round."""
        if not self.has_state:
            raise UnusableRun(f"{self.path} has saved nothing yet; {self.how_to_go_on}")
        state, files = read_checkpoint(self.path / "state", "server")
        try:
            cache = restored_cache(state["tree"], folder=self.path / "state", only_to_read=True)
            return ParameterTree.from_state(state["tree"], files, cache=cache), _round_of(state)
        except (KeyError, TypeError) as error:
            raise DamagedFile(f"{self.path / 'state'} holds no tree: {error!r}") from error

    def final_evaluation(self) -> Evaluation:
        """Return the last evaluation in the history; empty if there was none."""
        evaluations = [entry.evaluation for entry in self.history() if entry.evaluation]
        return evaluations[-1] if evaluations else {}

    @property
    def _history_path(self) -> Path:
        return self.path / "history.jsonl"


def mean_by_metric(evaluation: Evaluation, client_ids: list[str]) -> dict[str, float]:
    """Average each metric over clients, every client alike; those without it are left out.

    Examples
    --------
    >>> mean_by_metric({"a": {"accuracy": 0.5}, "b": {"accuracy": 1.0}}, ["a", "b"])
    {'accuracy': 0.75}
    """
    values: dict[str, list[float]] = {}
    for client_id in client_ids:
        for name, value in evaluation.get(client_id, {}).items():
            if value is not None:
                values.setdefault(name, []).append(value)
    # Divided first: a sum of what clients claim could leave the range of floats.
    return {name: fsum(v / len(numbers) for v in numbers) for name, numbers in values.items()}


def next_free_folder(parent: str | Path, name: str) -> Path:
    """Return the first of NAME-1, NAME-2, ... that does not exist."""
    number = 1
    while (Path(parent) / f"{name}-{number}").exists():
        number += 1
    return Path(parent) / f"{name}-{number}"


def _round_of(state: JSON) -> int:
    number = state.get("round") if isinstance(state, dict) else None
    if type(number) is not int or number < 0:
        raise DamagedFile(f"a saved server has done {number!r} rounds")
    return number


def _write_json(path: Path, kind: str, document: JSON) -> None:
    replace_file(path, seal({**document, "kind": kind}, indent=1))


def _read_json(path: Path, kind: str) -> JSON:
    document = read_sealed(path)
    if document.pop("kind", None) != kind:
        raise DamagedFile(f"{path} cannot be read: it is another file of a run")
    return document
