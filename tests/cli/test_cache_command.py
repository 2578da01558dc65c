"""``lightning-ort cache``."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ort.cli import main
from lightning_ort.compiler.cache.cache import Cache, Entry
from lightning_ort.compiler.cache.cache_folder import default_folder
from lightning_ort.compiler.regions.region import Timing
from lightning_ort.config import ORTConfig


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "cache", *args])
    main()


def entry(number: int) -> str:
    return f"region-{number:064x}"


FOREIGN = (
    "mine.json",
    "region-1.json",
    "graph-of-sales.json",
    f"{entry(0)}.json.orig",
    "notes.tmp",
    f"x{entry(0)}.onnx",
)


def fill(folder: Path, count: int) -> None:
    kept = Cache(ORTConfig(cache_dir=str(folder)))
    for number in range(count):
        kept.store(entry(number), Entry(bytes(960), Timing({}, 1)))
    for name in FOREIGN:
        (folder / name).write_text("{}")
    (folder / f"{entry(100)}.json").mkdir()
    (folder / f"{entry(101)}.onnx").symlink_to(folder / "mine.json")
    (folder / f"{entry(0)}.json.1a_b.tmp").write_text("half")


def test_info_and_clear(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fill(default_folder(), 3)
    command(monkeypatch, "info")
    assert "0 graphs and 3 regions, 3.5 kB" in capsys.readouterr().out
    command(monkeypatch, "clear")
    assert "7 files deleted, 3.5 kB" in capsys.readouterr().out
    left = {*FOREIGN, f"{entry(100)}.json", f"{entry(101)}.onnx"}
    assert {path.name for path in default_folder().iterdir()} == left
    with pytest.raises(SystemExit, match="the cache is empty"):
        command(monkeypatch, "info")


def test_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fill(default_folder(), 1)
    fill(tmp_path / "other", 2)
    before = sorted(default_folder().iterdir())
    command(monkeypatch, "clear", f"--folder={tmp_path / 'other'}")
    assert "5 files deleted" in capsys.readouterr().out
    assert sorted(default_folder().iterdir()) == before


def test_a_folder_that_others_can_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fill(tmp_path / "other", 1)
    (tmp_path / "other").chmod(0o777)
    command(monkeypatch, "info", f"--folder={tmp_path / 'other'}")
    assert "This cache is not used" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["info", "clear"])
def test_what_is_no_folder(action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "file").write_text("mine")
    if action == "info":
        with pytest.raises(SystemExit, match="the cache is empty"):
            command(monkeypatch, action, f"--folder={tmp_path / 'file'}")
    else:
        command(monkeypatch, action, f"--folder={tmp_path / 'file'}")
        assert "0 files deleted" in capsys.readouterr().out
    assert (tmp_path / "file").read_text() == "mine"


def test_unknown_action(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "empty")
    assert "info" in capsys.readouterr().err
