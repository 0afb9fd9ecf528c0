# SPDX-License-Identifier: BSD-3-Clause
"""Against pytorch-metric-learning and sentence-transformers, where they are installed: values and
gradients are theirs with the arguments of docs/batch_triplet_compared.md."""

from functools import partial

import pytest
import torch
from torch.nn.functional import normalize, relu

from fused_ops import batch_triplet_loss, triplet_margin_loss_indexed

from .cases import loss_and_gradients, random_batch

pytestmark = pytest.mark.usefixtures("fused_only")

MARGIN = 0.3
BATCH = {"count": 48, "dim": 16, "classes": 6, "dtype": torch.float64, "spread": 0.5}


def of_unit_rows(embeddings, labels, reference_embeddings=None, **settings):
    """Ours on rows of unit length, as pytorch-metric-learning has them unless told otherwise."""
    if reference_embeddings is not None:
        settings["reference_embeddings"] = normalize(reference_embeddings)
    return batch_triplet_loss(normalize(embeddings), labels, **settings)


def assert_same(theirs, ours, embeddings, labels, references=None, **settings):
    expected = loss_and_gradients(embeddings, labels, references, function=theirs)
    results = loss_and_gradients(embeddings, labels, references, function=ours, **settings)
    torch.testing.assert_close(results, expected, rtol=1e-7, atol=1e-10)
    assert all(gradient.any() for gradient in results[1:])


# name: (what the loss is made with, the miner, our function, our arguments)
METRIC_LEARNING = {
    "defaults": ({}, None, of_unit_rows, {"reduction": "mean_active"}),
    "mean": ({"reducer": "MeanReducer"}, None, of_unit_rows, {"reduction": "mean"}),
    "sum": ({"reducer": "SumReducer"}, None, of_unit_rows, {"reduction": "sum"}),
    "rows as they are": (
        {"distance": "plain"},
        None,
        batch_triplet_loss,
        {"reduction": "mean_active"},
    ),
    "squared": (
        {"distance": "squared"},
        None,
        of_unit_rows,
        {"distance": "squared", "reduction": "mean_active"},
    ),
    "cosine": (
        {"distance": "cosine"},
        None,
        batch_triplet_loss,
        {"distance": "cosine", "reduction": "mean_active"},
    ),
    "hard": (
        {},
        "BatchHardMiner",
        of_unit_rows,
        {"mining": "hard", "reduction": "mean_active"},
    ),
    "hard, mean": (
        {"reducer": "MeanReducer"},
        "BatchHardMiner",
        of_unit_rows,
        {"mining": "hard", "reduction": "mean"},
    ),
    "hard, soft": (
        {"smooth_loss": True, "distance": "plain"},
        "BatchHardMiner",
        batch_triplet_loss,
        {"mining": "hard", "soft": True, "reduction": "mean"},
    ),
}


def metric_learning(loss_settings, miner):
    """Theirs, as a function of what ours takes."""
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning import distances, losses, miners, reducers

    made = {
        "plain": partial(distances.LpDistance, normalize_embeddings=False),
        "squared": partial(distances.LpDistance, power=2),
        "cosine": distances.CosineSimilarity,
        None: distances.LpDistance,
    }[loss_settings.get("distance")]
    settings = loss_settings | {"distance": made()}
    if "reducer" in settings:
        settings["reducer"] = getattr(reducers, settings["reducer"])()
    loss = losses.TripletMarginLoss(margin=MARGIN, **settings)
    mine = getattr(miners, miner)(distance=made()) if miner else None

    def function(embeddings, labels, reference_embeddings=None, reference_labels=None):
        references = reference_embeddings, reference_labels
        indices = mine(embeddings, labels, *references) if mine else None
        return loss(embeddings, labels, indices, *references)

    return function


def assert_mixed(ours, embeddings, labels, **settings):
    """Some items are active and some are not, but for softplus, where all are."""
    active = ours(embeddings, labels, return_stats=True, **settings)[1].active_fraction
    assert active == 1 if "soft" in settings else 0.02 < active < 0.98


@pytest.mark.parametrize("name", METRIC_LEARNING)
def test_pytorch_metric_learning(name):
    loss_settings, miner, ours, settings = METRIC_LEARNING[name]
    theirs = metric_learning(loss_settings, miner)
    # A label that only one row has, which neither takes for an anchor.
    embeddings, labels = random_batch(**BATCH)
    labels[5] = 99
    assert_mixed(ours, embeddings, labels, margin=MARGIN, **settings)
    assert_same(theirs, ours, embeddings, labels, margin=MARGIN, **settings)
    references = random_batch(**BATCH | {"count": 70}, seed=1)
    assert_same(theirs, ours, embeddings, labels, references, margin=MARGIN, **settings)


@pytest.mark.parametrize("kind", ["all", "hard", "semihard"])
def test_their_miners_with_the_indexed_loss(kind):
    """Every triplet that violates the margin, and of those the hard and the semihard ones."""
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning import distances, losses, miners, reducers

    distance = partial(distances.LpDistance, normalize_embeddings=False)
    miner = miners.TripletMarginMiner(MARGIN, type_of_triplets=kind, distance=distance())
    loss = losses.TripletMarginLoss(MARGIN, distance=distance(), reducer=reducers.MeanReducer())
    embeddings, labels = random_batch(**BATCH)
    indices = miner(embeddings, labels)
    assert len(indices[0]) > 30

    def theirs(embeddings, labels):
        return loss(embeddings, labels, indices)

    def ours(embeddings, labels):
        return triplet_margin_loss_indexed(embeddings, *indices, margin=MARGIN, eps=0.0)

    assert_same(theirs, ours, embeddings, labels)


# The class, its method and our arguments.
SENTENCE_TRANSFORMERS = {
    "all": (
        "BatchAllTripletLoss",
        "batch_all_triplet_loss",
        {"mining": "all", "reduction": "mean_active"},
    ),
    "semihard": (
        "BatchSemiHardTripletLoss",
        "batch_semi_hard_triplet_loss",
        {"mining": "semihard"},
    ),
    "hard": ("BatchHardTripletLoss", "batch_hard_triplet_loss", {"mining": "hard"}),
    "hard, soft": (
        "BatchHardSoftMarginTripletLoss",
        "batch_hard_triplet_soft_margin_loss",
        {"mining": "hard", "soft": True, "margin": 0.0},
    ),
}


def sentence_transformers(name, distance="euclidean", margin=MARGIN):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    functions = losses.BatchHardTripletLossDistanceFunction
    settings = {
        "distance_metric": {
            "euclidean": functions.euclidean_distance,
            "squared": partial(functions.euclidean_distance, squared=True),
            "cosine": functions.cosine_distance,
        }[distance]
    }
    class_name, method, ours = SENTENCE_TRANSFORMERS[name]
    if "soft" not in ours:
        settings["margin"] = margin
    loss = getattr(losses, class_name)(None, **settings)
    return lambda embeddings, labels: getattr(loss, method)(labels, embeddings)


@pytest.mark.parametrize("distance", ["euclidean", "squared", "cosine"])
@pytest.mark.parametrize("name", SENTENCE_TRANSFORMERS)
def test_sentence_transformers(name, distance):
    embeddings, labels = random_batch(**BATCH)
    settings = {"margin": MARGIN, "distance": distance} | SENTENCE_TRANSFORMERS[name][2]
    theirs = sentence_transformers(name, distance)
    assert_mixed(batch_triplet_loss, embeddings, labels, **settings)
    assert_same(theirs, batch_triplet_loss, embeddings, labels, **settings)


def test_sentence_transformers_hard_counts_anchors_without_a_positive():
    """As if their positive were at distance 0; ours leaves them out."""
    embeddings, labels = random_batch(**BATCH)
    labels[5] = 99
    margin = 4.0

    def ours(embeddings, labels):
        valid = batch_triplet_loss(embeddings, labels, margin, "hard", reduction="none")
        others = torch.arange(len(labels)) != 5
        nearest = (embeddings[5] - embeddings[others]).norm(dim=1).min()
        return (valid.sum() + relu(margin - nearest)) / len(labels)

    assert_same(sentence_transformers("hard", margin=margin), ours, embeddings, labels)
