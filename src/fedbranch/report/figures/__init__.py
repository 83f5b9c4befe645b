"""Figures of runs for papers: training, tree, similarities, separation."""

from fedbranch.report.figures.figure import FORMATS, What, draw, save_figure

__all__ = ["FORMATS", "What", "draw", "save_figure"]
