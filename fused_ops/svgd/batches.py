# SPDX-License-Identifier: BSD-3-Clause
"""Mini-batches without end, which a later run takes up where an earlier one stopped."""

from collections.abc import Iterable
from typing import Any

import torch


class Batches:
    """Passes over an iterable, again and again.

    A place in a pass cannot be saved as such. What can is how many batches of the pass are taken,
    and the state at its start of the generators that may shuffle it: torch's default one and those
    of a DataLoader. From there the same pass comes again.
    """

    def __init__(self) -> None:
        self._source = self._iterator = None
        self._taken = 0
        self._at_start = []  # states of the generators at the start of the pass
        self._saved = None  # a loaded state that no source has taken up yet

    def next(self, source: Iterable) -> Any:
        """The next batch. Another source than before begins a pass of its own."""
        if source is not self._source:
            self._open(source)
        try:
            return self._take()
        except StopIteration:
            self._start_pass()
        try:
            return self._take()
        except StopIteration:
            raise ValueError(
                "batches: expected an iterable that yields at least one batch each time it is "
                f"iterated over, got {type(source).__name__} with none (left)"
            ) from None

    def state_dict(self) -> dict[str, Any] | None:
        if self._source is None:
            return self._saved
        return {
            "taken": self._taken,
            "at_start": self._at_start,
            "now": [generator.get_state() for generator in _generators(self._source)],
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self.__init__()
        self._saved = state

    def _open(self, source: Iterable) -> None:
        self._source, saved, self._saved = source, self._saved, None
        if saved is None:
            return self._start_pass()
        generators = _generators(source)
        if len(generators) != len(saved["now"]):
            raise ValueError(
                f"batches: expected {len(saved['now']) - 1} generators, as those of the saved run "
                f"had, got {len(generators) - 1}"
            )
        default = generators[0].get_state()
        for generator, state in zip(generators, saved["at_start"], strict=True):
            generator.set_state(state)
        self._start_pass()
        try:
            for _ in range(saved["taken"]):
                self._take()
        except StopIteration:
            raise ValueError(
                f"batches: expected those of the saved run, which took {saved['taken']} of a pass, "
                f"got {self._taken}"
            ) from None
        for generator, state in zip(generators, [default, *saved["now"][1:]], strict=True):
            generator.set_state(state)

    def _start_pass(self) -> None:
        self._at_start = [generator.get_state() for generator in _generators(self._source)]
        self._taken = 0
        self._iterator = iter(self._source)

    def _take(self) -> Any:
        batch = next(self._iterator)
        self._taken += 1
        return batch


def _generators(source: Iterable) -> list[torch.Generator]:
    """Torch's default generator, and those that a DataLoader or its sampler holds."""
    own = (getattr(part, "generator", None) for part in (source, getattr(source, "sampler", None)))
    return [torch.default_generator, *(g for g in own if isinstance(g, torch.Generator))]
