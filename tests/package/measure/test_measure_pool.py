"""Memory for drawn products: windows that do not overlap, and the ends of a result."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_products import small_drawn

from detkern.measure.pool import Pool, sets


@pytest.mark.parametrize("index", range(8))
def test_memory_is_windows_that_do_not_overlap(index: int) -> None:
    products = [small_drawn(1, other) for other in range(16)]
    one = products[index]
    pool = Pool(products, 4096, "cpu")
    found = pool.sets(one)
    assert len(found) == sets(one, 4096) >= 2
    windows = []
    for each in found:
        for tensor, name in ((each.a, one.product.operands[0]), (each.b, one.product.operands[1]), (each.out, "out")):
            assert tuple(tensor.shape) == one.product.matrix(name)
            assert tensor.is_contiguous()
            windows.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
        assert each.out.dtype == (torch.float32 if one.output_f32 else torch.bfloat16)
        assert each.peer_out.dtype == torch.bfloat16
        assert each.peer_out.data_ptr() == each.out.data_ptr()
        assert 0.7 < float(each.a.float().std()) < 1.3 or each.a.numel() < 100
    assert len({start % 256 for start, _ in windows if start}) <= 2  # of two buffers
    windows.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(windows))
    pool.spoil(found[0].out)
    rows, unwritten = pool.ends(found[0].out)
    assert unwritten == found[0].out.numel()
    found[0].out.zero_()
    found[0].out.view(torch.uint8)[0, : found[0].out.element_size()] = 0xFF
    rows, unwritten = pool.ends(found[0].out)
    assert unwritten == 1
    assert rows.dtype == torch.float32


def test_the_ends_of_a_result_are_looked_at() -> None:
    pool = Pool([small_drawn(1, 0)], 4096, "cpu")
    out = torch.zeros(1000, 4, dtype=torch.bfloat16)
    for row in (0, 255, 256, 500, 743, 744, 999):
        out.view(torch.int16)[row, 1] = -1
    rows, unwritten = pool.ends(out)
    assert rows.shape == (512, 4)
    assert unwritten == 4
