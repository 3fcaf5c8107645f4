"""Products by a given tile instead of the one that detkern chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from detkern.measure.shapes import Product

__all__ = ["contract_of", "forced_call", "forced_calls", "problem_of_sizes", "seen", "tiles_of"]


def contract_of(product: Product) -> Any:
    """The product's contract."""
    from detkern.vocabulary.contracts import get_contract

    return get_contract(product.contract)


def _views(product: Product, a: Any, b: Any, out: Any) -> tuple[Any, Any, Any]:
    """detkern's views of the matrices as they are meant (`Product.trans_a` and `trans_b`)."""
    from detkern.tensors import Device, TensorView
    from detkern.vocabulary.dtypes import by_name

    def view(tensor: Any, transpose: bool) -> TensorView:
        if transpose:
            tensor = tensor.t()
        dtype = by_name(str(tensor.dtype).removeprefix("torch."))
        assert dtype is not None
        device = Device("cuda", 0)
        return TensorView(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, device, array=tensor)

    return view(a, product.trans_a), view(b, product.trans_b), view(out, False)


def problem_of_sizes(product: Product, output_f32: bool = False, accumulate: bool = False) -> Any:
    """The problem of a product whose matrices are row-major and begin where an allocation could."""
    from detkern.operations.gemm.problem import gemm_problem
    from detkern.tensors import Device, TensorView
    from detkern.vocabulary.dtypes import F32, by_name

    dtype = by_name(product.dtype)
    assert dtype is not None

    def view(name: str, transpose: bool, kind: Any) -> TensorView:
        rows, columns = product.matrix(name)
        shape, strides = ((columns, rows), (1, columns)) if transpose else ((rows, columns), (columns, 1))
        return TensorView(256, shape, strides, kind, Device("cuda", 0))

    a, b = product.operands
    views = view(a, product.trans_a, dtype), view(b, product.trans_b, dtype)
    out = view("out", False, F32 if output_f32 else dtype)
    return gemm_problem(contract_of(product), *views, out, None, accumulate)


def tiles_of(product: Product, a: Any, b: Any, out: Any) -> list[Any]:
    """The tiles that can compute the product, those that the tables predict to be fastest first."""
    from detkern.cu import geometry, tile_choice
    from detkern.cu.device import describe
    from detkern.operations.gemm.problem import gemm_problem

    facts = describe(0)
    problem = gemm_problem(contract_of(product), *_views(product, a, b, out), None, False)
    found = tile_choice.candidates(problem, facts.capability, geometry.load_paths(problem))
    return sorted(found, key=lambda tile: tile_choice.predicted_us(problem, tile, facts.multiprocessors))


def forced_call(product: Product, tile: Any, a: Any, b: Any, out: Any) -> Callable[[], None]:
    """The product by a tile, on PyTorch's current stream; compiles and plans now. a, b: as `Product` has them."""
    problem, views = seen(product, [(a, b, out)])
    return forced_calls(problem, tile, views)[0]


def seen(
    product: Product, matrices: Iterable[tuple[Any, Any, Any]], accumulate: bool = False
) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """The problem of several sets of a, b and out, and detkern's views of each. Raises ValueError where the sets do not
    lie in memory alike.

    accumulate: to what is in `out`, which is float32 then.
    """
    from detkern.operations.gemm.problem import gemm_problem

    views = [_views(product, *one) for one in matrices]
    problems = {gemm_problem(contract_of(product), *three, None, accumulate) for three in views}
    if len(problems) != 1:
        raise ValueError("the sets of matrices do not lie in memory alike")
    return problems.pop(), views


def forced_calls(problem: Any, tile: Any, views: Iterable[tuple[Any, Any, Any]]) -> list[Callable[[], None]]:
    """The call by a tile for each of the sets that `seen` gave, planned once."""
    import torch

    from detkern.cu import geometry, launch
    from detkern.cu.device import describe
    from detkern.dispatch.backend import Execution
    from detkern.tensors import Device, TensorView
    from detkern.vocabulary.dtypes import by_name

    facts = describe(0)
    device = Device("cuda", 0)
    byte = by_name("e4m3")
    assert byte is not None
    chosen = geometry.launch_for(problem, tile, facts.multiprocessors)
    plan = launch.plan_for(problem, facts, torch.cuda.current_stream().cuda_stream, chosen)

    def allocate(size: int) -> TensorView:
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return TensorView(memory.data_ptr(), (size,), (1,), byte, device, array=memory)

    def call(three: tuple[TensorView, TensorView, TensorView]) -> None:
        execution = Execution(device, torch.cuda.current_stream().cuda_stream, allocate)
        launch.enqueue(plan, *three, None, execution)

    return [functools.partial(call, three) for three in views]
