"""One client to train: its examples, a model, and its update."""

import copy

import numpy as np
import torch
from torch import nn

from fedbranch import Task
from fedbranch.data import Examples
from fedbranch.training.client import local_update
from fedbranch.training.model_state import ModelState


def examples(num_rows=30, num_features=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, num_features)).astype(np.float32)
    return Examples(x, (x[:, 0] > 0).astype(np.int64))


def task_at_start(model):
    state = ModelState.of(model)
    return Task(
        node_id=0,
        params=np.zeros(len(state.params), dtype=np.float32),
        buffers=np.zeros(len(state.buffers), dtype=np.float32),
        base="0.0",
        purpose="train",
    )


def update_of(model, data, training, seed=1):
    work = copy.deepcopy(model)
    return local_update(work, ModelState.of(model), task_at_start(model), data, training, seed=seed)


def linear(num_features=4, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(num_features, 2)
