"""The room's door: every public name of its modules can be imported from the room."""

import importlib
import pkgutil

import pytest

import fedbranch.core
import fedbranch.core.exact_sum

LOOPS = {"compiled", "machine_code", "unit_sum"}  # the inside of exact sums


def modules_of(package):
    return [info.name for info in pkgutil.iter_modules(package.__path__) if not info.ispkg]


@pytest.mark.parametrize("package", [fedbranch.core, fedbranch.core.exact_sum])
def test_a_room_exports_every_public_name_of_its_modules(package):
    for name in set(modules_of(package)) - LOOPS:
        module = importlib.import_module(f"{package.__name__}.{name}")
        for public in module.__all__:
            assert public in package.__all__
            assert getattr(package, public) is getattr(module, public)


def test_no_public_name_hides_a_module():
    assert not set(fedbranch.core.__all__) & {*modules_of(fedbranch.core), "exact_sum"}
