"""Which core ATen ops, and which models of tests/models/zoo.py, export for training.

An op counts if a step that calls it with each of its samples is one model of standard operators, whose results and
gradients are eager's. Run as ``python -m tests.anywhere.coverage``, with names for some ops or models alone.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from lightning_ort import export_training
from lightning_ort.compat.onnxruntime import import_onnxruntime
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training.batch import Limits
from lightning_ort.onnx_export.training.models import Settings, convert
from lightning_ort.onnx_export.training.tracing import trace
from tests.conversion import harness
from tests.conversion.conformance import core_ops, function_of, name_of
from tests.conversion.core_op_samples import SAMPLES
from tests.models.conformance import Training
from tests.models.zoo import MODELS

RTOL, ATOL = harness.TOLERANCES[torch.float32]


class Calls(nn.Module):
    """Holds what a sample differentiates as parameters."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.leaves = nn.ParameterDict(
            {str(i): nn.Parameter(x.detach().clone()) for i, x in enumerate(inputs) if _is_leaf(x)}
        )


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _flat(results: Any) -> list[Tensor]:
    results = results if isinstance(results, (tuple, list)) else [results]
    return [result for result in results if isinstance(result, Tensor)]


def export_call(op: Any, call: Any) -> None:
    """Export a step that makes a call of an op, and compare."""
    fn, inputs = function_of(op, call, torch.float32)
    check_call(str(op), fn, inputs, compares=op is not torch.ops.aten.native_dropout.default)  # which draws


def check_call(name: str, fn: Any, inputs: list[Any], compares: bool = True) -> None:
    """Export a step that calls a function; assert that it returns eager's results and gradients."""
    module = Calls(inputs)
    fields = {f"x{i}": x for i, x in enumerate(inputs) if isinstance(x, Tensor) and not _is_leaf(x)}
    fields["unused"] = torch.zeros(1)

    weights: list[Tensor] = []

    def step(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = [module.leaves[str(i)] if _is_leaf(x) else values.get(f"x{i}", x) for i, x in enumerate(inputs)]
        # an op that writes to its argument writes to no parameter
        given = [x * 1 if isinstance(x, Tensor) and x.is_floating_point() else x for x in given]
        results = _flat(fn(*given))
        parts = [r for r in results if r.requires_grad]
        if not weights:  # in the first call, which is not traced
            weights.extend(harness.cotangents_for(parts))
        loss = sum(((r * w.to(r.dtype)).sum() for r, w in zip(parts, weights, strict=True)), start=torch.zeros(()))
        if loss.requires_grad:
            loss.backward()
        return {"loss": loss.detach()} | {f"r{i}": r.detach() for i, r in enumerate(results)}

    torch.manual_seed(0)
    want = step(fields)
    want |= {f"gradient/leaves.{key}": leaf.grad for key, leaf in module.leaves.items() if leaf.grad is not None}
    traced = trace(module, step, fields, {}, name)
    parameters = dict(module.named_parameters())
    state = {key: ("parameter", value) for key, value in parameters.items()}
    model = convert(traced, state, parameters, Settings(None), True, (), Limits({}))
    session = import_onnxruntime().InferenceSession(ir.to_proto(model.model).SerializeToString())
    feeds = {f"leaves.{key}": leaf.detach().numpy() for key, leaf in module.leaves.items()}
    feeds |= {key: value.numpy() for key, value in fields.items()}
    drawn = [value for value in session.get_inputs() if value.name.startswith("random/")]
    feeds |= {value.name: torch.rand(value.shape).numpy() for value in drawn}
    names = [value.name for value in session.get_outputs()]
    read = {value.name for value in session.get_inputs()}
    got = dict(zip(names, session.run(None, {k: v for k, v in feeds.items() if k in read}), strict=True))
    for key, value in want.items() if compares else ():
        result = torch.from_numpy(got[key])
        torch.testing.assert_close(result, value, rtol=RTOL, atol=ATOL, equal_nan=True, check_dtype=False, msg=key)


def examine(op: Any) -> str | None:
    """Return why an op does not export, or ``None``."""
    for call in SAMPLES[name_of(op)]:
        try:
            export_call(op, call)
        except ExportFailed as error:
            return str(error).partition("\n")[0].partition("exported: ")[2] or str(error)
        except AssertionError as error:
            return f"other results: {str(error).strip().splitlines()[0]}"
        except Exception as error:  # onnxruntime's own, and those of ops that torch cannot trace
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return None


def examine_model(name: str) -> str:
    """Return how an export of a model went."""
    torch.manual_seed(0)
    module = Training(MODELS[name].make())
    with tempfile.TemporaryDirectory() as folder:
        try:
            batch = module._batches[0]
            return str(export_training(module, batch, Path(folder) / "x", dropout=False)).partition("; ")[2]
        except Exception as error:
            return f"FAILED {type(error).__name__}: {str(error).replace(chr(10), ' ')[:400]}"


def main() -> None:
    logging.disable(logging.WARNING)

    wanted = sys.argv[1:]
    ops = [op for op in core_ops() if not wanted or name_of(op) in wanted or "--ops" in wanted]
    left = {}
    for op in ops:
        if (reason := examine(op)) is not None:
            left[name_of(op)] = reason
            print(name_of(op), "|", reason, flush=True)
    print(f"{len(ops) - len(left)} of {len(ops)} core ops export for training", flush=True)
    for name in MODELS:
        if name in wanted or "--models" in wanted or not wanted:
            start = time.time()
            print(name, "|", examine_model(name), f"| {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
