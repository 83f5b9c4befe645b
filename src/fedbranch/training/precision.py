"""The precision of products: full float32, TF32 on NVIDIA GPUs, or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, TypeAlias

import torch

__all__ = ["Precision", "mixed_precision", "products_in"]

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set whether a GPU may round the factors of products, and restore the settings afterwards."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    settings = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = settings


def mixed_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for a model's forward pass and its loss."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
