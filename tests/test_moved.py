"""Import paths of older documentation still work."""

import importlib
import sys

import pytest

import fedbranch  # noqa: F401 -- lets old paths be found
from fedbranch.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_names_of_the_new_one(old):
    if old.startswith("fedbranch.flower"):
        pytest.importorskip("flwr")
    sys.modules.pop(old, None)

    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        module = importlib.import_module(old)

    new = importlib.import_module(MOVED[old])
    assert module.__all__ == new.__all__
    assert all(getattr(module, name) is getattr(new, name) for name in new.__all__)


def test_a_path_that_never_was_is_an_error():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fedbranch.core.summer")
