# SPDX-License-Identifier: BSD-3-Clause
"""Particles in a user's form, and as the matrix that the ops take."""

from collections.abc import Mapping
from typing import Any

import torch

from fused_ops._support import check_floating

Particles = torch.Tensor | dict[str, torch.Tensor]


class Layout:
    """How particles lie in a matrix (N, dim): as they are, or a dict's tensors side by side."""

    def __init__(self, particles: Particles) -> None:
        self.is_dict = isinstance(particles, Mapping)
        parts = _named("particles", particles) if self.is_dict else {"particles": particles}
        if not parts:
            raise ValueError("particles: expected a tensor or a dict of tensors, got an empty dict")
        for name, part in parts.items():
            check_floating(name, part)
            if part.dim() < 1 or (not self.is_dict and part.dim() != 2):
                expected = "(N, ...)" if self.is_dict else "(N, dim)"
                raise ValueError(f"{name}: expected shape {expected}, got {tuple(part.shape)}")
        kinds = {name: (len(p), p.dtype, p.device) for name, p in parts.items()}
        if len(set(kinds.values())) > 1:
            raise ValueError(f"particles: expected one N, dtype and device, got {kinds}")
        self.count, self.dtype, _ = next(iter(kinds.values()))
        if self.count == 0:
            raise ValueError("particles: expected at least one, got 0")
        self.names = list(particles) if self.is_dict else None
        self.shapes = [tuple(part.shape) for part in parts.values()]

    def flatten(self, name: str, tensors: Particles) -> torch.Tensor:
        """(N, dim) of tensors that are in the form of the particles, which is checked; not always
        a copy."""
        parts = {name: tensors}
        if self.is_dict:
            if not isinstance(tensors, Mapping) or set(tensors) != set(self.names):
                got = sorted(tensors) if isinstance(tensors, Mapping) else type(tensors).__name__
                raise ValueError(f"{name}: expected a dict of {sorted(self.names)}, got {got}")
            parts = _named(name, {key: tensors[key] for key in self.names})
        for (name, part), shape in zip(parts.items(), self.shapes, strict=True):
            check_floating(name, part)
            if part.dtype != self.dtype:
                raise TypeError(f"{name}: expected the particles' {self.dtype}, got {part.dtype}")
            if part.shape != shape:
                raise ValueError(
                    f"{name}: expected the particles' shape {shape}, got {tuple(part.shape)}"
                )
        columns = [part.reshape(self.count, -1) for part in parts.values()]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def view(self, flat: torch.Tensor) -> Particles:
        """Views of a matrix in the form of the particles."""
        if not self.is_dict:
            return flat
        parts = flat.split([torch.Size(shape[1:]).numel() for shape in self.shapes], dim=1)
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }


def _named(name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}[{key!r}]": part for key, part in tensors.items()}
