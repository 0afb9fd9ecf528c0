# SPDX-License-Identifier: BSD-3-Clause
"""A case's errors, over draws of its inputs, and what they may be."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy
import torch

from fused_ops._support import name_of

Results = dict[str, torch.Tensor | numpy.ndarray]


class Undecided(Exception):
    """Rounding may decide what inputs of a mined loss give; others are to be drawn."""


class Case(NamedTuple):
    """`results_of` takes a list of `tensors` tensors of a shape, and returns what each
    implementation makes of them, and the truth. Errors are the root mean square over the draws."""

    results_of: Callable[[list[torch.Tensor]], tuple[dict[str, Results], Results]]
    tensors: int
    shape: tuple[int, int]
    draws: int


def widened(x: torch.Tensor) -> numpy.ndarray:
    return x.double().cpu().numpy().astype(numpy.longdouble)


def loss_results(
    op: str, losses: dict[str, Callable], inputs: list[torch.Tensor], exact: tuple
) -> tuple[dict[str, Results], Results]:
    """Each loss of the inputs with its gradients, and the truth, by their names."""
    names = op, "its gradients" if len(inputs) > 1 else "its gradient"
    found = {}
    for impl, function in losses.items():
        leaves = [x.detach().requires_grad_() for x in inputs]
        loss = function(*leaves)
        gradients = torch.stack(torch.autograd.grad(loss, leaves))
        found[impl] = dict(zip(names, (loss.detach(), gradients), strict=True))
    return found, dict(zip(names, exact, strict=True))


def relative_error(result: torch.Tensor, exact: numpy.ndarray) -> float:
    difference = widened(result) - exact
    return float(numpy.sqrt((difference**2).sum() / (exact**2).sum()))


def decided_results(case: Case, dtype: torch.dtype, device: str) -> Iterator[tuple]:
    """The results of one draw after the other."""
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(case.tensors, *case.shape, generator=generator, dtype=torch.float64)
        try:
            yield case.results_of(list(made.to(device, dtype).unbind()))
        except Undecided:
            continue


def measure_case(case: Case, dtype: torch.dtype, device: str) -> Iterator[dict]:
    """A row for each thing that an op returns."""
    torch._dynamo.reset()
    squares, names = {}, {}
    for found, exact in itertools.islice(decided_results(case, dtype, device), case.draws):
        for impl, results in found.items():
            for name, result in results.items():
                names.setdefault(name, (torch.finfo(result.dtype).eps / 2, result.dim() == 0))
                error = relative_error(result, exact[name])
                squares[name, impl] = squares.get((name, impl), 0) + error**2
    for name, (rounding, is_scalar) in names.items():
        errors = {
            impl: math.sqrt(square / case.draws)
            for (of, impl), square in squares.items()
            if of == name
        }
        row = {"result": name, "shape": case.shape, "dtype": name_of(dtype), **errors}
        yield row | {"rounding": rounding, "is_scalar": is_scalar}


def is_worse_than_promised(row: dict) -> bool:
    """Over twice eager's error and a rounding; of a single number, which luck decides, four. Where
    eager has no finite result, the roundings alone. Of many particles "high" promises 2e-5 on
    CUDA."""
    eager = row["eager"] if math.isfinite(row["eager"]) else 0
    most = 2 * eager + (4 if row["is_scalar"] else 1) * row["rounding"]
    if row["result"] == "svgd_phi" and row["shape"][0] > 2048:
        most = max(most, 2e-5)
    return not row["fused"] <= most
