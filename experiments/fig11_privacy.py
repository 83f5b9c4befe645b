"""What noise and sketches do to the groups.

    python -m experiments.fig11_privacy --data-dir DEST [--quick] [--jobs N]

20 clients in four groups, each of which permutes all labels in its own way, on MNIST. Every
client has 450 training examples, of which it holds 45 out for decisions; an MLP with one
hidden layer of 100 (79,510 parameters); 3 epochs of SGD (learning rate 0.1, batches of 20) in
each of 40 rounds; CFL with the default rule. The quick version runs on the embedded digits,
with a hidden layer of 32 (2,410 parameters), learning rate 0.2, for 25 rounds.

All clients hide what they send by a secret rotation. Beyond that:

- ``none``: nothing.
- ``noise 0.01``, ...: every client clips its update to length 1 and adds normal noise with
  this standard deviation to each number; it sends no losses, so that the rule has nothing but
  half updates to go by. Epsilon is that of the client that sent most, for all its data at
  once, at delta = 1e-5. For comparison, plain federated learning with the same noise.
- ``sketch 64``, ...: the server compares 64 numbers, ... of the hidden updates only; the
  updates themselves are averaged as before.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

import fedbranch as fb
from experiments.figure import (
    COLOURS,
    JSON,
    Claim,
    Experiment,
    How,
    Outcomes,
    main,
    mean_and_spread,
)
from fedbranch.data import digits, label_permutations, mnist
from fedbranch.privacy import Noise, Privacy, Secret
from fedbranch.sim import Run, mlp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"mnist": "MNIST", "digits": "digits"}
NUM_CLIENTS, NUM_GROUPS = 20, 4
CLIP, DELTA = 1.0, 1e-5
MULTIPLIERS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.1, 1.0, 10.0)
QUICK_MULTIPLIERS = (0.01, 0.03, 0.07, 0.1, 1.0, 10.0)
SIZES = (16, 64, 256, 1024)
ENOUGH = 64  # numbers of a sketch with which the groups must be found
LITTLE, MUCH = 0.01, 1.0  # noise with which they must be found, and with which they cannot be
WEAK_PROMISE = 100.0  # an epsilon beyond which a promise says next to nothing
FOUND = 0.9  # less: two groups share a cluster, or a client is in the wrong one


def measure(part: str, seed: int, how: How) -> JSON:
    """Train with one kind of privacy."""
    problem, name = part.split(": ")
    if problem == "digits":
        x, y = digits()
        rounds, learning_rate, hidden, test_fraction = 25, 0.2, 32, 0.2
    else:
        images = mnist("train", how.data_dir)
        rows = np.random.default_rng(seed).permutation(len(images.y))[:11_000]
        x, y = images.x[rows], images.y[rows]
        rounds, learning_rate, hidden, test_fraction = 40, 0.1, 100, 2 / 11
    clients = fb.federate(
        x,
        y,
        num_clients=NUM_CLIENTS,
        groups=label_permutations(NUM_GROUPS, seed=seed),
        test_fraction=test_fraction,
        validation_fraction=0.1,
        seed=seed,
    )
    # Published here, so that the figure can be measured again.
    secret = Secret(bytes(32), run=f"figure 11, seed {seed}")
    privacy = Privacy(secret)
    if name.startswith("noise"):
        privacy = Privacy(secret, noise=Noise(clip=CLIP, multiplier=_number(name)))
    elif name.startswith("sketch"):
        privacy = Privacy(secret, sketch=int(_number(name)))
    first: dict[str, NDArray[np.float32]] = {}  # client id -> its update in the first round

    def note(client_id: str, _this_round: int, update: fb.Update) -> fb.Update:
        first.setdefault(client_id, np.asarray(update.vector))
        return update

    def trained(rule: fb.Rule) -> Run:
        return fb.simulate(
            mlp(x.shape[1:], 10, hidden=[hidden], seed=seed),
            clients,
            rule=rule,
            rounds=rounds,
            training=fb.LocalTraining(optimizer=fb.sgd(learning_rate), epochs=3, batch_size=20),
            seed=seed,
            evaluate_every=rounds,
            device=how.device,
            before_send=note,
            privacy=privacy,
        )

    run = trained(fb.AutoRule())
    measured = {
        "ari": adjusted_rand_score(
            [client.group for client in clients.values()],
            [run.tree.position(client_id) for client_id in clients],
        ),
        "num_clusters": len(run.clusters),
        "split_in_rounds": [s.round for entry in run.history for s in entry.record.splits],
        "accuracy": {"CFL": run.overall_mean["accuracy"]},
    }
    if privacy.sketch is not None:
        plain = np.stack(list(first.values()))
        return measured | _cosine_errors(privacy, plain)
    measured["accuracy"]["FL"] = trained(fb.NeverSplit()).overall_mean["accuracy"]
    if privacy.noise is not None:
        measured["epsilon"] = max(run.epsilons(DELTA).values())
        # The length that all noise in an update has, against the longest clipped update.
        num_params = len(next(iter(first.values())))
        measured["noise_length"] = privacy.noise.multiplier * math.sqrt(num_params)
    return measured


def _number(name: str) -> float:
    """Return the number in the name of a part."""
    return float(name.split()[-1])


def _cosine_errors(privacy: Privacy, plain: NDArray[np.float32]) -> JSON:
    """Compare the cosines of all pairs of updates with those of their sketches."""
    transform = privacy.transform_of(num_params=plain.shape[1])
    assert transform is not None
    sketch = privacy.sketch_of(transform.params.num_hidden)
    assert sketch is not None
    pairs = np.triu_indices(len(plain), 1)
    true = fb.cosine_similarity(plain)[pairs]
    errors = fb.cosine_similarity(sketch.of(transform.params.hide(plain)))[pairs] - true
    stated = [sketch.typical_error(float(cosine)) for cosine in true]
    return {
        "cosine_error": float(np.sqrt(np.mean(errors**2))),
        "stated_error": float(np.sqrt(np.mean(np.square(stated)))),
    }


def _problem(outcomes: Outcomes) -> str:
    return outcomes.parts[0].split(": ")[0]


def _names(outcomes: Outcomes, kind: str) -> list[str]:
    """List the parts of a kind, after the one without, from little to much."""
    names = [part.split(": ")[1] for part in outcomes.parts]
    return ["none", *sorted((n for n in names if n.startswith(kind)), key=_number)]


def _of(outcomes: Outcomes, name: str) -> list[JSON]:
    return outcomes.of(f"{_problem(outcomes)}: {name}")


def _accuracy(outcomes: Outcomes, name: str, method: str = "CFL") -> float:
    return 100 * fmean(measured["accuracy"][method] for measured in _of(outcomes, name))


def _is_found(outcomes: Outcomes, name: str) -> bool:
    """Return whether the groups were found in every run."""
    return all(measured["ari"] >= FOUND for measured in _of(outcomes, name))


def _epsilon(outcomes: Outcomes, name: str) -> float:
    return fmean(measured["epsilon"] for measured in _of(outcomes, name))


def _short(number: float) -> str:
    """Write an epsilon with two digits.

    Examples
    --------
    >>> _short(6.543), _short(671.7), _short(52473.7)
    ('6.5', '670', '52,000')
    """
    return f"{float(f'{number:.2g}'):,.1f}" if number < 10 else f"{float(f'{number:.2g}'):,.0f}"


def draw(outcomes: Outcomes) -> Figure:
    """Draw how well the groups are found, and the accuracy, against noise and sketch size."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10.5, 4.2), layout="constrained", sharey=True, width_ratios=(1.25, 1)
    )
    noises, sketches = _names(outcomes, "noise"), _names(outcomes, "sketch")[1:]
    _draw_curves(left, outcomes, noises, ("CFL", "FL"))
    left.set_xticks(
        range(len(noises)),
        ["none\nε = ∞"] + [f"{_number(n):g}\n{_short(_epsilon(outcomes, n))}" for n in noises[1:]],
        fontsize=8,
    )
    left.set_xlabel("noise in each number, divided by the clip; below it ε at δ = 10⁻⁵")
    left.set_title(f"Differential privacy, {TITLES[_problem(outcomes)]}", fontsize=10)
    left.set_ylabel("adjusted Rand index, accuracy")
    _draw_curves(right, outcomes, [*sketches, "none"], ("CFL",))
    right.set_xticks(
        range(len(sketches) + 1),
        [
            f"{_number(n):.0f}\n{fmean(m['cosine_error'] for m in _of(outcomes, n)):.2f}"
            for n in sketches
        ]
        + ["all\n0"],
        fontsize=8,
    )
    right.set_xlabel("numbers in a sketch; below it the error of cosines, measured")
    right.set_title("Sketches", fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _draw_curves(
    axes: Axes, outcomes: Outcomes, names: list[str], methods: tuple[str, ...]
) -> None:
    curves = [("groups found (adjusted Rand index)", COLOURS[6], "ari", "")]
    curves += [
        (f"accuracy of {method}", COLOURS[0 if method == "CFL" else 1], "accuracy", method)
        for method in methods
    ]
    for label, colour, key, method in curves:
        values = [
            [m[key][method] if method else m[key] for m in _of(outcomes, name)] for name in names
        ]
        axes.plot([fmean(each) for each in values], color=colour, marker="o", ms=4, label=label)
        if len(outcomes.seeds) > 1:
            for place, each in enumerate(values):
                axes.plot([place] * len(each), each, "_", color=colour, ms=9, alpha=0.6)
    axes.set_ylim(-0.06, 1.06)


def claims(outcomes: Outcomes, _quick: bool) -> list[Claim]:
    """Describe what the groups survive, and where the noise hides them."""
    noises, sketches = _names(outcomes, "noise")[1:], _names(outcomes, "sketch")[1:]
    enough = [name for name in sketches if _number(name) >= ENOUGH]
    whole = [m["ari"] for name in ("none", *enough) for m in _of(outcomes, name)]
    alone = [m["ari"] for m in _of(outcomes, "none")]
    cost = max(_accuracy(outcomes, "none") - _accuracy(outcomes, name) for name in enough)
    ratios = [
        m["cosine_error"] / m["stated_error"] for name in sketches for m in _of(outcomes, name)
    ]
    ratio = math.sqrt(fmean(each**2 for each in ratios))
    little = [m for n in noises if _number(n) <= LITTLE for m in _of(outcomes, n)]
    much = [m for n in noises if _number(n) >= MUCH for m in _of(outcomes, n)]
    kept = [m for n in noises for m in _of(outcomes, n) if m["ari"] >= FOUND]
    least = min((m["epsilon"] for m in kept), default=math.inf)
    return [
        Claim(
            f"without noise, and with sketches of {ENOUGH} numbers or more, the groups are found",
            min(whole) >= FOUND,
            f"in {sum(ari >= FOUND for ari in whole)} of {len(whole)} runs, exactly in "
            f"{sum(ari == 1 for ari in whole)}; with neither exactly in "
            f"{sum(ari == 1 for ari in alone)} of {len(alone)}",
        ),
        Claim("such sketches cost less than 1 point of accuracy", cost < 1, f"{cost:.1f} points"),
        Claim(
            "cosines of sketches are off by (1 - cos²) / sqrt(size), but for a factor of 1.3",
            1 / 1.3 < ratio < 1.3,
            f"{ratio:.2f} times as much; {min(ratios):.2f} to {max(ratios):.2f} in single runs",
        ),
        Claim(
            f"with noise of at most {LITTLE:g} of the clip in each number they are found",
            all(m["ari"] >= FOUND for m in little),
            f"in {sum(m['ari'] >= FOUND for m in little)} of {len(little)} runs",
        ),
        Claim(
            f"with noise of {MUCH:g} or more they are lost: adjusted Rand index below 0.1",
            all(m["ari"] < 0.1 for m in much),
            f"at most {max(m['ari'] for m in much):.2f}",
        ),
        Claim(
            f"noise that promises a client something (ε ≤ {WEAK_PROMISE:g}) hides the groups",
            least > WEAK_PROMISE,
            f"the least ε with which they were found is {_short(least)}",
        ),
    ]


def summary(outcomes: Outcomes) -> str:
    """Describe where the groups are lost."""
    noises, sketches = _names(outcomes, "noise"), _names(outcomes, "sketch")[1:]
    found = [name for name in noises if _is_found(outcomes, name)]
    lost = [name for name in noises if name not in found]
    of_sketches = [_number(name) for name in sketches if _is_found(outcomes, name)]
    accuracy = mean_and_spread((m["accuracy"]["CFL"] for m in _of(outcomes, "none")), scale=100)
    return (
        f"{TITLES[_problem(outcomes)]}: CFL {accuracy} % without noise; groups found in every run "
        f"with {_told(outcomes, found[-1:])}, no longer with {_told(outcomes, lost[:1])}; "
        f"with sketches of {min(of_sketches, default=math.inf):.0f} numbers or more"
    )


def _told(outcomes: Outcomes, names: list[str]) -> str:
    if not names or names == ["none"]:
        return "any noise"
    (name,) = names
    return f"{name} (ε {_short(_epsilon(outcomes, name))})"


def _parts(problem: str, multipliers: tuple[float, ...], sizes: tuple[int, ...]) -> tuple[str, ...]:
    names = ["none", *(f"noise {m:g}" for m in multipliers), *(f"sketch {s}" for s in sizes)]
    return tuple(f"{problem}: {name}" for name in names)


EXPERIMENT = Experiment(
    name="fig11_privacy",
    title="Privacy: what noise and sketches do to the groups",
    paper="no experiment",
    measure=measure,
    draw=draw,
    claims=claims,
    summary=summary,
    differs="Not in the paper.",
    parts=_parts("mnist", MULTIPLIERS, SIZES),
    quick_parts=_parts("digits", QUICK_MULTIPLIERS, SIZES),
    data=("mnist",),
    quick_data=(),
)


if __name__ == "__main__":
    main(EXPERIMENT)
