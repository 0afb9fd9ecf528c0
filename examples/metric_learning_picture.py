# SPDX-License-Identifier: BSD-3-Clause
"""The picture of the metric learning demo: the embedding before and after, and the loss curves."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.offsetbox import AnnotationBbox, OffsetImage

COLOURS = plt.colormaps["tab10"].colors
INK = "#1b3a5c"


def draw_embedding(axes: Axes, points: np.ndarray, images: np.ndarray, labels: np.ndarray) -> None:
    """Every digit as its own image at its point, in the colour of its class."""
    axes.set_aspect("equal", adjustable="datalim")
    axes.update_datalim(points)
    axes.margins(0.06)
    axes.autoscale_view()
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color("0.85")
    for point, image, label in zip(points, images, labels, strict=True):
        thumbnail = np.empty((8, 8, 4))
        thumbnail[..., :3] = COLOURS[label]
        thumbnail[..., 3] = image.reshape(8, 8)  # Paper is transparent, so neighbours show.
        box = OffsetImage(thumbnail, zoom=1.4, interpolation="bilinear")
        axes.add_artist(AnnotationBbox(box, point, frameon=False, pad=0))


def draw_losses(axes: Axes, losses: dict[str, list[float]]) -> None:
    """The curves on top of each other: the first wide and pale, the second thin and dark."""
    styles = ({"color": "#f6c667", "linewidth": 5}, {"color": INK, "linewidth": 0.9})
    for (name, curve), style in zip(losses.items(), styles, strict=True):
        axes.semilogy(curve, label=name, solid_joinstyle="round", **style)
    axes.margins(x=0.01)
    axes.set_xlabel("batch")
    axes.set_title("Triplet margin loss of every batch", loc="left", color=INK)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(losses))


def draw(
    path: Path,
    images: np.ndarray,
    labels: np.ndarray,
    embeddings: dict[str, np.ndarray],
    losses: dict[str, list[float]],
) -> None:
    """Write the picture: titled embeddings [count, 2] side by side, the named losses below."""
    figure = plt.figure(figsize=(12, 9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    top, bottom = figure.subfigures(2, 1, height_ratios=(2.7, 1))
    panels = zip(top.subplots(1, len(embeddings)), embeddings.items(), strict=True)
    for axes, (title, points) in panels:
        draw_embedding(axes, points, images, labels)
        axes.set_title(title, loc="left", color=INK)
    draw_losses(bottom.subplots(), losses)
    figure.savefig(path, dpi=150)
    plt.close(figure)
