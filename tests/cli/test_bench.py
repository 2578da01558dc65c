"""``lightning-ort bench``: candidates that the user names, in the processes of ``lightning-ort tune``."""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from running import is_running
from torch import nn

from lightning_ort._busy import Stopwatch
from lightning_ort._imports import LIGHTNING
from lightning_ort.cli import bench, main
from lightning_ort.cli.bench import Summary, summary_of
from lightning_ort.cli.bench_picture import draw_bars
from lightning_ort.cli.load import load
from lightning_ort.compiler.report.data import GraphReport, RegionReport
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.run_part import StepReport
from lightning_ort.tuning import project, trainer_process
from lightning_ort.tuning.candidate import Candidate, configured
from lightning_ort.tuning.project import Project
from lightning_ort.tuning.trainer_process import Sample, VariantFailed
from lightning_ort.tuning.trials import Trial

MODULES = Path(__file__).parent / "bench_modules.py"
LIMIT = 60.0  # seconds, for what takes less than one on a quiet machine


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "bench", *args])
    monkeypatch.setenv("COLUMNS", "200")
    main()


def small(name: str = "Small") -> Project:
    return Project(module=load(f"{MODULES}:{name}", "module"), accelerator="cpu")


def trial(name: str, seconds: list[float], loss: float = 1.0, **more: Any) -> Trial:
    made = Trial(bench.parse(name), name=name, **more)
    for number, each in enumerate(seconds, 1):
        made.note(sample := Sample(each, [loss], 2**40))
        made.count(number, sample)
    return made


def columns_of(trials: list[Trial]) -> dict[str, list[str]]:
    return {str(column.header): list(map(str, column.cells)) for column in bench.to_table(trials, "a title").columns}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("stock", {"engine": "stock"}),
        ("compile+fused", {"engine": "compile", "optim": "auto"}),
        ("torch", {"engine": "torch"}),
        ("ort@bf16-mixed", {"engine": "ort", "precision": "bf16-mixed"}),
        ("ort+adamw_bnb_8bit@medium", {"engine": "ort", "optim": "adamw_bnb_8bit", "precision": "medium"}),
    ],
)
def test_how_a_candidate_is_written(text: str, settings: dict[str, str]) -> None:
    assert bench.parse(text) == Candidate(**settings)  # type: ignore[arg-type]


def test_one_that_is_named_twice_is_measured_twice() -> None:
    assert [one.name for one in bench.named(["stock", "ort", "stock"])] == ["stock", "ort", "stock (2)"]


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        ("ort", {}, {"engine": "ort", "start": "now"}),
        ("auto", {}, {"engine": "auto", "start": "now"}),
        ("ort", {"engine": "auto"}, {"engine": "auto", "start": "now"}),
        ("torch", {"start": "amortized"}, {"engine": "torch", "start": "amortized"}),
    ],
)
def test_settings_of_the_strategy(text: str, config: dict[str, str], expected: dict[str, str]) -> None:
    job = Project(module=LightningModule, ort_config=bench.NAMED | config)
    made = configured(job.base(), bench.parse(text), ort_config=job.ort_config)
    strategy = project.built(made["trainer"]["strategy"])
    assert {name: getattr(strategy.ort_config, name) for name in expected} == expected


def test_stock_and_ort_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--variants", "stock+fused", "ort", "--rounds=2", "--steps=3", "--warm-up=2", f"--output={tmp_path}"]
    run(monkeypatch, f"{MODULES}:Small", *arguments, "--args", "width=16", "--ort-config", "placement=always")
    shown = capsys.readouterr()
    found = json.loads((tmp_path / "bench.json").read_text())
    stock, ort = found["rows"]
    assert found["settings"]["args"] == {"width": 16}
    assert found["machine"]["torch"]
    assert "stock+fused" in shown.out
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    for row in (stock, ort):
        assert row["error"] is None
        assert [len(sample["losses"]) for sample in row["samples"]] == [3, 3]
        assert row["step_ms"] > 0
    assert stock["ratios"] == [1, 1]
    assert stock["summary"]["ort_runs"] == 0
    assert ort["summary"]["ort_runs"] >= 2 + 3 + 2  # loss and gradients in one; the first step runs unchanged
    assert "fused" in ort["summary"]["optimizers"][0]
    for ours, theirs in zip(ort["samples"], stock["samples"], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    # what the processes print is in their files
    assert "GPU available" not in shown.out + shown.err


def test_configuration_of_lightning_cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config = {
        # in bf16-mixed all of so small a module stays in torch
        "trainer": {"max_epochs": 1, "strategy": "ddp", "devices": 4, "accelerator": "cpu", "precision": "bf16-mixed"},
        "model": {"class_path": "bench_modules.Small", "init_args": {"width": 8}},
        "data": {"class_path": "bench_modules.Data", "init_args": {"width": 8}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.syspath_prepend(MODULES.parent)
    arguments = [f"--config={path}", "--rounds=1", "--steps=2", "--warm-up=1", f"--output={tmp_path}"]
    run(monkeypatch, *arguments, "--variants", "ort@32-true", "--ort-config", "placement=always")
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert row["error"] is None, (tmp_path / "ort@32-true" / "log.txt").read_text()
    assert row["summary"]["ort_runs"] > 0
    assert len(row["samples"][0]["losses"]) == 2


def test_torch_compile_leaves_no_child_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(12)])  # dynamo's limit for one function is 8
    x = torch.rand(2, 4)
    module.configure_callbacks = list  # type: ignore[assignment]
    project._prepare(SimpleNamespace(callbacks=[]), module, Candidate(engine="compile"), LIGHTNING)
    for layer in module.layers:
        x = layer(x)
    assert len(compiled) == 12


def test_a_variant_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limits: Callable[..., None]
) -> None:
    monkeypatch.setattr(Stopwatch, "slowdown", 3.0)
    monkeypatch.setattr(trainer_process, "start_method", lambda: "fork")  # which has what is replaced here
    limits(slowdown=1.25)
    arguments = ["--variants", "stock", "stock+adamw_apex_fused", "--rounds=1", "--steps=1", "--warm-up=1"]
    run(monkeypatch, f"{MODULES}:Small", *arguments)
    lines = capsys.readouterr().out.splitlines()
    assert any("other programs used the machine (steps took 3.0 times as long)" in line for line in lines)
    _, failed = (line for line in lines if "stock+adamw_apex_fused" in line)  # in the table, and why below
    assert "apex" in failed.replace("stock+adamw_apex_fused", "")
    assert any("1.00x" in line for line in lines)


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    process = project.start(small("Dies"), Candidate(), tmp_path)
    with pytest.raises(VariantFailed, match="ended with code 7"):
        process.sample(1)
    process.stop()


def test_a_process_that_the_system_ends_is_named(tmp_path: Path) -> None:
    process = project.start(small("IsKilled"), Candidate(), tmp_path)
    with pytest.raises(VariantFailed, match="the system ended its process, most likely for its memory .*code -9"):
        process.sample(1)
    process.stop()


def test_training_that_ends_early_is_named(tmp_path: Path) -> None:
    process = project.start(small("StopsItself"), Candidate(), tmp_path)
    with pytest.raises(VariantFailed, match="ended before another 5 steps"):
        process.sample(5)
    process.stop()


def _start_two(folder: Path, connection: Connection) -> None:
    processes = [project.start(small(), Candidate(), folder / name) for name in "ab"]
    connection.send([process._process.pid for process in processes])
    time.sleep(LIMIT)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_start_two, args=(tmp_path, theirs))
    process.start()
    pids = ours.recv()
    process.kill()
    process.join()
    end = time.monotonic() + LIMIT
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.05)


class Scripted:
    """A Trainer with given times, for what is made of them."""

    def __init__(self, project: Project, candidate: Candidate, folder: Path, after: Any) -> None:
        self.seconds = {"stock": [0.3, 0.1, 0.2, 0.1], "ort": [1.0, 0.05, 0.05, 0.1]}[candidate.engine or ""]
        self.taken = 0

    def sample(self, steps: int) -> Sample:
        if self.taken == 3 and self.seconds[0] == 1.0:
            raise KeyboardInterrupt
        self.taken += 1
        return Sample(self.seconds[self.taken - 1], [1.0] * steps, 1000)

    def stop(self) -> None:
        pass


def test_interrupted_run_keeps_the_finished_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "start", Scripted)
    stock, ort = bench.named(["stock", "ort"])
    bench.compare(Project(), [stock, ort], 3, 2, 10, tmp_path)
    assert [sample.step_seconds for sample in ort.samples] == [0.05, 0.05]
    found = bench.to_dict(ort, stock)
    assert found["ratios"] == [2, 4]
    assert found["step_ms"] == pytest.approx(50)
    assert found["startup_seconds"] == pytest.approx(9.5)
    assert found["error"] is None
    assert "summary" not in found
    assert bench.to_dict(stock, stock)["ratios"] == [1] * len(stock.samples)


def test_what_fails_later_keeps_its_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Fails(Scripted):
        def sample(self, steps: int) -> Sample:
            if self.taken == 3 and self.seconds[0] == 1.0:
                raise VariantFailed("RuntimeError: late")
            return super().sample(steps)

        def finish(self) -> Summary:
            return Summary(ort_runs=self.taken)

    monkeypatch.setattr(bench, "start", Fails)
    stock, ort = bench.named(["stock", "ort"])
    bench.compare(Project(), [stock, ort], 3, 2, 10, tmp_path)
    assert (len(stock.samples), len(ort.samples)) == (3, 2)
    assert (stock.summary, ort.summary) == (Summary(ort_runs=4), None)
    assert columns_of([stock, ort])["ms a step"] == ["50", "100"]
    assert list(bench.problems([stock, ort])) == ["ort: failed later: RuntimeError: late"]


def test_table_is_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(job: Project, trials: list[Trial], *args: Any) -> None:
        for one, seconds in zip(trials, [1.2345, 0.1], strict=True):
            one.__dict__ |= vars(trial(one.name, [seconds]))

    monkeypatch.setattr(bench, "compare", measured)
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "bench", f"{MODULES}:Small", "--variants", "stock+fused", "ort"])
    monkeypatch.setenv("COLUMNS", "40")
    main()
    shown = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    (line,) = (line for line in shown.splitlines() if "stock+fused" in line)
    assert "1,234" in line
    assert "1.00-1.00" in line
    assert "1,099,512" in line


def test_plot_shows_each_round_and_what_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], figure_class.savefig
    monkeypatch.setattr(figure_class, "savefig", lambda figure, *a, **k: [drawn.append(figure), save(figure, *a, **k)])
    samples = {"stock": [0.2, 0.2, 0.3], "ort+keep": [0.1, 0.2, 0.1], "stock+adamw_apex_fused": [], "ort": []}
    whys = {"stock+adamw_apex_fused": "apex is not installed"}
    draw_bars(
        [trial(name, times, why=whys.get(name, "")) for name, times in samples.items()], "a", "b", tmp_path / "plot.png"
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(samples)
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1, 2, 0, 0])
    assert axes.collections[1].get_offsets()[:, 0].tolist() == pytest.approx([2, 1, 3])
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["1.00x, 200 ms a step", "2.00x, 100 ms a step", "failed", "not finished"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to train"),
        (["nowhere.py:Small"], "there is no file"),
        ([f"{MODULES}:Missing"], "has no attribute 'Missing'"),
        ([f"{MODULES}:Smalls"], "did you mean 'Small'"),
        ([f"{MODULES}:Small", "--variants", "fast"], "unknown engine 'fast'; allowed are stock, compile, torch, ort"),
        ([f"{MODULES}:Small", "--rounds=0"], "--rounds=0: must be at least 1"),
        ([f"{MODULES}:Small", "--output=/proc/x"], "--output='/proc/x'"),
        ([f"{MODULES}:Small", "--ort-config", "placment=always"], "did you mean 'placement'"),
        ([f"{MODULES}:Small", "--variants", "ort@bf16-mix"], "did you mean 'bf16-mixed'"),
        ([f"{MODULES}:Small", "--variants", "ort+adamw_bnb_8bits"], "did you mean 'adamw_bnb_8bit'"),
        ([f"{MODULES}:WithoutData"], "there is no data to train with"),
        (["--config=nowhere.yaml"], "--config=nowhere.yaml: there is no such file"),
    ],
)
def test_bad_input(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    assert message in str(caught.value)


def test_nothing_is_compared_with_what_does_not_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self):\n        1 / 0\n"
    (tmp_path / "net.py").write_text(source)
    with pytest.raises(SystemExit, match="stock, which the others are compared with, does not train: .*division"):
        run(monkeypatch, f"{tmp_path}/net.py:Net", "--variants", "stock", "ort", "--rounds=1", "--steps=1")


def test_a_misspelt_section_gets_a_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("models: {class_path: a.B}\n")
    with pytest.raises(SystemExit, match="'models'; did you mean 'model'"):
        run(monkeypatch, f"--config={tmp_path}/config.yaml")


def test_rows_are_sorted_by_the_speed_that_they_show() -> None:
    # the median of the rounds' ratios of "ort" is 1, although its median time is half of the baseline's
    samples = {"stock": [0.2, 0.1, 0.2], "ort+keep": [0.4, 0.4, 0.4], "ort": [0.2, 0.1, 0.1], "torch": []}
    trials = [trial(name, times) for name, times in samples.items()]
    columns = columns_of(trials)
    assert columns["variant"] == ["ort *", "stock", "ort+keep", "torch"]
    assert columns["speed"][:3] == ["2.00x", "1.00x", "0.50x"]
    assert columns["ms a step"][:3] == ["100", "200", "400"]
    assert [bench.to_dict(one, trials[0]).get("speed") for one in trials] == [1.0, 0.5, 2.0, None]


def test_what_pays_and_what_trains_otherwise() -> None:
    startups = {"stock": 1.0, "ort": 2.0, "ort@16-true": 0.0, "ort+keep": 0.0}  # the third one by chance
    samples = {"stock": (0.2, 1.0), "ort": (0.1, 1.01), "ort@16-true": (0.1, 1.3), "ort+keep": (0.4, 1.0)}
    trials = [trial(name, [each], loss, startup=startups[name]) for name, (each, loss) in samples.items()]
    columns = columns_of(trials)
    found = dict(zip((name.rstrip(" *") for name in columns["variant"]), columns["pays after"], strict=True))
    assert found == {"ort": "10", "ort@16-true": "0", "stock": "-", "ort+keep": "never"}
    (text,) = bench.problems(trials)
    assert text.startswith("ort@16-true does not train as stock does: after the same batches its loss differs by 30%.")


def test_compiling_never_takes_less_than_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Faster(Scripted):  # at the start than later, as noise has it
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.seconds = [0.05, 0.1, 0.1, 0.1]

        def finish(self) -> Summary:
            return Summary()

    monkeypatch.setattr(bench, "start", Faster)
    bench.compare(Project(), trials := bench.named(["stock"]), 3, 2, 10, tmp_path)
    assert trials[0].startup == 0


@pytest.mark.parametrize(("ms", "expected"), [({"ort": 1.0, "torch": 2.0}, 0.75), ({"ort": 2.0, "torch": 1.0}, 0.0)])
def test_share_on_ort_is_of_what_stays_in_use(ms: dict[str, float], expected: float) -> None:
    regions = [RegionReport("ort_0", "ort", 3, runs=2), RegionReport("torch_1", "torch", 1)]
    report = CompileReport([GraphReport("training_step/step_0", regions)])
    report.steps.append(StepReport("training_step", ms))
    summary = summary_of(SimpleNamespace(strategy=SimpleNamespace(report=report)))
    assert summary.ort_node_fraction == expected
    assert summary.ort_runs == 2
