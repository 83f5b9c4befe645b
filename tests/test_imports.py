"""Which room may see which, and what is loaded when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedbranch"

# Room -> the rooms it may import. `fedbranch` itself is the public front.
MAY_SEE = {
    "errors": set(),
    "types": set(),
    "moved": set(),
    "core": {"core", "types"},
    "storage": {"errors", "storage", "types"},
    "population": {"population", "storage", "types"},
    "tree": {"core", "errors", "population", "storage", "tree", "types"},
    "protocol": {"core", "errors", "protocol", "types"},
    "rules": {"core", "errors", "rules", "types"},
    "server": {
        "core", "errors", "population", "protocol", "rules", "server", "storage", "tree", "types",
    },
    "runs": {"errors", "server", "storage", "tree", "types"},
    "data": {"core", "data", "errors", "storage", "types"},
    "training": {"data", "errors", "protocol", "training", "types"},
    "privacy": {"core", "data", "errors", "privacy", "protocol", "storage", "training", "types"},
    "sim": {
        "core", "data", "errors", "privacy", "protocol", "rules", "runs", "server", "sim",
        "storage", "training", "tree", "types",
    },
    "flower": {
        "core", "errors", "flower", "privacy", "protocol", "rules", "runs", "server", "storage",
        "training", "tree", "types",
    },
    "report": {
        "core", "data", "errors", "front", "report", "rules", "runs", "server", "storage", "tree",
        "types",
    },
    "cli": {
        "cli", "core", "data", "errors", "front", "privacy", "report", "rules", "runs", "sim", "storage",
        "training", "types",
    },
    "testing": {
        "core", "data", "errors", "flower", "protocol", "rules", "server", "sim", "testing",
        "training", "tree", "types",
    },
    "__main__": {"cli"},
}  # fmt: skip


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "front"


def imported_rooms(path):
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            rooms |= {room_of(a.name) for a in node.names if a.name.split(".")[0] == "fedbranch"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            if module == "fedbranch":
                names = {alias.name for alias in node.names}
                rooms |= {name if name in MAY_SEE else "front" for name in names}
            elif module.startswith("fedbranch."):
                rooms.add(room_of(module))
    return rooms


@pytest.mark.parametrize(
    "path", [p for p in sorted(SOURCE.rglob("*.py")) if p != SOURCE / "__init__.py"], ids=str
)
def test_arrows_point_one_way(path):
    room = path.relative_to(SOURCE).with_suffix("").parts[0]

    assert imported_rooms(path) <= MAY_SEE[room]


def test_the_map_itself_has_no_cycles():
    done = {"front"}
    remaining = {room: seen - {room} for room, seen in MAY_SEE.items()}
    while remaining:
        free = [room for room, seen in remaining.items() if seen <= done]
        assert free, f"a cycle among {sorted(remaining)}"
        done |= set(free)
        for room in free:
            del remaining[room]


def loaded_by(code):
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in result.stdout.split()}


def test_importing_fedbranch_loads_no_heavy_library():
    loaded = loaded_by("import fedbranch")

    assert loaded.isdisjoint({"torch", "flwr", "matplotlib", "numba", "sklearn", "datasets"})


def test_help_loads_no_heavy_library():
    loaded = loaded_by(
        "import sys; sys.argv = ['fedbranch', '--help']\n"
        "from fedbranch.cli.commands import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert stop.code == 0"
    )

    assert loaded.isdisjoint({"torch", "flwr", "matplotlib", "numba", "sklearn", "datasets"})


def test_the_conformance_checks_load_torch_and_flower_when_they_are_used():
    assert loaded_by("import fedbranch.testing").isdisjoint({"torch", "flwr"})


def test_a_rule_is_checked_without_flower():
    loaded = loaded_by(
        "import fedbranch as fb, fedbranch.testing as testing\ntesting.check_rule(fb.NeverSplit())"
    )

    assert "flwr" not in loaded


def test_a_server_works_without_torch():
    loaded = loaded_by(
        "import numpy as np, fedbranch as fb\n"
        "server = fb.Server(2, rule=fb.NeverSplit())\n"
        "server.plan(['a'])\n"
        "server.step({'a': fb.Update(np.float32([1, 2]), 1)})"
    )

    assert "torch" not in loaded


def test_without_flower_the_error_says_what_to_install():
    script = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'flwr': raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import fedbranch\n"
        "try: import fedbranch.flower\n"
        "except ImportError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert "pip install 'fedbranch[flower]'" in result.stdout, result.stderr


def test_the_strategy_works_without_torch():
    assert "torch" not in loaded_by("from fedbranch.flower import ClusteredStrategy")


def test_only_the_fake_touches_what_flower_keeps_to_itself():
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
    for path in (SOURCE / "flower").glob("*.py"):
        modules = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr")
        }
        private = {"flwr.supercore.task_identity"} if path.name == "testing.py" else set()
        assert modules <= public | private
