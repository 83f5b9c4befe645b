import math

import pytest
import torch
from torch import nn

from fedbranch.sim.ensemble import Ensemble


def test_an_ensemble_of_sure_models_has_no_infinite_logarithms():
    outputs = Ensemble([nn.Identity(), nn.ReLU()])(torch.tensor([[-1000.0, 0.0]]))

    assert outputs.tolist() == [pytest.approx([math.log(0.25), math.log(0.75)])]


def test_only_classifiers_make_ensembles():
    with pytest.raises(ValueError, match=r"outputs have shape \(4, 1\); an ensemble averages"):
        Ensemble([nn.Linear(3, 1)])(torch.zeros(4, 3))
