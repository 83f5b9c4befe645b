"""The house stays one that a stranger can work in: rooms, sizes, names, prose."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedbranch"
MODULES = sorted(SOURCE.rglob("*.py"))

MOST_ROOT_MODULES, MOST_ROOMS, MOST_LINES = 8, 20, 500
GRAB_BAGS = {"utils", "util", "helpers", "common", "misc"}
VAGUE_SUBJECT = re.compile(r"\b(who|whoever|nobody|somebody)\b|\bso many\b", re.IGNORECASE)
VAGUE_VERB = re.compile(r"(Give|Gives|Say|Says|Tell|Tells|Whether)\b")


def test_few_modules_stand_at_the_root_and_there_are_few_rooms():
    root_modules = list(SOURCE.glob("*.py"))
    folders = [path for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    front = {"__init__", "__main__"}

    assert len(root_modules) <= MOST_ROOT_MODULES
    assert len(folders) + len({path.stem for path in root_modules} - front) <= MOST_ROOMS


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_is_short_and_in_plain_words(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)

    assert path.stem not in GRAB_BAGS
    assert len(text.splitlines()) <= MOST_LINES
    assert not VAGUE_SUBJECT.search(text), "name the client, the reply, the parameter"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            assert not VAGUE_VERB.match(docstring), f"begin with a plain verb: {docstring[:60]!r}"


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if path.name != "__init__.py" and path.parent != SOURCE],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_the_folder_of_a_module_has_a_folder_of_tests(path):
    room = path.relative_to(SOURCE).parts[0]

    assert (ROOT / "tests" / room).is_dir()
