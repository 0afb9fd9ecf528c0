# SPDX-License-Identifier: BSD-3-Clause
"""Rows of results: where they are kept and how they are shown."""

import datetime
import functools
import json
import os
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
SOURCES = RESULTS.parents[1]
KEY = ("op", "case", "variant", "shape", "dtype", "impl")  # a rerun replaces the row of equal key
FIELDS = (
    *KEY, "time_us", "time_iqr_us", "graph_us", "wall_us", "peak_bytes", "launches",
    "max_abs_err", "rel_err", "sol", "gpu", "torch", "cuda", "commit", "date",
)  # fmt: skip


@functools.cache
def environment(device: str) -> dict:
    """The fields of a row that say where it was measured."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    """The commit measured; BENCHMARK_COMMIT names it where the sources came without git."""
    if commit := os.environ.get("BENCHMARK_COMMIT"):
        return commit

    def git(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *command], cwd=SOURCES, capture_output=True, text=True)

    changed = git("diff", "--quiet", "HEAD", "--", "csrc", "fused_ops", "setup.py").returncode
    return git("rev-parse", "--short=12", "HEAD").stdout.strip() + ("-dirty" if changed else "")


def file_of(row: dict) -> Path:
    """h200.jsonl for "NVIDIA H200", cpu.jsonl for the CPU."""
    name = row["gpu"].lower().removeprefix("nvidia ").replace(" ", "-") or "cpu"
    return RESULTS / f"{name}.jsonl"


def write(rows: list[dict]) -> None:
    """Merges rows into their file, through a new file so that none is lost half-way."""
    path = file_of(rows[0])
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    merged = {_key(row): row for row in [*known, *rows]}
    text = "".join(json.dumps({k: row.get(k) for k in FIELDS}) + "\n" for row in merged.values())
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _key(row: dict) -> tuple:
    return tuple(str(row[name]) for name in KEY)


def panel(title: str, rows: list[dict]) -> str:
    """What kernel benchmarks publish of one case: each implementation beside the fused one."""
    fused = next(row for row in rows if row["impl"] == "fused")
    lines = [title]
    for row in rows:
        parts = [
            f"  {row['impl']:8}",
            f"{row['time_us']:10.1f} us median",
            f"{row['mean_us']:10.1f} mean {row['std_us']:7.1f} std",
            f"{row['time_us'] / fused['time_us']:6.2f}x",
            f"wall {row['wall_us']:9.1f} ({row['wall_us'] / fused['wall_us']:.2f}x)",
            f"max abs err {row['max_abs_err']:.1e}, mean {row['mean_abs_err']:.1e},"
            f" rel {row['rel_err']:.1e}",
        ]
        if row.get("graph_us"):
            parts.append(f"graph {row['graph_us']:7.1f}")
        if row.get("peak_bytes"):
            ratio = row["peak_bytes"] / fused["peak_bytes"]
            parts.append(f"peak {row['peak_bytes'] / 2**20:8.1f} MB ({ratio:.2f}x)")
        if row.get("launches"):
            parts.append(f"{row['launches']} launches ({row['launches'] / fused['launches']:.1f}x)")
        if row.get("sol"):
            parts.append(f"speed of light {row['sol']:.3f}")
        lines.append(" | ".join(parts))
    return "\n".join(lines)
