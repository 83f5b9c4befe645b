"""Curves of clusters: the quantiles of their bands."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbranch.report.facts.series import quantile


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_numpys(values, share):
    assert quantile(np.sort(values), share) == pytest.approx(np.quantile(values, share))
