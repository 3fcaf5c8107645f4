"""All ops of torch.ops.detkern, registered on import: a new operation that has a module of its own here is one line."""

from __future__ import annotations

from . import affine, attention, functionalized, gradients, linear_logp, losses, recorded, reductions, rows, scattered
from .registration import Op, register

__all__ = ["OPS"]

OPS: tuple[Op, ...] = (
    *gradients.OPS,
    *rows.OPS,
    *reductions.OPS,
    *losses.OPS,
    *affine.OPS,
    *attention.OPS,
    *scattered.OPS,
    *linear_logp.OPS,
    *recorded.OPS,
)

for _op in OPS:
    register(_op)
functionalized.register()
