"""Random numbers as a function of the place of their use: (seed, round, client, pass, row).

A number is a hash of its place (SplitMix64, Steele et al. 2014). It is computed for all
clients at once, with whole numbers only. So the order of the clients, the number of clients
that train together, and the device change nothing. A generator with a state would have to be
set up for every client, and drawn from in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["SeededDropout", "permutations", "splitmix64"]

LARGEST_INT64 = 2**63 - 1


def permutations(seeds: Tensor, sizes: Tensor, passes: Sequence[int], width: int) -> Tensor:
    """Shuffle every client's rows, once for each pass over its data.

    Parameters
    ----------
    seeds, sizes
        Shape (num_clients,), int64: each client's seed and number of rows.
    passes
        Numbers of the passes to shuffle for.
    width
        Length of a shuffled row; at least the largest size.

    Returns
    -------
    Tensor
        Shape (num_clients, num_passes, width), int64: each client's rows in a random order.
        After them come the numbers from its size to ``width - 1``, as padding.

    Examples
    --------
    >>> seeds, sizes = torch.tensor([7, 8]), torch.tensor([3, 2])
    >>> permutations(seeds, sizes, passes=range(1), width=3).tolist()
    [[[2, 1, 0]], [[1, 0, 2]]]
    """
    device = seeds.device
    numbers = torch.as_tensor(list(passes), dtype=torch.int64, device=device)
    keys = splitmix64(seeds[:, None], 2 * numbers)[:, :, None]
    rows = torch.arange(width, device=device)
    # Keys have 63 bits, so that the largest int64 sorts padding after a client's rows.
    values = splitmix64(keys, rows) & LARGEST_INT64
    is_row = rows < sizes[:, None, None]
    return torch.where(is_row, values, LARGEST_INT64).argsort(dim=-1, stable=True)


class SeededDropout(TorchFunctionMode):
    """A context in which dropout depends on a seed, not on torch's global generator.

    Parameters
    ----------
    seed
        The client's seed: one number, int64.
    step
        Number of the mini-batch. Each mini-batch drops other numbers.

    Attributes
    ----------
    num_calls
        Number of dropout calls so far that were in training mode and dropped something.
    """

    def __init__(self, seed: Tensor, step: int | Tensor) -> None:
        super().__init__()
        self.num_calls = 0
        self._key = splitmix64(seed, 2 * step + 1)

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
        inplace: bool = False,  # noqa: ARG002  # callers use the result that is returned
    ) -> Tensor:
        if not training or p == 0:
            return input
        self.num_calls += 1
        # Dropout of whole channels draws once for each row and channel.
        shape = input.shape[: input.ndim - num_whole_dims]
        places = torch.arange(shape.numel(), device=input.device).reshape(shape)
        bits = splitmix64(splitmix64(self._key, self.num_calls), places)
        uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32) / 2**24
        keep = (uniform >= p).to(input.dtype)
        keep = keep / (1 - p) if p < 1 else keep
        return input * keep.reshape(shape + (1,) * num_whole_dims)


# Dropout functions, and the number of last dimensions that each of them drops as a whole.
_DROPPED_DIMS: dict[Callable[..., Any], int] = {
    functional.dropout: 0,
    functional.dropout1d: 1,
    functional.dropout2d: 2,
    functional.dropout3d: 3,
}


def splitmix64(key: Tensor, where: int | Tensor) -> Tensor:
    """Return the number at a place of the stream that a key names, all its bits as int64.

    Parameters
    ----------
    key, where
        Shapes that broadcast: the streams' keys, and the places in them, from 0 on.
    """
    # As tensors, because torch's integers wrap around at 64 bits and Python's do not.
    count = torch.full((), where, device=key.device) if isinstance(where, int) else where
    bits = key + (count + 1) * -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch would copy the sign bit of signed numbers."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted
