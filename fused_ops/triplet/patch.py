# SPDX-License-Identifier: BSD-3-Clause
"""Our function in the place of torch's."""

import sys
from types import ModuleType
from typing import ClassVar

import torch

from fused_ops.triplet import function
from fused_ops.triplet.function import reference


def triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """See :func:`fused_ops.triplet_margin_loss`, which stands here in the place of torch's."""
    if torch.jit.is_scripting():  # TorchScript cannot express ours
        return reference(
            anchor, positive, negative, margin, p, eps, swap, size_average, reduce, reduction
        )
    else:
        return function.triplet_margin_loss(
            anchor, positive, negative, margin, p, eps, swap, size_average, reduce, reduction
        )


triplet_margin_loss.__module__ = reference.__module__  # where pickle finds it meanwhile


class patch_torch:
    """Puts :func:`fused_ops.triplet_margin_loss` in the place of torch's, in the whole process.

    Call it for good, or use it as a context manager; torch's is back when every block has ended, in
    whatever order. Meanwhile ``torch.nn.functional.triplet_margin_loss`` is ours, and with it every
    ``torch.nn.TripletMarginLoss``, old or new, whose class stays torch's. So is each name of a
    module that was imported from there before. Not reached is a reference elsewhere: in a class, a
    closure, a default argument or ``functools.partial``.

    TorchScript compiles torch's function as ever.

    Args:
        enabled: False ends every patch, for good. Default: True

    Example::

        >>> fused_ops.patch_torch()  # before the training starts, whose code stays as it is
        >>> with fused_ops.patch_torch():
        ...     loss = torch.nn.TripletMarginLoss(swap=True)(anchor, positive, negative)
    """

    _active: ClassVar[set["patch_torch"]] = set()

    def __init__(self, enabled: bool = True) -> None:
        if enabled:
            self._active.add(self)
        else:
            self._active.clear()
        self._apply()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._active.discard(self)
        self._apply()

    @classmethod
    def _apply(cls) -> None:
        former, new = (
            (reference, triplet_margin_loss) if cls._active else (triplet_margin_loss, reference)
        )
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "fused_ops" or not isinstance(module, ModuleType):
                continue
            for attribute, value in list(vars(module).items()):
                if value is former:
                    setattr(module, attribute, new)
