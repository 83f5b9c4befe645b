"""Draw the README's figure, the tree above the curves, from a demo run: python demo.py [RUN].

Without a run folder the demo is run first. The parts are those of ``fedbranch plot``.
"""

import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib.image import imread, imsave

from fedbranch import RunFolder
from fedbranch.cli.experiment import Experiment
from fedbranch.report.facts.facts import read_facts
from fedbranch.report.figures import save_figure


def draw(run: RunFolder, target: Path) -> None:
    """Draw one part below the other; they are equally wide."""
    facts = read_facts([run])
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / "tree.png", Path(folder) / "training.png"]
        save_figure(facts, parts[0], "tree")
        save_figure(facts, parts[1], "training")
        imsave(target, np.vstack([imread(part) for part in parts]), metadata={"Software": None})


if __name__ == "__main__":
    target = Path(__file__).with_suffix(".png")
    if len(sys.argv) > 1:
        draw(RunFolder(sys.argv[1]), target)
    else:
        with tempfile.TemporaryDirectory() as folder:
            draw(Experiment.preset("demo").run(Path(folder) / "demo"), target)
    print(target)
