"""Chunks of clients that fit into memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedbranch.training.client import EVALUATION_BATCH_SIZE
from fedbranch.training.local_training import LocalTraining

__all__ = ["CPU_CHUNK_BYTES", "Chunking", "example_bytes", "gpu_memory_share", "in_turn"]

Result = TypeVar("Result")

# What a chunk of clients may take in memory. The larger, the less overhead per client.
CPU_CHUNK_BYTES = 2**29
GPU_MEMORY_SHARE = 0.2
# Clients in one chunk have at least this share of the largest client's steps. After their own
# last step they only wait.
LEAST_STEPS_SHARE = 0.75


class Chunking:
    """Cuts clients into chunks of similar length that fit into memory.

    Parameters
    ----------
    training
        How they train.
    num_params
        Of one model.
    example_bytes
        What one example takes, from :func:`example_bytes`.
    chunk_bytes
        What a chunk may take.
    """

    def __init__(
        self, training: LocalTraining, num_params: int, example_bytes: int, chunk_bytes: float
    ) -> None:
        self._training = training
        self._num_params = num_params
        self._example_bytes = example_bytes
        self._chunk_bytes = chunk_bytes

    def for_training(
        self, sizes: Mapping[str, int], *, on_halves: bool = False
    ) -> Iterator[list[str]]:
        """Cut clients into chunks for training.

        Parameters
        ----------
        sizes
            Client id -> number of examples that each of its models trains on.
        on_halves
            Whether each client trains two models, one on each half.
        """
        if not sizes:
            return iter(())
        training = self._training.on_a_half if on_halves else self._training
        steps_of_size = {size: training.num_steps(size) for size in set(sizes.values())}
        steps = {client_id: steps_of_size[size] for client_id, size in sizes.items()}
        width = training.batch_size + 1
        longest, most_steps = max(sizes.values()), max(steps.values())
        num_passes = training.epochs or -(
            -most_steps // training.batches_per_pass(min(sizes.values()))
        )
        # Parameters, gradients, optimiser state, results; activations; the order of examples.
        per_model = 4 * 6 * self._num_params
        per_model += min(width, longest) * self._example_bytes
        per_model += 8 * (num_passes * longest + most_steps * width)
        return self._chunks(steps, (2 if on_halves else 1) * per_model)

    def for_measuring(
        self, sizes: Mapping[str, int], *, models_per_client: int = 1
    ) -> Iterator[list[str]]:
        """Cut clients into chunks for measuring.

        Parameters
        ----------
        sizes
            Client id -> the largest number of examples that any of its models is measured on.
        models_per_client
            The largest number of models of any client.
        """
        longest = max(sizes.values(), default=1)
        per_model = 4 * 2 * self._num_params
        per_model += min(EVALUATION_BATCH_SIZE, longest) * self._example_bytes
        return self._chunks(sizes, models_per_client * per_model)

    def _chunks(self, length: Mapping[str, int], bytes_per_client: int) -> Iterator[list[str]]:
        largest = max(1, int(self._chunk_bytes / bytes_per_client))
        ordered = sorted(length, key=lambda client_id: -length[client_id])  # stable
        chunk: list[str] = []
        for client_id in ordered:
            is_short = chunk and length[client_id] < LEAST_STEPS_SHARE * length[chunk[0]]
            if len(chunk) == largest or is_short:
                yield chunk
                chunk = []
            chunk.append(client_id)
        if chunk:
            yield chunk


def in_turn(
    chunks: Iterable[list[str]],
    work: Callable[[list[str]], Result],
    free_memory: Callable[[], None],
) -> Iterator[tuple[list[str], Result]]:
    """Work through chunks; if memory does not suffice for a chunk, halve it and try again.

    Parameters
    ----------
    chunks
        Chunks of client ids.
    work
        Does the work for a chunk; raises ``torch.OutOfMemoryError`` if it is too large.
    free_memory
        Called before a smaller chunk is tried.

    Yields
    ------
    tuple
        Each chunk as it was done, and the result of the work.

    Raises
    ------
    torch.OutOfMemoryError
        If memory does not suffice for a single client.
    """
    waiting = list(chunks)[::-1]
    while waiting:
        chunk = waiting.pop()
        try:
            result = work(chunk)
        except torch.OutOfMemoryError:
            if len(chunk) == 1:
                raise
            free_memory()
            half = len(chunk) // 2
            waiting += [chunk[half:], chunk[:half]]
            continue
        yield chunk, result


def gpu_memory_share(device: torch.device) -> float:
    """Return what a chunk may take on a GPU, in bytes."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return GPU_MEMORY_SHARE * total


def example_bytes(model: nn.Module, training: LocalTraining, x: Tensor, y: Tensor) -> int:
    """Measure what one example takes while a model trains on it, in bytes.

    Parameters
    ----------
    model, training
        The model, which is left in training mode, and its loss.
    x, y
        Some examples.

    Returns
    -------
    int
        Three times what autograd keeps of one example for the gradient, and its inputs.
    """
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = max(tensor.nbytes, seen.get(tensor.data_ptr(), 0))
        return tensor

    model.train()
    devices = [x.device] if x.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        training.loss(model(x.clone()), y)
    own = {param.data_ptr() for param in model.parameters()}
    kept = sum(size for pointer, size in seen.items() if pointer not in own)
    return max(1, 3 * kept // len(x) + x.element_size() * x[0].numel())
