"""ONNX Runtime as a training backend for PyTorch Lightning.

``import lightning_ort`` makes ``Trainer(strategy="ort")`` work; :class:`ORTStrategy` is the same with settings.
Importing this package starts nothing: neither onnxruntime nor Lightning is loaded before it is used.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from lightning_ort._imports import __version__
from lightning_ort._registration import register_strategies
from lightning_ort.compiler.report import CompileReport
from lightning_ort.config import ORTConfig

if TYPE_CHECKING:
    from lightning_ort.lightning import (
        OnnxExport,
        ORTBFloat16Precision,
        ORTDDPStrategy,
        ORTMatmulPrecision,
        ORTMixedPrecision,
        ORTNativeZeRO1Strategy,
        ORTOptimizer,
        ORTPredictor,
        ORTStrategy,
        ORTTrainingSettings,
        ORTZeRO1Strategy,
    )
    from lightning_ort.onnx_export.export import export_onnx
    from lightning_ort.onnx_export.training.export import export_training
    from lightning_ort.onnx_export.training.restore import load_training_state
    from lightning_ort.optim.param_groups import param_groups
    from lightning_ort.tuning.api import TuneResult, tune

__all__ = [
    "CompileReport",
    "ORTBFloat16Precision",
    "ORTConfig",
    "ORTDDPStrategy",
    "ORTMatmulPrecision",
    "ORTMixedPrecision",
    "ORTNativeZeRO1Strategy",
    "ORTOptimizer",
    "ORTPredictor",
    "ORTStrategy",
    "ORTTrainingSettings",
    "ORTZeRO1Strategy",
    "OnnxExport",
    "TuneResult",
    "__version__",
    "export_onnx",
    "export_training",
    "load_training_state",
    "param_groups",
    "tune",
]

# As in Lightning, INFO messages go to the console unless the program configures logging.
_log = logging.getLogger(__name__)
if _log.level == logging.NOTSET:
    _log.setLevel(logging.INFO)
if not _log.hasHandlers():
    _log.addHandler(logging.StreamHandler())
    _log.propagate = False

register_strategies()

_ELSEWHERE = {
    "TuneResult": "lightning_ort.tuning.api",
    "export_onnx": "lightning_ort.onnx_export.export",
    "export_training": "lightning_ort.onnx_export.training.export",
    "load_training_state": "lightning_ort.onnx_export.training.restore",
    "param_groups": "lightning_ort.optim.param_groups",
    "tune": "lightning_ort.tuning.api",
}


def __getattr__(name: str) -> Any:
    if name in __all__ and name.startswith(("ORT", "Onnx")):  # ORTConfig is there already
        from lightning_ort._imports import preferred_namespace

        return getattr(preferred_namespace().classes, name)
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    from lightning_ort._arguments import closest

    # dunder names are asked for by Python and tools
    hint = "" if name.startswith("_") else f": {closest(name, __all__, 'names')}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
