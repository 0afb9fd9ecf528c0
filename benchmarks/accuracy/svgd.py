# SPDX-License-Identifier: BSD-3-Clause
"""median_bandwidth, svgd_phi and ksd."""

import math
from collections.abc import Iterator

import numpy
import torch

import fused_ops
from benchmarks.accuracy.measure import Case, Results, widened
from benchmarks.svgd.cases import reference_median, reference_phi

SHAPES = {(100, 2): 16, (1024, 32): 4}
CUDA_SHAPES = SHAPES | {(4096, 64): 1}
BLOCK = 2**22  # differences that the truth forms at once


def exact_results(inputs: list[numpy.ndarray]) -> Results:
    """By the definitions, in blocks of rows."""
    x, score = inputs
    count, dim = x.shape
    blocks = range(0, count, max(1, BLOCK // (count * dim)))
    size = blocks.step

    def differences(first):
        return x[first : first + size, None] - x

    distances = numpy.concatenate([(d * d).sum(-1) for d in map(differences, blocks)])
    h = numpy.sort(distances, axis=None)[(count * count - 1) // 2] / max(math.log(count), 1)
    weight = numpy.exp(distances / (-2 * h))
    repelled = numpy.concatenate(
        [(weight[i : i + size, :, None] * differences(i)).sum(1) for i in blocks]
    )
    phi = (weight @ score + repelled / h) / count
    # Of the discrepancy the two terms with one gradient are equal.
    trace = (weight * (dim / h - distances / h**2)).sum() / count
    total = (score * (weight @ score + 2 * repelled / h)).sum() / count + trace
    return {"median_bandwidth": h, "svgd_phi": phi, "ksd": total / count}


def eager_ksd(x: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    count, dim = x.shape
    differences = x[:, None] - x
    distances = differences.square().sum(-1)
    h = reference_median(x, score)
    weight = torch.exp(-distances / (2 * h))
    repelled = (weight[:, :, None] * differences).sum(1) / h
    trace = (weight * (dim / h - distances / h**2)).sum()
    return ((score * (weight @ score + 2 * repelled)).sum() + trace) / count**2


FUNCTIONS = {
    "fused": {
        "median_bandwidth": lambda x, score: fused_ops.median_bandwidth(x),
        "svgd_phi": fused_ops.svgd_phi,
        "ksd": lambda x, score: fused_ops.ksd(x, score, statistic="v"),
    },
    "eager": {"median_bandwidth": reference_median, "svgd_phi": reference_phi, "ksd": eager_ksd},
    "compile": {"svgd_phi": torch.compile(reference_phi)},
}


def results(inputs: list[torch.Tensor]) -> tuple[dict[str, Results], Results]:
    found = {
        impl: {name: function(*inputs) for name, function in functions.items()}
        for impl, functions in FUNCTIONS.items()
    }
    exact = exact_results([widened(x) for x in inputs])
    if inputs[0].is_cuda and len(inputs[0]) > 2048:
        found["fused"]["svgd_phi, highest"] = fused_ops.svgd_phi(*inputs, precision="highest")
        found["eager"]["svgd_phi, highest"] = found["eager"]["svgd_phi"]
        exact["svgd_phi, highest"] = exact["svgd_phi"]
    return found, exact


def cases(device: str) -> Iterator[Case]:
    for shape, draws in (CUDA_SHAPES if device == "cuda" else SHAPES).items():
        yield Case(results, 2, shape, draws)
