"""Softmax, its logarithm, and their gradients."""

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.checks import axis_of
from lightning_ort.compiler.executors.ort.conversion.elementary import exp
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, work_dtype
from lightning_ort.compiler.executors.ort.conversion.reduction import reduce
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, converts

aten = torch.ops.aten


@converts(aten._softmax.default)
def softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    value = ctx.value(x, dtype_of(node))
    if _has_kernel(ctx, value, x, dim):
        return _along(value, "Softmax", x, dim)
    powers = exp(_below_largest(value, x, dim))
    return powers / reduce("ReduceSum", x, powers, dim, keepdim=True)


@converts(aten._log_softmax.default)
def log_softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    value = ctx.value(x, dtype_of(node))
    if _has_kernel(ctx, value, x, dim):
        return _along(value, "LogSoftmax", x, dim)
    below = _below_largest(value, x, dim)
    return below - reduce("ReduceSum", x, exp(below), dim, keepdim=True).op("Log")


def _has_kernel(ctx: GraphBuilder, value: Value, x: fx.Node, dim: int) -> bool:
    """Whether a kernel is right and fast: those of a CPU for other dimensions than the last transpose twice (1.19)."""
    if not ctx.on_cpu or value.dtype not in (torch.float32, torch.float64):
        return True
    return value.dtype is torch.float32 and (rank_of(x) == 0 or axis_of(dim, rank_of(x)) == rank_of(x) - 1)


def _below_largest(value: Value, x: fx.Node, dim: int) -> Value:
    # onnxruntime's kernels for float64 (1.19) return numbers for a row with a NaN or an infinity, where torch has NaN
    return value - reduce("ReduceMax", x, value, dim, keepdim=True)


def _along(value: Value, op_type: str, x: fx.Node, dim: int) -> Value:
    if rank_of(x):
        return value.op(op_type, axis=dim)
    return value.unsqueeze(0).op(op_type, axis=0).squeeze(0)  # ONNX has no axis of a scalar


def _in_float32(ctx: GraphBuilder, grad: fx.Node, output: fx.Node) -> tuple[Value, Value]:
    """The result and its gradient as torch's kernels compute with them: half types in float32."""
    dtype = work_dtype(output)
    return ctx.value(output, dtype), ctx.value(grad, dtype)


def _kernel_runs(ctx: GraphBuilder, node: fx.Node, output: fx.Node, kernel: str) -> bool:
    return dtype_of(output) is torch.float32 and rank_of(output) > 0 and ctx.variant(node) == kernel


@converts(aten._softmax_backward_data.default, variants=("SoftmaxGrad_13", EXPANDED))
def softmax_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node, dim: int, *args: Any) -> Value:
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    y, grads = _in_float32(ctx, grad, output)
    if _kernel_runs(ctx, node, output, "SoftmaxGrad_13"):
        result = ctx.ms("SoftmaxGrad_13", grads, y, axis=dim)
    else:
        result = (grads - reduce("ReduceSum", output, grads * y, dim, keepdim=True)) * y
    return result.cast(dtype_of(node))


# on 1024 x 4000 float32 LogSoftmaxGrad_13 takes 25 ms, the expansion 4 (1.19.2, 2 threads)
@converts(aten._log_softmax_backward_data.default, variants=(EXPANDED, "LogSoftmaxGrad_13"))
def log_softmax_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node, dim: int, *args: Any
) -> Value:
    """_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    y, grads = _in_float32(ctx, grad, output)
    if _kernel_runs(ctx, node, output, "LogSoftmaxGrad_13"):
        result = ctx.ms("LogSoftmaxGrad_13", grads, y, axis=dim)
    else:
        result = grads - exp(y) * reduce("ReduceSum", output, grads, dim, keepdim=True)
    return result.cast(dtype_of(node))
