# SPDX-License-Identifier: BSD-3-Clause
"""The cases of batch_triplet_loss: a training step on a batch of unit rows, for each mining."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import normalize

from benchmarks.batch_triplet import libraries
from benchmarks.case import Case
from fused_ops import batch_triplet_loss
from fused_ops.batch_triplet import reference

MARGIN = 0.2
# The mean that the other libraries take.
REDUCTIONS = {"all": "mean_active", "semihard": "mean", "hard": "mean"}
CUDA_SHAPES = [  # rows, dim, classes
    (256, 128, 32),
    (1024, 256, 128),
    (2048, 256, 256),
    (4096, 512, 512),
    (8192, 512, 1024),
    (8192, 512, 4),
    (32768, 256, 4096),
]
CPU_SHAPES = [(512, 128, 64)]
LARGEST_CUBE = 2**30  # triplets, or elements of differences, that the reference may hold


def reference_loss(
    embeddings: torch.Tensor, labels: torch.Tensor, mining: str, reduction: str = "mean"
) -> torch.Tensor:
    """In PyTorch, in the dtype of the embeddings."""
    settings = 0, MARGIN, mining, "euclidean", reduction, False
    return reference.loss_and_totals(embeddings, labels, embeddings, labels, *settings)[0]


class BatchTripletCase(Case):
    op = "batch_triplet"

    def __init__(self, mining: str, count: int, dim: int, classes: int, device: str) -> None:
        variant = f"classes={classes}"
        super().__init__(mining, count, dim, torch.float32, device, float("nan"), variant)
        self.classes = classes

    def make_inputs(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        rows = torch.randn(self.count, self.dim, device=self.device, generator=generator)
        self.embeddings = normalize(rows).requires_grad_()
        order = torch.randperm(self.count, device=self.device, generator=generator)
        self.labels = order % self.classes

    @property
    def settings(self) -> dict:
        return {"margin": MARGIN, "mining": self.case, "reduction": REDUCTIONS[self.case]}

    @property
    def fits_reference(self) -> bool:
        return self.count**2 * max(self.count, self.dim) <= LARGEST_CUBE

    @property
    def reference(self) -> Callable:
        return partial(reference_loss, mining=self.case, reduction=REDUCTIONS[self.case])

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        losses = {"fused": partial(batch_triplet_loss, **self.settings)}
        if self.fits_reference:
            losses |= {"eager": self.reference, "compile": torch.compile(self.reference)}
        losses |= libraries.losses(self.case, MARGIN)
        calls = {name: partial(self.step, loss, self.embeddings) for name, loss in losses.items()}
        return {name: call for name, call in calls.items() if runs(call)}

    def step(self, loss: Callable, embeddings: torch.Tensor) -> torch.Tensor:
        embeddings.grad = None
        result = loss(embeddings, self.labels)
        result.backward()
        return result

    def results(self, call: Callable) -> list[torch.Tensor]:
        return [call().detach(), self.embeddings.grad]

    def exact(self) -> list[torch.Tensor]:
        embeddings = self.embeddings.detach().double().requires_grad_()
        # The kernels in float64, where the reference does not fit.
        loss = self.reference if self.fits_reference else partial(
            batch_triplet_loss, **self.settings
        )  # fmt: skip
        return [self.step(loss, embeddings).detach(), embeddings.grad]


def runs(call: Callable) -> bool:
    """Whether the device has memory for a call."""
    try:
        call()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        for mining in REDUCTIONS:
            yield BatchTripletCase(mining, *shape, device)
