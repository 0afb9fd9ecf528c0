# SPDX-License-Identifier: BSD-3-Clause
"""Writes docs/benchmarks.md, accuracy.md, distributed.md and the pictures from the rows:

python -m benchmarks.report
"""

import json
import math
from pathlib import Path

from benchmarks import accuracy, pictures
from benchmarks.accuracy.batch_triplet import CLEARANCE, ROWS_OF_A_CLASS
from benchmarks.accuracy.triplet import TRIPLETS_OF_A_ROW
from benchmarks.rows import RESULTS, file_of
from benchmarks.svgd import scaling

DOCS = Path(__file__).parents[1] / "docs"


def read_cases() -> dict[str, dict[tuple, dict[str, dict]]]:
    """device -> (op, case, variant, shape, dtype) -> impl -> row, in the order of the files."""
    devices = {}
    for path in sorted(RESULTS.glob("*.jsonl"), reverse=True):
        for row in map(json.loads, path.read_text().splitlines()):
            device = row["gpu"] or "CPU"
            case = row["op"], row["case"], row["variant"], tuple(row["shape"]), row["dtype"]
            devices.setdefault(device, {}).setdefault(case, {})[row["impl"]] = row
    return devices


def time(row: dict | None, field: str = "time_us") -> str:
    return f"{row[field]:,.1f}" if row and row[field] else ""


def ratio(rows: dict[str, dict], impl: str, field: str = "time_us") -> str:
    """Of another to fused, so above 1 fused is faster, or takes less memory."""
    if impl not in rows or not rows["fused"].get(field):
        return ""
    return f"{rows[impl][field] / rows['fused'][field]:.2f}"


def value(rows: dict[str, dict], impl: str, field: str, form: str) -> str:
    number = rows.get(impl, {}).get(field)
    return "" if number is None else f"{number:{form}}"


OPS = {
    "triplet": "triplet_margin_loss",
    "triplet_indexed": "triplet_margin_loss_indexed",
    "batch_triplet": "batch_triplet_loss",
    "svgd": "SVGD",
}
COLUMNS = ("fused", "eager", "compile")  # the implementations with columns in TABLES
# Several narrow tables rather than one that no screen shows whole: title -> column -> cell.
TABLES = {
    "Time": {
        "fused us": lambda rows: time(rows["fused"]),
        "in a CUDA graph": lambda rows: time(rows["fused"], "graph_us"),
        "eager us": lambda rows: time(rows.get("eager")),
        "compile us": lambda rows: time(rows.get("compile")),
        "eager / fused": lambda rows: ratio(rows, "eager"),
        "compile / fused": lambda rows: ratio(rows, "compile"),
    },
    "Wall time, memory and launches": {
        "wall, eager / fused": lambda rows: ratio(rows, "eager", "wall_us"),
        "wall, compile / fused": lambda rows: ratio(rows, "compile", "wall_us"),
        "peak memory, compile / fused": lambda rows: ratio(rows, "compile", "peak_bytes"),
        "launches, fused": lambda rows: value(rows, "fused", "launches", "d"),
        "launches, eager": lambda rows: value(rows, "eager", "launches", "d"),
        "of the bandwidth": lambda rows: value(rows, "fused", "sol", ".2f"),
    },
    "Error relative to float64": {
        "fused": lambda rows: value(rows, "fused", "rel_err", ".0e"),
        "eager": lambda rows: value(rows, "eager", "rel_err", ".0e"),
    },
}


def table(cases: dict[tuple, dict[str, dict]], columns: dict) -> list[str]:
    """One line a case, without the cases and columns that have nothing to show."""
    lines = {case: [cell(rows) for cell in columns.values()] for case, rows in cases.items()}
    lines = {case: cells for case, cells in lines.items() if any(cells)}
    shown = [place for place, _ in enumerate(columns) if any(c[place] for c in lines.values())]
    if not shown:
        return []
    titles = list(columns)
    return [
        "| case | " + " | ".join(titles[place] for place in shown) + " |",
        "|---|" + "---:|" * len(shown),
        *(
            f"| {name_of(case)} | " + " | ".join(cells[place] for place in shown) + " |"
            for case, cells in lines.items()
        ),
    ]


def name_of(case: tuple) -> str:
    _, name, variant, shape, dtype = case
    return f"{name} {variant} ".replace("  ", " ") + f"{' x '.join(map(str, shape))} {dtype}"


def sections(cases: dict[tuple, dict[str, dict]]) -> list[str]:
    lines = []
    for op, title in OPS.items():
        of_op = {case: rows for case, rows in cases.items() if case[0] == op}
        others = dict.fromkeys(impl for rows in of_op.values() for impl in rows)
        other_columns = {
            f"{impl} / fused": lambda rows, impl=impl: ratio(rows, impl)
            for impl in others
            if impl not in COLUMNS
        }
        for what, columns in {**TABLES, "Other implementations": other_columns}.items():
            if shown := table(of_op, columns):
                lines += ["", f"### {title}: {what[0].lower()}{what[1:]}", "", *shown]
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
        "`problems=` are independent problems in one call, and `loop` is a fused call for each.",
        "For the indexed loss `gathered` is our `triplet_margin_loss` of gathered rows, and",
        "`eager` PyTorch's. For the batch loss `eager` is the reference, which holds every",
        "triplet; a library without a time has no such mining, or ran out of memory. Where two",
        "distances are closer than rounding, float64 may mine another row than float32, and the",
        'gradient is off by a whole term: hence the errors of "semihard", and',
        "[Accuracy](accuracy.md) has those without.",
    ]
    for device, cases in devices.items():
        versions = next(iter(cases.values()))["fused"]
        cuda = f", CUDA {versions['cuda']}" if versions["cuda"] else ""
        timed = {
            case: rows
            for case, rows in cases.items()
            if not is_of_data(case) and not is_of_gpus(case)
        }
        lines += ["", f"## {device}", "", f"torch {versions['torch']}{cuda}.", *sections(timed)]
    (DOCS / "benchmarks.md").write_text("\n".join(lines) + "\n")


def accuracy_tables() -> list[str]:
    """Of each op, dtype and size, from what `benchmarks.accuracy` has measured."""
    lines = []
    for path in sorted(accuracy.RESULTS.glob("*.jsonl"), reverse=True):
        measured = [json.loads(line) for line in path.read_text().splitlines()]
        lines += [
            "", f"### {measured[0]['gpu'] or 'CPU'}, torch {measured[0]['torch']}", "",
            "| result | size | dtype | fused | eager | compile | fused / eager |",
            "|---|---|---|---:|---:|---:|---:|",
        ]  # fmt: skip
        for row in measured:
            errors = [row.get(impl) for impl in COLUMNS]
            shown = ["" if e is None else f"{e:.1e}" if math.isfinite(e) else "-" for e in errors]
            fused, eager = errors[:2]
            ratio = f"{fused / eager:.2f}" if eager and math.isfinite(eager) else ""
            if fused <= row["rounding"]:
                ratio = "rounding"
            size = " x ".join(map(str, row["shape"]))
            lines.append(
                f"| {row['result']} | {size} | {row['dtype']} | {' | '.join([*shown, ratio])} |"
            )
    return lines


def write_accuracy(devices: dict) -> None:
    lines = [
        "# Accuracy",
        "",
        "## Beside eager PyTorch and torch.compile",
        "",
        "Measured by `python -m benchmarks.accuracy` against NumPy in extended precision, from the",
        "definitions and the inputs as their dtype has them: errors relative to the norm of the",
        "result. Ours may be twice eager's and a rounding of the result to its type (four, of",
        "single numbers), and `benchmarks.accuracy` fails where one is larger; only `svgd_phi` of",
        'over 2048 particles may err by 2e-5 on CUDA, unless asked for `precision="highest"`.',
        "`rounding`: no more than rounding the exact result may lose. `-`: no finite result; where",
        "eager has none, ours may lose the roundings alone.",
        "",
        f"The indexed loss is of {TRIPLETS_OF_A_ROW} triplets a row; eager gathers their rows for",
        f"PyTorch's loss. The batch loss is of {ROWS_OF_A_CLASS} rows a class; eager is the",
        "reference in the dtype of the inputs. Mining jumps: where two distances are closer than",
        "rounding, or a term is as close to zero, the gradient of any implementation may be off by",
        "a whole term, and chance decides. So inputs are drawn until no such choice is closer than",
        f"{CLEARANCE} units in the last place of the largest distance, for 16 bits in float32.",
        "There eager still picks other rows, and compile, which looks for a rounded extreme among",
        "distances that are not rounded, finds none and picks the last.",
        *accuracy_tables(),
        "",
        "## SVGD on awkward particles",
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
            "", f"### {device}, {' x '.join(map(str, shape))} {dtype}", "",
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


def main() -> None:
    devices = read_cases()
    DOCS.mkdir(exist_ok=True)
    write_benchmarks(devices)
    write_accuracy(devices)
    write_distributed(devices)
    for device, cases in devices.items():
        name = file_of(next(iter(cases.values()))["fused"]).stem
        timed = {case: rows for case, rows in cases.items() if not is_of_data(case)}
        pictures.draw_all(device, timed, DOCS / f"benchmarks-{name}.png")
        pictures.draw_summary(device, timed, DOCS / f"summary-{name}.png")


if __name__ == "__main__":
    main()
