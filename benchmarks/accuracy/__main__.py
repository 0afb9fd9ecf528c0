# SPDX-License-Identifier: BSD-3-Clause
"""Measures every case, writes the rows, and fails where one is worse than promised."""

import json
import sys

import torch

import fused_ops
from benchmarks import rows
from benchmarks.accuracy import RESULTS, batch_triplet, svgd, triplet
from benchmarks.accuracy.measure import is_worse_than_promised, measure_case

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def main() -> None:
    fused_ops.set_fallback("error")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measured = []
    for dtype in DTYPES:
        for op in (triplet, batch_triplet, svgd):
            for case in op.cases(device):
                for row in measure_case(case, dtype, device):
                    print(row, flush=True)
                    measured.append(row | rows.environment(device))
    path = RESULTS / rows.file_of(measured[0]).name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in measured))
    if worse := [row for row in measured if is_worse_than_promised(row)]:
        sys.exit("worse than promised:\n" + "\n".join(map(str, worse)))


if __name__ == "__main__":
    main()
