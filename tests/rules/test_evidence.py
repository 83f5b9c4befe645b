"""The two norms of the paper's criteria, also of a sample of the clients."""

import numpy as np
import pytest

from fedbranch import NeverSplit
from fedbranch.rules.evidence import norm_measurements
from rules.made_evidence import evidence


def test_the_norm_of_the_mean_is_not_the_mean_of_the_norms():
    measured = norm_measurements(evidence([[3, 0], [-3, 0]]))

    assert measured == {"mean_norm": 0, "max_norm": 3, "num_answered": 2, "num_members": 2}


def test_the_estimated_mean_of_a_sample_is_unbiased():
    # ‖mean of a sample‖² overestimates ‖mean of all‖² by the sampling variance.
    rng = np.random.default_rng(0)
    population = rng.normal(size=(20, 5)) + 0.4
    true_square = float((population.mean(axis=0) ** 2).sum())
    naive, corrected = [], []
    for _ in range(4000):
        sample = population[rng.choice(20, size=8, replace=False)]
        naive.append(float((sample.mean(axis=0) ** 2).sum()))
        spread = ((sample - sample.mean(axis=0)) ** 2).sum() / 7
        corrected.append(naive[-1] - spread / 8 * (1 - 8 / 20))
        measured = norm_measurements(evidence(sample, num_members=20))["mean_norm"]
        assert measured == pytest.approx(np.sqrt(max(0, corrected[-1])), abs=1e-3)

    assert np.mean(corrected) == pytest.approx(true_square, rel=0.02)
    assert np.mean(naive) > 1.2 * true_square


def test_with_all_clients_there_the_mean_is_not_corrected():
    updates = np.random.default_rng(1).normal(size=(6, 4))

    measured = norm_measurements(evidence(updates))["mean_norm"]

    assert measured == pytest.approx(np.linalg.norm(updates.mean(axis=0)), rel=1e-6)


def test_a_rule_that_never_splits_measures_the_same():
    seen = evidence([[3, 4], [0, 1]], num_members=5)

    assert NeverSplit().examine(seen).measurements == norm_measurements(seen)
