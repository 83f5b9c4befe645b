"""The attacks by name, and the hostile clients of a simulation.

An attack alters what its clients send, or the data that they train on, or both. Asked for half
updates, an attacker treats each half as it would treat an update. So the noise that the halves
show fits the update that it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

import fedbranch as fb
from fedbranch.training.seeds import stream_seed
from studies.attack_matrix.crafted_updates import (
    Craft,
    Numbers,
    View,
    a_little_is_enough,
    common_direction,
    gaussian,
    inner_product_manipulation,
    mimic,
    min_max,
    model_replacement,
    opposite,
    times,
)
from studies.attack_matrix.poisoned_data import with_backdoor, with_flipped_labels

__all__ = ["ATTACKS", "Attack", "Attackers"]


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes
    ----------
    title
        Its name in the table.
    craft
        Makes up the update to send. None: the attacker sends what it learned.
    on_data
        Alters the attackers' data before training. None: they stay as they are.
    needs_honest
        Whether ``craft`` needs honest updates at the same parameters. An attacker without
        them sends what it learned.
    """

    title: str
    craft: Craft | None = None
    on_data: Callable[[fb.ClientData], fb.ClientData] | None = None
    needs_honest: bool = False


ATTACKS: Mapping[str, Attack] = {
    "label-flip": Attack("label flip", on_data=with_flipped_labels),
    "sign-flip": Attack("sign flip", opposite),
    "gaussian": Attack("Gaussian", gaussian(1)),
    "gaussian-10": Attack("Gaussian, ten times as long", gaussian(10)),
    "direction": Attack("common direction", common_direction),
    "times-10": Attack("×10", times(10)),
    "times-100": Attack("×100", times(100)),
    "alie": Attack("ALIE", a_little_is_enough, needs_honest=True),
    "ipm": Attack("IPM, ε = 0.5", inner_product_manipulation(0.5), needs_honest=True),
    "min-max": Attack("MinMax", min_max, needs_honest=True),
    "backdoor": Attack("backdoor, model replacement", model_replacement, with_backdoor),
    "mimic": Attack("mimic", mimic, needs_honest=True),
}


class Attackers:
    """The hostile clients of a simulation, for its ``before_send``.

    The simulator calls ``before_send`` client after client in the order of their ids.

    Parameters
    ----------
    attack
        What the attackers do.
    attacker_ids
        Their ids. All of them must come after all honest ids in sorted order, so that the
        attackers know what the honest clients send.
    seed
        The attackers' randomness follows from it.
    """

    def __init__(self, attack: Attack, attacker_ids: Collection[str], *, seed: int) -> None:
        self.attack = attack
        self.attacker_ids = frozenset(attacker_ids)
        self.seed = seed
        self._round = 0
        self._honest: dict[str, fb.Update] = {}  # of this round, by client id
        self._bases: dict[str, str | None] = {}  # of attackers' latest tasks, by client id
        self._victims: list[str] = []  # honest ids, in the order in which they were first seen

    def __call__(self, client_id: str, this_round: int, update: fb.Update) -> fb.Update:
        """Return what a client sends."""
        if this_round != self._round:
            self._round, self._honest = this_round, {}
        if client_id not in self.attacker_ids:
            self._note_honest(client_id, update)
            return update
        if self.attack.craft is None:
            return update
        here = [
            other
            for i in self._victims
            if (other := self._honest.get(i)) is not None and other.base == update.base
        ]
        num_attackers = self._num_attackers_with(client_id, update.base)
        if self.attack.needs_honest and not here:
            return update
        own_halves = _halves(update, 1 if update.half_difference is None else 2)
        sent = []
        for half, own in enumerate(own_halves):
            honest = [_halves(other, len(own_halves))[half] for other in here]
            view = View(
                own=own,
                honest=np.array(honest, dtype=np.float64).reshape(len(here), len(own)),
                num_attackers=num_attackers,
                rng=self._rng("noise", str(this_round), client_id, str(half)),
                secret_rng=self._rng("secret"),
            )
            sent.append(self.attack.craft(view))
        return replace(
            update,
            vector=np.mean(sent, axis=0).astype(np.float32),
            half_difference=None
            if len(sent) == 1
            else ((sent[0] - sent[1]) / 2).astype(np.float32),
        )

    def _note_honest(self, client_id: str, update: fb.Update) -> None:
        if client_id > min(self.attacker_ids, default=client_id):
            raise ValueError(
                f"honest client {client_id!r} comes after an attacker; give attackers ids that "
                "come last, so that they know what the honest ones send"
            )
        self._honest[client_id] = update
        if client_id not in self._victims:
            self._victims.append(client_id)

    def _num_attackers_with(self, client_id: str, base: str | None) -> int:
        """Count the attackers at the same parameters, as far as they are known.

        Attackers that come later in this round are assumed to train where those train that
        shared their parameters in the round before.
        """
        before = self._bases.get(client_id)
        mates = {i for i in self.attacker_ids if self._bases.get(i) == before}
        self._bases[client_id] = base
        mates |= {i for i, own in self._bases.items() if own == base}
        return len(mates)

    def _rng(self, *names: str) -> np.random.Generator:
        return np.random.default_rng(stream_seed(self.seed, "attack", *names))


def _halves(update: fb.Update, num: int) -> list[Numbers]:
    """Return the update itself (``num`` is 1), or the updates from its two halves.

    An update without halves has itself in both.
    """
    vector = np.asarray(update.vector)
    if num == 1:
        return [vector]
    if update.half_difference is None:
        return [vector, vector]
    half = np.asarray(update.half_difference)
    return [vector + half, vector - half]
