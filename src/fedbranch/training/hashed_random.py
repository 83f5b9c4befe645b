"""Random numbers as a function of where they are used: (seed, round, client, pass, row).

A generator with a state would have to be set up for every client and drawn from in turn.
Here a number is a hash of its place (SplitMix64, Steele et al. 2014), computed for all
clients at once, with whole numbers only. So the order of the clients, how many are trained
together, and the device change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["SeededDropout", "permutations"]

_LARGEST = 2**63 - 1


def permutations(seeds: Tensor, sizes: Tensor, passes: Sequence[int], width: int) -> Tensor:
    """Shuffle every client's rows, once for each pass over them.

    Parameters
    ----------
    seeds, sizes
        Shape (num_clients,), int64: each client's seed and number of rows.
    passes
        Which passes.
    width
        At least the largest size.

    Returns
    -------
    Tensor
        Shape (num_clients, num_passes, width): each client's rows in a random order, and
        behind them the numbers from its size on.

    Examples
    --------
    >>> seeds, sizes = torch.tensor([7, 8]), torch.tensor([3, 2])
    >>> permutations(seeds, sizes, passes=range(1), width=3).tolist()
    [[[2, 1, 0]], [[1, 0, 2]]]
    """
    device = seeds.device
    numbers = torch.as_tensor(list(passes), dtype=torch.int64, device=device)
    keys = _derived(seeds[:, None], 2 * numbers)[:, :, None]
    rows = torch.arange(width, device=device)
    # Half of the bits' range, so that what is beyond a client's rows can be sorted behind them.
    values = _derived(keys, rows) & _LARGEST
    is_row = rows < sizes[:, None, None]
    return torch.where(is_row, values, _LARGEST).argsort(dim=-1, stable=True)


class SeededDropout(TorchFunctionMode):
    """Within this context dropout depends on a seed, not on torch's global generator.

    Parameters
    ----------
    seed
        The client's seed: one number, int64.
    step
        Which mini-batch it is; each drops other numbers.
    """

    def __init__(self, seed: Tensor, step: int | Tensor) -> None:
        super().__init__()
        self.num_calls = 0
        self._key = _derived(seed, 2 * step + 1)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        num_whole_dims = _DROPPED_DIMS.get(func)
        if num_whole_dims is None:
            return func(*args, **(kwargs or {}))
        return self._dropout(num_whole_dims, *args, **(kwargs or {}))

    def _dropout(
        self,
        num_whole_dims: int,
        input: Tensor,  # noqa: A002  # torch's name for it
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,  # noqa: ARG002  # the result is what counts
    ) -> Tensor:
        if not training or p == 0:
            return input
        self.num_calls += 1
        # A row and a channel for the dropout of whole channels, all dimensions otherwise.
        shape = input.shape[: input.ndim - num_whole_dims]
        places = torch.arange(shape.numel(), device=input.device).reshape(shape)
        bits = _derived(_derived(self._key, self.num_calls), places)
        uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32) / 2**24
        keep = (uniform >= p).to(input.dtype)
        keep = keep / (1 - p) if p < 1 else keep
        return input * keep.reshape(shape + (1,) * num_whole_dims)


# Dropout functions, and over how many of the last dimensions each drops a whole block.
_DROPPED_DIMS: dict[Callable[..., Any], int] = {
    functional.dropout: 0,
    functional.dropout1d: 1,
    functional.dropout2d: 2,
    functional.dropout3d: 3,
}


def _derived(key: Tensor, where: int | Tensor) -> Tensor:
    """Give the number at a place of the stream that a key names."""
    # Python's numbers do not wrap around where torch's do.
    count = torch.full((), where, device=key.device) if isinstance(where, int) else where
    bits = key + (count + 1) * -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right without copying the sign, which torch does to signed numbers."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted
