"""The ops that PyTorch's dispatcher knows: `torch.ops.detkern.*`, with fake kernels, autocast and vmap rules.

They are what torch.compile and torch.export put into graphs, and what runs under modes and transforms. Their gradients
are registered in detkern.autograd.torch. On plain tensors each gives the bits of the function of `detkern` that it calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import api
from ...dtypes import DTYPES
from ...errors import ArgumentError, DTypeError, ShapeError
from . import batching, main_grads, route

__all__ = ["OPS", "autocast", "guarded", "library", "torch_dtype"]

library = torch.library.Library("detkern", "FRAGMENT")

_SETTINGS = "str? contract=None, ScalarType? out_dtype=None, str? backend=None"
_SCHEMAS = {
    "linear": "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? main_grad=None, Tensor? bias_main_grad=None, "
    f"{_SETTINGS}) -> Tensor",
    "matmul": f"(Tensor a, Tensor b, {_SETTINGS}) -> Tensor",
    "bias_gradient": "(Tensor dc, ScalarType? out_dtype=None, str? backend=None) -> Tensor",
    "matmul_accumulate_": "(Tensor(out!) out, Tensor a, Tensor b, str? contract=None, str? backend=None) -> ()",
    "bias_gradient_accumulate_": "(Tensor(out!) out, Tensor dc, str? backend=None) -> ()",
}
OPS: tuple[str, ...] = tuple(_SCHEMAS)

_NAMES = {dtype.name: getattr(torch, dtype.name) for dtype in DTYPES}
_OPERANDS = (torch.float32, torch.float16, torch.bfloat16)


def torch_dtype(value: Any) -> Any:
    """The torch dtype that an `out_dtype` argument names; DTypeError where a result cannot have it."""
    if value is None or value in _OPERANDS:
        return value
    from ...tensors import dtype_argument

    return _NAMES[dtype_argument(value).name]


def _linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    main_grad: Any = None,
    bias_main_grad: Any = None,
    contract: str | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
) -> Any:
    return api.linear(x, weight, bias, out_dtype=out_dtype, contract=contract, backend=backend)


def _matmul(a: Any, b: Any, contract: str | None = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    return api.gemm(a, b, out_dtype=out_dtype, contract=contract, backend=backend)


def _bias_gradient(dc: Any, out_dtype: Any = None, backend: str | None = None) -> Any:
    return api.bias_gradient(dc, out_dtype=out_dtype, backend=backend)


def _matmul_accumulate(out: Any, a: Any, b: Any, contract: str | None = None, backend: str | None = None) -> None:
    out = _destination(out)
    if out is not None:
        api.gemm(a, b, out=out, accumulate=True, contract=contract, backend=backend)


def _bias_gradient_accumulate(out: Any, dc: Any, backend: str | None = None) -> None:
    out = _destination(out)
    if out is not None:
        api.bias_gradient(dc, out=out, accumulate=True, backend=backend)


def _destination(main_grad: Any) -> Any:
    """In a backward, what it asks for is known only when it runs, not when a compiler traces it."""
    node = torch._C._current_autograd_node()
    return main_grad if node is None else main_grads.destination(node.next_functions, main_grad)


def guarded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that refuses forward-mode differentiation, whose tangents PyTorch drops at registered ops in silence."""

    @functools.wraps(kernel)
    def guarded(*arguments: Any) -> Any:
        if route.forward_mode():
            raise ArgumentError(
                "torch.ops.detkern has no forward-mode derivative, and torch.compile traces nothing else: call the functions "
                "of detkern.torch, uncompiled, which have one"
            )
        return kernel(*arguments)

    return guarded


# Fake kernels: shapes and types of results, and the errors that need no data. Sizes may be symbolic.


def _check_operands(first: Any, first_name: str, second: Any, second_name: str) -> None:
    for tensor, name in ((first, first_name), (second, second_name)):
        if tensor.dtype not in _OPERANDS:
            raise DTypeError(f"{name} is {tensor.dtype}; detkern takes float32, float16 and bfloat16")
        if tensor.dim() == 0:
            raise ShapeError(f"{name} has no dimensions; give at least one, as in {name}.reshape(1)")
    if first.dtype != second.dtype:
        raise DTypeError(
            f"{first_name} is {first.dtype} and {second_name} is {second.dtype}, and operands of different types are not "
            f"mixed: cast {second_name} to {first.dtype} or {first_name} to {second.dtype}"
        )


def _fake_linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    main_grad: Any = None,
    bias_main_grad: Any = None,
    contract: str | None = None,
    out_dtype: Any = None,
    backend: str | None = None,
) -> Any:
    _check_operands(x, "x", weight, "weight")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit: [.., K] and [N, K] are needed")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ShapeError(f"bias has shape {list(bias.shape)}; weight {list(weight.shape)} needs [{weight.shape[0]}]")
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def _fake_matmul(a: Any, b: Any, contract: str | None = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    _check_operands(a, "a", b, "b")
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ShapeError(f"a {list(a.shape)} and b {list(b.shape)} do not fit: a ends in K, b is [.., K, N]")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty(
        (*batch, *(a.shape[-2:-1] if a.dim() > 1 else ()), *(b.shape[-1:] if b.dim() > 1 else ())),
        dtype=out_dtype or a.dtype,
    )


def _fake_bias_gradient(dc: Any, out_dtype: Any = None, backend: str | None = None) -> Any:
    return dc.new_empty(dc.shape[-1:], dtype=out_dtype or dc.dtype)


def _fake_nothing(*arguments: Any) -> None:
    return None


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (_linear, _fake_linear),
    "matmul": (_matmul, _fake_matmul),
    "bias_gradient": (_bias_gradient, _fake_bias_gradient),
    "matmul_accumulate_": (_matmul_accumulate, _fake_nothing),
    "bias_gradient_accumulate_": (_bias_gradient_accumulate, _fake_nothing),
}
for _name, _schema in _SCHEMAS.items():
    # Any strides are read where they lie, so a compiler need not copy an operand into those that it saw when tracing.
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    library.impl(_name, guarded(_KERNELS[_name][0]), "CompositeExplicitAutograd")
    torch.library.register_fake(f"detkern::{_name}", guarded(_KERNELS[_name][1]), lib=library)


# Autocast: torch.nn.functional.linear's and torch.matmul's own rule, which casts every floating operand, bias too, to the
# type that autocast has now. torch.library.register_autocast casts to one type fixed at registration.


def autocast(*operands: Any) -> list[Any]:
    """The operands (None among them too) as autocast wants them on the first one's device."""
    device_type = operands[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(operands)
    wanted = torch.get_autocast_dtype(device_type)
    return [x.to(wanted) if x is not None and x.dtype in _OPERANDS else x for x in operands]


def _autocast(name: str, device_type: str, operands: int) -> Callable[..., Any]:
    op = getattr(torch.ops.detkern, name).default

    def kernel(*arguments: Any) -> Any:
        cast = autocast(*arguments[:operands])
        with torch.autocast(device_type, enabled=False):
            return op(*cast, *arguments[operands:])

    return kernel


for _device, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    library.impl("linear", _autocast("linear", _device, 3), _key)
    library.impl("matmul", _autocast("matmul", _device, 2), _key)


# vmap. The dispatcher leaves out arguments that have their default.


def _linear_vmap(
    info: Any,
    in_dims: Sequence[int | None],
    x: Any,
    weight: Any,
    bias: Any = None,
    main_grad: Any = None,
    bias_main_grad: Any = None,
    *settings: Any,
) -> tuple[Any, int]:
    batching.refuse_main_grads(main_grad, bias_main_grad)

    def call(x: Any, weight: Any, bias: Any) -> Any:
        return torch.ops.detkern.linear.default(x, weight, bias, None, None, *settings)

    return batching.linear(call, info.batch_size, (*in_dims, None)[:3], x, weight, bias)


def _matmul_vmap(info: Any, in_dims: Sequence[int | None], a: Any, b: Any, *settings: Any) -> tuple[Any, int]:
    def call(a: Any, b: Any) -> Any:
        return torch.ops.detkern.matmul.default(a, b, *settings)

    return batching.matmul(call, in_dims, a, b)


def _bias_gradient_vmap(info: Any, in_dims: Sequence[int | None], dc: Any, *settings: Any) -> tuple[Any, int]:
    def call(dc: Any) -> Any:
        return torch.ops.detkern.bias_gradient.default(dc, *settings)

    return batching.each(call, info.batch_size, in_dims[:1], dc)


for _name, _rule in (("linear", _linear_vmap), ("matmul", _matmul_vmap), ("bias_gradient", _bias_gradient_vmap)):
    torch.library.register_vmap(f"detkern::{_name}", _rule, lib=library)
