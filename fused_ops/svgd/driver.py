# SPDX-License-Identifier: BSD-3-Clause
"""Whole runs of Stein variational gradient descent."""

import contextlib
import copy
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fused_ops._support import accumulate_dtype
from fused_ops.svgd.batches import Batches
from fused_ops.svgd.discrepancy import ksd
from fused_ops.svgd.function import check_number, check_update, svgd_phi
from fused_ops.svgd.layout import Layout, Particles


class SVGD:
    r"""Stein variational gradient descent with any optimiser of torch.optim.

    Each step gives the optimiser the direction of `svgd_phi`, with the score divided by the
    temperature T:

    .. math::
        \phi_i = \frac{1}{N} \sum_j \left[ \frac{1}{T} K_{ij}\, score_j
                 + repulsion \cdot \nabla_{x_j} K_{ij} \right]

    T = 1 samples the density p, other temperatures sample :math:`p^{1/T}`; an annealed run starts
    hot, where repulsion spreads the particles, and ends at 1.

    Args:
        particles: where they start: (N, dim), or a dict of (N, \*shape) tensors by parameter name,
            of one floating-point dtype and device. They are copied.
        log_density: a function of the particles that returns their log densities, (N,), up to a
            constant; autograd takes the score. It is called with all particles at once, a tensor or
            dict as given, and in steps with a batch as ``log_density(particles, batch)``. The
            `log_prob` of a `torch.distributions` posterior is one. Scale the likelihood of a
            mini-batch by the number of batches.
        score: instead of it, a function that returns the gradients of the log density, a tensor or
            dict like the particles.
        optimizer: a function of a list of parameters that returns a `torch.optim.Optimizer`
            whose steps need no closure: a class, or
            ``functools.partial(torch.optim.Adam, lr=0.1)``.
            Default: `torch.optim.Adam` with ``lr=0.01``
        scheduler: a function of the optimiser that returns a learning rate scheduler, stepped once
            a step. Default: None
        temperature: T > 0, a number or a function of the number of steps taken; ``math.inf`` leaves
            repulsion alone. Default: 1.0
        bandwidth: as in `svgd_phi`. Default: "median"
        kernel: "rbf" or "imq". Default: "rbf"
        repulsion: factor of the repulsive term. Default: 1.0
        precision: as in `svgd_phi`. Default: "high"

    Attributes:
        particles: as they are now, in the form given: views, which later steps move. Clone them to
            keep them.
        steps_taken: how many steps have been.
        history: lists of numbers by name, one entry for each recorded step, see `run`.
        optimizer, scheduler: what the functions have returned.

    Raises:
        TypeError: an argument of a wrong type, or particles or score that are not floating point.
        ValueError: both or neither of ``log_density`` and ``score``; no particles; shapes, devices,
            names or dtypes that do not fit together; a bandwidth, kernel, precision or temperature
            that is none. `step` and `run` raise these for what the functions return.

    Example::

        >>> posterior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
        >>> sampler = fused_ops.SVGD(torch.randn(100, 2) + 5, posterior.log_prob)
        >>> particles = sampler.run(1000)

        The likelihood of a module, one network a particle:

        >>> start = {name: torch.randn(20, *p.shape) for name, p in net.named_parameters()}
        >>> def log_density(parameters, batch):
        ...     x, y = batch
        ...     outputs = torch.vmap(lambda p: torch.func.functional_call(net, p, (x,)))(parameters)
        ...     likelihood = -(outputs - y).square().sum((1, 2)) / (2 * 0.1**2) * len(loader)
        ...     prior = sum(-p.square().reshape(20, -1).sum(1) / 2 for p in parameters.values())
        ...     return likelihood + prior
        >>> sampler = fused_ops.SVGD(start, log_density)
        >>> parameters = sampler.run(2000, loader, stop={"movement": 1e-4})

        The loop by hand, which stays as simple where a run needs no more:

        >>> particles = torch.randn(100, 2) + 5
        >>> optimizer = torch.optim.Adam([particles], lr=0.01)
        >>> for _ in range(1000):
        ...     particles.grad = -fused_ops.svgd_phi(particles, lambda x: -x)
        ...     optimizer.step()

    Source: Liu & Wang, "Stein Variational Gradient Descent", NeurIPS 2016,
    https://arxiv.org/abs/1608.04471; annealing: D'Angelo & Fortuin, "Annealed Stein Variational
    Gradient Descent", 2021, https://arxiv.org/abs/2101.09815
    """

    def __init__(
        self,
        particles: Particles,
        log_density: Callable[..., torch.Tensor] | None = None,
        score: Callable[..., Particles] | None = None,
        *,
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        temperature: float | Callable[[int], float] = 1.0,
        bandwidth: str | float | torch.Tensor = "median",
        kernel: str = "rbf",
        repulsion: float = 1.0,
        precision: str = "high",
    ) -> None:
        if (log_density is None) == (score is None):
            raise ValueError("expected one of log_density and score, got both or neither")
        functions = {"log_density": log_density, "score": score, "scheduler": scheduler}
        for name, function in (functions | {"optimizer": optimizer}).items():
            if function is not None and not callable(function):
                raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
        self._layout = Layout(particles)
        flat = self._layout.flatten("particles", particles).detach()
        self._flat = flat.clone(memory_format=torch.contiguous_format)
        self._log_density, self._score, self._temperature = log_density, score, temperature
        self._bandwidth_and_kernel = {"bandwidth": bandwidth, "kernel": kernel}
        self._settings = {"repulsion": repulsion, "precision": precision}
        self._settings |= self._bandwidth_and_kernel
        check_update(self._flat, self._flat, **self._settings)
        if not callable(temperature):
            _check_temperature(temperature)
        self.steps_taken = 0
        self.history: dict[str, list[float]] = {"step": [], "movement": [], "ksd": []}
        if log_density is not None:
            self.history["log_density"] = []
        self.optimizer = (optimizer or _adam)([self._flat])
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer: expected a function that returns a torch.optim.Optimizer, got one that "
                f"returns {type(self.optimizer).__name__}"
            )
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self._batches = Batches()

    @property
    def particles(self) -> Particles:
        return self._layout.view(self._flat)

    def run(
        self,
        steps: int,
        batches: Iterable | None = None,
        *,
        progress: bool = True,
        callbacks: Sequence[Callable[["SVGD"], Any]] = (),
        stop: Mapping[str, float] | Callable[["SVGD"], bool] | None = None,
        record: int | None = 50,
    ) -> Particles:
        """Takes steps, and records every so many of them in the history.

        A recorded step adds to ``history["step"]`` its number, from 1 on; to "movement" the mean
        Euclidean distance that it moved the particles; and of the particles that it started from,
        with its batch, to "ksd" the squared discrepancy `ksd` ("v", with the bandwidth and kernel
        of the run, at temperature 1) and to "log_density" the mean, where there is a function of
        it. The host waits for the device on these steps and on no others.

        Args:
            steps: how many.
            batches: mini-batches, such as a `torch.utils.data.DataLoader`; each step takes the
                next, in as many passes as it needs. A run with the same object as the last goes on
                where that stopped. Default: None
            progress: whether to show a bar of tqdm, if that is installed. Default: True
            callbacks: functions that are called with the sampler after every step, for checkpoints
                or pictures.
            stop: ends the run early, after a recorded step: either tolerances by name, of which one
                has been reached by the history's last entry, such as ``{"movement": 1e-4}`` or
                ``{"ksd": 1e-3}``, or a function of the sampler. Adam's movement dies out with
                its learning rate only, which a scheduler can lower. Default: None
            record: every how many steps to record; None for never. A record takes about as long
                as two more steps, with "imq" longer. Default: 50

        Returns:
            The particles, as the attribute.

        Raises:
            TypeError, ValueError: bad arguments, batches that yield none, or as the class.
        """
        if not isinstance(steps, numbers.Integral) or steps < 0:
            raise ValueError(f"steps: expected a number of steps, got {steps!r}")
        if record is not None and (not isinstance(record, numbers.Integral) or record < 1):
            raise ValueError(f"record: expected a positive number of steps or None, got {record!r}")
        reached = self._stop_rule(stop, record)
        with _bar(steps, progress) as bar:
            for _ in range(steps):
                batch = () if batches is None else (self._batches.next(batches),)
                recorded = record is not None and (self.steps_taken + 1) % record == 0
                self._step(batch, recorded)
                for callback in callbacks:
                    callback(self)
                if bar is not None:
                    if recorded:
                        bar.set_postfix({k: v[-1] for k, v in self.history.items() if k != "step"})
                    bar.update()
                if recorded and reached(self):
                    break
        return self.particles

    def step(self, batch: Any = None) -> None:
        """Takes one step, with a batch or without, and records nothing."""
        self._step(() if batch is None else (batch,), False)

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on bit for bit: a copy, which ``torch.load`` can read with
        ``weights_only=True``.

        It holds particles, optimiser, scheduler, number of steps, history, the place in the
        batches, and the states of torch's default generators, from which log densities and shuffled
        batches may draw. The functions are not in it.
        """
        return copy.deepcopy(self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a run from its `state_dict`, in a sampler made with the same arguments.

        Sets torch's default generators too. The next run with batches goes on in the pass of the
        saved one, provided that its batches come in the same order each time, as those of a list
        do, or are shuffled by torch's default generator or by a DataLoader's. The batches before
        are skipped.

        Args:
            state: what `state_dict` has returned.

        Raises:
            TypeError: particles of another dtype.
            ValueError: particles of other names or shapes, a scheduler in one of the two only, or
                other entries.
        """
        state = copy.deepcopy(dict(state))
        if other := self._state().keys() ^ state.keys():
            raise ValueError(f"state: expected what state_dict returns, got other {sorted(other)}")
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError("state: expected a scheduler in both the state and the sampler")
        self._flat.copy_(self._layout.flatten("state['particles']", state["particles"]))
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.steps_taken, self.history = state["steps_taken"], state["history"]
        self._batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["generators"]["cpu"].cpu())
        if state["generators"]["cuda"] is not None and self._flat.device.type == "cuda":
            torch.cuda.set_rng_state(state["generators"]["cuda"].cpu(), self._flat.device)

    def _state(self) -> dict[str, Any]:
        device = self._flat.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return {
            "particles": self.particles,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "steps_taken": self.steps_taken,
            "history": self.history,
            "batches": self._batches.state_dict(),
            "generators": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    @torch.no_grad()
    def _step(self, batch: tuple, recorded: bool) -> None:
        score, log_density = self._evaluate(batch)
        temperature = self._temperature
        if callable(temperature):
            _check_temperature(temperature := temperature(self.steps_taken))
        driving = score if temperature == 1 else score / temperature
        self._flat.grad = svgd_phi(self._flat, driving, **self._settings).neg_()
        before = self._flat.clone() if recorded else None
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.steps_taken += 1
        if recorded:
            self._record(before, score, log_density)

    @torch.enable_grad()
    def _evaluate(self, batch: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The score, (N, dim), and the log densities where there is a function of them."""
        if self._score is not None:
            score = self._score(self._layout.view(self._flat), *batch)
            return self._layout.flatten("score", score), None
        particles = self._flat.detach().requires_grad_()
        values = self._log_density(self._layout.view(particles), *batch)
        expected = f"log_density: expected a tensor of shape ({self._layout.count},), "
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"{expected}got {type(values).__name__}")
        if values.shape != (self._layout.count,):
            raise ValueError(f"{expected}one value a particle, got shape {tuple(values.shape)}")
        if not values.requires_grad:
            raise ValueError(f"{expected}which autograd can lead back to the particles")
        (score,) = torch.autograd.grad(values.sum(), particles)
        return score, values.detach()

    def _record(self, before, score, log_density) -> None:
        dtype = accumulate_dtype(before.dtype)
        values = [
            (self._flat.to(dtype) - before.to(dtype)).norm(dim=1).mean(),
            ksd(before, score, statistic="v", **self._bandwidth_and_kernel),
        ]
        if log_density is not None:
            values.append(log_density.to(dtype).mean())
        row = [self.steps_taken, *torch.stack(values).tolist()]
        for column, value in zip(self.history.values(), row, strict=True):
            column.append(value)

    def _stop_rule(self, stop, record) -> Callable[["SVGD"], bool]:
        if stop is None:
            return lambda sampler: False
        if record is None:
            raise ValueError("stop: expected record to be a number of steps, got None")
        if callable(stop):
            return stop
        if not isinstance(stop, Mapping) or not stop or stop.keys() - {"movement", "ksd"}:
            raise ValueError(
                f"stop: expected a function or a dict of movement, ksd or both, got {stop!r}"
            )
        for name, tolerance in stop.items():
            check_number(f"stop[{name!r}]", tolerance)
        return lambda sampler: any(
            sampler.history[name][-1] <= tolerance for name, tolerance in stop.items()
        )


def _adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def _check_temperature(value: float) -> None:
    check_number("temperature", value)
    if not value > 0:
        raise ValueError(f"temperature: expected a positive number, got {value!r}")


def _bar(steps: int, progress: bool) -> contextlib.AbstractContextManager:
    if progress:
        with contextlib.suppress(ImportError):
            from tqdm.auto import tqdm

            return tqdm(total=steps, desc="SVGD", unit="step")
    return contextlib.nullcontext()
