"""``lightning-ort run``: scripts that know nothing of this package, as ``python`` runs them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

import lightning_ort
from lightning_ort.cli import main
from lightning_ort.strategies.distributed import relaunch

PROJECT = Path(__file__).with_name("cli_project.py")
RUN = ("-m", "lightning_ort", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
SHOW = """
import json, sys
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, sys.modules["__main__"].__dict__ is globals()]))
"""


def python(*arguments: Any, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with this package to be found and one thread."""
    path = [str(Path(lightning_ort.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a script that fails in a function if it is told to, and of a package with one that shows what it sees."""
    (tmp_path / "fails.py").write_text("def fail():\n    raise ValueError('mine')\n\n\nfail()\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "show.py").write_text(SHOW)
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The command in this process, which is left as it was."""

    def run(*arguments: str) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["lightning-ort", "run", *arguments])
        monkeypatch.setattr(sys, "path", ["of the command", *sys.path])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(relaunch, "_command", None)
        main()

    return run


def test_a_script_sees_what_it_always_sees(command: Any, folder: Path, capsys: pytest.CaptureFixture) -> None:
    path = folder / "package" / "show.py"
    command("package/show.py", "--help", "-m", "x y", "--", "run")
    arguments = ["--help", "-m", "x y", "--", "run"]
    assert json.loads(capsys.readouterr().out) == [
        [str(path), *arguments],
        str(path.parent),
        "__main__",
        str(path),
        True,
    ]


def test_a_module_sees_what_it_always_sees(command: Any, folder: Path, capsys: pytest.CaptureFixture) -> None:
    path = str(folder / "package" / "show.py")
    command("-m", "package.show", "--help")
    assert json.loads(capsys.readouterr().out) == [[path, "--help"], str(folder), "__main__", path, True]


def test_the_first_argument_is_no_part_of_the_script(command: Any, capsys: pytest.CaptureFixture) -> None:
    command("--help")
    assert capsys.readouterr().out.startswith("usage: lightning-ort run SCRIPT")


@pytest.mark.parametrize("status", [0, 7])
def test_status(command: Any, folder: Path, status: int) -> None:
    (folder / "ends.py").write_text(f"raise SystemExit({status})")
    with pytest.raises(SystemExit) as info:
        command("ends.py")
    assert info.value.code == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass a script to run"),
        (("absent.py",), "'absent.py' is not a file"),
        (("package",), "'package' is not a file"),
        (("-m",), "-m needs the name of a module"),
        (("--strategy=ort", "fails.py"), "unknown option '--strategy=ort'"),
    ],
)
def test_wrong_arguments(command: Any, arguments: Any, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as info:
        command(*arguments)
    assert info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["package.absent", "absent.show", "package"])
def test_no_such_module(command: Any, module: str) -> None:
    with pytest.raises(SystemExit, match=f"lightning-ort run: .*{module.partition('.')[0]}"):
        command("-m", module)


def test_a_module_that_does_not_import_is_the_scripts_own_error(command: Any, folder: Path) -> None:
    (folder / "imports.py").write_text("import absent_module")
    for arguments in (("imports.py",), ("-m", "imports")):
        with pytest.raises(ModuleNotFoundError, match="absent_module"):
            command(*arguments)


def test_help_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "Run a script whose Trainer then knows the strategies" in " ".join(capsys.readouterr().out.split())


def test_an_error_looks_as_in_python(folder: Path) -> None:
    plain, ours = (python(*start, "fails.py", cwd=folder) for start in ((), RUN))
    assert "mine" in ours.stderr
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode == 1


def test_ctrl_c_ends_it_as_it_ends_python(folder: Path) -> None:
    # a shell that starts the tests in the background has SIGINT ignored, in all that they start
    handle = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    (folder / "waits.py").write_text(f"{handle}\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = python(*RUN, "waits.py", cwd=folder)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[1].endswith('waits.py", line 2, in <module>')
    assert done.stderr.endswith("KeyboardInterrupt\n")


def fit(folder: Path, *start: str, project: str = "lightning.pytorch", **trainer: Any) -> dict[int, dict[str, Any]]:
    """Train the project with a configuration file, and return the facts of each rank."""
    # which places by a fixed rule: what is measured could leave all of so small a model to torch
    settings = {"deterministic": True, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {**settings, **trainer}}))
    variables = {"PROJECT_USES": project, "LIGHTNING_ORT_CONFIG": '{"start": "now"}'}
    done = python(*start, PROJECT, "fit", "--config=config.yaml", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    files = sorted(folder.glob("fit.*.json"))
    return {int(file.suffixes[0][1:]): json.loads(file.read_text()) for file in files}


@pytest.mark.slow
def test_project_trains_by_name(tmp_path: Path) -> None:
    facts = fit(tmp_path, *RUN, strategy="ort")
    assert facts[0]["strategy"] == "ORTStrategy"
    assert facts[0]["report"]["ort_runs"] > 0
    assert facts[0]["argv"] == [str(PROJECT), "fit", "--config=config.yaml"]
    checkpoint = torch.load(next(tmp_path.glob("**/*.ckpt")), weights_only=True)
    assert list(checkpoint["state_dict"]) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


@pytest.mark.slow
def test_checkpoint_is_for_plain_python(tmp_path: Path) -> None:
    facts = fit(tmp_path, *RUN, strategy="ort")
    arguments = (f"--ckpt_path={next(tmp_path.glob('**/*.ckpt'))}", f"--trainer.default_root_dir={tmp_path}")
    done = python(PROJECT, "test", *arguments, "--trainer.accelerator=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tested = json.loads((tmp_path / "test.0.json").read_text())
    assert tested["report"] is None  # Lightning's own strategy
    assert tested["weight"] == facts[0]["weight"]


@pytest.mark.parametrize("command", [None, ["run", "-m", "package.train"]])
def test_other_processes_start_the_same_way(command: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch, "_command", command)
    monkeypatch.setattr(sys, "argv", argv := ["train.py", "fit", "--help"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda arguments, **_: started.append(arguments))
    trainer = Trainer(strategy="ort_ddp", accelerator="cpu", devices=3, logger=False, enable_checkpointing=False)
    trainer.strategy.launcher._call_children_scripts()
    if command is None:
        assert started == [[sys.executable, os.path.abspath("train.py"), "fit", "--help"]] * 2
    else:
        assert started == [[sys.executable, "-m", "lightning_ort.__main__", *command, "fit", "--help"]] * 2
    assert sys.argv is argv
    assert sys.modules["__main__"].__spec__ is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "project"),
    [
        pytest.param(RUN, "lightning.pytorch", id="launcher"),
        pytest.param(RUN, "pytorch_lightning", id="pytorch_lightning"),
        pytest.param((*TORCHRUN, *RUN), "lightning.pytorch", id="torchrun"),
    ],
)
def test_two_processes(start: tuple[str, ...], project: str, tmp_path: Path) -> None:
    pytest.importorskip(project)
    facts = fit(tmp_path, *start, project=project, strategy="ort_ddp", devices=2)
    assert list(facts) == [0, 1]
    assert {fact["strategy"] for fact in facts.values()} == {"ORTDDPStrategy"}
    assert all(fact["report"]["ort_runs"] > 0 for fact in facts.values())
    assert facts[0]["weight"] == facts[1]["weight"]
    assert facts[0]["argv"] == facts[1]["argv"]
