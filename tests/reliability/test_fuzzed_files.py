"""Fuzzed files, and files that are made to do harm, are read or refused."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbranch.cli.experiment import Experiment
from fedbranch.errors import DamagedFile
from fedbranch.storage.checkpoint import read_checkpoint
from fedbranch.storage.sealed_json import seal
from tests.reliability.fuzz_files import (
    EXPERIMENT,
    ODD,
    SEALED,
    Folder,
    make_folder,
    read_experiment,
    replaced,
    with_header,
)
from tests.reliability.small_run import processes, read_hostile

ROOT = Path(__file__).parents[2]

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from(ODD)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 5_000), st.sampled_from(["cut", "insert", "replace"]), st.binary()),
    min_size=1,
    max_size=4,
)


def edited(content, edits):
    for place, how, new in edits:
        place %= len(content) + 1
        end = len(content) if how == "cut" else place + (len(new) if how == "replace" else 0)
        content = content[:place] + new + content[end:]
    return content


class Counted:
    """Counts of files that were read or refused."""

    def __init__(self):
        self.num_files = self.num_refused = 0

    def add(self, outcome):
        self.num_files += 1
        self.num_refused += outcome == "refused"


def fuzz(tmp_path, files_per_kind):
    """Feed the readers; other errors than ours come out."""
    folder, counted = Folder(tmp_path / "run"), Counted()
    often = settings(
        max_examples=files_per_kind,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    names = st.sampled_from(SEALED)

    @often
    @given(st.sampled_from([str(p.relative_to(folder.path)) for p in folder.contents]), EDITS)
    def raw_bytes(name, edits):
        content = edited(folder.contents[folder.path / name], edits)
        counted.add(folder.read_with(name, content))

    @often
    @given(names, st.integers(0, 300), JSON_VALUES)
    def sealed_documents(name, number, value):
        content = seal(replaced(folder.document(name), number, value))
        counted.add(folder.read_with(name, content))

    @often
    @given(st.integers(0, 100), JSON_VALUES)
    def sealed_lines(number, value):
        lines = folder.contents[folder.path / "history.jsonl"].splitlines(keepends=True)
        document = json.loads(lines[0])
        del document["sha256"]
        lines[0] = seal(replaced(document, number, value))
        counted.add(folder.read_with("history.jsonl", b"".join(lines)))

    @often
    @given(EDITS)
    def tensors(edits):
        counted.add(folder.read_with_tensors(edited(folder.leaves, edits)))

    @often
    @given(st.integers(0, 40), JSON_VALUES)
    def tensor_headers(number, value):
        length = int.from_bytes(folder.leaves[:8], "little")
        header, data = folder.leaves[8 : 8 + length], folder.leaves[8 + length :]
        changed = json.dumps(replaced(json.loads(header), number, value)).encode()
        counted.add(folder.read_with_tensors(with_header(changed, data)))

    @often
    @given(EDITS, st.text(max_size=30))
    def experiments(edits, text):
        content = edited(EXPERIMENT.encode(), edits).decode(errors="replace")
        counted.add(read_experiment(content))
        counted.add(read_experiment(text))

    for kind in (
        raw_bytes,
        sealed_documents,
        sealed_lines,
        tensors,
        tensor_headers,
        experiments,
    ):
        kind()
    return counted


def test_fuzzed_files_are_read_or_refused(tmp_path):
    counted = fuzz(tmp_path, files_per_kind=25)

    assert counted.num_refused > 50


@pytest.mark.reliability
def test_thousands_of_fuzzed_files_are_read_or_refused(tmp_path, measured):
    counted = fuzz(tmp_path, files_per_kind=600)
    result = f"{counted.num_files:,} files by Hypothesis: only our own errors"
    if importlib.util.find_spec("atheris") is not None:
        result += f"; {atheris_runs(5_000):,} by atheris: likewise"

    measured("fuzz-files", result)
    assert counted.num_files >= 4_000
    assert counted.num_refused > 1_000


def atheris_runs(num_files):
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability.fuzz_files", str(num_files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return int(re.search(r"stat::number_of_executed_units: *(\d+)", done.stderr)[1])


# Files that are made to do harm

F32 = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}


def header(**tensors):
    return with_header(json.dumps(tensors).encode(), bytes(12))


def many_tensors():
    parts = ",".join(
        f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000)
    )
    return with_header(("{" + parts + "}").encode())


TENSORS = {
    "a header beyond the file": lambda: with_header(b"{}", length=2**62),
    "a header of 2**64 - 1 bytes": lambda: with_header(b"{}", length=2**64 - 1),
    "a header of 100 MB": lambda: with_header(b"{}", length=100_000_000),
    "a header of 50 MB, all there": lambda: with_header(b" " * 50_000_000),
    "a header of no JSON": lambda: with_header(b"\xff" * 100),
    "a header nested 100,000 deep": lambda: with_header(b"[" * 100_000),
    "a million tensors": many_tensors,
    "overlapping tensors": lambda: header(a=F32, b=F32),
    "negative offsets": lambda: header(a={**F32, "data_offsets": [-12, 0]}),
    "offsets beyond the file": lambda: header(a={**F32, "data_offsets": [0, 10**15]}),
    "a dtype of another size": lambda: header(a={**F32, "dtype": "F64"}),
    "no such dtype": lambda: header(a={**F32, "dtype": "F7"}),
    "a shape of 10**15 numbers": lambda: header(a={**F32, "shape": [10**15]}),
    "a shape with a product that overflows": lambda: header(a={**F32, "shape": [2**40, 2**40]}),
    "a negative shape": lambda: header(a={**F32, "shape": [-3]}),
    "a shape that is not a number": lambda: header(a={**F32, "shape": [float("nan")]}),
    "an empty file": lambda: b"",
}


def million(text):
    return "{" + ",".join(f'"k{i}":{text}' for i in range(1_000_000)) + "}"


DOCUMENTS = {
    "a million keys": lambda: million("0").encode(),
    "a million objects": lambda: million("{}").encode(),
    "nested 1,000,000 deep": lambda: b"[" * 1_000_000,
    "nested 1,000,000 deep, sealed": lambda: sealed_text('{"state": ' + "[" * 1_000_000),
    "a number of 1,000,000 digits, sealed": lambda: sealed_text('{"round": ' + "9" * 1_000_000),
    "not a number, sealed": lambda: sealed_text('{"round": NaN'),
    "an empty file": lambda: b"",
    "20 MB of spaces": lambda: b" " * 20_000_000,
}


def sealed_text(text):
    """Seal a text that seal() would refuse."""
    import hashlib

    return f'{text}, "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


def entries(name, file, num_bytes=12):
    return {name: {"file": file, "sha256": "0" * 64, "bytes": num_bytes}}


MANIFESTS = {
    "a path that leads out": lambda: entries("x", "../../etc/passwd"),
    "an absolute path": lambda: entries("x", "/etc/passwd"),
    "a name that leads out": lambda: entries("../x", f"../x-{'0' * 16}.safetensors"),
    "a device": lambda: entries("x", "/dev/zero", 10**15),
    "a name of 1,000,000 characters": lambda: entries("x" * 1_000_000, "x"),
    "a file of 10**18 bytes": lambda: entries("x", f"x-{'0' * 16}.safetensors", 10**18),
    "no manifest": list,
}


def hostile_folders(home):
    """Make a folder for each hostile file; return them by description."""
    folders = {}
    template = make_folder(home / "template")
    for number, (what, make) in enumerate(TENSORS.items()):
        path = home / f"tensors-{number}"
        Hostile(path, template).put_tensors(make())
        folders[f"safetensors: {what}"] = path
    for number, (what, make) in enumerate(DOCUMENTS.items()):
        for name in (*SEALED[:4], "history.jsonl"):
            path = home / f"document-{number}-{name.replace('/', '-')}"
            Hostile(path, template)
            (path / name).write_bytes(make() + b"\n")
            folders[f"{name}: {what}"] = path
    for number, (what, make) in enumerate(MANIFESTS.items()):
        path = home / f"manifest-{number}"
        Hostile(path, template).put_manifest(make())
        folders[f"manifest: {what}"] = path
    path = home / "sparse"
    Hostile(path, template)
    os.truncate(path / "state/state.json", 2_000_000_000)
    folders["state.json: 2 GB of nothing"] = path
    path = home / "link"
    Hostile(path, template).put_link()
    folders["a link in the place of tensors"] = path
    return folders


class Hostile(Folder):
    """A folder with one hostile file and no state before it."""

    def __init__(self, path, template=None):
        super().__init__(path, template)
        (path / "state/previous.json").unlink()

    def put_tensors(self, content):
        import hashlib

        digest = hashlib.sha256(content).hexdigest()
        name = f"leaves-{digest[:16]}.safetensors"
        (self.path / "state" / name).write_bytes(content)
        document = self.document("state/state.json")
        document["tensors"]["leaves"] = {"file": name, "sha256": digest, "bytes": len(content)}
        (self.path / "state/state.json").write_bytes(seal(document))

    def put_manifest(self, manifest):
        document = {**self.document("state/state.json"), "tensors": manifest}
        (self.path / "state/state.json").write_bytes(seal(document))

    def put_link(self):
        (file,) = (
            self.path / "state" / entry["file"]
            for name, entry in self.document("state/state.json")["tensors"].items()
            if name == "leaves"
        )
        file.rename(self.path / "elsewhere")
        file.symlink_to(self.path / "elsewhere")


def read_all_hostile(tmp_path):
    context, largest = processes(), 0
    folders = hostile_folders(tmp_path)
    for what, path in folders.items():
        receive, answer = context.Pipe(duplex=False)
        child = context.Process(target=read_hostile, args=(path, answer))
        child.start()
        answer.close()
        refused, num_bytes = receive.recv()
        child.join()
        print(f"{what}: {refused}, {num_bytes / 1e6:.1f} MB")
        assert DamagedFile.__name__ in refused, what
        assert num_bytes < 100e6, what
        largest = max(largest, num_bytes)
    return len(folders), largest


@pytest.mark.reliability
def test_hostile_files_are_refused_within_100_megabytes(tmp_path, measured):
    num_files, largest = read_all_hostile(tmp_path)

    measured(
        "hostile-files", f"{num_files} of {num_files} refused, at most {largest / 1e6:.0f} MB more"
    )


@pytest.mark.parametrize(
    "what", [name for name in TENSORS if name not in ("a million tensors",)], ids=str
)
def test_a_hostile_tensor_file_is_refused(tmp_path, what):
    Hostile(tmp_path / "run").put_tensors(TENSORS[what]())

    with pytest.raises(DamagedFile, match=r"leaves-\w+\.safetensors"):
        read_checkpoint(tmp_path / "run" / "state", "server")


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_hostile_manifest_is_refused(tmp_path, what):
    Hostile(tmp_path / "run").put_manifest(MANIFESTS[what]())

    with pytest.raises(DamagedFile, match="state"):
        read_checkpoint(tmp_path / "run" / "state", "server")


def test_a_deeply_nested_experiment_is_refused():
    assert Experiment.parse(EXPERIMENT, "demo").rounds > 0
    assert read_experiment("rounds = " + "[" * 100_000) == "refused"
