# SPDX-License-Identifier: BSD-3-Clause
"""The cases of triplet_margin_loss: a shape and dtype, forward or a training step."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

import fused_ops
from benchmarks.case import Case
from benchmarks.triplet import seed

CUDA_SHAPES = [
    (32768, 8192, torch.float32),
    (32768, 8192, torch.bfloat16),
    (1048576, 64, torch.float32),
    (1048576, 63, torch.float32),
    (65536, 256, torch.float16),
    (65536, 1001, torch.float16),
    (128, 65536, torch.float32),
    (4, 4194304, torch.float32),
    (256, 128, torch.float32),
    (4096, 128, torch.float32),
    (8192, 768, torch.bfloat16),
]
CUDA_VARIANTS = [
    (32768, 8192, torch.float32, "upstream=0.37"),
    (32768, 8192, torch.float32, "upstream=varying"),
    (32768, 8192, torch.float32, "inactive=0.9"),
    (8192, 768, torch.bfloat16, "autocast"),
]
CPU_SHAPES = [
    (4096, 8192, torch.float32),
    (8192, 256, torch.float32),
    (256, 128, torch.float32),
]
UNITS = {"forward": 3, "train": 6}  # N x dim tensors that must be moved
COMPARED_ROWS = 64  # of the gradients


def recompute(*inputs: torch.Tensor) -> torch.Tensor:
    """The fused loss with its gradients left to the backward."""
    with fused_ops.set_gradients_in_forward(False):
        return fused_ops.triplet_margin_loss(*inputs)


class TripletCase(Case):
    op = "triplet"

    def make_inputs(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = self.count, self.dim
        self.inputs = anchor, positive, _ = [
            torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)
            for _ in range(3)
        ]
        if self.variant == "inactive=0.9":
            inactive = int(0.9 * self.count)
            positive[:inactive] = anchor[:inactive] + positive[:inactive] / 8
        self.upstream = torch.full((), 0.37, device=self.device)

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        losses = {
            "fused": fused_ops.triplet_margin_loss,
            "eager": F.triplet_margin_loss,
            "compile": torch.compile(F.triplet_margin_loss),
        }
        if self.device == "cuda" and self.case == "train":
            losses["recompute"] = recompute
        if self.device == "cuda" and self.case == "forward" and seed.takes(*self.inputs):
            losses["seed"] = seed.triplet_margin_loss
        return {name: partial(self.step, loss, self.inputs) for name, loss in losses.items()}

    def step(self, loss: Callable, inputs: list[torch.Tensor]) -> torch.Tensor:
        training = self.case == "train"
        for tensor in inputs:
            tensor.requires_grad_(training).grad = None
        with torch.autocast(self.device, self.dtype, enabled=self.variant == "autocast"):
            result = loss(*inputs)
        if self.variant == "upstream=varying":
            self.upstream = self.upstream * 1.01
        if self.variant.startswith("upstream"):
            result = result * self.upstream
        if training:
            result.backward()
        return result

    def results(self, call: Callable) -> list[torch.Tensor]:
        self.upstream = torch.full_like(self.upstream, 0.37)
        return [call().detach(), *self._gradients(self.inputs)]

    def exact(self) -> list[torch.Tensor]:
        inputs = [tensor.detach().double() for tensor in self.inputs]
        return [self.step(F.triplet_margin_loss, inputs).detach(), *self._gradients(inputs)]

    def _gradients(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        # The last rows, active in every variant; cloned, since a view would keep the rest alive.
        return [
            tensor.grad[-COMPARED_ROWS:].clone() for tensor in inputs if tensor.grad is not None
        ]

    def moved_bytes(self) -> int:
        return UNITS[self.case] * self.count * self.dim * self.dtype.itemsize


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        for case in UNITS:
            yield TripletCase(case, *shape, device, bandwidth)
    for *shape, variant in CUDA_VARIANTS if device == "cuda" else []:
        yield TripletCase("train", *shape, device, bandwidth, variant)
