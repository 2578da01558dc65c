"""Names and messages of users are shown as they are, in every command and report."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ort import param_groups
from lightning_ort._text import plain
from lightning_ort.cli import bench, doctor, main
from lightning_ort.compiler.cache.cache import Cache, Entry
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import Timing
from lightning_ort.compiler.report.data import FallbackReport, GraphReport, RegionReport
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.run_part import OptimizerReport, RunReport, StepReport
from lightning_ort.config import ORTConfig
from lightning_ort.tuning.project import Project
from lightning_ort.tuning.trainer_process import Sample
from lightning_ort.tuning.trials import Trial

MARKUP = "x[batch, 3] [/red] [bold]b :Llama: :smile: [link=x] \\[a] $x_{$ {0} %s é \N{GREEK SMALL LETTER OMEGA}"
CONTROL = "\x1b[31m \r \x07 \udc80"
HOSTILE = MARKUP + CONTROL
NAME = MARKUP.replace("/", "")  # of a file or folder


class Command:
    """Runs commands and keeps what they print to a terminal of an encoding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
        self.out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
        self._monkeypatch = monkeypatch

    def __call__(self, *args: Any) -> str:
        self._monkeypatch.setattr(sys, "argv", ["lightning-ort", *map(str, args)])
        self._monkeypatch.setattr(sys, "stdout", self.out)
        main()
        shown = self.out.buffer.getvalue().decode(self.out.encoding)  # type: ignore[attr-defined]
        return " ".join(shown.split())  # a title has the width of its table


@pytest.fixture(params=["utf-8", "ascii", "latin-1"])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "600")
    return Command(monkeypatch, request.param)


def test_plain() -> None:
    assert plain(HOSTILE, "utf-8") == MARKUP + r"\x1b[31m \r \x07 \udc80"
    assert plain("a\n\tb\N{GRINNING FACE}", "utf-8") == "a\n\tb\N{GRINNING FACE}"
    assert plain("é", "ascii") == r"\xe9"


def report() -> CompileReport:
    reason = Reason(ReasonType.RUN_FAILED, HOSTILE)
    region = RegionReport(HOSTILE, "torch", 1, {HOSTILE: 1}, reason, {HOSTILE: reason})
    entries = [FallbackReport(HOSTILE, reason)]
    optimizers = [OptimizerReport(HOSTILE, HOSTILE, HOSTILE)]
    steps = [StepReport(HOSTILE, {"ort": 1.0})]
    return CompileReport([GraphReport(HOSTILE, [region])], entries, entries, run=RunReport(optimizers, steps, HOSTILE))


def test_text_of_a_report() -> None:
    # graph, region, reason and op; fallback, note: where and why; step; optimizer: which, as what, why; host memory
    shown, in_reasons = report().to_text(width=2000), " ".join(HOSTILE.split())  # they are one line
    assert shown.count(plain(HOSTILE, "utf-8")) + shown.count(plain(in_reasons, "utf-8")) == 4 + 4 + 1 + 2 + 1
    assert json.loads(json.dumps(report().to_dict())) == report().to_dict()


def test_report(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.json").write_text(json.dumps(report().to_dict()))
    shown = command("report", tmp_path / f"{NAME}.json")
    assert f"{plain(NAME)}.html" in shown
    page = (tmp_path / f"{NAME}.html").read_text(encoding="utf-8")
    assert MARKUP in page


def test_cache(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / NAME
    Cache(ORTConfig(cache_dir=str(folder))).store(f"region-{0:064x}", Entry(b"", Timing({}, 1)))
    command("cache", "info", "--folder", folder)
    shown = command("cache", "clear", "--folder", folder)
    assert shown.count(f"{plain(folder)}: ") == 2


def test_memory(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "nets.py").write_text("from torch.nn import Linear as Llama\n")
    options = ["--args", '{"in_features": 4, "out_features": 4}', "--optim", "adafactor"]
    shown = command("memory", f"{folder}/nets.py:Llama", *options)
    title = plain(f"{folder}/nets.py:Llama: 20 parameters")  # above the table, in lines of its width
    assert "".join(title.split()) in "".join(shown.split())


def test_bench(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(project: Project, trials: list[Trial], *args: Any) -> None:
        args[-1](HOSTILE)  # what it is doing
        trials[0].note(sample := Sample(1.0, [1.0], None))
        trials[0].count(1, sample)
        for one in trials:
            one.why = HOSTILE
        trials[0].name = HOSTILE

    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "nets.py").write_text("from torch.nn import Linear as Llama\n")
    monkeypatch.setattr(bench, "compare", measured)
    monkeypatch.setattr(bench, "VARIANTS", ("stock", "ort"))
    shown = command("bench", f"{folder}/nets.py:Llama", f"--output={folder}")
    assert plain(f"{folder}/nets.py:Llama: median of") in shown
    assert shown.count(plain(HOSTILE)) == 4  # a variant, what failed of it later, and of the other
    assert json.loads((folder / "bench.json").read_text())["rows"][1]["error"] == HOSTILE
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_convert(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = {"state_dict": {}, "optimizer_states": [{"state": {}}]}
    monkeypatch.setattr("lightning_ort.cli.convert.read_directory", lambda *args: checkpoint)
    shown = command("convert", tmp_path, tmp_path / NAME)
    assert plain(f"{tmp_path / NAME}: 0 tensors") in shown
    assert (tmp_path / NAME).is_file()


def test_export(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("lightning_ort.cli.export.export_onnx", lambda module, path, *args, **kwargs: path)
    (tmp_path / "nets.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Llama(BoringModel):\n    example_input_array = 1\n"
    )
    (module_state,) = [nn.Linear(32, 2).state_dict()]
    weights = {f"layer.{name}": value for name, value in module_state.items()}
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.6.0"}, tmp_path / "a.ckpt")
    arguments = ["--module", f"{tmp_path}/nets.py:Llama", "-o", tmp_path / NAME]
    shown = command("export", tmp_path / "a.ckpt", *arguments)
    assert plain(tmp_path / NAME) in shown


@pytest.mark.parametrize("json_", [True, False])
def test_doctor(json_: bool, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda machine: [doctor.Finding(HOSTILE, "ok", HOSTILE, HOSTILE)])
    shown = command("doctor", *(["--json"] if json_ else []))
    if json_:
        assert json.loads(shown)[0]["text"] == HOSTILE
    else:
        assert shown.count(plain(HOSTILE)) == 3


def test_param_groups() -> None:
    kind = type(HOSTILE.replace("\udc80", ""), (nn.Linear,), {})
    assert "x[batch, 3] [/red]" in " ".join(str(param_groups(kind(2, 2), weight_decay=0.1)).split())
