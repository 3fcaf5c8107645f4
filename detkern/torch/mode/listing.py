"""What batch_invariant_mode covers and what strict refuses, as docs/batch-invariant-mode.md lists it, from what
coverage.py holds.

`python -m detkern.torch.mode.listing --write docs/batch-invariant-mode.md` puts the lists into the page.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from ...errors import ArgumentError
from . import coverage

__all__ = ["inserted", "names", "page_parts"]

# Names as `names` gives them, and what becomes of them.
_COVERED = (
    ("mm bmm mv dot vdot matmul linear linalg.vecdot", "one product by the contract"),
    ("addmm baddbmm addmv addbmm addr", "[alpha and beta](contracts.md#alpha-and-beta)"),
    ("einsum tensordot inner", "products; several contracted dimensions are one chain"),
    ("linalg.multi_dot chain_matmul", "from left to right"),
    ("sum mean softmax log_softmax", "[row operations](contracts.md#row-operations) over any dimensions"),
    (
        "rms_norm",
        "`mean_square`, then PyTorch's elementwise functions in float32, with its epsilon where none is given",
    ),
    ("logsumexp var var_mean std std_mean", "[reductions](contracts.md#reductions-made-of-row-operations)"),
    ("norm linalg.norm linalg.vector_norm linalg.matrix_norm foreach_norm", "the same; order 0, 1, 2, ±inf"),
    ("cumsum", "[prefix sums](contracts.md#prefix-sums): exact, each rounded once"),
    ("cross_entropy", "`log_softmax`, then sums over the losses and over the weights"),
    ("nll_loss", "sums over the losses and over the weights"),
    (
        "mse_loss l1_loss smooth_l1_loss huber_loss",
        "[losses](contracts.md#losses): all elements are one row",
    ),
    ("kl_div binary_cross_entropy_with_logits", "the same"),
    ("linear_cross_entropy", "[linear_logp](contracts.md#linear_logp) where it has class indices and no weights"),
    (
        "scaled_dot_product_attention",
        "[eager attention](contracts.md#scaled-dot-product-attention), no dropout; see below",
    ),
    ("add sub mul div pow rsub where", "the gradient of what they broadcast: a sum, see below"),
    ("maximum minimum addcmul addcdiv lerp outer", "the same"),
    ("expand expand_as broadcast_to broadcast_tensors", "the same"),
    ("embedding getitem index index_select", "their gradients: [scattered sums](contracts.md#the-scattered-sum)"),
    ("gather take take_along_dim repeat_interleave", "the same"),
    ("index_add scatter_add", "scattered sums onto the tensor"),
    ("index_put scatter scatter_reduce", "the same, where they add"),
    ("sigmoid silu gelu rsqrt polar", "on the CPU out of exp, erf, tanh, sin and cos in float32, see below"),
    ("elu celu selu mish softplus softshrink exp2", "on the CPU without vectors, see below"),
    ("sinh cosh acos asin acosh asinh atanh atan2 ldexp logaddexp i0e", "the same"),
)
# Other names of the same functions.
_ALIASES = {
    "expit": "sigmoid", "linalg.matmul": "matmul", "rmatmul": "matmul", "subtract": "sub", "multiply": "mul",
    "divide": "div", "true_divide": "div", "nll_loss2d": "nll_loss", "nll_loss_nd": "nll_loss",
    "rdiv": "div", "ger": "outer", "rtruediv": "div", "rpow": "pow",
}  # fmt: skip
_WIDTH = 120


def _public(name: str) -> str:
    """A name without what tells methods, operators and aten ops apart: addmm_ is addmm, linalg_vecdot linalg.vecdot."""
    name = name.strip("_").removeprefix("special_")
    if name.startswith("linalg_"):
        name = f"linalg.{name.removeprefix('linalg_')}"
    return _ALIASES.get(name, name)


def names() -> dict[str, bool]:
    """What the mode has handlers for, and whether for a form that works in place too."""
    given = {coverage.name_of(func) for func in (*coverage.HANDLERS, *coverage.ELEMENTWISE)}
    given.add("linear_cross_entropy")  # which older releases of PyTorch do not have
    found: dict[str, bool] = {}
    for name in given:
        in_place = name.endswith("_") and not name.startswith("__")
        found[_public(name)] = found.get(_public(name), False) or in_place
    return found


def _table() -> str:
    have = names()
    listed = [name for row, _ in _COVERED for name in row.split()]
    if sorted(listed) != sorted(have):
        raise ArgumentError(f"listed and handled names differ: {sorted({*listed} ^ {*have})}")
    lines = ["| | computed as |", "|---|---|"]
    for row, how in _COVERED:
        shown = ", ".join(f"`{name}`" + ("¹" if have[name] else "") for name in row.split())
        lines.append(f"| {shown.replace('`getitem`', '`x[…]`')} | {how} |")
    return "\n".join([*lines, "", "¹ In place too."])


def _refused() -> str:
    public = sorted(name for name in coverage.UNCOVERED if not name.startswith("_"))
    hidden = sorted(name for name in coverage.UNCOVERED if name.startswith("_"))
    parts = [
        f"strict raises on {', '.join(f'`{name}`' for name in public)};",
        f"and on the ops {', '.join(f'`{name}`' for name in hidden)}.",
    ]
    return textwrap.fill(" ".join(parts), _WIDTH, break_on_hyphens=False, break_long_words=False)


def page_parts() -> dict[str, str]:
    """The generated parts of the page, by name."""
    return {"covered": _table(), "refused": _refused()}


def inserted(page: str) -> str:
    """The page with its generated parts as they are now.

    Raises:
        ArgumentError: it lacks the comments around a part, or names are listed that have no handler, or the other way
            round.
    """
    for name, text in page_parts().items():
        begin, end = f"<!-- {name}: detkern/torch/mode/listing.py -->\n", f"<!-- end of {name} -->\n"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ArgumentError(f"the page needs the lines {begin.strip()!r} and {end.strip()!r}, each once")
        before, rest = page.split(begin)
        page = f"{before}{begin}{text}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Print the generated parts, or write them into the page."""
    parser = argparse.ArgumentParser(description="List what batch_invariant_mode covers and what strict refuses.")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the lists into this page")
    page = parser.parse_args().write
    if page is None:
        print("\n\n".join(page_parts().values()))
    else:
        page.write_text(inserted(page.read_text()))


if __name__ == "__main__":
    main()
