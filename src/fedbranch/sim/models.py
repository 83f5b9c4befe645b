"""Small models for experiments. The initial weights follow from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["LanguageModel", "Normalised", "cnn", "language_model", "logistic_regression", "mlp"]


class Normalised(nn.Module):
    """A first layer for images kept as bytes: it scales them to mean 0 and deviation 1.

    Bytes take a quarter of the memory of floats, on a GPU too. They are converted in each
    forward pass.

    Parameters
    ----------
    mean, deviation
        Mean and deviation of each channel, divided by the largest byte, 255.

    Examples
    --------
    >>> Normalised([0.5], [0.25])(torch.tensor([[[[255]]]], dtype=torch.uint8))
    tensor([[[[2.]]]])
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        super().__init__()
        # Frozen parameters move to a device with the model, but are not trained or averaged.
        self.mean, self.deviation = (
            nn.Parameter(torch.tensor(values).reshape(-1, 1, 1), requires_grad=False)
            for values in (mean, deviation)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scale bytes of shape (num_images, channels, height, width)."""
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.deviation


def logistic_regression(input_shape: Sequence[int], num_classes: int, *, seed: int) -> nn.Module:
    """Make a linear classifier."""
    return mlp(input_shape, num_classes, hidden=(), seed=seed)


def mlp(
    input_shape: Sequence[int], num_classes: int, *, hidden: Sequence[int], seed: int
) -> nn.Module:
    """Make a multi-layer perceptron.

    Parameters
    ----------
    input_shape
        Shape of one example.
    num_classes
        Number of outputs.
    hidden
        Width of each hidden layer.
    seed
        Seeds the initial weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        width = int(torch.Size(input_shape).numel())
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        return nn.Sequential(*layers, nn.Linear(width, num_classes))


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    channels: Sequence[int],
    hidden: int,
    seed: int,
) -> nn.Module:
    """Make a convolutional network: 3x3 convolutions with pooling, then two linear layers.

    Each pooling halves height and width.

    Parameters
    ----------
    input_shape
        (channels, height, width) of one image.
    num_classes
        Number of outputs.
    channels
        Number of output channels of each convolution.
    hidden
        Width of the layer before the last.
    seed
        Seeds the initial weights.

    Raises
    ------
    ValueError
        If the images are too small to be halved by every convolution.
    """
    depth, height, width = input_shape
    if min(height, width) < 2 ** len(channels):
        raise ValueError(
            f"images of {height} x {width} cannot be halved {len(channels)} times; use fewer channels"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for next_depth in channels:
            layers += [nn.Conv2d(depth, next_depth, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            depth, height, width = next_depth, height // 2, width // 2
        flat = depth * height * width
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(flat, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )


class LanguageModel(nn.Module):
    """A model that predicts each next word: an embedding, LSTM layers and a linear layer.

    Parameters
    ----------
    num_words
        Size of the vocabulary.
    width
        Width of the words' embedding.
    hidden
        Number of units in each recurrent layer.
    num_layers
        Number of recurrent layers.
    dropout
        The share of numbers that is dropped in training, before and after the recurrent
        layers.
    ties_weights
        Score words by their own embedding. Then width and hidden must be equal.
    """

    def __init__(
        self,
        num_words: int,
        *,
        width: int,
        hidden: int,
        num_layers: int = 2,
        dropout: float = 0.0,
        ties_weights: bool = False,
    ) -> None:
        super().__init__()
        if ties_weights and width != hidden:
            raise ValueError(
                f"width is {width} and hidden {hidden}; for tied weights they must be the same"
            )
        self.embedding = nn.Embedding(num_words, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.recurrent = nn.LSTM(width, hidden, num_layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, num_words)
        nn.init.zeros_(self.output.bias)
        if ties_weights:
            self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        """Map words (num_rows, length) to scores of the next ones (num_rows, num_words, length)."""
        hidden, _ = self.recurrent(self.dropout(self.embedding(words)))
        scores: Tensor = self.output(self.dropout(hidden))
        return scores.transpose(1, 2)  # classes second, as for the cross-entropy


def language_model(
    num_words: int,
    *,
    width: int,
    hidden: int,
    num_layers: int = 2,
    dropout: float = 0.0,
    ties_weights: bool = False,
    seed: int,
) -> nn.Module:
    """Make a recurrent language model, which predicts each next word.

    Parameters
    ----------
    num_words, width, hidden, num_layers, dropout, ties_weights
        As for :class:`LanguageModel`.
    seed
        Seeds the initial weights.

    Examples
    --------
    >>> model = language_model(50, width=4, hidden=8, seed=0)
    >>> model(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape  # rows, words, places
    torch.Size([2, 50, 3])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(
            num_words,
            width=width,
            hidden=hidden,
            num_layers=num_layers,
            dropout=dropout,
            ties_weights=ties_weights,
        )
