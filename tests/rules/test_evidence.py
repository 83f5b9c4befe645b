"""The two norms of the paper's criteria, also of a sample of the clients."""

import numpy as np
import pytest

from fedbranch import (
    NeverSplit,
)
from rules.made_evidence import evidence
from rules.test_thresholds import RULE


def test_the_norm_of_the_mean_is_not_the_mean_of_the_norms():
    decision = RULE.examine(evidence([[3, 0], [-3, 0]]))

    assert decision.measurements["mean_norm"] == 0


def test_the_estimated_mean_of_a_sample_is_unbiased():
    # ‖mean of a sample‖² overestimates ‖mean of all‖² by the sampling variance.
    rng = np.random.default_rng(0)
    everybody = rng.normal(size=(20, 5)) + 0.4
    true_square = float((everybody.mean(axis=0) ** 2).sum())
    naive, corrected = [], []
    for _ in range(4000):
        sample = everybody[rng.choice(20, size=8, replace=False)]
        naive.append(float((sample.mean(axis=0) ** 2).sum()))
        spread = ((sample - sample.mean(axis=0)) ** 2).sum() / 7
        corrected.append(naive[-1] - spread / 8 * (1 - 8 / 20))
        measured = NeverSplit().examine(evidence(sample, num_members=20)).measurements["mean_norm"]
        assert measured == pytest.approx(np.sqrt(max(0, corrected[-1])), abs=1e-3)

    assert np.mean(corrected) == pytest.approx(true_square, rel=0.02)
    assert np.mean(naive) > 1.2 * true_square


def test_with_all_clients_there_the_mean_is_not_corrected():
    updates = np.random.default_rng(1).normal(size=(6, 4))

    measured = NeverSplit().examine(evidence(updates)).measurements["mean_norm"]

    assert measured == pytest.approx(np.linalg.norm(updates.mean(axis=0)), rel=1e-6)
