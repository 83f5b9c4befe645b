"""Values that claim to be arrays, numbers, metrics or ids, and are none."""

import itertools
from collections.abc import Mapping
from fractions import Fraction


class Trap:
    """Something that calls itself an array and is none."""

    def __array__(self, *args, **kwargs):
        raise KeyError("trap")


class Silent(Exception):
    """An error that cannot even be shown."""

    def __repr__(self):
        raise KeyError("silence")


class Unshowable:
    """Calls itself an array, and fails with an error that cannot be shown."""

    def __array__(self, *args, **kwargs):
        raise Silent


class Liar(Fraction):
    """Calls itself a number and has no value."""

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
    """An id that cannot even be shown."""

    def __str__(self):
        raise RuntimeError("no name")

    __repr__ = __str__
