"""Whatever is wrong with an argument, the error names it, what was passed, and what is allowed, at once."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_ort
from lightning_ort import (
    CompileReport,
    OnnxExport,
    ORTBFloat16Precision,
    ORTConfig,
    ORTDDPStrategy,
    ORTMatmulPrecision,
    ORTMixedPrecision,
    ORTNativeZeRO1Strategy,
    ORTOptimizer,
    ORTPredictor,
    ORTStrategy,
    ORTZeRO1Strategy,
    export_onnx,
    param_groups,
)
from lightning_ort.cli.bench import parse
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.optim import memory
from lightning_ort.optim.swap import OptimizerSwap

LINEAR = nn.Linear(2, 2)
# what is passed; a substring that stands for a file or folder of the test's is replaced by it
FILE, FOLDER = "<a file>", "<a folder>"
CHOICES = {
    "engine": "'auto', 'ort', 'recorded', 'torch'",
    "dropout_masks": "'exact', 'fast'",
    "placement": "'measured', 'always'",
    "fallback": "'warn', 'raise'",
    "dynamic": "True, False, None",
}
DEBUG_CHOICES = {
    "kernels": "'auto', 'training', 'standard'",
    "capture": "'auto', 'step', 'modules'",
    "check_against_eager": "True, False",
}
OP = "Pass names such as 'aten.gelu.default'"
Case = tuple[Callable[..., Any], dict[str, Any], type[Exception], tuple[str, ...]]

CONFIG: list[Case] = [
    *[
        (ORTConfig, {name: value}, ValueError, (f"ORTConfig({name}={value!r})", f"choose one of {allowed}"))
        for name, allowed in CHOICES.items()
        for value in ("x", 7, [], {}, math.nan, b"ort")
    ],
    *[
        (ORTConfig, {"debug": {name: value}}, ValueError, (f"({name}={value!r})", f"choose one of {allowed}"))
        for name, allowed in DEBUG_CHOICES.items()
        for value in ("x", 7, [], {}, math.nan, b"ort")
    ],
    *[(ORTConfig, {"debug": value}, TypeError, ("debug=", "pass a mapping")) for value in ("x", 7, None, [1])],
    (ORTConfig, {"debug": {"kernel": "auto"}}, TypeError, ("'kernel'", "did you mean 'kernels'?")),
    # what settings were called before
    (ORTConfig, {"kernels": "auto"}, TypeError, ("'kernels'", "debug={'kernels': 'auto'}")),
    (ORTConfig, {"capture": "modules"}, TypeError, ("'capture'", "debug={'capture': 'modules'}")),
    *[(ORTConfig, {"capture": value}, TypeError, ("'capture'", "engine='torch'")) for value in ("off", False)],
    (ORTConfig.parse, {"value": {"torch_ops": ["aten.mm"]}}, ValueError, ("debug={'torch_ops': ['aten.mm']}",)),
    *[
        (ORTConfig, {"activation_memory_budget": value}, kind, ("ORTConfig(activation_memory_budget=", "from 0 to 1"))
        for value, kind in (
            (-0.1, ValueError),
            (1.5, ValueError),
            (math.nan, ValueError),
            (True, TypeError),
            ("x", TypeError),
        )
    ],
    (ORTConfig, {"activation_memory_budget": 0.5, "engine": "torch"}, ValueError, ("compiles nothing; leave one",)),
    (ORTConfig, {"dynamic": 1}, ValueError, ("dynamic=1", "True, False, None")),
    (ORTConfig, {"placement": None}, ValueError, ("placement=None", "'measured', 'always'")),
    (ORTConfig, {"placment": "always"}, TypeError, ("'placment'", "did you mean 'placement'?")),
    (ORTConfig, {"xyzzy": 1}, TypeError, ("'xyzzy'", "the fields are engine, placement")),
    (ORTConfig.parse, {"value": {"placment": "always"}}, ValueError, ("'placment'", "did you mean 'placement'?")),
    (ORTConfig.parse, {"value": {1: 2}}, ValueError, ("field 1", "the fields are engine")),
    (ORTConfig.parse, {"value": 3}, TypeError, ("config=3", "an ORTConfig, a mapping")),
    *[
        (ORTConfig, {"debug": {"torch_ops": value}}, TypeError, ("torch_ops=", "pass a list of"))
        for value in ("aten.gelu", 3, [3], None, {"aten.gelu": 1})
    ],
    (
        ORTConfig,
        {"debug": {"torch_ops": ["aten.geluu"]}},
        ValueError,
        ("torch_ops=('aten.geluu',)", "mean 'aten.gelu'?", OP),
    ),
    (
        ORTConfig,
        {"debug": {"torch_ops": ["aten.gelu.defalt"]}},
        ValueError,
        ("aten.gelu.defalt", "'aten.gelu.default'", OP),
    ),
    *[
        (
            ORTConfig,
            {"debug": {"torch_ops": [value]}},
            ValueError,
            ("torch_ops=", repr(value), "Did you mean 'aten.gelu'?", OP),
        )
        for value in ("gelu", "aten::gelu", "aten.gelu.", "ATen.gelu")
    ],
    *[
        (ORTConfig, {"debug": {"torch_ops": ["aten.mm", value]}}, ValueError, ("torch_ops=", OP))
        for value in ("", ".", "aten", "aten.", "aten.__class__", "aten.name", "prims.add", "aten.mm.default.x")
    ],
    *[
        (ORTConfig, {"debug": {"providers": value}}, TypeError, ("providers=", "pass a list of strings"))
        for value in ("CPUExecutionProvider", 3, [3], {})
    ],
    (ORTConfig, {"debug": {"providers": []}}, ValueError, ("providers=()", "at least one")),
    (ORTConfig, {"debug": {"providers": ["CPU"]}}, ValueError, ("providers=('CPU',)", "'CPUExecutionProvider'")),
    (ORTConfig, {"debug": {"providers": ["CPUExecutionProvider"] * 2}}, ValueError, ("providers=", "each once")),
    (
        ORTBackend,
        {"config": {"debug": {"providers": ["XExecutionProvider"]}}},
        ValueError,
        ("providers", "available are"),
    ),
    (ORTBackend, {"config": {"engine": "auto"}}, ValueError, ("engine='auto'", "engine='ort'")),
    (ORTBackend, {"config": "x"}, TypeError, ("config='x'", "an ORTConfig")),
    *[
        (ORTConfig, {"debug": {name: value}}, error, (f"{name}={value!r}", allowed))
        for name in ("min_region_nodes", "intra_op_threads")
        for value, error, allowed in [
            *[(value, ValueError, "must be at least 1") for value in (0, -1, -(2**70))],
            *[(value, TypeError, "pass an integer") for value in ("2", True, 1.5, math.nan, math.inf, [1])],
        ]
    ],
    (ORTConfig, {"debug": {"min_region_nodes": None}}, TypeError, ("min_region_nodes=None", "pass an integer")),
    (ORTConfig, {"debug": {"intra_op_threads": 2**70}}, ValueError, ("intra_op_threads=", "at most 1024")),
    (ORTConfig, {"debug": {"intra_op_threads": 1025}}, ValueError, ("intra_op_threads=1025", "at most 1024")),
    *[
        (ORTConfig, settings, error, (f"{name}=", allowed))
        for name in ("cache_dir", "save_onnx_dir", "report")
        for value, error, allowed in [
            *[(value, TypeError, "None") for value in (3, True, [], b"x")],
            *[(value, ValueError, "None") for value in ("", "a\0b")],
            *[(f"{FILE}/below/x", ValueError, "Pass a f"), ("/proc/below/x", ValueError, "Pass a f")],
            ("x" * 300, ValueError, "Pass a f"),
        ]
        for settings in [{"debug": {name: value}} if name == "save_onnx_dir" else {name: value}]
    ],
    (ORTConfig, {"debug": {"save_onnx_dir": FILE}}, ValueError, ("save_onnx_dir=", "Pass a folder")),
    (ORTConfig, {"cache_dir": FILE}, ValueError, ("cache_dir=", "Pass a folder")),
    (ORTConfig, {"report": FOLDER}, ValueError, ("report=", "this is a folder. Pass a file")),
]


def strategy_cases(strategy: Callable[..., Any]) -> list[Case]:
    names = "'auto', 'keep', 'adamw_torch_fused'"
    return [
        *[(strategy, {"optim": value}, TypeError, (f"optim={value!r}", names)) for value in (None, 3, [], True)],
        (strategy, {"optim": "adamw_torch_fuse"}, ValueError, ("optim='adamw_torch_fuse'", "'adamw_torch_fused'?")),
        (strategy, {"optim": "xyzzy"}, ValueError, ("optim='xyzzy'", names.replace("'", ""))),
        *[
            (strategy, {"host_memory": value}, ValueError, (f"host_memory={value!r}", "'retain', 'default'"))
            for value in ("keep", None, 1, [])
        ],
        *[(strategy, {"config": value}, TypeError, (f"config={value!r}", "an ORTConfig")) for value in ("always", 3)],
        (strategy, {"config": {"placement": "x"}}, ValueError, ("placement='x'", "'measured', 'always'")),
        (strategy, {"config": {"placment": "always"}}, ValueError, ("'placment'", "'placement'")),
    ]


LIGHTNINGS = {"accelerator": "Accelerator", "checkpoint_io": "CheckpointIO", "precision_plugin": "Precision"}
STRATEGIES: list[Case] = [
    *[case for kind in (ORTStrategy, ORTDDPStrategy, ORTNativeZeRO1Strategy) for case in strategy_cases(kind)],
    *[
        (ORTStrategy, {"device": value}, ValueError, (f"device={value!r}", "such as 'cpu', 'cuda'"))
        for value in ("gpu", "cpu:x", "", -1, 1.5, True, [])
    ],
    *[
        (ORTStrategy, {name: value}, TypeError, (f"{name}={value!r}", kind))
        for name, kind in LIGHTNINGS.items()
        for value in ("16-mixed", 3, [])
    ],
    *[
        (kind, {"find_unused_parameter": True}, TypeError, ("'find_unused_parameter'", "'find_unused_parameters'"))
        for kind in (ORTDDPStrategy, ORTNativeZeRO1Strategy)
    ],
    (ORTDDPStrategy, {"placement": "always"}, TypeError, ("'placement'", "it is a setting of `config`")),
]

OPTIMIZERS: list[Case] = [
    *[
        (ORTOptimizer, {"name": value}, TypeError, (f"name={value!r}", "'auto', 'keep', 'adamw_torch_fused'"))
        for value in (None, 3, [])
    ],
    (ORTOptimizer, {"name": "adamw"}, ValueError, ("name='adamw'", "'adamw_torch_fused'?")),
    *[
        (kind, {"name": "adamw_bnb_8bit", **settings}, error, words)
        for kind in (ORTOptimizer, OptimizerSwap)
        for settings, error, words in [
            *[
                ({"min_8bit_size": value}, TypeError, (f"min_8bit_size={value!r}", "pass an integer of 0 or more"))
                for value in ("4096", None, math.nan, 1.5, True, [])
            ],
            ({"min_8bit_size": -1}, ValueError, ("min_8bit_size=-1", "at least 0")),
            *[
                ({"bits": value}, TypeError, (f"bits={value!r}", "names of modules to 8 or 32"))
                for value in (8, "8", [8], {1: 8}, [("a", 8)])
            ],
            *[
                ({"bits": {"net": value}}, ValueError, ("bits={'net': ", "choose 8 or 32"))
                for value in (4, "8", None, True, 8.0, [])
            ],
            *[
                ({"options": value}, TypeError, (f"options={value!r}", "names to values"))
                for value in (8, "eps", ["eps"], {1: 2})
            ],
        ]
    ],
    (ORTOptimizer, {"name": "auto", "options": {"eps": 1}}, ValueError, ("options={'eps': 1}", "'auto'")),
    (ORTOptimizer, {"name": "auto", "min_8bit_size": 1}, ValueError, ("`min_8bit_size`", "'auto'")),
    *[
        (param_groups, {"module": LINEAR, "weight_decay": value}, error, ("weight_decay=", allowed))
        for value, error, allowed in [
            *[(value, ValueError, "finite, and not negative") for value in (-1, -0.1, math.nan, math.inf)],
            *[(value, TypeError, "pass a number of 0 or more") for value in ("0.1", None, True, [], torch.ones(1))],
        ]
    ],
    *[
        (param_groups, {"module": value, "weight_decay": 0.1}, TypeError, ("module=", "a torch.nn.Module"))
        for value in (None, nn.Linear, [LINEAR], "net")
    ],
    (param_groups, {"module": nn.ReLU(), "weight_decay": 0.1}, ValueError, ("ReLU", "requires a gradient")),
    *[
        (function, {"module": LINEAR, "optim": value}, error, ("optim=", "adamw_torch_fused"))
        for function, error in ((memory.predict, ValueError), (memory.measure, TypeError))
        for value in (None, [], 3)
    ],
    *[
        (function, {"module": None, "optim": "adafactor"}, TypeError, ("module=None", "a torch.nn.Module"))
        for function in (memory.predict, memory.measure)
    ],
    *[
        (memory.predict(LINEAR, "adafactor").per_rank, {"ranks": value}, error, (f"ranks={value!r}", "1"))
        for value, error in ((0, ValueError), (-1, ValueError), ("2", TypeError), (None, TypeError))
    ],
]

PRECISION: list[Case] = [
    *[
        (ORTMixedPrecision, {"precision": value}, ValueError, (f"precision={value!r}", "'16-mixed', 'bf16-mixed'"))
        for value in ("16", 16, None, [])
    ],
    *[
        (ORTMixedPrecision, {"max_overflows": value}, error, (f"max_overflows={value!r}", "1"))
        for value, error in [
            *[(value, TypeError) for value in (math.nan, math.inf, "5", None, True, 1.5, [])],
            *[(value, ValueError) for value in (0, -1)],
        ]
    ],
    *[
        (ORTMixedPrecision, {"device": value}, ValueError, (f"device={value!r}", "'cpu', 'cuda'"))
        for value in ("gpu", -1, [])
    ],
    *[(ORTMixedPrecision, {"scaler": value}, TypeError, ("scaler=", "GradScaler or None")) for value in (1, "auto")],
    (
        ORTMixedPrecision,
        {"precision": "bf16-mixed", "scaler": torch.amp.GradScaler("cpu")},
        ValueError,
        ("scaler", "Leave the scaler out"),
    ),
    *[
        (ORTMatmulPrecision, {"level": value}, ValueError, (f"level={value!r}", "'highest', 'high', 'medium'"))
        for value in ("low", None, 1, [])
    ],
    *[
        (ORTBFloat16Precision, {"master_weights": value}, ValueError, (f"master_weights={value!r}", "True, False"))
        for value in ("yes", None, 1, [])
    ],
]


def export_cases(function: Callable[..., Any], **given: Any) -> list[Case]:
    return [
        *[
            (function, {"path": "x.onnx", "tolerance": value, **given}, error, (f"tolerance={value!r}", "0 or more"))
            for value, error in (("1e-4", TypeError), (None, TypeError), (True, TypeError), ([], TypeError))
        ],
        *[
            (function, {"path": "x.onnx", "tolerance": value, **given}, ValueError, (f"tolerance={value!r}", "finite"))
            for value in (-1, math.nan, math.inf)
        ],
        *[
            (
                function,
                {"path": "x.onnx", "quantize": value, **given},
                ValueError,
                (f"quantize={value!r}", "'fp16', 'int8', None"),
            )
            for value in ("int4", 8, [], True)
        ],
        *[
            (
                function,
                {"path": "x.onnx", "dynamic_batch": value, **given},
                ValueError,
                ("dynamic_batch=", "True, False"),
            )
            for value in ("yes", None, 1, [])
        ],
        *[
            (function, {"path": value, **given}, TypeError, (f"path={value!r}", "pass a path"))
            for value in (None, 3, [])
        ],
        *[(function, {"path": value, **given}, ValueError, ("path=", "pass a path")) for value in ("", "a\0b")],
        *[
            (function, {"path": value, **given}, ValueError, ("path=", "Pass a file that can be written"))
            for value in (FOLDER, f"{FILE}/x.onnx", "/proc/x.onnx")
        ],
    ]


ONNX: list[Case] = [
    *export_cases(export_onnx, module=LINEAR, sample=torch.ones(1, 2)),
    *export_cases(OnnxExport),
    *[
        (export_onnx, {"path": "x.onnx", "module": value}, TypeError, ("module=", "a torch.nn.Module"))
        for value in (None, nn.Linear, "net")
    ],
    *[
        (OnnxExport, {"path": "x.onnx", "best": value}, ValueError, ("best=", "True, False"))
        for value in ("yes", 1, [])
    ],
    *[(ORTPredictor, {"path": value}, TypeError, (f"path={value!r}", "pass a path")) for value in (None, 3, [])],
    (ORTPredictor, {"path": "no_such.onnx"}, FileNotFoundError, ("no_such.onnx", "lightning-ort export")),
    (ORTPredictor, {"path": FOLDER}, FileNotFoundError, ("there is no such file",)),
    (ORTPredictor, {"path": FILE}, ValueError, ("onnxruntime cannot load it",)),
    *[
        (ORTPredictor, {"path": FILE, "providers": value}, TypeError, ("providers=", "a list", "CPUExecutionProvider"))
        for value in ("CPUExecutionProvider", [], None, 3)
    ],
    (ORTPredictor, {"path": FILE, "providers": ["X"]}, ValueError, ("providers", "no X", "CPUExecutionProvider")),
]

OTHERS: list[Case] = [
    *[
        (CompileReport().to_text, {"width": value}, error, (f"width={value!r}", "1"))
        for value, error in ((0, ValueError), (-5, ValueError), ("80", TypeError), (None, TypeError))
    ],
    *[
        (CompileReport.from_dict, {"data": value}, ValueError, ("not a report of",))
        for value in (None, 3, [], {}, "x", {"graphs": 3})
    ],
    (parse, {"text": "fast"}, ValueError, ("'fast'", "stock, compile, torch, ort")),
    (parse, {"text": "stock+adamw_torch_fuse"}, ValueError, ("adamw_torch_fuse", "'adamw_torch_fused'")),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Puts real paths in the place of those that stand for them."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)

    def put(value: Any) -> Any:
        if type(value) is dict:
            return {key: put(item) for key, item in value.items()}
        if not isinstance(value, str):
            return value
        return value.replace(FILE, str(tmp_path / "file")).replace(FOLDER, str(tmp_path / "folder"))

    return put


def check(cases: list[Case], put: Callable[[Any], Any]) -> None:
    """All that is wrong with what is said, case by case."""
    wrong = []
    for function, kwargs, error, words in cases:
        case = f"{getattr(function, '__qualname__', function)}({kwargs})"
        try:
            function(**{name: put(value) for name, value in kwargs.items()})
        except Exception as raised:
            missing = [word for word in words if word not in str(raised)]
            if type(raised) is not error or missing:
                wrong.append(f"{case}: {type(raised).__name__}: {raised} (misses {missing})")
        else:
            wrong.append(f"{case}: nothing was said")
    assert not wrong, "\n".join(wrong)


TABLES = {
    "config": CONFIG,
    "strategies": STRATEGIES,
    "optimizers": OPTIMIZERS,
    "precision": PRECISION,
    "onnx": ONNX,
    "others": OTHERS,
}


@pytest.mark.parametrize("table", TABLES)
def test_wrong_arguments(table: str, places: Callable[[Any], Any]) -> None:
    if table == "onnx":
        pytest.importorskip("onnxscript")
    if table == "others":
        pytest.importorskip("jsonargparse")
    check(TABLES[table], places)


DEEPSPEED: list[Case] = [
    *strategy_cases(ORTZeRO1Strategy),
    *[
        (ORTZeRO1Strategy, {"deepspeed_config": value}, TypeError, ("deepspeed_config=", "a dict, or the path"))
        for value in (3, [], True, b"x.json")
    ],
    *[
        (ORTZeRO1Strategy, {"deepspeed_config": value}, ValueError, ("deepspeed_config=", "Pass the path"))
        for value in (FOLDER, FILE, "", "a\0b")
    ],
    (
        ORTZeRO1Strategy,
        {"deepspeed_config": "no_such.json"},
        MisconfigurationException,
        ("deepspeed_config='no_such.json'", "Pass the path"),
    ),
    *[
        (ORTZeRO1Strategy, {"deepspeed_config": {key: value}}, TypeError, ("deepspeed_config", f"{key}={value!r}", "{"))
        for key in ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler")
        for value in (3, None, [], True, "yes")
    ],
    *[
        (
            ORTZeRO1Strategy,
            {"deepspeed_config": {"zero_optimization": {"offload_optimizer": value}}},
            TypeError,
            ("offload_optimizer=", "{'device': 'cpu'}"),
        )
        for value in (None, True, "cpu")
    ],
    *[
        (ORTZeRO1Strategy, {name: value}, ValueError, (f"{name}={value!r}", "True, False"))
        for name in ("offload_optimizer", "overlap_comm", "contiguous_gradients")
        for value in ("yes", 1, [])
    ],
    *[
        (ORTZeRO1Strategy, {"reduce_bucket_size": value}, error, (f"reduce_bucket_size={value!r}", "1"))
        for value, error in [
            *[(value, TypeError) for value in ("5e8", math.nan, math.inf, 1.5, True, [])],
            *[(value, ValueError) for value in (0, -1)],
        ]
    ],
    *[
        (
            ORTZeRO1Strategy,
            {"checkpoint": value},
            ValueError,
            (f"checkpoint={value!r}", "choose one of 'file', 'directory'"),
        )
        for value in ("files", None, [])
    ],
    *[
        (ORTZeRO1Strategy, {"start_method": value}, ValueError, (f"start_method={value!r}", "'popen', 'spawn'"))
        for value in ("thread", None, [])
    ],
    *[
        (ORTZeRO1Strategy, {"stage": value}, ValueError, (f"stage={value!r}", "Leave it out"))
        for value in (2, "1", None)
    ],
]


def test_wrong_arguments_for_deepspeed(places: Callable[[Any], Any]) -> None:
    pytest.importorskip("deepspeed")
    check(DEEPSPEED, places)


def test_options_of_the_backend() -> None:
    module = torch.compile(LINEAR, backend="ort", options={"placment": "always"})
    with pytest.raises(Exception, match="did you mean 'placement'"):
        module(torch.ones(1, 2))
    module = torch.compile(LINEAR, backend="ort", options={"debug": {"torch_ops": {"aten.mm": 1}}})
    with pytest.raises(Exception, match="pass a list of strings"):
        module(torch.ones(1, 2))


def test_right_arguments(tmp_path: Path) -> None:
    """What is allowed at the borders."""
    config = ORTConfig(
        report=tmp_path / "c" / "d.json",
        cache_dir=tmp_path,
        debug={
            "torch_ops": ["aten.gelu", "aten.gelu.default", "aten._foreach_add.List", "aten.sym_size.int"],
            "providers": ["XExecutionProvider"],
            "intra_op_threads": 1024,
            "min_region_nodes": 2.0,
            "save_onnx_dir": tmp_path / "a" / "b",
        },
    )
    assert type(config.debug.min_region_nodes) is int
    assert not list(tmp_path.iterdir())  # nothing is made before there is something to write
    ORTMixedPrecision(max_overflows=1)
    param_groups(LINEAR, weight_decay=0)
    ORTDDPStrategy(find_unused_parameters=True, bucket_cap_mb=30, gradient_as_bucket_view=True)
    OptimizerSwap("adamw_bnb_8bit", min_8bit_size=0, bits={"": 8})


# by LightningCLI, as YAML: what is refused by its types and what by ours

YAML: list[tuple[str, Any, tuple[str, ...]]] = [
    ("ORTStrategy", {"config": {"placement": "x"}}, ("placement", "x", "measured", "always")),
    ("ORTStrategy", {"config": {"placment": "always"}}, ("placment",)),
    ("ORTStrategy", {"config": {"debug": {"torch_ops": ["aten.geluu"]}}}, ("torch_ops", "aten.geluu", "aten.gelu")),
    ("ORTStrategy", {"config": {"debug": {"providers": []}}}, ("providers", "at least one")),
    ("ORTStrategy", {"config": {"debug": {"intra_op_threads": 2**70}}}, ("intra_op_threads", "1024")),
    ("ORTStrategy", {"config": {"debug": {"intra_op_threads": 0}}}, ("intra_op_threads", "at least 1")),
    ("ORTStrategy", {"config": {"debug": {"min_region_nodes": "many"}}}, ("min_region_nodes", "many", "int")),
    ("ORTStrategy", {"config": {"debug": {"save_onnx_dir": "/proc/x"}}}, ("save_onnx_dir", "/proc/x")),
    ("ORTStrategy", {"config": {"report": "/proc/x"}}, ("report", "/proc/x")),
    ("ORTStrategy", {"config": {"cache_dir": ""}}, ("cache_dir", "'auto'")),
    ("ORTStrategy", {"optim": None}, ("optim", "adamw_torch_fused")),
    ("ORTStrategy", {"optim": "adamw"}, ("optim", "adamw", "adamw_torch_fused")),
    ("ORTStrategy", {"host_memory": "keep"}, ("host_memory", "keep", "retain", "default")),
    ("ORTDDPStrategy", {"host_memory": 3}, ("host_memory", "3", "retain", "default")),
    ("ORTDDPStrategy", {"dict_kwargs": {"find_unused_parameter": True}}, ("find_unused_parameter",)),
    ("ORTOptimizer", {"name": "adamw_bnb_8bit", "bits": 8}, ("bits", "8")),
    ("ORTOptimizer", {"name": "adamw_bnb_8bit", "bits": {"net": 4}}, ("bits", "net", "8 or 32")),
    ("ORTOptimizer", {"name": "adamw_bnb_8bit", "min_8bit_size": -1}, ("min_8bit_size", "at least 0")),
    ("ORTOptimizer", {"name": "adamw_bnb_8bit", "options": 3}, ("options", "3")),
    ("OnnxExport", {"path": "x.onnx", "tolerance": -1}, ("tolerance", "-1", "not negative")),
    ("OnnxExport", {"path": "x.onnx", "quantize": "int4"}, ("quantize", "int4", "fp16", "int8")),
    ("ORTMixedPrecision", {"max_overflows": 0}, ("max_overflows", "at least 1")),
    ("ORTMixedPrecision", {"max_overflows": ".nan"}, ("max_overflows", "int")),
    ("ORTMatmulPrecision", {"level": "low"}, ("level", "low", "highest", "medium")),
]


def cli(key: str, value: Any, folder: Path) -> LightningCLI:
    trainer = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False}
    path = folder / "config.yaml"  # JSON is YAML
    path.write_text(json.dumps({"trainer": {**trainer, key: value}}))
    return LightningCLI(BoringModel, BoringDataModule, args=[f"--config={path}"], run=False, save_config_callback=None)


@pytest.mark.parametrize(("name", "arguments", "words"), YAML)
def test_wrong_arguments_in_yaml(
    name: str, arguments: dict[str, Any], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("jsonargparse")
    extra = {key: arguments[key] for key in arguments if key == "dict_kwargs"}
    init = {key: value for key, value in arguments.items() if key not in extra}
    given = {"class_path": f"lightning_ort.{name}", "init_args": init, **extra}
    key = "strategy" if "Strategy" in name else "plugins" if "Precision" in name else "callbacks"
    with pytest.raises((SystemExit, TypeError, ValueError)) as raised:
        cli(key, given if key == "strategy" else [given], tmp_path)
    said = f"{raised.value} {capsys.readouterr().err}"
    assert not [word for word in words if word not in said], said


def test_yaml_still_knows_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = {"class_path": "lightning_ort.ORTStrategy", "init_args": {"config": {"placement": "always"}}}
    strategy = cli("strategy", given, tmp_path).trainer.strategy
    assert strategy.ort_config == ORTConfig(placement="always")
    args = [f"--config={tmp_path / 'config.yaml'}", "--print_config"]
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, BoringDataModule, args=args, run=False)
    out = capsys.readouterr().out
    for name in ("placement: always", "min_region_nodes: 2", "cache_dir: auto", "torch_ops: []"):
        assert name in out


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("ORTTrainingSettings", {"thread": 1}, "ORTTrainingSettings has no argument 'thread': did you mean 'threads'?"),
        ("ORTOptimizer", {"named": "keep"}, "ORTOptimizer has no argument 'named': did you mean 'name'?"),
        ("OnnxExport", {}, "OnnxExport needs the argument 'path'. The arguments are path, "),
        ("OnnxExport", {"file": "x"}, "OnnxExport has no argument 'file': the arguments are path, "),
        (
            "ORTMatmulPrecision",
            {"levels": "high"},
            "ORTMatmulPrecision has no argument 'levels': did you mean 'level'?",
        ),
        ("ORTStrategy", {"placement": "always"}, "it is a setting of `config`, config={'placement': 'always'}."),
    ],
)
def test_wrong_arguments_name_the_class_that_was_called(kind: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(lightning_ort, kind)(**arguments)
    assert message in str(caught.value)
