# SPDX-License-Identifier: BSD-3-Clause
"""The picture of the distributed example: each process's particles over the exact posterior."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

INK = "#1b3a5c"
COLOURS = ("#e8743b", "#5f93c4", "#f6c667", "#7a9e7e", "#a4679c", "#1b3a5c", "#9c755f", "#b0b0b0")
LINES = {0.5: "--", 0.9: "-"}  # by the share of the posterior inside


def draw_ellipses(axes: Axes, mean: np.ndarray, covariance: np.ndarray) -> None:
    """Contours that hold shares of a normal density in two dimensions."""
    angle = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    for share, line in LINES.items():
        # A squared radius is exponentially distributed, with mean 2.
        radius = np.sqrt(-2 * np.log(1 - share))
        outline = mean[:, None] + radius * np.linalg.cholesky(covariance) @ circle
        label = f"{share:.0%} of the posterior"
        axes.plot(*outline, line, color=INK, linewidth=1.2, zorder=3, label=label)


def draw(
    path: Path,
    panels: dict[str, list[np.ndarray]],
    mean: np.ndarray,
    covariance: np.ndarray,
    pair: list[int],
) -> None:
    """Write the picture.

    Args:
        path: of the PNG file.
        panels: by their titles, the particles [count, dim] of every process.
        mean: [dim], of the exact posterior.
        covariance: [dim, dim], of the exact posterior.
        pair: the two dimensions to show.
    """
    figure, row = plt.subplots(1, len(panels), figsize=(12, 5.8), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    for axes, (title, parts) in zip(row, panels.items(), strict=True):
        draw_ellipses(axes, mean[pair], covariance[np.ix_(pair, pair)])
        for rank, part in enumerate(parts):
            axes.scatter(
                *part[:, pair].T, s=18, color=COLOURS[rank % len(COLOURS)], edgecolors="white",
                linewidths=0.4, label=f"process {rank}",
            )  # fmt: skip
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_xlabel(f"weight {pair[0]}")
        axes.set_title(title, loc="left", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel(f"weight {pair[1]}")
    figure.legend(
        *row[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
