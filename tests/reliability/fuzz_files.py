"""Files for fuzzing the readers, and fuzzing with atheris (extra ``[fuzz]``).

    python -m tests.reliability.fuzz_files [number of files]

Damaged bytes hardly pass a checksum, so most files here are damaged before they are sealed. An
attacker can compute a checksum as well.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import struct
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from fedbranch import NeverSplit, RunFolder, Server, Update, runs
from fedbranch.cli import experiment
from fedbranch.cli import toml_settings as settings
from fedbranch.cli.experiment import Experiment
from fedbranch.errors import FedbranchError
from fedbranch.runs import Round
from fedbranch.server import records, server
from fedbranch.storage import atomic as files
from fedbranch.storage import checkpoint
from fedbranch.storage.sealed_json import seal, unseal
from fedbranch.tree import tree

SEALED = ["run.json", "summary.json", "names.json", "state/state.json", "state/previous.json"]

EXPERIMENT = (Path(experiment.__file__).parent / "presets" / "demo.toml").read_text()
ODD = [None, True, -1, 0, 1, 10**12, 2**63, 2**70, 0.5, -1e308, "", "a", "0", "inf", "nan"]
ODD += [[], {}, [[]], [1, 2], ["a"], {"a": 1}, {"0": {}}, [None], {"": None}]


def make_folder(path: Path) -> Path:
    """Make a run folder with one of every kind of file."""
    run = RunFolder.create(path, {"method": "cfl", "clients": [{"id": "a", "group": None}]})
    run.save_names({"a": "hospital A"})
    saved = Server(3, rule=NeverSplit())
    for number in range(2):
        tasks = saved.plan(["a", "b"])
        vector = np.float32([1, number, 0])
        updates = {i: Update(vector, num_examples=1, base=t.base) for i, t in tasks.items()}
        run.append(Round(record=saved.step(updates), evaluation={"a": {"loss": 0.5}}))
        run.save_server(saved)
    saved.tree.split(0, [{"a": np.float32([1, 0, 0])}, {"b": np.float32([0, 1, 0])}])
    run.save_server(saved)
    run.finish({"rounds": 2, "clusters": {"0": ["a", "b"]}, "mean": {}})
    return path


class Folder:
    """A run folder; its files are replaced one at a time, read, and put back."""

    def __init__(self, path: Path, template: Path | None = None) -> None:
        self.path = make_folder(path) if template is None else shutil.copytree(template, path)
        self.contents = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}

    def read_with(self, name: str, content: bytes) -> str:
        """Read the folder with another content of one file; return "read" or "refused"."""
        path = self.path / name
        path.write_bytes(content)
        try:
            return read_everything(self.path)
        finally:
            path.write_bytes(self.contents[path])

    def read_with_tensors(self, content: bytes) -> str:
        """Read the folder with another file of the leaves, which the state names correctly."""
        path = self.path / "state" / "state.json"
        document = unseal(self.contents[path])
        digest = hashlib.sha256(content).hexdigest()
        name = f"leaves-{digest[:16]}.safetensors"
        entry = {"file": name, "sha256": digest, "bytes": len(content)}
        document["tensors"]["leaves"] = entry
        tensors = self.path / "state" / name
        is_new = not tensors.exists()
        tensors.write_bytes(content)
        try:
            return self.read_with("state/state.json", seal(document))
        finally:
            if is_new:
                tensors.unlink()

    @property
    def leaves(self) -> bytes:
        document = unseal(self.contents[self.path / "state" / "state.json"])
        return self.contents[self.path / "state" / document["tensors"]["leaves"]["file"]]

    def document(self, name: str) -> dict:
        return unseal(self.contents[self.path / name])


def read_everything(path: Path) -> str:
    """Read a run folder as reports and a resumed run do; other errors than ours come out."""
    outcomes = []
    for read in (
        lambda: RunFolder(path).summary,
        lambda: RunFolder(path).names,
        lambda: RunFolder(path).history(),
        lambda: RunFolder(path).tree(),
        lambda: Server.load(path / "state"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read()
                outcomes.append("read")
            except FedbranchError:
                outcomes.append("refused")
    return "refused" if "refused" in outcomes else "read"


def read_experiment(text: str) -> str:
    """Read an experiment; other errors than ours come out."""
    try:
        Experiment.parse(text, "fuzzed")
    except FedbranchError:
        return "refused"
    return "read"


def with_header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def replaced(document: object, number: int, value: object) -> object:
    """Replace the n-th part of a JSON document, counted from its root, by a value."""
    document = json.loads(json.dumps(document))
    places: list[tuple[object, object]] = []

    def walk(part: object) -> None:
        items = (
            part.items()
            if isinstance(part, dict)
            else enumerate(part)
            if isinstance(part, list)
            else ()
        )
        for key, inner in items:
            places.append((part, key))
            walk(inner)

    walk(document)
    part, key = places[number % len(places)]
    part[key] = value  # type: ignore[index]  # walk finds lists and dicts only
    return document


def own_functions() -> list:
    """Return all functions of the readers, for atheris to watch which branches a file takes."""
    functions = []
    for module in (checkpoint, experiment, files, records, runs, server, settings, tree):
        for value in vars(module).values():
            if getattr(value, "__module__", "").startswith("fedbranch"):
                members = vars(value).values() if inspect.isclass(value) else [value]
                functions += [getattr(member, "__func__", member) for member in members]
    return [function for function in functions if inspect.isfunction(function)]


def main() -> None:
    """Fuzz with atheris, which prints the number of files at its end."""
    import atheris

    num_files = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    home = Path(tempfile.mkdtemp())
    folder = Folder(home / "run")

    def edited(content: bytes, provider: atheris.FuzzedDataProvider) -> bytes:
        place = provider.ConsumeIntInRange(0, len(content))
        end = place + provider.ConsumeIntInRange(0, 8)
        return content[:place] + provider.ConsumeBytes(100) + content[end:]

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        kind = provider.ConsumeIntInRange(0, 3)
        if kind == 0:
            name = SEALED[provider.ConsumeIntInRange(0, len(SEALED) - 1)]
            number = provider.ConsumeIntInRange(0, 200)
            value = ODD[provider.ConsumeIntInRange(0, len(ODD) - 1)]
            folder.read_with(name, seal(replaced(folder.document(name), number, value)))
        elif kind == 1:
            lines = folder.contents[folder.path / "history.jsonl"]
            folder.read_with("history.jsonl", edited(lines, provider))
        elif kind == 2:
            folder.read_with_tensors(edited(folder.leaves, provider))
        else:
            read_experiment(edited(EXPERIMENT.encode(), provider).decode(errors="replace"))

    for function in own_functions():
        atheris.instrument_func(function)
    options = [f"-runs={num_files}", "-seed=1", "-max_len=120", "-len_control=0"]
    atheris.Setup([sys.argv[0], *options, "-print_final_stats=1"], one)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
