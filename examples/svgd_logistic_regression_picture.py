# SPDX-License-Identifier: BSD-3-Clause
"""The picture of the logistic regression demo: predictions with their spread, and weights."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

INK = "#1b3a5c"
CLASSES = {0: ("malignant", "#e8743b"), 1: ("benign", "#5f93c4")}
WEIGHTS_SHOWN = 10


def draw_predictions(
    axes: Axes, labels: np.ndarray, probabilities: np.ndarray, interval: np.ndarray
) -> None:
    """The rows in the order of their probability, in the colour of their class."""
    order = probabilities.argsort(kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    for label, (name, colour) in CLASSES.items():
        rows = labels == label
        axes.vlines(rank[rows], *interval[:, rows], color=colour, alpha=0.35, linewidth=1)
        axes.plot(rank[rows], probabilities[rows], ".", color=colour, markersize=4.5, label=name)
    axes.axhline(0.5, color="0.85", linewidth=1, zorder=0)
    axes.set(xlabel="held-out tumours, in order", ylabel="probability of benign")
    axes.margins(x=0.02)
    axes.legend(frameon=False, markerscale=2.5, loc="center left")
    axes.set_title("Mean of the particles, and where 90% of them are", loc="left", color=INK)


def draw_weights(axes: Axes, weights: dict[str, np.ndarray]) -> None:
    """Mean and deviation over the particles of the weights with the largest means."""
    largest = sorted(weights, key=lambda name: -abs(weights[name].mean()))[:WEIGHTS_SHOWN]
    for row, name in enumerate(reversed(largest)):
        mean, deviation = weights[name].mean(), weights[name].std()
        axes.errorbar(mean, row, xerr=deviation, fmt="o", color=INK, elinewidth=1.2, markersize=5)
    axes.axvline(0, color="0.85", linewidth=1, zorder=0)
    axes.set_yticks(range(len(largest)), reversed(largest))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("weight, ± one deviation of the particles")
    axes.set_title(f"The {len(largest)} largest weights", loc="left", color=INK)


def draw(
    path: Path,
    labels: np.ndarray,
    probabilities: np.ndarray,
    interval: np.ndarray,
    weights: dict[str, np.ndarray],
) -> None:
    """Write the picture.

    Args:
        path: of the PNG file.
        labels: [rows], 0 or 1.
        probabilities: [rows], of label 1, where the row was held out.
        interval: [2, rows], between which the particles' probabilities are.
        weights: [particles] by the name of the feature.
    """
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.8), width_ratios=(1.5, 1), layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    draw_predictions(left, labels, probabilities, interval)
    draw_weights(right, weights)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
