# SPDX-License-Identifier: BSD-3-Clause
"""Runs the benchmarks: python -m benchmarks [--op triplet] [--match forward].

Every case is measured in one run for the fused op and for its baselines, on CUDA where there is a
GPU and on the CPU elsewhere, and its rows replace those of the last run in benchmarks/results.
"""

import argparse

import torch

import fused_ops
from benchmarks import batch_triplet, measure, rows, svgd, triplet
from benchmarks.triplet import indexed

OPS = {
    "triplet": triplet.cases,
    "triplet_indexed": indexed.cases,
    "batch_triplet": batch_triplet.cases,
    "svgd": svgd.cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPS, help="only this op")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--match", default="", help="only cases whose description contains this")
    arguments = parser.parse_args()
    fused_ops.set_fallback("error")  # PyTorch must not be measured in our name
    bandwidth = measure.bandwidth(arguments.device)
    for op, cases in OPS.items():
        if arguments.op not in (None, op):
            continue
        for case in cases(arguments.device, bandwidth):
            if arguments.match in case.title:
                measured = case.measure()
                rows.write(measured)
                print(rows.panel(case.title, measured), flush=True)


if __name__ == "__main__":
    main()
