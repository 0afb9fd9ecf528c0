# SPDX-License-Identifier: BSD-3-Clause
"""The cases of triplet_margin_loss: a shape and dtype, forward or a training step."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

import fused_ops
from benchmarks.case import Case

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
COMPARED_ROWS = 64  # of the gradients


class TripletCase(Case):
    op = "triplet"

    def make_inputs(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = self.count, self.dim
        self.inputs = [
            torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)
            for _ in range(3)
        ]

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        losses = {
            "fused": fused_ops.triplet_margin_loss,
            "eager": F.triplet_margin_loss,
            "compile": torch.compile(F.triplet_margin_loss),
        }
        return {name: partial(self.step, loss, self.inputs) for name, loss in losses.items()}

    def step(self, loss: Callable, inputs: list[torch.Tensor]) -> torch.Tensor:
        training = self.case == "train"
        for tensor in inputs:
            tensor.requires_grad_(training).grad = None
        result = loss(*inputs)
        if training:
            result.backward()
        return result

    def results(self, call: Callable) -> list[torch.Tensor]:
        return [call().detach(), *self._gradients(self.inputs)]

    def exact(self) -> list[torch.Tensor]:
        inputs = [tensor.detach().double() for tensor in self.inputs]
        return [self.step(F.triplet_margin_loss, inputs).detach(), *self._gradients(inputs)]

    def _gradients(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.grad[:COMPARED_ROWS] for tensor in inputs if tensor.grad is not None]

    def moved_bytes(self) -> int:
        return UNITS[self.case] * self.count * self.dim * self.dtype.itemsize


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        for case in UNITS:
            yield TripletCase(case, *shape, device, bandwidth)
