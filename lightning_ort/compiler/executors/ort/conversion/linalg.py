"""Matrix products. A transposed operand is folded into the product instead of being copied."""

from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, axis_of, dtype_of, rank_of
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten


def _untransposed(ctx: GraphBuilder, x: fx.Node) -> tuple[Value, int | None]:
    """The operand, and 1 if it is the transpose (of the last two dimensions) of the value returned."""
    swaps, rank = False, rank_of(x)
    args: Any = x.args
    if x.target is aten.t.default:
        swaps = rank == 2
    elif x.target is aten.transpose.int:
        swaps = {axis_of(dim, rank) for dim in args[1:3]} == {rank - 2, rank - 1}
    elif x.target is aten.permute.default:
        dims = [axis_of(dim, rank) for dim in args[1]]
        swaps = dims == [*range(rank - 2), rank - 1, rank - 2]
    # a transpose that another region computed is an input of this one
    if swaps and isinstance(source := x.args[0], fx.Node) and source in ctx.values:
        return ctx.values[source], 1
    return ctx.value(x), None


def _check_product(node: fx.Node) -> None:
    if not dtype_of(node).is_floating_point:
        raise Unsupported(f"a matrix product of {dtype_of(node)}")


def _gemm(ctx: GraphBuilder, x: fx.Node, y: fx.Node, bias: Value | None = None, **scale: float) -> Value:
    a, trans_a = _untransposed(ctx, x)
    b, trans_b = _untransposed(ctx, y)
    return a.op("Gemm", b, bias, transA=trans_a, transB=trans_b, **scale)


@converts(aten.mm.default, aten.bmm.default)
def mm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    if rank_of(node) == 2 or ctx.has_contributed:
        _check_product(node)
    if rank_of(node) == 2:
        return _gemm(ctx, x, y)
    a, trans_a = _untransposed(ctx, x)
    b, trans_b = _untransposed(ctx, y)
    # FusedMatMul is a contributed operator with a CPU kernel for float32 only
    is_fused = ctx.has_contributed and (dtype_of(node) is torch.float32 or node.meta["val"].is_cuda)
    if (trans_a or trans_b) and is_fused:
        return ctx.ms("FusedMatMul", a, b, transA=trans_a or 0, transB=trans_b or 0)
    return ctx.value(x).op("MatMul", ctx.value(y))


@converts(aten.addmm.default)
def addmm(
    ctx: GraphBuilder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    factors = (alpha, beta)
    if any(isinstance(factor, fx.Node) for factor in factors):  # attributes are constants
        return baddbmm(ctx, node, bias, x, y, beta=beta, alpha=alpha)
    if dtype_of(node) is torch.float64 and any(float(np.float32(factor)) != factor for factor in factors):
        return baddbmm(ctx, node, bias, x, y, beta=beta, alpha=alpha)  # attributes are float32
    _check_product(node)
    # with beta=0 torch ignores the bias, even a NaN in it
    names = {"alpha": alpha, "beta": 1 if beta == 0 else beta}
    scale = {name: float(factor) for name, factor in names.items() if factor != 1}
    return _gemm(ctx, x, y, None if beta == 0 else ctx.value(bias), **scale)


@converts(aten.baddbmm.default)
def baddbmm(
    ctx: GraphBuilder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    product = mm(ctx, node, x, y)
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # torch ignores the bias
        return product
    return product + (bias if beta == 1 else ctx.value(bias) * beta)


@converts(aten.dot.default)
def dot(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    _check_product(node)
    return ctx.value(x).op("MatMul", ctx.value(y))


@converts(aten.mv.default)
def mv(ctx: GraphBuilder, node: fx.Node, x: fx.Node, vec: fx.Node) -> Value:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    _check_product(node)
    # as a matrix of one column: onnxruntime 1.19 fuses a transpose into a MatMul with a vector and gets it wrong
    a, trans_a = _untransposed(ctx, x)
    return a.op("Gemm", ctx.value(vec).unsqueeze(1), transA=trans_a).squeeze(1)


@converts(aten.linear.default)
def linear(ctx: GraphBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, bias: Any = None) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    _check_product(node)
    addend = None if bias is None else ctx.value(bias)
    if rank_of(x) == 2 and rank_of(weight) == 2:
        return ctx.value(x).op("Gemm", ctx.value(weight), addend, transB=1)
    product = ctx.value(x).op("MatMul", ctx.value(weight).op("Transpose", perm=[1, 0]))
    return product if addend is None else product + addend
