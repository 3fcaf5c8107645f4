"""Products and bias gradients with gradients: the ops (registration.py says what these are), and a third form of each
for plain tensors, an autograd.Function in the old style, which costs least.

A backward is made of differentiable products again, so it can be differentiated in turn.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ... import api
from ...operations.gemm.gradient import GradientProduct, Layout, linear_gradient, matmul_gradient
from . import eager, main_grads, products, route
from .registration import Op

__all__ = ["OPS", "Settings", "accumulate_rows", "bias_gradient", "linear", "matmul", "record_linear"]


class Settings(NamedTuple):
    """What a call freezes at its forward, beside its tensors; where it is recorded, `contract` is a name.

    main_grad, bias_main_grad: float32 tensors that a backward adds to, instead of returning the gradient; see
    main_grads.py."""

    contract: str | None
    out_dtype: Any
    backend: str | None
    main_grad: Any = None
    bias_main_grad: Any = None


def matmul(a: Any, b: Any, settings: Settings) -> Any:
    """a @ b, recorded where autograd records, in the form that fits the tensors."""
    if route.direct(a, b):
        if route.recorded(a, b):
            return _apply_matmul(a, b, settings)
        return eager.matmul(a, b, *settings[:3])
    if route.transformed():
        return MATMUL.function.apply(a, b, *settings[:3])
    return MATMUL.overload(a, b, *settings[:3])


def linear(x: Any, weight: Any, bias: Any, settings: Settings) -> Any:
    """x @ weight.T + bias, in the same way."""
    if route.direct(x, weight, bias):
        if route.recorded(x, weight, bias):
            return record_linear(x, weight, bias, settings)
        return eager.linear(x, weight, bias, *settings[:3])
    form = LINEAR.function.apply if route.transformed() else LINEAR.overload
    contract, out_dtype, backend, *main_grads = settings
    return form(x, weight, bias, *main_grads, contract, out_dtype, backend)


def bias_gradient(dc: Any, out_dtype: Any, backend: str | None) -> Any:
    """The sum of dc [.., N] over all rows, in the same way."""
    if route.direct(dc, dc):
        if route.recorded(dc, dc):
            return _apply_bias_gradient(dc, out_dtype, backend)
        return eager.bias_gradient(dc, out_dtype, backend)
    if route.transformed():
        return BIAS_GRADIENT.function.apply(dc, out_dtype, backend)
    return BIAS_GRADIENT.overload(dc, out_dtype, backend)


# The backward of each op.


def _save_matmul(ctx: Any, a: Any, b: Any, settings: Settings) -> None:
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.shapes, ctx.dtype, ctx.settings = (a.shape, b.shape), a.dtype, settings


def _matmul_gradients(ctx: Any, dc: Any) -> tuple[Any, Any]:
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    with _no_autocast(dc):
        sources = {"a": a, "b": b, "dc": dc if dc.dtype is ctx.dtype else dc.to(ctx.dtype)}
        return (
            _gradient(matmul_gradient("a", *ctx.shapes), sources, ctx.settings) if needs_a else None,
            _gradient(matmul_gradient("b", *ctx.shapes), sources, ctx.settings) if needs_b else None,
        )


def _save_linear(ctx: Any, x: Any, weight: Any, bias: Any, settings: Settings) -> None:
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
    # main_grad is not saved as a tensor is: the backwards of other micro-batches change it in the meantime, and should.
    ctx.shapes, ctx.dtype, ctx.settings = (x.shape, weight.shape), x.dtype, settings
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_gradients(ctx: Any, dc: Any) -> tuple[Any, Any, Any]:
    x, weight = ctx.saved_tensors
    # An op that is called without bias has no place for it here.
    needs_x, needs_weight, needs_bias = (*ctx.needs_input_grad, False)[:3]
    settings: Settings = ctx.settings
    main_grad, bias_main_grad = settings.main_grad, settings.bias_main_grad
    functions = ()
    if main_grad is not None or bias_main_grad is not None:
        main_grads.need_no_graph("call linear without accumulate where create_graph=True")
        functions = ctx.next_functions
        # A compiler traces every backward as a call of torch.autograd.grad for all there is, so what is asked for shows
        # only when its graph runs, and the ops that accumulate look then.
        if type(dc) is torch.Tensor:
            if main_grad is not None:
                asked = main_grads.asked(functions, main_grad)
                needs_weight, main_grad = needs_weight and asked is not False, None if asked is None else main_grad
            if bias_main_grad is not None:
                asked = main_grads.asked(functions, bias_main_grad)
                needs_bias, bias_main_grad = (
                    needs_bias and asked is not False,
                    None if asked is None else bias_main_grad,
                )
    dx = dweight = dbias = None
    with _no_autocast(dc):
        sources = {"x": x, "weight": weight, "dc": dc if dc.dtype is ctx.dtype else dc.to(ctx.dtype)}
        if needs_x:
            dx = _gradient(linear_gradient("x", *ctx.shapes), sources, settings)
        if needs_weight:
            rule = linear_gradient("weight", *ctx.shapes)
            if main_grad is None:
                dweight = _gradient(rule, sources, settings)
            else:
                _accumulate(main_grad, functions, rule, sources, settings)
        if needs_bias:
            if bias_main_grad is None:
                dbias = bias_gradient(dc, ctx.bias_dtype, settings.backend)
            else:
                accumulate_rows(bias_main_grad, functions, dc, settings.backend)
    return dx, dweight, dbias


def accumulate_rows(main_grad: Any, functions: Any, dc: Any, backend: str | None) -> None:
    """Add the rows of dc [.., N] to a parameter's accumulator [N], as the chain of the bias gradient.

    functions: the `next_functions` of the node that is running its backward.
    """
    if route.direct(dc, main_grad):
        out = main_grads.destination(functions, main_grad)
        if out is not None:
            api.bias_gradient(dc, out=out, accumulate=True, backend=backend)
    else:
        BIAS_GRADIENT_ACCUMULATE.overload(main_grad, dc, backend)


def _save_bias_gradient(ctx: Any, dc: Any) -> None:
    ctx.shape, ctx.dtype = dc.shape, dc.dtype


def _spread(ctx: Any, incoming: Any) -> Any:
    return incoming.expand(ctx.shape).to(ctx.dtype)


def _no_autocast(dc: Any) -> AbstractContextManager[Any]:
    """The types of a backward's products were settled in its forward, also where it runs inside of autocast."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch.autocast(dc.device.type, enabled=False)  # type: ignore[no-any-return]


def _laid(sources: dict[str, Any], layout: Layout) -> Any:
    source, view, broadcast, order, merged = layout
    tensor = sources[source]
    if view is not None:
        tensor = tensor.reshape(view)
    if broadcast is not None:
        tensor = tensor.expand(broadcast)
    if order is not None:
        tensor = tensor.t() if order == (1, 0) else tensor.permute(order)  # the first takes half the time
    return tensor if merged is None else tensor.reshape(merged)


def _gradient(rule: GradientProduct, sources: dict[str, Any], settings: Settings) -> Any:
    # A gradient has the operands' type, which a product has that names none.
    gradient = matmul(
        _laid(sources, rule.left), _laid(sources, rule.right), Settings(settings.contract, None, settings.backend)
    )
    return gradient if rule.shape is None else gradient.reshape(rule.shape)


def _accumulate(
    main_grad: Any, functions: Any, rule: GradientProduct, sources: dict[str, Any], settings: Settings
) -> None:
    left, right = _laid(sources, rule.left), _laid(sources, rule.right)
    if route.direct(left, right, main_grad):
        out = main_grads.destination(functions, main_grad)
        if out is not None:
            api.gemm(left, right, out=out, accumulate=True, contract=settings.contract, backend=settings.backend)
    else:
        MATMUL_ACCUMULATE.overload(main_grad, left, right, settings.contract, settings.backend)


# Past the dispatcher.


class _Matmul(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, settings: Settings) -> Any:
        _save_matmul(ctx, a, b, settings)
        return eager.matmul(a, b, *settings[:3])

    @staticmethod
    def backward(ctx: Any, dc: Any) -> Any:
        return *_matmul_gradients(ctx, dc), None


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, settings: Settings) -> Any:
        _save_linear(ctx, x, weight, bias, settings)
        return eager.linear(x, weight, bias, *settings[:3])

    @staticmethod
    def backward(ctx: Any, dc: Any) -> Any:
        return *_linear_gradients(ctx, dc), None


class _BiasGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, dc: Any, out_dtype: Any, backend: str | None) -> Any:
        _save_bias_gradient(ctx, dc)
        return eager.bias_gradient(dc, out_dtype, backend)

    @staticmethod
    def backward(ctx: Any, incoming: Any) -> Any:
        return _spread(ctx, incoming), None, None


# Function.apply first looks for the transforms of torch.func, which takes as long as recording does. They are not at
# work where a call goes past the dispatcher, so this is the method of its base, which records.
_apply_matmul = super(torch.autograd.Function, _Matmul).apply
_apply_bias_gradient = super(torch.autograd.Function, _BiasGradient).apply
record_linear = super(torch.autograd.Function, _Linear).apply


# The ops. A tangent is a sum of products by the contract, each rounded to the result's type before they are added.


def _sum(terms: list[Any]) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _setup_matmul(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, contract, out_dtype, backend = inputs
    _save_matmul(ctx, a, b, Settings(route.freeze(contract, a.dtype, a.device), out_dtype, backend))


def _matmul_jvp(ctx: Any, da: Any, db: Any, *_: Any) -> Any:
    a, b = route.primals(ctx)
    da, db = route.tangents((da, db), (ctx.dtype, ctx.dtype))
    pairs = [(da, b)] if da is not None else []
    pairs += [(a, db)] if db is not None else []
    return _sum([matmul(left, right, ctx.settings) for left, right in pairs])


def _setup_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, main_grad, bias_main_grad, contract, out_dtype, backend = inputs
    frozen = route.freeze(contract, x.dtype, x.device)
    _save_linear(ctx, x, weight, bias, Settings(frozen, out_dtype, backend, main_grad, bias_main_grad))
    ctx.result_dtype = output.dtype


def _linear_jvp(ctx: Any, dx: Any, dweight: Any, dbias: Any, *_: Any) -> Any:
    x, weight = route.primals(ctx)
    dx, dweight = route.tangents((dx, dweight), (ctx.dtype, ctx.dtype))
    pairs = [(dx, weight)] if dx is not None else []
    pairs += [(x, dweight)] if dweight is not None else []
    settings = Settings(*ctx.settings[:3])
    terms = [linear(left, right, None, settings) for left, right in pairs]
    if dbias is not None:
        terms.append(dbias.to(ctx.result_dtype).expand((*ctx.shapes[0][:-1], ctx.shapes[1][0])))
    return _sum(terms)


def _setup_bias_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    _save_bias_gradient(ctx, inputs[0])
    ctx.options = inputs[1:]


def _bias_gradient_jvp(ctx: Any, ddc: Any, *_: Any) -> Any:
    return bias_gradient(ddc.to(ctx.dtype), *ctx.options)


_SETTINGS = "str? contract=None, ScalarType? out_dtype=None, str? backend=None"

LINEAR = Op(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? main_grad=None, Tensor? bias_main_grad=None, "
    f"{_SETTINGS}) -> Tensor",
    products.linear,
    products.fake_linear,
    setup=_setup_linear,
    backward=_linear_gradients,
    kept=lambda arguments, output: arguments[:2],
    jvp=_linear_jvp,
    vmap=products.batched_linear,
    autocast=3,
)
MATMUL = Op(
    "matmul",
    f"(Tensor a, Tensor b, {_SETTINGS}) -> Tensor",
    products.matmul,
    products.fake_matmul,
    setup=_setup_matmul,
    backward=_matmul_gradients,
    kept=lambda arguments, output: arguments[:2],
    jvp=_matmul_jvp,
    vmap=products.batched_matmul,
    autocast=2,
)
BIAS_GRADIENT = Op(
    "bias_gradient",
    "(Tensor dc, ScalarType? out_dtype=None, str? backend=None) -> Tensor",
    products.bias_gradient,
    products.fake_bias_gradient,
    setup=_setup_bias_gradient,
    backward=lambda ctx, incoming: (_spread(ctx, incoming),),
    jvp=_bias_gradient_jvp,
    vmap=products.batched_bias_gradient,
)
MATMUL_ACCUMULATE = Op(
    "matmul_accumulate_",
    "(Tensor(out!) out, Tensor a, Tensor b, str? contract=None, str? backend=None) -> ()",
    products.matmul_accumulate,
    products.fake_nothing,
)
BIAS_GRADIENT_ACCUMULATE = Op(
    "bias_gradient_accumulate_",
    "(Tensor(out!) out, Tensor dc, str? backend=None) -> ()",
    products.bias_gradient_accumulate,
    products.fake_nothing,
)
OPS = (LINEAR, MATMUL, BIAS_GRADIENT, MATMUL_ACCUMULATE, BIAS_GRADIENT_ACCUMULATE)
