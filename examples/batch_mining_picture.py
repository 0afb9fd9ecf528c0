# SPDX-License-Identifier: BSD-3-Clause
"""The picture of the batch mining demo: the embedding of each run side by side."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from metric_learning_picture import INK, draw_embedding


def draw(
    path: Path, images: np.ndarray, labels: np.ndarray, embeddings: dict[str, np.ndarray]
) -> None:
    """Write the picture: titled embeddings [count, 2], two in a row."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 12), layout="constrained")
    for axes, (title, points) in zip(panels.flat, embeddings.items(), strict=True):
        draw_embedding(axes, points, images, labels)
        axes.set_title(title, loc="left", color=INK)
    figure.savefig(path, dpi=110)
    plt.close(figure)
