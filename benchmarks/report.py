# SPDX-License-Identifier: BSD-3-Clause
"""Writes docs/benchmarks.md, accuracy.md, distributed.md and the pictures from the rows:

python -m benchmarks.report
"""

import json
import math
from pathlib import Path

import matplotlib

from benchmarks.rows import RESULTS, file_of
from benchmarks.svgd import scaling

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the backend is chosen

DOCS = Path(__file__).parents[1] / "docs"
BASELINES = {"eager": "#f4c264", "compile": "#8fb3d9"}


def read_cases() -> dict[str, dict[tuple, dict[str, dict]]]:
    """device -> (op, case, variant, shape, dtype) -> impl -> row, in the order of the files."""
    devices = {}
    for path in sorted(RESULTS.glob("*.jsonl"), reverse=True):
        for row in map(json.loads, path.read_text().splitlines()):
            device = row["gpu"] or "CPU"
            case = row["op"], row["case"], row["variant"], tuple(row["shape"]), row["dtype"]
            devices.setdefault(device, {}).setdefault(case, {})[row["impl"]] = row
    return devices


def time(row: dict | None) -> str:
    return "" if row is None else f"{row['time_us']:,.1f}"


def ratio(rows: dict[str, dict], impl: str, field: str = "time_us") -> str:
    if impl not in rows or not rows["fused"].get(field):
        return ""
    return f"{rows[impl][field] / rows['fused'][field]:.2f}"


def table(cases: dict[tuple, dict[str, dict]]) -> list[str]:
    """One line a case; a ratio is that of the other to fused, so above 1 fused is faster."""
    lines = [
        "| op | case | shape | dtype | fused us | in a graph | eager us | compile us "
        "| eager / fused | compile / fused | others / fused | wall, eager / fused "
        "| wall, compile / fused | peak memory, compile / fused | launches, fused | eager "
        "| of the bandwidth | rel. error, fused | eager |",
        "|---|---|---|---|" + "---:|" * 15,
    ]
    for (op, case, variant, shape, dtype), rows in cases.items():
        fused, eager = rows["fused"], rows.get("eager")
        others = [impl for impl in rows if impl not in ("fused", *BASELINES)]
        cells = [
            op, f"{case} {variant}".strip(), " x ".join(map(str, shape)), dtype, time(fused),
            f"{fused['graph_us']:,.1f}" if fused["graph_us"] else "",
            time(eager), time(rows.get("compile")), ratio(rows, "eager"), ratio(rows, "compile"),
            ", ".join(f"{impl} {ratio(rows, impl)}" for impl in others),
            ratio(rows, "eager", "wall_us"), ratio(rows, "compile", "wall_us"),
            ratio(rows, "compile", "peak_bytes"), fused["launches"] or "",
            eager["launches"] or "" if eager else "",
            f"{fused['sol']:.2f}" if fused["sol"] else "", f"{fused['rel_err']:.0e}",
            f"{eager['rel_err']:.0e}" if eager else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def is_of_data(case: tuple) -> bool:
    return case[2].startswith("data=")


def is_of_gpus(case: tuple) -> bool:
    return case[2].startswith("gpus=")


def write_benchmarks(devices: dict) -> None:
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks.report` from the rows in `benchmarks/results`, which",
        "`make bench` measures. Times are medians: on a GPU of one call by CUDA events after the",
        "L2 cache was filled by reading other data, on the CPU of the whole Python call. Wall time",
        "is host and device together, calls back to back. Errors are relative to float64. The part",
        "of the bandwidth is that of the inputs read and the gradients written once, at the best",
        "rate at which PyTorch reads three tensors or copies one here.",
        "",
        "`eager` is PyTorch's function, `compile` is torch.compile of it, compiled anew for each",
        "case. `recompute` is `fused` with `set_gradients_in_forward(False)`, `seed` a kernel as a",
        "first attempt has it: a block of 256 threads to a row, no eps, forward only. For SVGD",
        "`eager` forms all differences, `matrix` is the fastest form in PyTorch, products around",
        "the mean, and `matrix_compile` that compiled; `seed` is torch.cdist, torch.median and a",
        "kernel with a block to a particle; `highest` and `medium` are `fused` in that precision.",
    ]
    for device, cases in devices.items():
        versions = next(iter(cases.values()))["fused"]
        cuda = f", CUDA {versions['cuda']}" if versions["cuda"] else ""
        timed = {
            case: rows
            for case, rows in cases.items()
            if not is_of_data(case) and not is_of_gpus(case)
        }
        lines += ["", f"## {device}", "", f"torch {versions['torch']}{cuda}.", "", *table(timed)]
    (DOCS / "benchmarks.md").write_text("\n".join(lines) + "\n")


def write_accuracy(devices: dict) -> None:
    lines = [
        "# Accuracy of SVGD on awkward particles",
        "",
        "Written by `python -m benchmarks.report` from the rows in `benchmarks/results`. The error",
        "of phi, bandwidth included, relative to the norm of the float64 result. `high` is the",
        "default; it and `medium` differ from `highest` on CUDA only. `eager` forms all",
        "differences in PyTorch, `matrix` products around the mean. The time is that of `high`",
        "beside its time on Gaussian particles. `-`: the median is zero, and PyTorch's forms have",
        "no result there.",
    ]
    for device, cases in devices.items():
        shown = {case: rows for case, rows in cases.items() if is_of_data(case)}
        if not shown:
            continue
        _, _, _, shape, dtype = next(iter(shown))
        gaussian = next(iter(shown.values()))["fused"]["time_us"]
        impls = {"high": "fused", "highest": "highest", "medium": "medium", "eager": "eager"}
        impls["matrix"] = "matrix"
        impls = {name: impl for name, impl in impls.items() if impl in next(iter(shown.values()))}
        lines += [
            "", f"## {device}, {' x '.join(map(str, shape))} {dtype}", "",
            "| particles | " + " | ".join(impls) + " | time |",
            "|---|" + "---:|" * (len(impls) + 1),
        ]  # fmt: skip
        for case, rows in shown.items():
            errors = [rows[impl]["rel_err"] for impl in impls.values()]
            errors = [f"{error:.0e}" if math.isfinite(error) else "-" for error in errors]
            relative = f"{rows['fused']['time_us'] / gaussian:.2f}"
            lines.append("| " + " | ".join([case[2][len("data=") :], *errors, relative]) + " |")
    (DOCS / "accuracy.md").write_text("\n".join(lines) + "\n")


def write_distributed(devices: dict) -> None:
    for device, cases in devices.items():
        sizes = [
            scaling.Measured(
                case[3][0], rows["one_gpu"]["time_us"] / 1e6, rows["fused"]["time_us"] / 1e6
            )
            for case, rows in cases.items()
            if case[2] == "gpus=2" and case[3][1] == scaling.DIM
        ]
        if sizes:
            text = "\n".join(scaling.page(sizes, device))
            (DOCS / "distributed.md").write_text(text + "\n")


def draw(device: str, cases: dict, path: Path) -> None:
    """Bars of how many times longer the baselines take, where there are both."""
    shown = {
        case: rows
        for case, rows in cases.items()
        if BASELINES.keys() <= rows.keys() and not is_of_data(case)
    }
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(shown) + 1.2), layout="constrained")
    for offset, (impl, color) in enumerate(BASELINES.items()):
        values = [rows[impl]["time_us"] / rows["fused"]["time_us"] for rows in shown.values()]
        places = [place + 0.4 * offset for place in range(len(shown))]
        bars = axes.barh(places, values, height=0.38, color=color, label=impl)
        axes.bar_label(bars, [f"{value:.1f}" for value in values], padding=3, fontsize=8)
    labels = [
        f"{op} {case} {variant}  {' x '.join(map(str, shape))}  {dtype}"
        for op, case, variant, shape, dtype in shown
    ]
    axes.set_yticks([place + 0.2 for place in range(len(shown))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=0.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_title(f"Time of PyTorch / time of fused_ops, {device}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    devices = read_cases()
    DOCS.mkdir(exist_ok=True)
    write_benchmarks(devices)
    write_accuracy(devices)
    write_distributed(devices)
    for device, cases in devices.items():
        name = file_of(next(iter(cases.values()))["fused"]).stem
        draw(device, cases, DOCS / f"benchmarks-{name}.png")


if __name__ == "__main__":
    main()
