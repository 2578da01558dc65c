"""Options and help of all commands."""

import argparse
import re
import sys

import pytest

from lightning_ort import __version__
from lightning_ort.cli import main
from lightning_ort.cli.arguments import add_mapping, add_switch

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
    assert not re.search(r"``|:\w+:`|\btype:|Optional\[|\bnull\b|--\w+_|default: (False|None)", text)
    assert not re.search(r"^  (-\S+|\w+)( [A-Z_|a-z=]+)?\n(?! {10})", text, re.MULTILINE)  # nothing without a text
    assert "usage: lightning-ort" in text


def test_help_lists_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(monkeypatch, capsys)
    assert all(f"\n    {command} " in text for command in (*COMMANDS, "run"))
    monkeypatch.setattr(sys, "argv", ["lightning-ort"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == text  # without a command too


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "--version"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lightning-ort {__version__}\n"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_switch(parser, "--dropout", "", default=True)
    add_mapping(parser, "--args", "")
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "given", [["--args", '{"net": {"width": 8, "deep": true}}'], ["--args", "net.width=8", "--args", "net.deep=true"]]
)
def test_mappings_are_written_in_two_ways(given: list[str]) -> None:
    assert parsed(*given).args == {"net": {"width": 8, "deep": True}}


@pytest.mark.parametrize(
    ("given", "found"), [([], True), (["--dropout=false"], False), (["--dropout", "True"], True), (["--dropout"], True)]
)
def test_switches(given: list[str], found: bool) -> None:
    assert parsed(*given).dropout is found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--dropout", "maybe"], "write true or false"),
        (["--args", "8"], "no mapping"),
        (["--args", "{1: 2}"], "no mapping"),
        (["--args", "{"], "no mapping"),
    ],
)
def test_what_cannot_be_read_is_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*given)
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bech"], "'bench'"),
        (["bench", "net.py:Net", "--round=3"], "'--round': did you mean '--rounds'"),
        (["bench", "net.py:Net", "--warm_up=3"], "'--warm_up': did you mean '--warm-up'"),
    ],
)
def test_a_wrong_command_or_option_gets_a_suggestion(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", *given])
    with pytest.raises(SystemExit, match=message):
        main()


def test_a_list_reaches_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory", "torch.nn:Transformer", "--optim", "adamw_torch_fused", "--ranks", "4", "64"]
    monkeypatch.setattr(sys, "argv", ["lightning-ort", *arguments])
    main()
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 ranks" in shown
    assert "64 ranks" in shown
    assert "adamw_bnb_8bit" not in shown
