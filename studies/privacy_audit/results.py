"""The results of an audit: measured, saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # has no types

from fedbranch.errors import FedbranchError
from studies.privacy_audit.attacks import ATTACKS, Attack
from studies.privacy_audit.measures import Measured
from studies.privacy_audit.scene import Scene, Sizes
from studies.privacy_audit.views import VIEWS, View

__all__ = ["Results", "audit"]

FORMAT = 1


@dataclass(frozen=True)
class Results:
    """What all attacks got under all transforms.

    Attributes
    ----------
    seed, sizes
        The settings of the audit. On one machine the same settings give the same results.
    measured
        By the attack's key and the view, in the order of :data:`ATTACKS`.
    """

    seed: int
    sizes: Sizes
    measured: Mapping[str, Mapping[View, Measured]]

    @property
    def rows(self) -> list[tuple[Attack, Mapping[View, Measured]]]:
        """The measured attacks, each with what it got by view."""
        return [(attack, self.measured[attack.key]) for attack in ATTACKS if attack.key in self]

    def __contains__(self, key: str) -> bool:
        return key in self.measured

    def to_json(self) -> dict[str, Any]:
        """Return all results and the texts of the attacks as JSON values."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "sizes": asdict(self.sizes),
            "attacks": {
                attack.key: {
                    "title": attack.title,
                    "tries": attack.tries,
                    "goal": attack.goal,
                    "knows": attack.knows,
                    "measured": {
                        view: asdict(result) | {"word": result.word}
                        for view, result in by_view.items()
                    },
                }
                for attack, by_view in self.rows
            },
        }

    def save(self, path: str | Path) -> None:
        """Write a JSON file; the same results give the same bytes."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read a file that :meth:`save` has written.

        Raises
        ------
        FedbranchError
            If the file has another format.
        """
        content = json.loads(Path(path).read_text())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FedbranchError(
                f"{path} has no audit results in format {FORMAT}; make it again with "
                f"fedbranch audit --out {path}"
            )
        measured: dict[str, dict[View, Measured]] = {
            key: {
                view: Measured(**{k: v for k, v in result.items() if k != "word"})
                for view, result in attack["measured"].items()
            }
            for key, attack in content["attacks"].items()
        }
        return cls(content["seed"], Sizes(**content["sizes"]), measured)


def audit(
    *,
    seed: int = 0,
    sizes: Sizes | None = None,
    only: Collection[str] | None = None,
    on_attack: Callable[[Attack], None] | None = None,
) -> Results:
    """Run the attacks of an honest-but-curious server on clients with real digits.

    Parameters
    ----------
    seed
        Of all draws: digits, models, secrets.
    sizes
        How much is measured; by default ``Sizes()``, which takes minutes.
    only
        The keys of the attacks to run; by default all of them.
    on_attack
        Is called with each attack before it runs.

    Raises
    ------
    ValueError
        If no attack has one of the keys in ``only``.
    """
    known = [attack.key for attack in ATTACKS]
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        raise ValueError(f"there are no attacks {unknown}; there are {known}")
    scene = Scene(seed, sizes or Sizes())
    measured: dict[str, dict[View, Measured]] = {}
    with _one_thread():
        for attack in ATTACKS:
            if only is None or attack.key in only:
                if on_attack is not None:
                    on_attack(attack)
                measured[attack.key] = {view: attack.attempt(scene, view) for view in VIEWS}
    return Results(seed, scene.sizes, measured)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: sums of several threads depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)
