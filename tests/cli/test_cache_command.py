"""``lightning-ort cache``."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ort.cli import main
from lightning_ort.compiler.cache import Cache, Entry, Timing, default_folder
from lightning_ort.config import ORTConfig


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "cache", *args])
    main()


def fill(folder: Path, count: int) -> None:
    kept = Cache(ORTConfig(cache_dir=str(folder)))
    for number in range(count):
        kept.store(f"region-{number}", Entry(bytes(960), Timing(None, None, 1)))
    (folder / "mine.json").write_text("{}")


def test_info_and_clear(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fill(default_folder(), 3)
    command(monkeypatch, "info")
    assert "0 graphs and 3 regions, 3.4 kB" in capsys.readouterr().out
    command(monkeypatch, "clear")
    assert "6 files deleted, 3.4 kB" in capsys.readouterr().out
    assert [path.name for path in default_folder().iterdir()] == ["mine.json"]
    with pytest.raises(SystemExit, match="nothing is kept here"):
        command(monkeypatch, "info")


def test_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    fill(default_folder(), 1)
    fill(tmp_path / "other", 2)
    command(monkeypatch, "clear", f"--folder={tmp_path / 'other'}")
    assert "4 files deleted" in capsys.readouterr().out
    assert len(list(default_folder().iterdir())) == 3


def test_unknown_action(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "empty")
    assert "info" in capsys.readouterr().err
