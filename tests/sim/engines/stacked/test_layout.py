import numpy as np
import torch
from torch import nn

import fedbranch as fb
from fedbranch.sim.engines.stacked.layout import cpu_layout, pool_before_relu
from sim.engines.small_problems import cnn, make_clients, seeded


def test_pooling_before_relu_is_the_same_to_the_bit():
    torch.manual_seed(0)
    x = torch.randn(6, 2, 9, 9)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(3, padding=1)))
    x[0] = 0.0  # ties

    results = []
    for change in (lambda m: m, pool_before_relu):
        changed = change(nn.Sequential(*model))
        inputs = x.clone().requires_grad_()
        outputs = changed(inputs)
        gradient = torch.autograd.grad(outputs.square().sum(), inputs)[0]
        results.append((outputs, gradient, [type(module) for module in changed]))

    (before, gradient_before, _), (after, gradient_after, order) = results
    assert order == [nn.Conv2d, nn.MaxPool2d, nn.ReLU]
    assert torch.equal(before, after)
    assert torch.equal(gradient_before, gradient_after)


TRAINING = fb.LocalTraining(epochs=1, batch_size=10)


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)  # refuses channels-last images


def cnn_tail(flatten=None):
    return nn.Sequential(nn.Conv2d(4, 2, 3), flatten or nn.Flatten(), nn.Linear(32, 3))


def test_a_model_that_refuses_channels_last_keeps_its_own_order():
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])

    def is_channels_last(model):
        own = cpu_layout(model, TRAINING, x, y)
        return any(
            p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last)
            and not p.is_contiguous()
            for p in own.parameters()
        )  # fmt: skip

    assert is_channels_last(nn.Sequential(nn.Conv2d(1, 4, 3), cnn_tail()))
    assert not is_channels_last(nn.Sequential(nn.Conv2d(1, 4, 3), cnn_tail(View())))
    clients = make_clients([12, 40, 9, 25, 31], (1, 8, 8))
    workers, reference = (
        fb.fedavg(cnn(View()), clients, rounds=3, training=TRAINING, engine=engine)
        for engine in ("workers", "reference")
    )
    np.testing.assert_allclose(workers.tree.root.params, reference.tree.root.params, atol=1e-5)
