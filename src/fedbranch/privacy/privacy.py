"""The privacy settings of a federation: what its members do to their replies."""

from __future__ import annotations

import operator
from dataclasses import KW_ONLY, dataclass
from typing import get_args

from fedbranch.core.projection import SMALLEST_SIZE
from fedbranch.privacy.noise import Noise
from fedbranch.privacy.secret import Secret
from fedbranch.privacy.sketch import Sketch
from fedbranch.privacy.transforms import Kind, Transform

__all__ = ["Privacy"]


@dataclass(frozen=True)
class Privacy:
    """What clients do to their replies before they send them.

    In this order: noise, the transform, the sketch.

    Attributes
    ----------
    secret
        What the members share and the server does not know.
    transform
        How parameters are hidden. None: they are sent as they are.
    sketch
        The number of coordinates of a hidden update that the server compares, instead of all.
        The update itself is then only averaged. While a cluster waits for more replies or
        losses, the server still has to keep it. Needs the rotation, after which any coordinates
        are a random sample of the update.
    noise
        Differential privacy for each client; by default none.

    Examples
    --------
    >>> Privacy(Secret(bytes(32), "demo"))
    Privacy(secret=<Secret of run 'demo', epoch 1: 59b03ffd>, transform='rotation', sketch=None, noise=None)
    """

    secret: Secret
    _: KW_ONLY
    transform: Kind | None = "rotation"
    sketch: int | None = None
    noise: Noise | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.secret, Secret):
            raise TypeError(
                f"secret is a {type(self.secret).__name__}; pass a Secret, such as "
                "Secret.new('name of the run')"
            )
        kinds = (*get_args(Kind), None)
        if self.transform not in kinds:
            raise ValueError(f"transform is {self.transform!r}; it must be one of {kinds}")
        if self.sketch is not None:
            object.__setattr__(self, "sketch", _checked_size(self.sketch))
            if self.transform != "rotation":
                raise ValueError(
                    f"sketch is {self.sketch} with transform {self.transform!r}; some numbers stand "
                    "for all of them after a rotation only: transform='rotation'"
                )
        if not isinstance(self.noise, Noise | None):
            raise TypeError(f"noise is {self.noise!r}; pass Noise(clip=..., multiplier=...)")

    def transform_of(
        self, *, num_params: int, num_buffers: int = 0, num_counters: int = 0
    ) -> Transform | None:
        """Return the transform for a model of this size; None if nothing is hidden."""
        if self.transform is None:
            return None
        return Transform.of(
            self.secret,
            self.transform,
            num_params=num_params,
            num_buffers=num_buffers,
            num_counters=num_counters,
        )

    def sketch_of(self, num_hidden: int) -> Sketch | None:
        """Return the sketch for hidden updates of this length; None if all numbers are compared."""
        if self.sketch is None:
            return None
        if self.sketch > num_hidden:
            fewer = "take fewer of them, or " if num_hidden > SMALLEST_SIZE else "take "
            raise ValueError(
                f"sketch is {self.sketch}, but a hidden update of this model has only {num_hidden} "
                f"numbers; {fewer}sketch=None to compare all"
            )
        return Sketch(num_hidden, self.sketch)

    def describe(self) -> dict[str, object]:
        """Describe the settings as JSON values, with the secret's fingerprint for the secret.

        Descriptions are equal if the settings are.

        Examples
        --------
        >>> Privacy(Secret(bytes(32), "demo")).describe()["secret"]
        '59b03ffd'
        """
        noise = self.noise
        return {
            "run": self.secret.run,
            "epoch": self.secret.epoch,
            "secret": self.secret.fingerprint,
            "transform": self.transform,
            "sketch": self.sketch,
            "noise": None
            if noise is None
            else {"clip": noise.clip, "multiplier": noise.multiplier},
        }


def _checked_size(size: object) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        checked = operator.index(size)  # type: ignore[arg-type]  # raises TypeError if it is no whole number
    except TypeError:
        raise TypeError(
            f"sketch is {size!r}; it must be a whole number, such as 1000, or None"
        ) from None
    if checked < SMALLEST_SIZE:
        raise ValueError(
            f"sketch is {checked}; it must be at least {SMALLEST_SIZE}, or no cosine can be told "
            "from another; 1000 is often enough"
        )
    return checked
