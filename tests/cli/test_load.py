"""The object that a command line names is that one, whatever else has its name."""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_ort.cli.arguments import add_project
from lightning_ort.cli.load import load, load_project


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(file: Path, text: str = "def make():\n    return __file__\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", ["random", "json", "torch", "antigravity", "token", "my-net", "1st", "pytest"])
def test_a_file_is_imported_and_not_what_has_its_name(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"{name}.py")
    assert load(f"{file}:make", "module")() == str(file)
    assert load(f"{file}:make", "module") is load(f"{file}:make", "module")  # once
    assert sys.modules["random"] is random


def test_files_of_one_name(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        file = write(tmp_path / folder / "net.py", f"class Net:\n    folder = {folder!r}\n")
        assert load(f"{file}:Net", "module").folder == folder
    assert load(f"{tmp_path}/a/net.py:Net", "module").folder == "a"


def test_a_file_that_the_program_has_imported_is_that_module(tmp_path: Path) -> None:
    assert load(f"{__file__}:write", "module") is write


def test_a_file_imports_what_is_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "parts_of_it.py", "value = 3\n")
    file = write(tmp_path / "random.py", "from parts_of_it import value\n")
    assert load(f"{file}:value", "module") == 3


def test_what_is_beside_a_file_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "beside_it.py", "value = 'elsewhere'\n")
    write(tmp_path / "here" / "beside_it.py", "value = 'here'\n")
    sys.path.insert(0, str(tmp_path / "elsewhere"))
    file = write(tmp_path / "here" / "random.py", "from beside_it import value\n")
    write(tmp_path / "here" / "other_net.py", "value = 1\n")
    assert load(f"{file}:value", "module") == "here"
    assert load(f"{tmp_path}/here/other_net.py:value", "module") == 1
    assert sys.path.count(str(tmp_path / "here")) == 1


def test_a_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "below" / "random.py")
    monkeypatch.chdir(tmp_path)
    assert load("below/random.py:make", "module")() == str(tmp_path / "below" / "random.py")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def make(:\n", "SyntaxError"),
        (b"\x00\x01", "null bytes"),
        (b"\xff\xfe", "SyntaxError"),
        (b"x = 1\nmake = y\n", r"NameError: name 'y' is not defined \(.*broken.py, line 2\)"),
        (b"raise ValueError('[/red]')\n", r"ValueError: \[/red\]"),
        (b"import no_such_package\n", "no_such_package"),
        (b"", "has no attribute 'make'"),
    ],
)
def test_files_that_cannot_be_imported(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_bytes(content)
    for _ in range(2):  # half a module is not left behind
        with pytest.raises(SystemExit, match=message) as caught:
            load(f"{tmp_path}/broken.py:make", "module")
        assert str(caught.value).startswith(f"module='{tmp_path}/broken.py:make': ")


@pytest.mark.parametrize("path", ["x.py:", "x.py:a..b", ":make", "make", "x.py:a-b", ""])
def test_other_ways_of_writing(path: str) -> None:
    with pytest.raises(SystemExit, match="write it as package.module:name"):
        load(path, "module")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no file"):
        load(f"{tmp_path}/random.py:make", "module")
    with pytest.raises(SystemExit, match="there is no file"):
        load(f"{tmp_path}:make".replace(":make", ".py:make"), "module")


CONFIG = "config.yaml"


def given(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_project(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Nothing to train: name a module"),
        (("--args", "a=1"), "Nothing to train: name a module"),
        (("--config", CONFIG, "--args", "a=1"), "--args and --data-args cannot be combined with --config"),
        (("net.py:Net", "--config", CONFIG, "--data-args", "a=1"), "cannot be combined with --config"),
        (("--config", "nowhere.yaml"), "--config=.*nowhere.yaml: there is no such file"),
        (("--config", CONFIG), r"its model has no class_path, .*: lightning-ort bench main\.py:Model"),
    ],
)
def test_what_names_nothing_to_train(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / CONFIG, "model: {width: 8}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        load_project("bench", given(*arguments))


def test_a_project_of_what_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a_net.py")
    write(tmp_path / CONFIG, "model: {width: 8}\n")
    named = (f"{file}:make", "--args", '{"a": 1}', "--data", f"{file}:make", "--data-args", '{"b": 2}', "--seed", "3")
    project = load_project("bench", given(*named))
    assert (project.module, project.args, project.data_args) == (project.data, {"a": 1}, {"b": 2})
    assert (project.module(), project.config, project.seed) == (str(file), None, 3)
    project = load_project("bench", given(f"{file}:make", "--config", str(tmp_path / CONFIG)))
    assert (project.config, project.data, project.args) == ({"model": {"width": 8}}, None, {})
