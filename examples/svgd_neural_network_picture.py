# SPDX-License-Identifier: BSD-3-Clause
"""The picture of the neural network example: scores beside the published, and predictions."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

INK, GREY, ORANGE, PALE = "#1b3a5c", "0.6", "#e8743b", "#bfd6ea"
COLOURS = {"SVGD, fused_ops": ORANGE, "linear regression": GREY}


def draw_scores(axes: Axes, column: int, scores: dict, summaries: dict, title: str) -> None:
    """A row for each method: its mean and standard error, and dots for the splits if ours."""
    for row, (name, summary) in enumerate(reversed(summaries.items())):
        mean, error = summary[column]
        colour = COLOURS.get(name, INK)
        for value in (split[column] for split in scores.get(name, ())):
            axes.plot(value, row, "o", color=colour, alpha=0.35, markersize=5, markeredgewidth=0)
        style = {"color": colour, "capsize": 4, "markeredgecolor": "white", "markersize": 9}
        axes.errorbar(mean, row, xerr=error, fmt="D", zorder=3, **style)
        text = f"{mean:.2f} ± {error:.2f}".replace("-", "\N{MINUS SIGN}")
        place = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": colour}
        axes.annotate(text, (mean, row), (0, 11), **place)
    axes.set_yticks(range(len(summaries)), reversed(summaries))
    axes.set_ylim(-0.5, len(summaries) - 0.3)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", color=INK)


def draw_predictions(
    axes: Axes, means: np.ndarray, variances: np.ndarray, targets: np.ndarray
) -> None:
    """Predicted over true prices, with two deviations of the mixture of the particles."""
    centre = means.mean(0)
    deviation = np.sqrt(variances.mean() + means.var(0))
    axes.axline((0, 0), slope=1, color="0.8", linewidth=1, zorder=0)
    axes.errorbar(
        targets, centre, 2 * deviation, fmt="o", color=ORANGE, ecolor=PALE, elinewidth=1.5,
        markersize=5, markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    axes.set_xlabel("true median price, 1000 dollars")
    axes.set_ylabel("predicted, ± 2 deviations")
    axes.spines[["top", "right"]].set_visible(False)
    inside = np.mean(np.abs(targets - centre) <= 2 * deviation)
    axes.set_title(f"Held-out tracts of one split, {inside:.0%} inside", loc="left", color=INK)


def draw(
    path: Path,
    scores: dict[str, list[tuple[float, float]]],
    summaries: dict[str, tuple],
    means: np.ndarray,
    variances: np.ndarray,
    targets: np.ndarray,
) -> None:
    """Write the picture.

    Args:
        path: of the PNG file.
        scores: (RMSE, log-likelihood) of every split, for the methods run here.
        summaries: for these and the published ones, (mean, standard error) of either.
        means: [particles, rows], what the particles predict for the rows of one split.
        variances: [particles, 1], of their noise.
        targets: [rows], the truth.
    """
    figure = plt.figure(figsize=(12, 6.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))
    top, bottom = left.subplots(2, 1)
    draw_scores(top, 0, scores, summaries, "RMSE, 1000 dollars: dots are splits, lower is better")
    draw_scores(bottom, 1, scores, summaries, "Log-likelihood: higher is better")
    draw_predictions(right.subplots(), means, variances, targets)
    figure.savefig(path, dpi=150)
    plt.close(figure)
