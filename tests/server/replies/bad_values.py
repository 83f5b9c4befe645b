"""Values that claim to be arrays, numbers, metrics or ids, and are none."""

import itertools
from collections.abc import Mapping
from fractions import Fraction


class Trap:
    """A value that claims to be an array and fails when it is read."""

    def __array__(self, *args, **kwargs):
        raise KeyError("trap")


class Silent(Exception):
    """An error that has no representation."""

    def __repr__(self):
        raise KeyError("silence")


class Unshowable:
    """A value that claims to be an array and fails with an error without a representation."""

    def __array__(self, *args, **kwargs):
        raise Silent


class Liar(Fraction):
    """A value that claims to be a number and has no value."""

    def __float__(self):
        raise ZeroDivisionError


class Endless(Mapping):
    """Metrics without end."""

    def __getitem__(self, name):
        return 1.0

    def __iter__(self):
        return map(str, itertools.count())

    def __len__(self):
        return 1


class Nameless:
    """An id that has no representation."""

    def __str__(self):
        raise RuntimeError("no name")

    __repr__ = __str__
