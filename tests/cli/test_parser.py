"""Options and help of all commands."""

import re
import sys

import pytest

from lightning_ort import __version__
from lightning_ort.cli import main
from lightning_ort.cli.parser import in_one_style

COMMANDS = ("bench", "cache", "convert", "doctor", "export", "memory", "report", "tune")


def help_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, width: int = 80
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "argv", ["lightning-ort", *arguments, "--help"])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_for_people(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(monkeypatch, capsys, command, width=width)
    assert not re.search(r"``|:\w+:`|\btype:|Optional\[|\bnull\b|--\w+_|default: False", text)
    assert text.count("\narguments:\n") == 1
    assert "usage: lightning-ort" in text


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(monkeypatch, capsys)
    assert all(f"\n    {command} " in text for command in (*COMMANDS, "run"))
    assert "required" not in text
    assert "\ncommands (COMMAND --help says more):\n    bench " in text


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "--version"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lightning-ort {__version__}\n"


def test_hyphens_and_underscores_are_the_same() -> None:
    given = ["--input-shape", "1", "--warm_up=3", "--args.my_width", "a-b", "-o", "x-y", "--data-args={'a-b': 1}"]
    assert in_one_style(given) == [
        *("--input_shape", "1", "--warm_up=3", "--args.my_width", "a-b", "-o", "x-y"),
        "--data_args={'a-b': 1}",
    ]


@pytest.mark.parametrize("given", [["--ranks", "1", "4"], ["--ranks=[1,4]"], ["--ranks", "[1, '4']"]])
def test_lists_are_written_in_two_ways(given: list[str]) -> None:
    assert in_one_style([*given, "--measure", "[2]"], {"--ranks"}) == ["--ranks", "1", "4", "--measure", "[2]"]


@pytest.mark.parametrize("given", [("4", "64"), ("[4,64]",)])
def test_a_list_reaches_the_command(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lightning-ort", "memory", "torch.nn:Transformer", "--optim", "adamw_torch_fused", "--ranks", *given]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 ranks" in shown
    assert "64 ranks" in shown
    assert "adamw_bnb_8bit" not in shown
