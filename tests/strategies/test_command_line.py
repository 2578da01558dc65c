"""An unmodified LightningCLI script takes the strategy by class path, and each of its settings."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from small_modules import Small

import lightning_ort
from lightning_ort import ORTConfig, ORTStrategy

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def cli(*args: str, run: bool = False) -> LightningCLI:
    return LightningCLI(Small, run=run, args=list(args), trainer_defaults=QUIET, save_config_callback=None)


def config_file(folder: Path, strategy: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return f"--config={path}"


def test_yaml(tmp_path: Path) -> None:
    init_args = {"config": {"placement": "always", "report": None, "debug": {"torch_ops": ["aten.gelu"]}}}
    strategy = {"class_path": "lightning_ort.ORTStrategy", "init_args": init_args}
    trainer = cli(config_file(tmp_path, strategy)).trainer
    assert type(trainer.strategy) is ORTStrategy
    assert trainer.strategy.ort_config == ORTConfig(placement="always", debug={"torch_ops": ("aten.gelu",)})


@pytest.mark.parametrize("name", ["ORTStrategy", "ORTDDPStrategy", "ORTNativeZeRO1Strategy", "ORTZeRO1Strategy"])
def test_each_strategy_round_trips(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    strategy = {"class_path": f"lightning_ort.{name}", "init_args": {"host_memory": "default"}}
    if name == "ORTZeRO1Strategy":
        pytest.importorskip("deepspeed")  # now, since its first import writes to stdout
        capsys.readouterr()
    with pytest.raises(SystemExit):
        cli(config_file(tmp_path, strategy), "--print_config")
    printed = capsys.readouterr().out  # with the defaults of Lightning's arguments, too
    assert "process_group_backend: null" in printed or name == "ORTStrategy"
    (tmp_path / "printed.yaml").write_text(printed)
    for arguments in (config_file(tmp_path, strategy), f"--config={tmp_path / 'printed.yaml'}"):
        made = cli(arguments).trainer.strategy
        assert type(made) is getattr(lightning_ort, name)
        assert made._memory.choice == "default"


def test_fit(tmp_path: Path) -> None:
    strategy = {"class_path": "lightning_ort.ORTStrategy", "init_args": {"config": {"placement": "always"}}}
    instance = LightningCLI(
        Small,
        args=["fit", config_file(tmp_path, strategy), f"--trainer.default_root_dir={tmp_path}"],
        trainer_defaults=QUIET,
        save_config_callback=None,
    )
    assert instance.trainer.strategy.report.ort_runs > 0


def test_arguments() -> None:
    trainer = cli(
        "--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.config.debug.capture=modules"
    ).trainer
    assert trainer.strategy.ort_config == ORTConfig(debug={"capture": "modules"})
    assert cli("--trainer.strategy=ort").trainer.strategy.strategy_name == "ort"


def test_print_config_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.config.placement=always"]
    with pytest.raises(SystemExit):
        cli(*arguments, "--print_config")
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)["trainer"]["strategy"]
    assert printed["init_args"]["config"]["placement"] == "always"
    assert printed["init_args"]["config"]["fallback"] == "warn"  # a default, for people to see and change
    (tmp_path / "printed.yaml").write_text(text)
    assert cli(f"--config={tmp_path / 'printed.yaml'}").trainer.strategy.ort_config == ORTConfig(placement="always")


def test_saved_config_repeats_the_run(tmp_path: Path) -> None:
    arguments = ["--trainer.strategy=lightning_ort.ORTStrategy", "--trainer.strategy.config.placement=always"]
    args = ["fit", *arguments, f"--trainer.default_root_dir={tmp_path}"]
    first = LightningCLI(Small, args=args, trainer_defaults=QUIET)
    saved = tmp_path / "config.yaml"
    again = LightningCLI(Small, args=["fit", f"--config={saved}"], save_config_kwargs={"overwrite": True})
    assert again.trainer.strategy.ort_config == first.trainer.strategy.ort_config == ORTConfig(placement="always")
    assert again.trainer.strategy.report.ort_runs == first.trainer.strategy.report.ort_runs > 0
    assert again.model.losses == first.model.losses


def test_help_shows_each_setting(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli("--trainer.strategy.help=lightning_ort.ORTStrategy")
    text = capsys.readouterr().out
    for name in ("placement", "fallback", "report", "debug", "intra_op_threads"):
        assert f"'{name}'" in text


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"placment": "always"}, "placment"),
        ({"placement": "never"}, "placement"),
        ({"kernels": "standard"}, "debug={'kernels': 'standard'}"),
        ({"capture": "off"}, "engine='torch'"),
    ],
)
def test_wrong_settings_are_refused(setting: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    strategy = {"class_path": "lightning_ort.ORTStrategy", "init_args": {"config": setting}}
    with pytest.raises(ValueError, match=re.escape(says)):
        cli(config_file(tmp_path, strategy))
