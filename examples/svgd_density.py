# SPDX-License-Identifier: BSD-3-Clause
"""Move a clump of particles onto two moons with Stein variational gradient descent.

The density is two half circles drawn with a blurred pen. Only its score is used, which autograd
takes of the log density, so any differentiable density can stand in its place.
"""

import math
from pathlib import Path

import torch
from svgd_density_picture import animate, draw
from timing import median_seconds
from torch import Tensor
from tqdm import tqdm

import fused_ops
from fused_ops.svgd import reference

SEED = 0
PARTICLES = 500
STEPS = 1000
STEP_SIZE = 0.3
# The paper's rule, about half the default: the particles settle more evenly.
BANDWIDTH = "paper"
START, START_SPREAD = (-1.85, -1.55), 0.12
EARLY_STEP = 40  # shown between the first and the last
# The GIF's steps, close together at first and as far as there is something to see.
FRAMES, LAST_FRAME_STEP = 56, 400

PEN_WIDTH = 0.22
PEN_STROKES = 64
GRID_REACH, GRID_POINTS = 2.35, 240

# Independent draws from the density miss its mean by 1 / sqrt(PARTICLES) of its deviation, and its
# covariance by somewhat more of its norm. Particles that space themselves out must do better. A
# repulsion that is wrong by a quarter does not, one of the wrong sign is far off.
MOMENT_TOLERANCE = 1 / math.sqrt(PARTICLES)

# (particles, dim) where an update is timed and compared.
TIMED_SHAPES = ((100, 2), (PARTICLES, 2), (1024, 32))
# float32 sums agree to 1e-6; a GPU that multiplies in TF32 errs by some 1e-4.
UPDATE_TOLERANCE = 1e-3


def moons(device: torch.device) -> Tensor:
    """Centres of the pen strokes, [2 * PEN_STROKES, 2]: two interleaved half circles of radius 1.

    They are placed as in scikit-learn's make_moons, then shifted to a mean of zero.
    """
    angle = torch.linspace(0, math.pi, PEN_STROKES, device=device)
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    centres = torch.cat([upper, torch.tensor([1.0, 0.5], device=device) - upper])
    return centres - centres.mean(dim=0)


def log_density(points: Tensor) -> Tensor:
    """Log density of the moons at `points` [count, 2], up to a constant: [count]."""
    distances = (points[:, None] - moons(points.device)).square().sum(dim=-1)
    return (-distances / (2 * PEN_WIDTH**2)).logsumexp(dim=1)


def score(points: Tensor) -> Tensor:
    """Gradient of the log density at every point, [count, 2]."""
    points = points.detach().requires_grad_()
    return torch.autograd.grad(log_density(points).sum(), points)[0]


def start(device: torch.device) -> Tensor:
    """A tight clump of particles [PARTICLES, 2], away from the density."""
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(PARTICLES, 2, generator=generator)
    return (torch.tensor(START) + START_SPREAD * noise).to(device)


def move(particles: Tensor, steps: int) -> list[Tensor]:
    """The particles [PARTICLES, 2] at the start and after every step."""
    path = [particles]
    for _ in tqdm(range(steps), "Moving", ncols=88, unit="step"):
        particles = fused_ops.svgd_step(particles, score, STEP_SIZE, bandwidth=BANDWIDTH)
        path.append(particles)
    return path


def density_grid(device: torch.device) -> tuple[Tensor, Tensor]:
    """Points [GRID_POINTS**2, 2] of a square grid, row by row, and their probabilities."""
    axis = torch.linspace(-GRID_REACH, GRID_REACH, GRID_POINTS, device=device)
    points = torch.cartesian_prod(axis, axis).flip(1)
    return points, log_density(points).softmax(dim=0)


def mean_and_covariance(points: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Moments, [2] and [2, 2], of `points` [count, 2] with `probabilities` [count]."""
    points, probabilities = points.double(), probabilities.double()
    mean = probabilities @ points
    centred = points - mean
    return mean, centred.T @ (probabilities[:, None] * centred)


def moment_errors(particles: Tensor, grid: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """Errors of the particles' mean, in deviations of the density, and covariance, relative."""
    weights = particles.new_full((len(particles),), 1 / len(particles))
    mean, covariance = mean_and_covariance(particles, weights)
    exact_mean, exact_covariance = mean_and_covariance(grid, probabilities)
    mean_error = (mean - exact_mean).abs() / exact_covariance.diagonal().sqrt()
    covariance_error = (covariance - exact_covariance).norm() / exact_covariance.norm()
    return mean_error.max().item(), covariance_error.item()


def check_moments(particles: dict[int, Tensor], grid: Tensor, probabilities: Tensor) -> None:
    """Raise if the last particles do not have the density's mean and covariance; a NaN fails too.

    `particles` [PARTICLES, 2] by step.
    """
    print("\nError of the particles' moments  mean  covariance")
    for step, moved in particles.items():
        errors = moment_errors(moved, grid, probabilities)
        print(f"  {f'after {step} steps':27}  {errors[0]:7.3f}  {errors[1]:10.3f}")
    print(f"  {'tolerance':27}  {MOMENT_TOLERANCE:7.3f}  {MOMENT_TOLERANCE:10.3f}")
    if not all(error <= MOMENT_TOLERANCE for error in errors):
        raise RuntimeError("the particles do not have the density's mean and covariance")


def reference_phi(particles: Tensor, score: Tensor) -> Tensor:
    """The update of `fused_ops.svgd_phi` in plain PyTorch."""
    bandwidth = reference.bandwidth(particles, "median")
    return reference.phi(particles, score, bandwidth, kernel="rbf", repulsion=1.0)


def compare_updates(device: torch.device) -> None:
    """Time the fused update beside the plain one; raise if they differ."""
    print("\nUpdate alone, bandwidth included, median")
    print(f"  {'particles':12}  {'torch':>10}  {'fused':>10}  torch / fused  difference")
    for shape in TIMED_SHAPES:
        inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(SEED)).to(device)
        times = median_seconds(device, reference_phi, fused_ops.svgd_phi, *inputs)
        expected = reference_phi(*inputs)
        difference = (fused_ops.svgd_phi(*inputs) - expected).abs().max() / expected.abs().max()
        columns = "  ".join(f"{1e3 * time:7.3f} ms" for time in times)
        ratio = times[0] / times[1]
        print(f"  {'{} x {}'.format(*shape):12}  {columns}  {ratio:13.2f}  {difference:10.1e}")
        if not difference <= UPDATE_TOLERANCE:
            raise RuntimeError(f"the updates of {shape} particles in torch and fused_ops differ")


def run(device: torch.device, output: Path, *, steps: int = STEPS) -> list[Path]:
    """Move the particles, print how well and how fast, and return the files written."""
    particles = start(device)
    print("\nStein variational gradient descent: a clump of particles moves onto two moons")
    print(f"  {PARTICLES} particles, {steps} steps of {STEP_SIZE}")
    print(f"  {fused_ops.explain(fused_ops.svgd_step, particles, score, STEP_SIZE)}\n")

    path = move(particles, steps)
    shown = {step: path[step] for step in (0, EARLY_STEP, steps)}
    grid, probabilities = density_grid(device)
    compare_updates(device)
    check_moments(shown, grid, probabilities)

    picture, film = output / "svgd_density.png", output / "svgd_density.gif"
    density = probabilities.view(GRID_POINTS, GRID_POINTS).cpu().numpy()
    panels = {f"After {step} steps" if step else "Start": moved for step, moved in shown.items()}
    draw(picture, density, GRID_REACH, {title: p.cpu().numpy() for title, p in panels.items()})
    last = min(steps, LAST_FRAME_STEP)
    film_steps = [round(last * (frame / FRAMES) ** 2) for frame in range(FRAMES + 1)]
    animate(film, density, GRID_REACH, {step: path[step].cpu().numpy() for step in film_steps})
    return [picture, film]
