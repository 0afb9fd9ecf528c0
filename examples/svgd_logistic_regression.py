# SPDX-License-Identifier: BSD-3-Clause
"""Bayesian logistic regression with Stein variational gradient descent, beside the plain one.

The model is that of Liu & Wang (NeurIPS 2016, https://arxiv.org/abs/1608.04471): a label is 1 with
probability sigmoid(w . x), the weights are w ~ N(0, I / alpha), and alpha ~ Gamma(1, rate 0.01). A
particle holds w and log alpha. `score`, `fit` and `predict` serve any data set with two classes.

A hundred particles in 32 dimensions serve to predict, not to tell how uncertain a weight is: their
deviations are less than half of those that Hamiltonian Monte Carlo finds.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.preprocessing import StandardScaler
from svgd_logistic_regression_picture import draw
from torch import Tensor
from tqdm import tqdm

import fused_ops

SEED = 0
FOLDS = 5
PARTICLES = 100
STEPS = 500
LEARNING_RATE = 0.05
RATE = 0.01  # of alpha's prior

# What the Bayesian model may lose against the plain one. They differ in their priors, and so in
# accuracy on the rows near the boundary, some five of 569 here: were each of these a coin toss, the
# accuracies would differ by 0.004. The log-likelihoods differ by some 0.006, and by 0.02 where the
# particles collapse into one.
ACCURACY_MARGIN = 0.01
LOG_LIKELIHOOD_MARGIN = 0.01


def with_intercept(features: Tensor) -> Tensor:
    """`features` [rows, dim] with a column of ones, whose weight is the intercept."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def score(particles: Tensor, features: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """Gradient of the log posterior at every particle, [count, dim + 1].

    Args:
        particles: [count, dim + 1], each w and log alpha.
        features: [rows, dim]; the intercept, if wanted, is a column of ones.
        labels: [rows], 0 or 1, in the dtype of the features.
        scale: rows of the data set for each row given here, for minibatches.
    """
    weights, alpha = particles[:, :-1], particles[:, -1:].exp()
    residuals = labels - torch.sigmoid(weights @ features.T)
    weight_score = scale * residuals @ features - alpha * weights
    dim = weights.shape[1]
    # The density of log alpha is that of alpha times alpha, which is where the 1 comes from.
    norms = weights.square().sum(dim=1, keepdim=True)
    alpha_score = 1 + dim / 2 - alpha * (RATE + norms / 2)
    return torch.cat([weight_score, alpha_score], dim=1)


def draw_prior(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws from the prior, [count, dim + 1]."""
    alpha = torch.empty(count, 1).exponential_(RATE, generator=generator)
    weights = torch.randn(count, dim, generator=generator) / alpha.sqrt()
    return torch.cat([weights, alpha.log()], dim=1)


def fit(
    features: Tensor,
    labels: Tensor,
    *,
    count: int = PARTICLES,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    batch_size: int | None = None,
    seed: int = SEED,
    on_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Particles of the posterior, [count, dim + 2]: weights, intercept and log alpha.

    Args:
        features: [rows, dim], float32, standardised.
        labels: [rows], 0 or 1.
        count: number of particles.
        steps: number of updates, each through Adam.
        learning_rate: Adam's.
        batch_size: rows drawn for every update; None takes all of them.
        seed: of the first particles, drawn from the prior, and of the batches.
        on_step: called after every update.
    """
    generator = torch.Generator().manual_seed(seed)
    features, labels = with_intercept(features), labels.to(features)
    particles = draw_prior(count, features.shape[1], generator).to(features)
    optimizer = torch.optim.Adam([particles], learning_rate)
    batch, scale = slice(None), 1.0
    for _ in range(steps):
        if batch_size is not None:
            batch = torch.randint(len(features), (batch_size,), generator=generator)
            scale = len(features) / batch_size
        # An optimizer descends, the particles ascend.
        gradient = score(particles, features[batch], labels[batch], scale)
        particles.grad = -fused_ops.svgd_phi(particles, gradient)
        optimizer.step()
        on_step()
    return particles


def predict_each(particles: Tensor, features: Tensor) -> Tensor:
    """Probability of label 1 by each of the particles of `fit`, [rows, count], float64."""
    weights = particles[:, :-1].double()
    return torch.sigmoid(with_intercept(features.double()) @ weights.T)


def predict(particles: Tensor, features: Tensor) -> Tensor:
    """Probability of label 1, [rows], float64: the mean over the particles of `fit`."""
    return predict_each(particles, features).mean(dim=1)


def cross_validate(
    features: np.ndarray, labels: np.ndarray, device: torch.device, steps: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Fit both models without each fold in turn, on features standardised by the other rows.

    Returns each model's probability of label 1 for every row, [rows], by the fit that held the row
    out; the particles' 5 % and 95 % quantiles of it, [2, rows]; and the last fit's weights,
    [PARTICLES, dim], without the intercept.
    """
    plain, bayesian = np.empty((2, len(labels)))
    interval = np.empty((2, len(labels)))
    splits = StratifiedKFold(FOLDS, shuffle=True, random_state=SEED).split(features, labels)
    with tqdm(total=FOLDS * steps, desc="Fitting", ncols=88, unit="step") as progress:
        for train, test in splits:
            standardised = StandardScaler().fit(features[train]).transform(features)
            model = LogisticRegression().fit(standardised[train], labels[train])
            plain[test] = model.predict_proba(standardised[test])[:, 1]

            inputs = torch.from_numpy(standardised).float().to(device)
            targets = torch.from_numpy(labels[train]).to(device)
            particles = fit(inputs[train], targets, steps=steps, on_step=progress.update)
            bayesian[test] = predict(particles, inputs[test]).cpu()
            each = predict_each(particles, inputs[test]).cpu().numpy()
            interval[:, test] = np.quantile(each, (0.05, 0.95), axis=1)
    probabilities = {"logistic regression": plain, "Bayesian, SVGD": bayesian}
    return probabilities, interval, particles[:, :-2].cpu().numpy()


def check(plain: tuple[float, float], bayesian: tuple[float, float]) -> None:
    """Raise if the Bayesian model's accuracy or log-likelihood is below the plain one's."""
    margins = ACCURACY_MARGIN, LOG_LIKELIHOOD_MARGIN
    lost = [before - after for before, after in zip(plain, bayesian, strict=True)]
    if not all(loss <= margin for loss, margin in zip(lost, margins, strict=True)):
        raise RuntimeError("Bayesian logistic regression is worse than the plain one")


def run(device: torch.device, output: Path, *, steps: int = STEPS) -> list[Path]:
    """Cross-validate both models, print how they compare, and return the files written."""
    data = load_breast_cancer()
    features, labels = data.data, data.target
    rows, dim = features.shape
    particles = draw_prior(PARTICLES, dim + 1, torch.Generator()).to(device)
    print("\nBayesian logistic regression: breast cancer, malignant or benign, by SVGD")
    print(f"  {rows} rows of {dim} features, {FOLDS}-fold cross-validation")
    print(f"  {PARTICLES} particles, {steps} steps")
    # The path depends on shape, dtype and device, which a score shares with its particles.
    print(f"  {fused_ops.explain(fused_ops.svgd_phi, particles, score=particles)}\n")

    probabilities, interval, weights = cross_validate(features, labels, device, steps)
    results = {
        name: (accuracy_score(labels, model > 0.5), -log_loss(labels, model))
        for name, model in probabilities.items()
    }
    print(f"\n{'Held-out rows':21}  accuracy  log-likelihood")
    for name, (accuracy, log_likelihood) in results.items():
        print(f"  {name:19}  {accuracy:8.3f}  {log_likelihood:14.3f}")
    check(*results.values())

    picture = output / "svgd_logistic_regression.png"
    named_weights = dict(zip(data.feature_names, weights.T, strict=True))
    draw(picture, labels, probabilities["Bayesian, SVGD"], interval, named_weights)
    return [picture]
