# SPDX-License-Identifier: BSD-3-Clause
"""The cases of triplet_margin_loss: a shape and dtype, forward or a training step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import fused_ops
from benchmarks import measure, rows

CUDA_SHAPES = [
    (32768, 8192, torch.float32),
    (32768, 8192, torch.bfloat16),
    (1048576, 64, torch.float32),
    (65536, 256, torch.float16),
    (128, 65536, torch.float32),
    (4, 4194304, torch.float32),
    (256, 128, torch.float32),
    (4096, 128, torch.float32),
    (8192, 768, torch.bfloat16),
]
CPU_SHAPES = [
    (4096, 8192, torch.float32),
    (8192, 256, torch.float32),
    (256, 128, torch.float32),
]
UNITS = {"forward": 3, "train": 9}  # N x dim tensors moved, forward and backward apart


def implementations() -> dict[str, Callable]:
    # A recompilation limit reached by earlier shapes would make the compiled baseline eager.
    torch._dynamo.reset()
    return {
        "fused": fused_ops.triplet_margin_loss,
        "eager": F.triplet_margin_loss,
        "compile": torch.compile(F.triplet_margin_loss),
    }


@dataclass
class Case:
    case: str  # forward or train
    rows: int
    dim: int
    dtype: torch.dtype
    device: str
    bandwidth: float

    @property
    def title(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"triplet {self.case} ({self.rows}, {self.dim}) {dtype} on {self.device}"

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = self.rows, self.dim
        tensors = [
            torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)
            for _ in range(3)
        ]
        return [tensor.requires_grad_(self.case == "train") for tensor in tensors]

    def step(self, loss: Callable, inputs: list[torch.Tensor]) -> torch.Tensor:
        result = loss(*inputs)
        if self.case == "train":
            for tensor in inputs:
                tensor.grad = None
            result.backward()
        return result

    def measure(self) -> list[dict]:
        inputs = self.inputs()
        exact = self.outputs(F.triplet_margin_loss, [x.detach().double() for x in inputs])
        measured = []
        for name, loss in implementations().items():
            for _ in range(3):
                self.step(loss, inputs)
            row = {
                "op": "triplet",
                "case": self.case,
                "variant": "",
                "shape": [self.rows, self.dim],
                "dtype": str(self.dtype).removeprefix("torch."),
                "impl": name,
            }
            row |= errors(self.outputs(loss, inputs), exact)
            row |= measure.measure(lambda loss=loss: self.step(loss, inputs), self.device)
            moved = UNITS[self.case] * self.rows * self.dim * inputs[0].element_size()
            row["sol"] = moved / row["time_us"] * 1e6 / self.bandwidth
            if self.device == "cpu":
                row["sol"] = None
            measured.append(row | rows.environment(self.device))
        return measured

    def outputs(self, loss: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The loss, and for a training step the gradients of a few rows."""
        inputs = [tensor.detach().requires_grad_(self.case == "train") for tensor in inputs]
        result = [self.step(loss, inputs).detach()]
        return result + [tensor.grad[:64] for tensor in inputs if tensor.grad is not None]


def errors(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> dict:
    """Errors of the loss and the gradients together, the latter relative to their own norm."""
    differences = [(a.double() - b).abs() for a, b in zip(outputs, exact, strict=True)]
    return {
        "max_abs_err": max(d.max().item() for d in differences),
        "mean_abs_err": max(d.mean().item() for d in differences),
        "rel_err": max(
            (d.norm() / b.norm()).item() for d, b in zip(differences, exact, strict=True)
        ),
    }


def cases(device: str) -> Iterator[Case]:
    bandwidth = measure.bandwidth(device)
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        for case in ("forward", "train"):
            yield Case(case, *shape, device, bandwidth)
