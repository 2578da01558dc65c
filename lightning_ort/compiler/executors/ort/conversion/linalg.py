"""Matrix products. A transposed operand is folded into the product instead of being copied."""

from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, dtype_of, rank_of, shape_of
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten


def _untransposed(ctx: GraphBuilder, x: fx.Node) -> tuple[Value, int]:
    """The operand, and 1 where it is the transpose (of the last two dimensions) of the value returned."""
    swaps = False
    if x.target is aten.t.default:
        swaps = rank_of(x) == 2
    elif x.target is aten.transpose.int:
        rank = rank_of(x)
        swaps = {dim % rank for dim in x.args[1:3]} == {rank - 2, rank - 1}  # type: ignore[operator]
    elif x.target is aten.permute.default:
        rank = rank_of(x)
        dims = [dim % rank for dim in x.args[1]]  # type: ignore[operator, union-attr]
        swaps = dims == [*range(rank - 2), rank - 1, rank - 2]
    # a transpose computed by another region is not known here
    if swaps and isinstance(source := x.args[0], fx.Node) and source in ctx.values:
        return ctx.values[source], 1
    return ctx.value(x), 0


def _check_product(node: fx.Node, x: fx.Node) -> None:
    if not dtype_of(node).is_floating_point:
        raise Unsupported(f"a matrix product of {dtype_of(node)}")
    if 0 in (*shape_of(x), *shape_of(node)):
        raise Unsupported("a matrix product of empty tensors")


def _matmul(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    _check_product(node, x)
    a, trans_a = _untransposed(ctx, x)
    b, trans_b = _untransposed(ctx, y)
    if rank_of(node) == 2:
        return ctx.op("Gemm", a, b, transA=trans_a or None, transB=trans_b or None)
    if trans_a or trans_b:
        # contrib op with a CPU kernel for float32 only
        if dtype_of(node) is torch.float32 or node.meta["val"].is_cuda:
            return ctx.ms("FusedMatMul", a, b, transA=trans_a, transB=trans_b)
        a, b = ctx.value(x), ctx.value(y)
    return ctx.op("MatMul", a, b)


@converts(aten.mm.default)
def mm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    return _matmul(ctx, node, x, y)


@converts(aten.bmm.default)
def bmm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return _matmul(ctx, node, x, y)


@converts(aten.addmm.default)
def addmm(
    ctx: GraphBuilder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    if isinstance(alpha, fx.Node) or isinstance(beta, fx.Node):  # attributes are constants
        return baddbmm(ctx, node, bias, x, y, beta=beta, alpha=alpha)
    _check_product(node, x)
    a, trans_a = _untransposed(ctx, x)
    b, trans_b = _untransposed(ctx, y)
    if any(float(np.float32(factor)) != factor for factor in (alpha, beta)) and dtype_of(node) is torch.float64:
        return _add_product(ctx, node, bias, _matmul(ctx, node, x, y), beta, alpha)  # attributes are float32
    scale: dict[str, Any] = {"alpha": float(alpha)} if alpha != 1 else {}
    if beta == 0:  # torch then ignores even a NaN in the bias
        return ctx.op("Gemm", a, b, transA=trans_a or None, transB=trans_b or None, **scale)
    if beta != 1:
        scale["beta"] = float(beta)
    return ctx.op("Gemm", a, b, ctx.value(bias), transA=trans_a or None, transB=trans_b or None, **scale)


@converts(aten.baddbmm.default)
def baddbmm(
    ctx: GraphBuilder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _add_product(ctx, node, bias, _matmul(ctx, node, x, y), beta, alpha)


def _add_product(ctx: GraphBuilder, node: fx.Node, bias: fx.Node, product: Value, beta: Scalar, alpha: Scalar) -> Value:
    """``beta * bias + alpha * product``."""
    dtype = dtype_of(node)
    if alpha != 1:
        product = ctx.op("Mul", product, ctx.value(alpha, dtype))
    if beta == 0:
        return product
    scaled = ctx.value(bias) if beta == 1 else ctx.op("Mul", ctx.value(bias), ctx.value(beta, dtype))
    return ctx.op("Add", product, scaled)


@converts(aten.dot.default)
def dot(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    _check_product(node, x)
    return ctx.op("MatMul", ctx.value(x), ctx.value(y))


@converts(aten.mv.default)
def mv(ctx: GraphBuilder, node: fx.Node, x: fx.Node, vec: fx.Node) -> Value:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    _check_product(node, x)
    # as a matrix of one column: onnxruntime 1.19 fuses a transpose into a MatMul with a vector and gets it wrong
    a, trans_a = _untransposed(ctx, x)
    column = ctx.op("Unsqueeze", ctx.value(vec), ctx.ints([1]))
    return ctx.op("Squeeze", ctx.op("Gemm", a, column, transA=trans_a or None), ctx.ints([1]))


@converts(aten.linear.default)
def linear(ctx: GraphBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, bias: Any = None) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    _check_product(node, x)
    if rank_of(x) == 2 and len(shape_of(weight)) == 2:
        inputs = [ctx.value(x), ctx.value(weight)] + ([ctx.value(bias)] if bias is not None else [])
        return ctx.op("Gemm", *inputs, transB=1)
    product = ctx.op("MatMul", ctx.value(x), ctx.op("Transpose", ctx.value(weight), perm=[1, 0]))
    return product if bias is None else ctx.op("Add", product, ctx.value(bias))
