# SPDX-License-Identifier: BSD-3-Clause
"""What a benchmark case is: something that several implementations do, timed one after another."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import measure, rows
from fused_ops._support import name_of


@dataclass
class Case(ABC):
    case: str  # what is done, such as forward, train or phi
    count: int  # rows, or particles
    dim: int
    dtype: torch.dtype
    device: str
    bandwidth: float  # of the device, in bytes a second
    variant: str = ""  # what is unusual about it, such as autocast

    op = ""  # the op's name, given by the subclass

    @property
    def title(self) -> str:
        shape = f"({self.count}, {self.dim})"
        what = " ".join(filter(None, [self.op, self.case, self.variant]))
        return f"{what} {shape} {name_of(self.dtype)} on {self.device}"

    @abstractmethod
    def make_inputs(self) -> None:
        """Makes what the implementations are called with; not before a case is run."""

    @abstractmethod
    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Callables by name, "fused" first."""

    @abstractmethod
    def results(self, call: Callable) -> list[torch.Tensor]:
        """What an implementation computes, to be compared with `exact`."""

    @abstractmethod
    def exact(self) -> list[torch.Tensor]:
        """The results in float64."""

    def moved_bytes(self) -> int | None:
        """Bytes that must pass through device memory; None where they are not the limit."""
        return None

    def measure(self) -> list[dict]:
        # A recompilation limit reached by earlier cases would make the compiled baseline eager.
        torch._dynamo.reset()
        self.make_inputs()
        exact = self.exact()
        measured = []
        for name, call in self.implementations().items():
            found = errors(self.results(call), exact)
            row = {
                "op": self.op,
                "case": self.case,
                "variant": self.variant,
                "shape": [self.count, self.dim],
                "dtype": name_of(self.dtype),
                "impl": name,
            }
            row |= found | measure.measure(call, self.device)
            if self.device == "cuda" and (moved := self.moved_bytes()):
                row["sol"] = moved / row["time_us"] * 1e6 / self.bandwidth
            measured.append(row | rows.environment(self.device))
        return measured


def errors(results: list[torch.Tensor], exact: list[torch.Tensor]) -> dict:
    """The largest over all results; rel_err is relative to the norm of each."""
    differences = [(a.double() - b).abs() for a, b in zip(results, exact, strict=True)]
    return {
        "max_abs_err": max(d.max().item() for d in differences),
        "mean_abs_err": max(d.mean().item() for d in differences),
        "rel_err": max(
            (d.norm() / b.norm()).item() for d, b in zip(differences, exact, strict=True)
        ),
    }
