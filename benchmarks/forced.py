"""Products by a given tile instead of the one that detkern chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .shapes import Product

__all__ = ["contract_of", "forced_call", "tiles_of"]


def contract_of(product: Product) -> Any:
    """The product's contract."""
    from detkern.contracts import get_contract

    return get_contract(product.contract)


def _views(product: Product, a: Any, b: Any, out: Any) -> tuple[Any, Any, Any]:
    """detkern's views of the matrices as they are meant (`Product.trans_a` and `trans_b`)."""
    from detkern.dtypes import by_name
    from detkern.tensors import Device, TensorView

    dtype = by_name(product.dtype)
    assert dtype is not None

    def view(tensor: Any, transpose: bool) -> TensorView:
        if transpose:
            tensor = tensor.t()
        device = Device("cuda", 0)
        return TensorView(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, device, array=tensor)

    return view(a, product.trans_a), view(b, product.trans_b), view(out, False)


def tiles_of(product: Product, a: Any, b: Any, out: Any) -> list[Any]:
    """The tiles that can compute the product, those that the tables predict to be fastest first."""
    from detkern.cu import geometry
    from detkern.cu.device import describe
    from detkern.operations.gemm.problem import gemm_problem

    facts = describe(0)
    problem = gemm_problem(contract_of(product), *_views(product, a, b, out), None, False)
    found = geometry.candidates(problem, facts.capability, geometry.load_paths(problem))
    return sorted(found, key=lambda tile: geometry.predicted_us(problem, tile, facts.multiprocessors))


def forced_call(product: Product, tile: Any, a: Any, b: Any, out: Any) -> Callable[[], None]:
    """The product by a tile, on PyTorch's current stream; compiles and plans now. a, b: as `Product` has them."""
    import torch

    from detkern.backend import Execution
    from detkern.cu import geometry, launch
    from detkern.cu.device import describe
    from detkern.dtypes import by_name
    from detkern.operations.gemm.problem import gemm_problem
    from detkern.tensors import Device, TensorView

    facts = describe(0)
    device = Device("cuda", 0)
    byte = by_name("e4m3")
    assert byte is not None
    views = _views(product, a, b, out)
    problem = gemm_problem(contract_of(product), *views, None, False)
    chosen = geometry.launch_for(problem, tile, facts.multiprocessors)
    plan = launch.plan_for(problem, facts, torch.cuda.current_stream().cuda_stream, chosen)

    def allocate(size: int) -> TensorView:
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return TensorView(memory.data_ptr(), (size,), (1,), byte, device, array=memory)

    def call() -> None:
        execution = Execution(device, torch.cuda.current_stream().cuda_stream, allocate)
        launch.enqueue(plan, *views, None, execution)

    return call
