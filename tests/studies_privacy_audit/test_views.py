"""What the server sees: lengths and angles stay, and runs apart have secrets of their own."""

import numpy as np
import pytest

from studies.privacy_audit.views import VIEWS, seen_apart, seen_together


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_keeps_norms_and_angles(view):
    plain = np.random.default_rng(0).normal(size=(5, 97)).astype(np.float32)

    seen = seen_together(view, plain, seed=0)

    np.testing.assert_allclose(seen @ seen.T, plain @ plain.T, rtol=1e-4, atol=1e-4)


def test_runs_apart_have_different_secrets():
    plain = np.random.default_rng(0).normal(size=(1, 97)).astype(np.float32).repeat(2, axis=0)

    apart = seen_apart("rotation", plain, seed=0)
    together = seen_together("rotation", plain, seed=0)

    assert np.abs(apart[0] - apart[1]).max() > 0.1
    np.testing.assert_array_equal(together[0], together[1])
