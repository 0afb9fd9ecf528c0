# SPDX-License-Identifier: BSD-3-Clause
"""Train an embedding of handwritten digits twice: with torch's triplet loss and with the fused one.

Both runs start from the same weights and see the same triplets, so their loss curves agree up to
rounding. The embedding has two dimensions: the picture shows it as it is, without a projection.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from metric_learning_picture import draw
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timing import median_seconds, seconds
from torch import Tensor, nn
from tqdm import tqdm

import fused_ops

SEED = 0
HIDDEN = 256
DIMENSIONS = 2
MARGIN = 1.0
LEARNING_RATE = 0.05
MOMENTUM = 0.9
BATCHES = 600
BATCH_SIZE = 1024

# (rows, width) of the embeddings when the loss is timed alone; the first is the one trained here.
TIMED_SHAPES = ((BATCH_SIZE, DIMENSIONS), (256, 128), (8192, 256))

# While the weights are still alike, the losses differ by float32 rounding of a mean near 1, some
# 1e-7. SGD passes an error of the gradient on in proportion, so one of 0.1 % shows here already.
EARLY_BATCHES = 10
EARLY_TOLERANCE = 1e-5
# Later, rounding puts some triplet on the other side of the margin: its gradient appears or
# vanishes, and the runs drift apart. torch's own loss, computed in float64 and rounded back, drifts
# by up to 0.003 from itself over such trainings; several times that is allowed.
TOLERANCE = 0.02

Loss = Callable[..., Tensor]


@dataclass
class Digits:
    """Images [count, 64] with values in [0, 1], and their classes [count]."""

    images: Tensor
    labels: Tensor


class Training:
    """A copy of `initial` in training, with the loss and the seconds of every batch so far."""

    def __init__(self, loss_function: Loss, initial: nn.Module) -> None:
        self.loss_function = loss_function
        self.model = copy.deepcopy(initial)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, MOMENTUM)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, images: Tensor, triplet: Tensor) -> None:
        """One batch, timed; `triplet` [3, batch] indexes `images`."""
        self.seconds.append(seconds(images.device, self._update, images, triplet))

    def _update(self, images: Tensor, triplet: Tensor) -> None:
        anchor, positive, negative = self.model(images[triplet])
        loss = self.loss_function(anchor, positive, negative, margin=MARGIN)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def split_digits(device: torch.device) -> tuple[Digits, Digits]:
    """scikit-learn's digits as (train, test), 70 % and 30 % of every class, sorted by class."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.3, stratify=labels, random_state=SEED)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, parts)

    def sort(images: Tensor, labels: Tensor) -> Digits:
        labels, order = labels.sort(stable=True)
        return Digits(images[order].float().to(device), labels.to(device))

    return sort(train_images, train_labels), sort(test_images, test_labels)


def sample_triplets(labels: Tensor, batches: int) -> Tensor:
    """Random triplets as indices [batches, 3, BATCH_SIZE] of anchor, positive and negative.

    `labels` are sorted, so that a class is a range of indices: the positive is a step to another
    member of the anchor's range, the negative a step out of it.
    """
    generator = np.random.default_rng(SEED)
    classes = labels.cpu().numpy()
    total, sizes = len(classes), np.bincount(classes)
    starts = np.cumsum(sizes) - sizes

    anchor = generator.integers(total, size=(batches, BATCH_SIZE))
    start, size = starts[classes[anchor]], sizes[classes[anchor]]
    positive = start + (anchor - start + generator.integers(1, size)) % size
    negative = (start + size + generator.integers(total - size)) % total
    return torch.from_numpy(np.stack([anchor, positive, negative], axis=1)).to(labels.device)


def make_model(device: torch.device) -> nn.Module:
    """A multilayer perceptron from pixels to the embedding, the same weights at every call."""
    torch.manual_seed(SEED)
    layers = nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIMENSIONS)
    return nn.Sequential(*layers).to(device)


def train(
    initial: nn.Module, images: Tensor, triplets: Tensor, show_progress: bool
) -> dict[str, Training]:
    """Train with both losses, which take turns so that a busy machine slows both alike."""
    trainings = {
        "torch": Training(F.triplet_margin_loss, initial),
        "fused": Training(fused_ops.triplet_margin_loss, initial),
    }
    progress = tqdm(triplets, "Training", disable=not show_progress, ncols=88, unit="batch")
    for batch, triplet in enumerate(progress, start=1):
        for training in trainings.values():
            training.step(images, triplet)
        if batch % 50 == 0:
            progress.set_postfix({name: f"{t.losses[-1]:.4f}" for name, t in trainings.items()})
    return trainings


@torch.no_grad()
def recall_at_1(points: Tensor, labels: Tensor) -> float:
    """Share of points whose nearest other point is of the same class."""
    # Exact distances: by matrix multiplication close neighbours would lose their order.
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(torch.inf)
    return (labels[distances.argmin(dim=1)] == labels).double().mean().item()


def print_training_times(trainings: dict[str, Training]) -> None:
    """The whole training, and its median batch, which a busy moment of the machine spares."""
    print(f"\n{'Training':14}  {'total':>10}  median batch")
    for name, training in trainings.items():
        total, median = sum(training.seconds), statistics.median(training.seconds)
        print(f"  {name:12}  {total:8.2f} s  {median * 1e3:9.3f} ms")


def print_loss_times(device: torch.device) -> None:
    """The loss alone, which in the training above is a small share of the time."""

    def gradients(loss_function: Loss, inputs: list[Tensor]) -> None:
        torch.autograd.grad(loss_function(*inputs, margin=MARGIN), inputs)

    torch_gradients = partial(gradients, F.triplet_margin_loss)
    fused_gradients = partial(gradients, fused_ops.triplet_margin_loss)
    print("\nLoss alone, forward and backward, median")
    print(f"  {'embeddings':12}  {'torch':>10}  {'fused':>10}  torch / fused")
    for rows, width in TIMED_SHAPES:
        inputs = [torch.randn(rows, width, device=device, requires_grad=True) for _ in range(3)]
        times = median_seconds(device, torch_gradients, fused_gradients, inputs)
        columns = "  ".join(f"{1e3 * time:7.3f} ms" for time in times)
        print(f"  {f'{rows} x {width}':12}  {columns}  {times[0] / times[1]:13.2f}")


def check(trainings: dict[str, Training], before: float, after: float) -> None:
    """Raise if the loss curves disagree or recall@1 did not improve; a NaN fails too."""
    difference = np.abs(np.subtract(*(training.losses for training in trainings.values())))
    early, largest = difference[:EARLY_BATCHES].max(), difference.max()
    print("\nLargest difference of the two loss curves")
    print(f"  first {EARLY_BATCHES:<4} batches  {early:.1e}  (tolerance {EARLY_TOLERANCE:.0e})")
    print(f"  all {len(difference):<6} batches  {largest:.1e}  (tolerance {TOLERANCE:.0e})")
    if not (early <= EARLY_TOLERANCE and largest <= TOLERANCE):
        raise RuntimeError("the loss curves of torch and fused_ops disagree")
    if not after > before:
        raise RuntimeError(f"recall@1 did not improve: {before:.3f} before, {after:.3f} after")


def run(device: torch.device, output: Path, *, batches: int = BATCHES) -> list[Path]:
    """Train with both losses, print how they compare, and return the files written."""
    training_set, test_set = split_digits(device)
    triplets = sample_triplets(training_set.labels, batches)
    initial = make_model(device)

    print("\nMetric learning: handwritten digits, triplet margin loss")
    print(f"  {len(training_set.labels)} images, embedded in {DIMENSIONS} dimensions")
    print(f"  {batches} batches of {BATCH_SIZE} triplets")
    first_batch = initial(training_set.images[triplets[0]])
    print(f"  {fused_ops.explain(fused_ops.triplet_margin_loss, *first_batch, margin=MARGIN)}\n")

    # What only the first calls pay for stays out of the times.
    train(initial, training_set.images, triplets[:10], show_progress=False)
    trainings = train(initial, training_set.images, triplets, show_progress=True)

    models = {"before": initial}
    models |= {f"after, {name}": training.model for name, training in trainings.items()}
    with torch.no_grad():
        embeddings = {name: model(test_set.images) for name, model in models.items()}
    embeddings["64 pixels"] = test_set.images
    recall = {name: recall_at_1(points, test_set.labels) for name, points in embeddings.items()}

    print(f"\nRecall@1 on {len(test_set.labels)} held-out digits")
    for name, value in recall.items():
        print(f"  {name:12}  {value:8.3f}")
    print_training_times(trainings)
    print_loss_times(device)
    check(trainings, recall["before"], recall["after, fused"])

    titles = {"before": "Before training", "after, fused": "After training with the fused loss"}
    picture = output / "metric_learning.png"
    draw(
        picture,
        test_set.images.cpu().numpy(),
        test_set.labels.cpu().numpy(),
        {
            f"{title}\nrecall@1 {recall[name]:.2f}": embeddings[name].cpu().numpy()
            for name, title in titles.items()
        },
        {name: training.losses for name, training in trainings.items()},
    )
    return [picture]
