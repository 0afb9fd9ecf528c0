# SPDX-License-Identifier: BSD-3-Clause
"""A call of everything that has kernels, for tests of what holds of all of them."""

import hashlib

import torch

from fused_ops import (
    batch_triplet_loss,
    ksd,
    median_bandwidth,
    svgd_phi,
    svgd_step,
    triplet_margin_loss,
    triplet_margin_loss_indexed,
)
from fused_ops.batch_triplet.ops import MINING

SHAPES = [(40, 33), (5, 3000), (300, 64)]


def make_inputs(device, dtype=torch.float32, shapes=SHAPES):
    """Three matrices of each shape: of a loss, and particles with a score."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, *s, generator=generator).to(device, dtype).unbind() for s in shapes]


def run_every_op(inputs, products=True):
    """`products` is whether to call what contains a matrix product of PyTorch."""
    results = []
    for matrices in inputs:
        leaves = [x.detach().requires_grad_() for x in matrices]
        loss = triplet_margin_loss(*leaves, margin=0.3, swap=True)
        results += [loss.detach(), *torch.autograd.grad(loss, leaves)]
        embeddings, count = leaves[0], len(matrices[0])
        indices = torch.arange(3 * count, device=embeddings.device).view(3, -1) * 7 % count
        loss = triplet_margin_loss_indexed(embeddings, *indices, margin=0.3, swap=True)
        results += [loss.detach(), *torch.autograd.grad(loss, embeddings)]
        for mining in MINING if products else ():
            loss = batch_triplet_loss(embeddings, indices[0] % 5, mining=mining)
            results += [loss.detach(), *torch.autograd.grad(loss, embeddings)]
        particles, score, _ = matrices
        results.append(svgd_phi(particles, score))
        results.append(svgd_step(particles, score, 0.1, bandwidth="paper", kernel="imq"))
        results += [median_bandwidth(particles, "reference"), ksd(particles, score)]
    return results


def fingerprint(device, threads=1):
    """Of all bits of all results in each dtype."""
    torch.set_num_threads(threads)
    # Large enough for several threads, but for those of PyTorch's sum that ends the discrepancy:
    # they change its order from 32,768 elements on. On CUDA for tensor cores.
    many = (701, 33) if device == "cpu" else (2100, 64)
    digest = hashlib.sha256()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for result in run_every_op(make_inputs(device, dtype, [*SHAPES, many])):
            digest.update(result.cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
