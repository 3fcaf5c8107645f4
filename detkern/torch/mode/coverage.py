"""What batch_invariant_mode does with each function that PyTorch lets it see.

- A *handler* computes it by detkern (products.py, einsum.py, reductions.py, statistics.py, losses.py, attention.py).
  One that gives NotImplemented leaves the call to PyTorch, watched.
- *Elementwise* functions have handlers too (pointwise.py, broadcasting.py); most of their calls are PyTorch's.
- *Python* of PyTorch's own that calls such functions further down is run again with the mode on: a copy of the function
  that does not ask for modes at its start.
- *Uncovered* names multiply matrices in kernels of their own: strict refuses them.
- *Plain* names neither multiply nor sum, or sum a row that no other row can reach: they go straight to PyTorch. PASSED
  holds their functions, UNRECORDED those that are plain where autograd records nothing: most of a model's calls are one
  of these, and are told apart by one look-up.
- The rest, composed below Python, is watched: see watch.py.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import attention, broadcasting, heads, indexing, losses, pointwise, products, reductions, statistics
from .einsum import einsum

__all__ = [
    "ELEMENTWISE", "HANDLERS", "PASSED", "PLAIN", "POINTWISE", "PYTHON", "TRACED", "TRACED_PYTHON", "UNCOVERED",
    "UNRECORDED", "UNSEEN_WHEN_COMPILED", "name_of",
]  # fmt: skip


def name_of(func: Any) -> str:
    """PyTorch's name for a function, a method or an aten op."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.split("::")[1]  # type: ignore[no-any-return]
    return getattr(func, "__name__", "")


def _by_function(handlers: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Handlers by what a mode is given: functions of torch, methods, aten ops with all their overloads."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, handler in handlers.items():
        for place in (
            torch,
            torch.Tensor,
            torch._C._nn,
            torch._C._linalg,
            torch._C._special,
            torch._C._VariableFunctions,
        ):
            func = getattr(place, name, None)
            if callable(func):
                found[func] = handler
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            found[packet] = handler
            for overload in packet.overloads():
                found[getattr(packet, overload)] = handler
    return found


def _summing() -> dict[Any, Callable[..., Any]]:
    parts = (products, reductions, statistics, losses, attention, indexing)
    found = _by_function({name: handler for part in parts for name, handler in part.HANDLERS.items()})
    found[torch.linalg.matmul] = products.matmul
    found[torch.Tensor.__matmul__] = products.matmul
    found[torch.Tensor.__rmatmul__] = products.rmatmul
    found[torch.chain_matmul] = products.chain_matmul
    found[torch._VF.einsum] = found[torch.einsum] = einsum
    found[torch._VF.tensordot] = found[torch.tensordot] = products.tensordot
    found[F.softmax] = reductions.functional_softmax
    found[F.log_softmax] = reductions.functional_log_softmax
    found[F.rms_norm] = reductions.rms_norm
    found[F.cross_entropy] = losses.cross_entropy
    found[F.kl_div] = losses.functional_kl_div
    found[F.embedding] = indexing.functional_embedding
    if hasattr(F, "linear_cross_entropy"):
        found[F.linear_cross_entropy] = heads.linear_cross_entropy
    return found


def _broadcasting() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name in broadcasting.NAMES:
        for place in (torch, torch.Tensor):
            func = getattr(place, name, None)
            if callable(func):
                found[func] = broadcasting.handler_of(func, name)
    return found


HANDLERS: dict[Any, Callable[..., Any]] = _summing()
_BROADCASTING = _broadcasting()
ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    **_by_function({**pointwise.HANDLERS, **indexing.ELEMENTWISE}), F.silu: pointwise.functional_silu, **_BROADCASTING,
}  # fmt: skip

POINTWISE = frozenset(pointwise.HANDLERS)

_UNCOVERED = """
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
    flex_attention varlen_attn
    _scaled_mm _scaled_mm_v2 scaled_mm _grouped_mm grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 scaled_grouped_mm
    _addmm_activation _trilinear bilinear _linear_cross_entropy
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    cudnn_convolution cudnn_convolution_transpose mkldnn_convolution miopen_convolution convolution_overrideable
    _slow_conv2d_forward thnn_conv2d slow_conv3d _conv_depthwise2d conv_depthwise3d
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn
    mkldnn_rnn_layer _thnn_fused_lstm_cell
    _native_multi_head_attention _transformer_encoder_layer_fwd
    cdist _euclidean_dist _cdist_forward
    mkldnn_linear _mkldnn_linear _weight_int4pack_mm _weight_int8pack_mm _mixed_dtypes_linear
    smm sspaddmm hspmm _sparse_mm _sparse_addmm sparse_sampled_addmm _cslt_sparse_mm _sparse_semi_structured_linear
    _sparse_semi_structured_mm _sparse_semi_structured_addmm
    embedding_bag _embedding_bag _embedding_bag_forward_only index_reduce index_reduce_
"""
UNCOVERED = frozenset(_UNCOVERED.split())

# Composed below Python of products or softmaxes: watched as they run, but not seen by torch.compile, which traces
# functions.
UNSEEN_WHEN_COMPILED = frozenset(
    (
        "matrix_power",
        "linalg_matrix_power",
        "matrix_exp",
        "linalg_matrix_exp",
        "cov",
        "corrcoef",
        "pinverse",
        "linalg_pinv",
    )
)


def _pointwise() -> set[str]:
    """The aten ops that PyTorch itself calls pointwise, and those that give views."""
    names: set[str] = set()
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        name = schema.name.removeprefix("aten::")
        if "." in name or not name.isidentifier():
            continue
        aliases = [r.alias_info for r in schema.returns]
        if aliases and all(a is not None and not a.is_write for a in aliases):
            names.add(name)
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is not None and torch.Tag.pointwise in overload.tags:
            names.add(name)
    return names


# linalg_matrix_rank sums nothing, and with out= PyTorch leaves out as it was under a dispatch mode.
# custom_function_call is an autograd.Function under a transform: what it calls is seen by itself.
_PLAIN = """
    __get__ __set__ __delete__ __getitem__ __setitem__ __len__ __bool__ __int__ __float__ __index__
    __repr__ __str__ __format__
    __hash__ __contains__ __iter__ __array__ __dlpack__ __dlpack_device__ __deepcopy__ __reduce_ex__ __setstate__
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __div__ __rdiv__ __idiv__ __truediv__
    __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__
    __pow__ __rpow__ __ipow__
    __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iand__ __ior__
    add sub mul div true_divide subtract multiply divide floor_divide neg negative pow abs absolute
    sqrt rsqrt exp log sin cos tanh sigmoid relu gelu
    silu where masked_fill masked_fill_ masked_scatter masked_select dropout dropout_ bernoulli bernoulli_
    dim size numel nelement stride storage_offset element_size is_contiguous is_floating_point
    is_complex is_signed is_inference
    data_ptr untyped_storage storage type type_as get_device item tolist numpy requires_grad_
    detach detach_ register_hook
    retain_grad is_same_size is_pinned pin_memory share_memory_ is_shared set_ has_names is_conj
    is_neg is_tensor is_storage
    is_nonzero is_set_to ndimension result_type can_cast promote_types get_default_dtype set_default_dtype manual_seed
    zeros ones empty full arange linspace logspace eye tensor as_tensor from_numpy rand randn randint randperm normal
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones
    new_empty new_full new_tensor
    new_empty_strided empty_strided empty_permuted scalar_tensor tril tril_ triu triu_ tril_indices triu_indices vander
    to cpu cuda float half double bfloat16 int long short bool char byte contiguous clone copy_ fill_ zero_ reshape view
    view_as reshape_as flatten unflatten ravel squeeze squeeze_ unsqueeze unsqueeze_ expand expand_as broadcast_to
    broadcast_tensors transpose transpose_ swapaxes swapdims permute movedim moveaxis t t_ T mT H
    mH cat concat concatenate
    stack hstack vstack dstack split chunk unbind tensor_split select narrow slice index_select index_copy index_copy_
    index_fill index_fill_ gather take take_along_dim repeat repeat_interleave tile roll flip fliplr flipud rot90 pad
    diagonal diag diag_embed unfold nonzero argwhere argmax argmin max min amax amin aminmax topk
    sort argsort msort kthvalue
    mode median unique unique_consecutive bincount histc searchsorted bucketize multinomial cumprod cummax cummin
    any all isin equal allclose isclose embedding one_hot layer_norm native_layer_norm group_norm
    uniform_ normal_ random_ exponential_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    constant_ zeros_ ones_ eye_ orthogonal_ resize_ resize_as_ _set_grad_enabled set_grad_enabled
    backward_hooks pixel_shuffle max_pool1d max_pool2d max_pool3d glu prelu
    elu selu leaky_relu softplus
    logsigmoid hardtanh hardswish mish threshold clamp clip complex real imag view_as_real
    view_as_complex outer ger kron
    cartesian_prod meshgrid block_diag atleast_1d atleast_2d atleast_3d lerp lerp_ addcmul addcmul_ addcdiv addcdiv_
    linalg_matrix_rank custom_function_call _foreach_add_ _foreach_mul_ _foreach_addcdiv_ _foreach_addcmul_
    _foreach_lerp_ _foreach_sqrt _foreach_div_
"""
PLAIN = (frozenset(_PLAIN.split()) | _pointwise()) - UNCOVERED

# Methods in Python that call super(), which torch.compile does not trace, by their name: functions that do the same.
TRACED = {"unflatten": torch.unflatten}


def _no(*_: Any, **__: Any) -> bool:
    return False


def _copied(func: types.FunctionType, scope: dict[str, Any]) -> types.FunctionType:
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _python() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for holder in (F, torch.functional, torch.Tensor, torch.autograd):
        scopes: dict[int, dict[str, Any]] = {}
        for func in vars(holder).values():
            if not isinstance(func, types.FunctionType) or func in HANDLERS or func in ELEMENTWISE:
                continue
            asks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
            if not asks or func.__name__ in PLAIN or func.__name__ in UNCOVERED:
                continue
            scope = scopes.get(id(func.__globals__))
            if scope is None:
                scope = dict(func.__globals__)
                scope.update(dict.fromkeys(asks, _no))
                # Under this name torch.compile would look the module's own functions up.
                scope.pop("__name__", None)
                scopes[id(func.__globals__)] = scope
            found[func] = _copied(func, scope)
    return found


PYTHON: dict[Any, Callable[..., Any]] = _python()
# torch.compile traces the others itself.
TRACED_PYTHON = {func: copy for func, copy in PYTHON.items() if func.__module__ == "torch.nn.functional"}


def _passed() -> frozenset[Any]:
    """The functions, methods and properties of PyTorch's own that are plain by their name, and nothing else."""
    found: set[Any] = set()
    named = (torch, F, torch.functional, torch._C._nn, torch._C._linalg, torch._C._special, torch._C._VariableFunctions)
    for holder in (*named, torch.Tensor):
        for name in PLAIN:
            func = getattr(holder, name, None)
            if callable(func) and name_of(func) == name:
                found.add(func)
    for kind in torch.Tensor.__mro__[:-1]:
        for value in vars(kind).values():
            if isinstance(value, (types.GetSetDescriptorType, property)):
                found.add(value.__get__)  # reading shape, dtype, device, ...
    return frozenset(func for func in found if func not in HANDLERS and func not in ELEMENTWISE and func not in PYTHON)


PASSED = _passed()
UNRECORDED = frozenset((*_BROADCASTING, *_by_function(indexing.ELEMENTWISE)))
