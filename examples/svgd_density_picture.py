# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of the SVGD demo: particles over the density, in three panels and moving."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import PillowWriter
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap

INK = "#1b3a5c"
PAPER_TO_BLUE = LinearSegmentedColormap.from_list("density", ["#ffffff", "#bfd6ea", "#5f93c4"])
PARTICLE = {"s": 11, "color": "#e8743b", "edgecolors": "white", "linewidths": 0.4}


FRAMES_PER_SECOND, LAST_FRAMES = 16, 32  # the last frame stays for two seconds
TRAIL = 4  # frames


def draw_density(axes: Axes, density: np.ndarray, reach: float) -> None:
    """The density in blue, without ticks.

    `density` is a square grid of values, rows along the second coordinate, over [-reach, reach].
    """
    extent = (-reach, reach, -reach, reach)
    axes.imshow(
        density, cmap=PAPER_TO_BLUE, origin="lower", extent=extent, interpolation="bilinear"
    )
    axes.set(xticks=[], yticks=[], xlim=(-reach, reach), ylim=(-reach, reach))
    axes.spines[:].set_color("0.85")


def draw(path: Path, density: np.ndarray, reach: float, panels: dict[str, np.ndarray]) -> None:
    """Write the picture: one panel for each titled cloud of particles [count, 2]."""
    figure, row = plt.subplots(1, len(panels), figsize=(12, 4.4), layout="constrained")
    for axes, (title, particles) in zip(row, panels.items(), strict=True):
        draw_density(axes, density, reach)
        axes.scatter(*particles.T, **PARTICLE)
        axes.set_title(title, loc="left", color=INK)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def animate(path: Path, density: np.ndarray, reach: float, frames: dict[int, np.ndarray]) -> None:
    """Write a GIF of the particles [count, 2] by step, each with a trail of where it came from."""
    # Fixed places: a layout computed anew for every frame would shake.
    figure = plt.figure(figsize=(3.9, 4.2))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.89))
    draw_density(axes, density, reach)
    # Above the density, below the particles.
    trails = LineCollection([], color=PARTICLE["color"], alpha=0.15, linewidth=0.8, zorder=0.5)
    axes.add_collection(trails)
    dots = axes.scatter([], [], **PARTICLE)
    title = axes.set_title(" ", loc="left", color=INK)
    clouds = list(frames.values())
    writer = PillowWriter(FRAMES_PER_SECOND)
    with writer.saving(figure, path, dpi=100):
        for frame, step in enumerate(frames):
            trails.set_segments(np.stack(clouds[max(0, frame - TRAIL) : frame + 1], axis=1))
            dots.set_offsets(clouds[frame])
            title.set_text(f"Step {step}")
            writer.grab_frame()
        for _ in range(LAST_FRAMES):
            writer.grab_frame()
    plt.close(figure)
