# SPDX-License-Identifier: BSD-3-Clause
"""The cases of triplet_margin_loss_indexed: a training step of triplets of one batch's rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import fused_ops
from benchmarks.case import Case

# embeddings, dim, triplets, dtype
CUDA_SHAPES = [
    (1024, 128, 16384, torch.float32),
    (8192, 512, 262144, torch.float32),
    (8192, 512, 262144, torch.bfloat16),
    (8192, 509, 262144, torch.float32),
    (64, 512, 262144, torch.float32),
]
CPU_SHAPES = [(512, 128, 16384, torch.float32), (1024, 512, 32768, torch.float32)]


def gathered(loss: Callable) -> Callable:
    """`loss` of rows that are gathered first."""

    def step(embeddings, anchor_index, positive_index, negative_index, **settings):
        indices = anchor_index, positive_index, negative_index
        return loss(*(embeddings[index] for index in indices), **settings)

    return step


@dataclass
class TripletIndexedCase(Case):
    triplets: int = 0

    op = "triplet_indexed"

    def make_inputs(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        make = {"device": self.device, "generator": generator}
        self.embeddings = torch.randn(self.count, self.dim, **make).to(self.dtype)
        self.indices = torch.randint(self.count, (3, self.triplets), **make)

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        losses = {
            "fused": fused_ops.triplet_margin_loss_indexed,
            "eager": gathered(F.triplet_margin_loss),
            "compile": torch.compile(gathered(F.triplet_margin_loss)),
            "gathered": gathered(fused_ops.triplet_margin_loss),
        }
        return {name: partial(self.step, loss, self.embeddings) for name, loss in losses.items()}

    def step(self, loss: Callable, embeddings: torch.Tensor) -> torch.Tensor:
        embeddings.requires_grad_().grad = None
        result = loss(embeddings, *self.indices)
        result.backward()
        return result

    def results(self, call: Callable) -> list[torch.Tensor]:
        return [call().detach(), self.embeddings.grad]

    def exact(self) -> list[torch.Tensor]:
        embeddings = self.embeddings.detach().double()
        loss = self.step(gathered(F.triplet_margin_loss), embeddings)
        return [loss.detach(), embeddings.grad]


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for count, dim, triplets, dtype in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        variant = f"triplets={triplets}"
        yield TripletIndexedCase("train", count, dim, dtype, device, bandwidth, variant, triplets)
