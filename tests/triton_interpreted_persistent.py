"""What test_measure_peers.py runs with TRITON_INTERPRET=1:
the benchmark's persistent kernel beside PyTorch's matmul."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from detkern.measure import persistent_triton

generator = torch.Generator().manual_seed(1)
compared = 0
# More tiles than programs, sizes that are not a multiple of a tile, a band that is cut, each layout.
for m, n, k, trans_a, trans_b in ((130, 260, 72, False, True), (1, 8, 64, False, True), (129, 24, 40, False, False),
                                  (1100, 136, 8, True, False)):  # fmt: skip
    a = torch.randn((k, m) if trans_a else (m, k), generator=generator).to(torch.float16)
    b = torch.randn((n, k) if trans_b else (k, n), generator=generator).to(torch.float16)
    left, right = a.t() if trans_a else a, b.t() if trans_b else b
    out = torch.full((m, n), float("nan"), dtype=torch.float16)
    persistent_triton.call(left, right, out, programs=2)()
    expected = left.double() @ right.double()
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < 1e-3, (m, n, k, error)
    compared += 1
print(compared, "products")
