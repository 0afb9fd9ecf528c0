# SPDX-License-Identifier: BSD-3-Clause
"""The same losses by other libraries, where they are installed."""

import importlib
from collections.abc import Callable
from importlib.metadata import version

import torch

# Where sentence-transformers has had its losses, the newest first.
MODULES = "sentence_transformers.sentence_transformer.losses", "sentence_transformers.losses"
NAMES = {
    "all": ("BatchAllTripletLoss", "batch_all_triplet_loss"),
    "semihard": ("BatchSemiHardTripletLoss", "batch_semi_hard_triplet_loss"),
    "hard": ("BatchHardTripletLoss", "batch_hard_triplet_loss"),
}


def losses(mining: str, margin: float) -> dict[str, Callable]:
    """Functions of embeddings and labels by the library's name and version."""
    found = {
        "pytorch-metric-learning": pytorch_metric_learning(mining, margin),
        "sentence-transformers": sentence_transformers(mining, margin),
    }
    return {f"{name} {version(name)}": loss for name, loss in found.items() if loss is not None}


def pytorch_metric_learning(mining: str, margin: float) -> Callable | None:
    """Its "semihard" takes every triplet with a loss between 0 and the margin: no baseline."""
    try:
        from pytorch_metric_learning import distances, losses, miners, reducers
    except ImportError:
        return None
    if mining == "semihard":
        return None
    distance = distances.LpDistance(normalize_embeddings=False)
    if mining == "all":  # its default is the mean over the active triplets
        return losses.TripletMarginLoss(margin=margin, distance=distance)
    loss = losses.TripletMarginLoss(
        margin=margin, distance=distance, reducer=reducers.MeanReducer()
    )
    miner = miners.BatchHardMiner(distance=distance)
    return lambda embeddings, labels: loss(embeddings, labels, miner(embeddings, labels))


def sentence_transformers(mining: str, margin: float) -> Callable | None:
    class_name, method = NAMES[mining]
    for module in MODULES:
        try:
            kind = getattr(importlib.import_module(module), class_name)
        except ImportError:
            continue
        compute = getattr(kind(torch.nn.Identity(), margin=margin), method)
        return lambda embeddings, labels: compute(labels, embeddings)
    return None
