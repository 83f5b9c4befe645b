import pytest
import torch
from torch import nn

import fedbranch as fb
from fedbranch.sim.engines.stacked.chunks import Chunking, example_bytes, in_turn

TRAINING = fb.LocalTraining(epochs=2, batch_size=10)
SIZES = {"a": 20, "b": 40, "c": 38, "d": 4}


def chunks_of(chunk_bytes, **settings):
    chunking = Chunking(TRAINING, num_params=100, example_bytes=50, chunk_bytes=chunk_bytes)
    return list(chunking.for_training(SIZES, **settings))


def test_clients_of_similar_length_train_together_the_longest_first():
    assert chunks_of(10**9) == [["b", "c"], ["a"], ["d"]]


# One model: 2,400 bytes for its numbers, 11 * 50 for a mini-batch, 8 * (2 * 40 + 8 * 11) for the
# order of its examples; in all 4,294.
@pytest.mark.parametrize(
    ("chunk_bytes", "expected"),
    [(2 * 4294, [["b", "c"]]), (2 * 4294 - 1, [["b"], ["c"]]), (1, [["b"], ["c"]])],
)
def test_a_chunk_fits_into_memory_or_is_a_single_client(chunk_bytes, expected):
    assert chunks_of(chunk_bytes)[: len(expected)] == expected


def test_two_models_for_each_client_take_twice_the_memory():
    chunking = Chunking(TRAINING, num_params=100, example_bytes=50, chunk_bytes=8000)
    sizes = dict.fromkeys("abcdef", 10)  # 800 bytes for numbers and 500 for examples

    one, two = (list(chunking.for_measuring(sizes, models_per_client=n)) for n in (1, 2))

    assert one == [list("abcdef")]
    assert two == [list("abc"), list("def")]


def test_without_clients_there_are_no_chunks():
    chunking = Chunking(TRAINING, num_params=100, example_bytes=50, chunk_bytes=1)

    assert list(chunking.for_training({})) == []
    assert list(chunking.for_measuring({})) == []


def test_a_chunk_that_needs_too_much_memory_is_halved_until_it_fits():
    freed = []

    def work(chunk):
        if len(chunk) > 2:
            raise torch.OutOfMemoryError("there is memory for two clients only")
        return len(chunk)

    done = list(in_turn([list("abcde"), list("fg")], work, lambda: freed.append(True)))

    assert done == [(["a", "b"], 2), (["c"], 1), (["d", "e"], 2), (["f", "g"], 2)]
    assert len(freed) == 2


def test_a_single_client_that_needs_too_much_memory_is_an_error():
    def work(chunk):
        raise torch.OutOfMemoryError("there is no memory at all")

    with pytest.raises(torch.OutOfMemoryError, match="no memory at all"):
        list(in_turn([["a"]], work, lambda: None))


def test_an_examples_memory_grows_with_the_activations_of_the_model():
    x, y = torch.randn(6, 6), torch.zeros(6, dtype=torch.long)
    narrow, wide = (
        example_bytes(
            nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)), TRAINING, x, y
        )
        for width in (8, 800)
    )

    # Relu's result, in float32, is kept for its own gradient and for that of the layer after it.
    assert wide - narrow >= 4 * (800 - 8)
