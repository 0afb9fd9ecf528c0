# SPDX-License-Identifier: BSD-3-Clause
"""Train an embedding of handwritten digits on the triplets of each batch, once for every mining.

The batch is all that the loss is given: images of ten classes, in no order. All runs start from the
same weights and see the same batches. Beside them stands the loss on one triplet drawn for each
image, as a data loader would draw it. The picture shows the held-out digits in two dimensions.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from batch_mining_picture import draw
from metric_learning import Digits, make_model, recall_at_1, split_digits
from timing import seconds
from torch import Tensor, nn
from tqdm import tqdm

import fused_ops
from fused_ops import batch_triplet_loss, triplet_margin_loss

SEED = 0
BATCHES = 300
BATCH_SIZE = 64  # of a larger one the hardest are outliers, and "hard" first collapses
LEARNING_RATE = 3e-3
MARGIN = 1.0

# The mean over the active triplets keeps the step long when most are satisfied.
MININGS = {
    "all": {"mining": "all", "reduction": "mean_active"},
    "semihard": {"mining": "semihard", "reduction": "mean_active"},
    "hard": {"mining": "hard", "soft": True},
}


def drawn_triplets(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss on one positive and one negative of each row, drawn from the batch."""
    same = labels[:, None] == labels
    positive = torch.multinomial(same.float().fill_diagonal_(1e-9), 1)[:, 0]
    negative = torch.multinomial((~same).float(), 1)[:, 0]
    return triplet_margin_loss(embeddings, embeddings[positive], embeddings[negative], MARGIN)


def losses() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """A function of embeddings and labels for each run."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"drawn": drawn_triplets}
    for name, settings in MININGS.items():
        found[name] = fused_ops.BatchTripletLoss(MARGIN, **settings)
    return found


def train(
    model: nn.Module, loss_function: Callable, digits: Digits, batches: Tensor, name: str
) -> float:
    """Trains on batches of indices; the seconds it took."""
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)

    def run() -> None:
        for batch in tqdm(batches, f"{name:9}", ncols=88, unit="batch"):
            loss = loss_function(model(digits.images[batch]), digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return seconds(batches.device, run)


def describe(points: Tensor, labels: Tensor) -> str:
    """What the batch loss finds in a trained embedding."""
    _, stats = batch_triplet_loss(points, labels, MARGIN, return_stats=True)
    return (
        f"{stats.active_fraction:8.1%}  {stats.positive_distance:8.2f}  "
        f"{stats.negative_distance:8.2f}"
    )


def check(recall: dict[str, float]) -> None:
    """Raises where a training has not improved the embedding; a NaN fails too."""
    for name in MININGS:
        if not recall[name] > recall["untrained"] + 0.05:
            raise RuntimeError(f"recall@1 of {name} is {recall[name]:.3f}: {recall}")


def run(device: torch.device, output: Path, *, batches: int = BATCHES) -> list[Path]:
    """Train with every mining, print how they compare, and return the files written."""
    training_set, test_set = split_digits(device)
    torch.manual_seed(SEED)
    drawn = torch.randint(len(training_set.labels), (batches, BATCH_SIZE)).to(device)
    initial = make_model(device)

    print("\nMining inside the batch: handwritten digits, batch triplet loss")
    print(f"  {batches} batches of {BATCH_SIZE} images, of which every triplet is looked at")
    first = initial(training_set.images[drawn[0]]), training_set.labels[drawn[0]]
    print(f"  {fused_ops.explain(batch_triplet_loss, *first, MARGIN)}\n")

    models, times = {"untrained": initial}, {}
    for name, loss_function in losses().items():
        models[name] = copy.deepcopy(initial)
        times[name] = train(models[name], loss_function, training_set, drawn, name)

    with torch.no_grad():
        points = {name: model(test_set.images) for name, model in models.items()}
    recall = {name: recall_at_1(rows, test_set.labels) for name, rows in points.items()}
    print(f"\nOn {len(test_set.labels)} held-out digits")
    print(f"  {'':10}  recall@1    active  positive  negative   training")
    for name, rows in points.items():
        taken = f"{times[name]:8.2f} s" if name in times else ""
        print(f"  {name:10}  {recall[name]:8.3f}  {describe(rows, test_set.labels)} {taken}")
    check(recall)

    picture = output / "batch_mining.png"
    draw(
        picture,
        test_set.images.cpu().numpy(),
        test_set.labels.cpu().numpy(),
        {f"{name}: recall@1 {recall[name]:.2f}": points[name].cpu().numpy() for name in times},
    )
    return [picture]
