import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *options):
    result = subprocess.run(
        [sys.executable, *options, EXAMPLES / name],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_quickstart():
    output, _ = run("quickstart.py")

    assert "hospital-0, hospital-2, hospital-4" in output
    assert "hospital-1, hospital-3, hospital-5" in output
    assert "round" in output


def test_any_loop_finds_the_makes_without_loading_torch():
    output, loaded = run("any_loop.py", "-X", "importtime")

    for first in range(3):
        assert ", ".join(f"sensor-{i:02d}" for i in range(first, 12, 3)) in output
    assert "fedbranch.server.server" in loaded
    assert " torch" not in loaded


NOTEBOOK = EXAMPLES / "who_groups_with_whom.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs_offline_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    for group in range(3):
        assert f"7 clients of true group(s) {group}\n" in text
    assert "client-20 goes to node 3" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert list(tmp_path.rglob("*.html"))


def test_the_notebook_is_kept_without_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells

    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
