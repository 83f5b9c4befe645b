"""Draw the README's figure from a demo run: python docs/figures/demo.py [RUN].

Without a run folder the demo is run first.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fedbranch import RunFolder
from fedbranch.experiment import Experiment

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]  # Okabe and Ito: safe for all eyes


def draw(run: RunFolder, target: Path) -> None:
    """Accuracy of every client over the rounds, and what every examination found."""
    tree, history = run.tree(), run.history()
    rounds = [entry.record.round for entry in history]
    plain = [
        sum(metrics["accuracy"] for metrics in entry.evaluation.values()) / len(entry.evaluation)
        for entry in run.baselines["fedavg"].history()
    ]
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.2), height_ratios=[2, 1], layout="constrained"
    )
    for colour, leaf in zip(COLOURS, tree.leaves, strict=False):
        for number, client_id in enumerate(tree.members(leaf.id)):
            accuracy = [entry.evaluation[client_id]["accuracy"] for entry in history]
            label = f"leaf {leaf.id}: {tree.num_members(leaf.id)} clients" if number == 0 else None
            top.plot(rounds, accuracy, color=colour, linewidth=1, alpha=0.8, label=label)
    top.plot(rounds, plain, ":", color="black", linewidth=2, label="plain federated learning")
    top.set(ylabel="accuracy on held-out data", ylim=(0, 1))
    top.legend(loc="lower right", frameon=False)
    top.set_title("20 clients, 4 groups with swapped labels: one model branches into four")

    examinations = [
        decision
        for entry in history
        for decision in entry.record.decisions
        if "p_structure" in decision.measurements
    ]
    for colour, node in zip(["black", *COLOURS], tree, strict=False):
        own = [decision for decision in examinations if decision.node_id == node.id]
        bottom.plot(
            [decision.round for decision in own],
            [decision.measurements["p_structure"] for decision in own],
            "o-",
            color=colour,
            markersize=4,
            linewidth=0.6,
            label="all clients" if node.id == 0 else None,
        )
    needed = [d.measurements["p_structure_needed"] for d in examinations if d.node_id == 0]
    bottom.axhline(needed[0], color="black", linewidth=0.8, linestyle="--")
    bottom.annotate("needed for 20 clients", (80, needed[0]), ha="right", va="bottom", fontsize=8)
    bottom.set(xlabel="communication round", yscale="log", ylim=(2, 1e-9))
    bottom.set_ylabel("p-value of the\nbest groups found")

    for split in (split for entry in history for split in entry.record.splits):
        for axes in (top, bottom):
            axes.axvline(split.round, color="grey", linewidth=0.8)
        top.annotate(
            f"split\n{' + '.join(str(len(group)) for group in split.groups)}",
            (split.round, 0.02),
            textcoords="offset points",
            xytext=(3, 2),
            fontsize=8,
        )
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    target = Path(__file__).with_suffix(".png")
    if len(sys.argv) > 1:
        draw(RunFolder(sys.argv[1]), target)
    else:
        with tempfile.TemporaryDirectory() as folder:
            draw(Experiment.preset("demo").run(Path(folder) / "demo"), target)
    print(target)
