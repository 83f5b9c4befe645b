"""What the documents say must be so."""

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from fedbranch import AutoRule, Thresholds, __version__
from fedbranch.experiment import Data, Experiment, Model, Training, preset_names

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def code_blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_the_documented_experiment_is_valid_and_names_every_setting():
    text, thresholds = code_blocks(ROOT / "docs" / "experiments.md", "toml")

    assert isinstance(Experiment.parse(text, "docs").rule, AutoRule)

    with_thresholds = text[: text.index("[rule]")] + thresholds
    assert isinstance(Experiment.parse(with_thresholds, "docs").rule, Thresholds)
    known = {item.name for item in fields(Thresholds)}
    assert set(tomllib.loads(thresholds)["rule"]) == known
    table = tomllib.loads(text)
    sections = {"data": Data, "model": Model, "training": Training, "rule": AutoRule}
    for name, section in sections.items():
        known = {item.name for item in fields(section)} - {"steps"}
        assert set(table[name]) == known
    assert set(table) == {item.name for item in fields(Experiment)}


def test_every_preset_is_documented():
    text = (ROOT / "docs" / "experiments.md").read_text()

    assert all(f"`{name}`" in text for name in preset_names())


def test_python_blocks_are_python_and_use_public_names():
    import fedbranch

    for block in code_blocks(ROOT / "README.md", "python"):
        # An ellipsis stands for "and so on"; everything else must parse.
        tree = ast.parse(block.replace(", ...}", "}"))
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "fb"
        }
        assert used <= set(fedbranch.__all__)


def test_the_map_names_every_room():
    rooms = {
        path.stem if path.is_file() else path.name
        for path in (ROOT / "src" / "fedbranch").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    } - {"__init__", "__main__"}
    named = set(re.findall(r"^\| `(\w+)/?` \|", (ROOT / "docs/architecture.md").read_text(), re.M))

    assert named == rooms


def test_the_versions_agree():
    assert f"version: {__version__}" in (ROOT / "CITATION.cff").read_text()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    names = {
        re.match(r"[\w-]+", requirement)[0]
        for requirements in [project["dependencies"], *extras]
        for requirement in requirements
    } - {"fedbranch"}
    reasons = (ROOT / "docs" / "architecture.md").read_text().split("## Dependencies")[1]

    assert all(name in reasons for name in names)


def test_the_privacy_page_runs():
    """Its blocks in one go, as a reader would try them; those for Flower need a federation."""
    text = (ROOT / "docs" / "privacy.md").read_text()
    before, rest = text.split("### Over Flower")
    over_flower, after = rest.split("\n## ", 1)
    names = {}
    for part in (before, after):
        for block in re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL):
            exec(block, names)

    assert set(names["run"].epsilons(delta=1e-5)) == set(names["clients"])
    for block in re.findall(r"```python\n(.*?)```", over_flower, flags=re.DOTALL):
        ast.parse(block)
