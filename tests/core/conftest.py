import math

import pytest

from fedbranch.core.exact_sum import machine_code as module


@pytest.fixture
def machine_code(monkeypatch):
    """Numba's code, for updates of any size; and a switch back to NumPy's."""
    pytest.importorskip("numba", reason="there is no machine code without Numba")

    def use(is_used):
        monkeypatch.setattr(module, "LEAST_NUMBERS", 0 if is_used else math.inf)

    return use
