"""What hostile clients send, and how they lie.

An attack alters what its clients send, or the data that they train on, or both. Those who send
something else know more than any real attacker would: every honest update of the same round, as
it is sent (the papers' setting of full knowledge). ``before_send`` is called client after client
in the order of their ids, so attackers get ids that come last.

Asked for half updates, an attacker does to either half what it would do to an update: what it
says of its noise fits what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

import fedbranch as fb
from fedbranch.training.seeds import stream_seed

Vector = NDArray[np.float32]

TRIGGER_LABEL = 0
TRIGGERED_SHARE = 0.5  # of an attacker's rows


@dataclass(frozen=True, eq=False)
class View:
    """What an attacker knows when it makes up an update.

    Attributes
    ----------
    own
        The update that it would send if it were honest.
    honest
        Shape (num_honest, dim): what the honest clients sent that train at the same parameters.
    num_attackers
        How many of its kind do, itself included.
    rng
        Anew for every client, round and half.
    secret_rng
        The same for all attackers and rounds.
    """

    own: Vector
    honest: NDArray[np.float64]
    num_attackers: int
    rng: np.random.Generator
    secret_rng: np.random.Generator

    @property
    def num_clients(self) -> int:
        """All who train at the same parameters."""
        return len(self.honest) + self.num_attackers


Craft = Callable[[View], NDArray[np.floating]]


@dataclass(frozen=True)
class Attack:
    """An attack.

    Attributes
    ----------
    title
        For people.
    craft
        Makes up what to send; None to send what was learned.
    on_data
        What to do to the attackers' data first; None to leave them as they are.
    needs_honest
        Whether it makes no sense without honest updates at the same parameters; an attacker
        that is alone then sends what it learned.
    """

    title: str
    craft: Craft | None = None
    on_data: Callable[[fb.ClientData], fb.ClientData] | None = None
    needs_honest: bool = False


# What to send


def opposite(view: View) -> NDArray[np.floating]:
    """Send the opposite of the own update."""
    return -view.own


def gaussian(factor: float) -> Craft:
    """Send noise, new every time, so many times as long as the own update."""

    def craft(view: View) -> NDArray[np.floating]:
        return factor * _as_long_as(view.own, view.rng.normal(size=len(view.own)))

    return craft


def common_direction(view: View) -> NDArray[np.floating]:
    """Send the attackers' secret direction, the same in all rounds, as long as the own update."""
    return _as_long_as(view.own, view.secret_rng.normal(size=len(view.own)))


def times(factor: float) -> Craft:
    """Send a multiple of the own update."""

    def craft(view: View) -> NDArray[np.floating]:
        return factor * view.own

    return craft


def a_little_is_enough(view: View) -> NDArray[np.floating]:
    """Shift the honest mean by as many standard deviations as stay unseen (Baruch et al., 2019).

    ``mean - z * std`` for each coordinate, with z such that the attackers and the honest clients
    still farther out are a majority. With few attackers z is 0.
    """
    return view.honest.mean(axis=0) - largest_shift(
        view.num_clients, view.num_attackers
    ) * view.honest.std(axis=0)


def largest_shift(num_clients: int, num_attackers: int) -> float:
    """Give the z of a little is enough: Φ(z) = (n - m - s) / (n - m), s = ⌊n/2 + 1⌋ - m.

    Where the attackers are a majority by themselves one supporter, s = 1, is assumed.
    """
    num_honest = num_clients - num_attackers
    num_supporters = max(1, math.floor(num_clients / 2 + 1) - num_attackers)
    share = (num_honest - num_supporters) / num_honest
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


def inner_product_manipulation(scale: float) -> Craft:
    """Send the opposite of the honest mean, scaled (Xie et al., 2020)."""

    def craft(view: View) -> NDArray[np.floating]:
        return -scale * view.honest.mean(axis=0)

    return craft


def min_max(view: View) -> NDArray[np.floating]:
    """Go from the honest mean towards its opposite, yet not far (Shejwalkar & Houmansadr, 2021).

    As far as no honest update is farther away than the two honest ones farthest apart.
    """
    mean = view.honest.mean(axis=0)
    length = np.linalg.norm(mean)
    if length == 0:
        return mean
    towards = -mean / length
    gram = view.honest @ view.honest.T
    squares = np.diag(gram)
    diameter = max(0.0, float((squares[:, None] + squares[None, :] - 2 * gram).max()))
    offsets = mean - view.honest
    along = offsets @ towards
    # |offset + step * towards|**2 <= diameter: the larger root, of the client that is nearest.
    rest = np.maximum(0.0, along**2 - (offsets**2).sum(axis=1) + diameter)
    return mean + float((np.sqrt(rest) - along).min()) * towards


def model_replacement(view: View) -> NDArray[np.floating]:
    """Scale the own update so that the attackers' mean replaces the model (Bagdasaryan, 2020)."""
    return view.num_clients / view.num_attackers * view.own


def mimic(view: View) -> NDArray[np.floating]:
    """Copy an honest client's update: always the same client's, while it is here.

    Nobody sees that (Karimireddy et al., 2022): its victim's data count for more than others'.
    """
    return view.honest[0]


# What to train on


def with_flipped_labels(client: fb.ClientData) -> fb.ClientData:
    """Replace every label y by 9 - y, also where it measures."""

    def flipped(examples: fb.data.Examples | None) -> tuple[NDArray, NDArray] | None:
        return None if examples is None else (examples.x, 9 - examples.y)

    return _with_parts(client, flipped)


def with_backdoor(client: fb.ClientData) -> fb.ClientData:
    """Put the trigger on the first half of the rows, with the label that the attackers want."""

    def poisoned(examples: fb.data.Examples | None) -> tuple[NDArray, NDArray] | None:
        if examples is None:
            return None
        num_triggered = math.ceil(TRIGGERED_SHARE * len(examples.y))
        x, y = examples.x.copy(), examples.y.copy()
        x[:num_triggered] = triggered(x[:num_triggered])
        y[:num_triggered] = TRIGGER_LABEL
        return x, y

    return _with_parts(client, poisoned)


def triggered(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Brighten a corner of two by two pixels."""
    marked = images.copy()
    marked[..., -2:, -2:] = 1
    return marked


def _with_parts(
    client: fb.ClientData,
    change: Callable[[fb.data.Examples | None], tuple[NDArray, NDArray] | None],
) -> fb.ClientData:
    return fb.ClientData(
        change(client.train),
        change(client.test),
        validation=change(client.validation),
        group=client.group,
    )


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

    Parameters
    ----------
    attack
        What they do.
    attacker_ids
        Who they are. All of them must come after all honest clients in the order of ids.
    seed
        Their randomness follows from it.
    """

    def __init__(self, attack: Attack, attacker_ids: Collection[str], *, seed: int) -> None:
        self.attack = attack
        self.attacker_ids = frozenset(attacker_ids)
        self.seed = seed
        self._round = 0
        self._honest: dict[str, fb.Update] = {}  # of this round, by client id
        self._bases: dict[str, str | None] = {}  # where attackers trained last, by client id
        self._victims: list[str] = []  # honest ids, in the order in which they were first seen

    def __call__(self, client_id: str, this_round: int, update: fb.Update) -> fb.Update:
        """Give what a client sends."""
        if this_round != self._round:
            self._round, self._honest = this_round, {}
        if client_id not in self.attacker_ids:
            if client_id > min(self.attacker_ids, default=client_id):
                raise ValueError(
                    f"honest client {client_id!r} comes after an attacker; give attackers ids that "
                    "come last, so that they know what the honest ones send"
                )
            self._honest[client_id] = update
            if client_id not in self._victims:
                self._victims.append(client_id)
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

    def _num_attackers_with(self, client_id: str, base: str | None) -> int:
        """Count the attackers at the same parameters, as far as can be known.

        Those who come later in this round are taken to be where their mates of the round
        before are.
        """
        before = self._bases.get(client_id)
        mates = {i for i in self.attacker_ids if self._bases.get(i) == before}
        self._bases[client_id] = base
        mates |= {i for i, own in self._bases.items() if own == base}
        return len(mates)

    def _rng(self, *names: str) -> np.random.Generator:
        return np.random.default_rng(stream_seed(self.seed, "attack", *names))


def _halves(update: fb.Update, num: int) -> list[NDArray[np.floating]]:
    """Give an update, or the two of its halves; who has no halves has the same in both."""
    if num == 1:
        return [update.vector]
    if update.half_difference is None:
        return [update.vector, update.vector]
    return [update.vector + update.half_difference, update.vector - update.half_difference]


def _as_long_as(own: Vector, direction: NDArray[np.floating]) -> NDArray[np.floating]:
    return direction * (np.linalg.norm(own) / np.linalg.norm(direction))


# Lies


@dataclass(frozen=True, kw_only=True)
class Deceived(fb.AutoRule):
    """The default rule, when some clients lie about the losses that it asks them for.

    Before a split they exchange the loss after a step together and the one after a step of
    their group. After it they say that the mean of all models is as good for them as the best
    is, and every leaf as bad as the worst.
    """

    liars: frozenset[str] = frozenset()

    def examine(self, evidence: fb.Evidence) -> fb.Decision:
        """Decide on what the clients say."""
        said = {
            client_id: exchanged(losses) if client_id in self.liars else losses
            for client_id, losses in evidence.losses.items()
        }
        return super().examine(replace(evidence, losses=said))

    def review(self, review: fb.Review) -> fb.Decision:
        """Look at a split again, by what the clients say."""
        said = {
            client_id: for_a_merge(losses) if client_id in self.liars else losses
            for client_id, losses in review.losses.items()
        }
        return super().review(replace(review, losses=said))


def exchanged(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Say of either what is true of the other: a step together, and one in the own group."""
    return tuple(losses[place ^ 1] for place in range(len(losses)))  # they come in pairs


def for_a_merge(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Speak for the mean of all models, which comes first, and against every leaf."""
    return (min(losses), *[max(losses)] * (len(losses) - 1))
