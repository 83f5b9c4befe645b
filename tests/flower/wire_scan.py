"""Looks for plain numbers and keys in bytes that the server has seen."""

from __future__ import annotations

import base64
import re

import numpy as np

RUN = 8  # plain numbers in a row that are no accident


class Overheard:
    """Everything that the server's side has seen, as bytes."""

    def __init__(self):
        self.parts = []

    def add(self, *parts):
        self.parts += parts

    @property
    def bytes(self):
        return b"\0".join(self.parts)

    def holds_key(self, secret):
        seen, key = self.bytes, secret.key
        forms = [key, key.hex().encode(), base64.b64encode(key)[:40], repr(key)[2:-1].encode()]
        return any(form in seen for form in forms)

    def num_plain_runs(self, arrays):
        """Count the places at which 8 numbers of an array stand in a row, in either float type."""
        seen = self.bytes
        return sum(_num_runs(seen, arrays, dtype) for dtype in (np.float32, np.float64))


def numbers_in(text):
    """The numbers in a log that have enough digits to be recognised."""
    return {np.float32(word) for word in re.findall(r"-?\d+\.\d{4,}(?:e-?\d+)?", text)}


def _num_runs(seen, arrays, dtype):
    width = np.dtype(dtype).itemsize
    words = np.dtype(f"u{width}")
    sought = [
        _hashes(np.ascontiguousarray(array, dtype).reshape(-1).view(words))
        for array in arrays
        if array.dtype.kind == "f" and array.size >= RUN
    ]
    zeros = _hashes(np.zeros(RUN, words))
    needles = np.setdiff1d(np.concatenate(sought), zeros)
    total = 0
    for start in range(width):
        num_words = (len(seen) - start) // width
        total += int(np.isin(_hashes(np.frombuffer(seen, words, num_words, start)), needles).sum())
    return total


def _hashes(words):
    """Name every run of words by a number; two different ones share it with chance 2**-60."""
    factors = np.random.default_rng(0).integers(1, 2**63, size=RUN, dtype=np.uint64) | np.uint64(1)
    windows = np.lib.stride_tricks.sliding_window_view(words.astype(np.uint64), RUN)
    mixed = np.zeros(len(windows), np.uint64)
    for column, factor in zip(windows.T, factors, strict=True):
        mixed += (column ^ (column >> np.uint64(17))) * factor
    return mixed
