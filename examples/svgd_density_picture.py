# SPDX-License-Identifier: BSD-3-Clause
"""The picture of the SVGD demo: particles over the density before, during and after."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap

INK = "#1b3a5c"
PAPER_TO_BLUE = LinearSegmentedColormap.from_list("density", ["#ffffff", "#bfd6ea", "#5f93c4"])
PARTICLE = {"s": 11, "color": "#e8743b", "edgecolors": "white", "linewidths": 0.4}


def draw(path: Path, density: np.ndarray, reach: float, panels: dict[str, np.ndarray]) -> None:
    """Write the picture: one panel for each titled cloud of particles [count, 2].

    `density` is a square grid of values, rows along the second coordinate, over [-reach, reach].
    """
    figure, row = plt.subplots(1, len(panels), figsize=(12, 4.4), layout="constrained")
    for axes, (title, particles) in zip(row, panels.items(), strict=True):
        axes.imshow(
            density,
            cmap=PAPER_TO_BLUE,
            origin="lower",
            extent=(-reach, reach, -reach, reach),
            interpolation="bilinear",
        )
        axes.scatter(*particles.T, **PARTICLE)
        axes.set(xticks=[], yticks=[], xlim=(-reach, reach), ylim=(-reach, reach))
        axes.spines[:].set_color("0.85")
        axes.set_title(title, loc="left", color=INK)
    figure.savefig(path, dpi=150)
    plt.close(figure)
