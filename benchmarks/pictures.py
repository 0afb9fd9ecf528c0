# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of the benchmarks: how many times longer PyTorch takes than the fused kernels."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the backend is chosen

BASELINES = {"eager": "#f4c264", "compile": "#8fb3d9"}
MATRIX = {"matrix_compile": "#9cc99b"}
LABELS = {
    "eager": "PyTorch, eager",
    "compile": "torch.compile of it",
    "matrix_compile": "products of matrices, compiled",
}

# The cases of the short picture: small and large, fast and not faster.
NAMES = {
    ("triplet", "train"): "triplet loss, training step",
    ("triplet", "forward"): "triplet loss, forward",
    ("svgd", "phi"): "SVGD, exact median",
}
TELLING = (
    ("triplet", "train", (1048576, 64), "float32"),
    ("triplet", "train", (32768, 8192), "bfloat16"),
    ("triplet", "train", (8192, 768), "bfloat16"),
    ("triplet", "train", (256, 128), "float32"),
    ("triplet", "forward", (256, 128), "float32"),
    ("triplet", "forward", (32768, 8192), "float32"),
    ("svgd", "phi", (1024, 32), "float32"),
    ("svgd", "phi", (2048, 64), "float32"),
    ("svgd", "phi", (4096, 64), "float32"),
    ("svgd", "phi", (16384, 256), "float32"),
)


def draw_all(device: str, cases: dict, path: Path) -> None:
    """Every case that has both baselines."""
    shown = {
        f"{op} {case} {variant}  {' x '.join(map(str, shape))}  {dtype}": rows
        for (op, case, variant, shape, dtype), rows in cases.items()
        if BASELINES.keys() <= rows.keys()
    }
    _draw(device, shown, BASELINES, 9, path)


def draw_summary(device: str, cases: dict, path: Path) -> None:
    """The telling cases, and none where the device has not all of them."""
    timed = {
        (op, case, shape, dtype): rows
        for (op, case, variant, shape, dtype), rows in cases.items()
        if not variant
    }
    if timed.keys() >= set(TELLING):
        shown = {
            f"{NAMES[op, case]}\n{' x '.join(map(str, shape))} {dtype}": timed[
                op, case, shape, dtype
            ]
            for op, case, shape, dtype in TELLING
        }
        _draw(device, shown, {**BASELINES, **MATRIX}, 6, path)


def _draw(
    device: str, shown: dict[str, dict], baselines: dict[str, str], width: float, path: Path
) -> None:
    figure, axes = plt.subplots(figsize=(width, 0.42 * len(shown) + 1.2), layout="constrained")
    bars = {impl: [] for impl in baselines}  # (place, height, ratio)
    for place, rows in enumerate(shown.values()):
        present = [impl for impl in baselines if impl in rows]
        height = 0.8 / max(len(present), 2)
        for rank, impl in enumerate(present):
            ratio = rows[impl]["time_us"] / rows["fused"]["time_us"]
            bars[impl].append((place + height * (rank + 0.5 - len(present) / 2), height, ratio))
    for impl, color in baselines.items():
        places, heights, ratios = zip(*bars[impl], strict=True)
        drawn = axes.barh(places, ratios, height=heights, color=color, label=LABELS[impl])
        axes.bar_label(drawn, [_text(ratio) for ratio in ratios], padding=3, fontsize=7)
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=0.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_title(f"Time of PyTorch / time of fused_ops, {device}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower right", ncols=len(baselines), fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _text(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"  # 0.95 is not 1.0
