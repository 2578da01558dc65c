"""A command that reads a file ends with a message and status 1, whatever is in the file, and prints no traceback."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ort.cli import doctor, main

MODULE = "lightning.pytorch.demos.boring_classes:BoringModel"


BYTES = {
    "empty": b"",
    "text": b"hello: [world\n",
    "binary": bytes(range(256)) * 40,
    "null": b"null",
    "image": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "json": b'{"trainer": 3, "model": [], "data": null}',
    "deep json": b"[" * 100_000,
    "endless numbers": b'{"graphs": [], "fallbacks": [], "notes": [], "graph_breaks": 1e999, "x": ' + b"9" * 5000,
}


def write(path: Path, kind: str) -> None:
    if kind == "checkpoint":
        torch.save({"state_dict": {"layer.weight": torch.ones(3)}, "pytorch-lightning_version": "2.6.0"}, path)
    elif kind == "tensor":
        torch.save(torch.ones(2), path)
    else:
        path.write_bytes(BYTES[kind])


KINDS = (*BYTES, "checkpoint", "tensor")
COMMANDS: dict[str, tuple[str, list[str]]] = {
    "report": ("run.json", ["report", "FILE"]),
    "export": ("a.ckpt", ["export", "FILE", f"--module={MODULE}", "-o", "OUT", "--input-shape", "1", "32"]),
    "export sample": ("a.pt", ["export", "GOOD", f"--module={MODULE}", "-o", "OUT", "--sample", "FILE"]),
    "export arrays": ("a.npz", ["export", "GOOD", f"--module={MODULE}", "-o", "OUT", "--sample", "FILE"]),
    "export module": ("a.py", ["export", "GOOD", "--module=FILE:Net", "-o", "OUT"]),
    "memory": ("net.py", ["memory", "FILE:Net"]),
    "bench": ("net.py", ["bench", "FILE:Net"]),
    "bench data": ("net.py", ["bench", MODULE, "--data=FILE:Net"]),
    "convert": ("latest", ["convert", "FOLDER", "OUT"]),
    "convert a file": ("a.ckpt", ["convert", "FILE", "OUT"]),
    "cache": ("cache", ["cache", "info", "--folder=FILE"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_files(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    name, arguments = COMMANDS[command]
    good = tmp_path / "good.ckpt"
    from lightning.pytorch.demos.boring_classes import BoringModel

    torch.save({"state_dict": BoringModel().state_dict(), "pytorch-lightning_version": "2.6.0"}, good)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        write(folder / name, kind)
        places = {"FILE": folder / name, "FOLDER": folder, "OUT": folder / "out", "GOOD": good}
        given = arguments
        for word, place in places.items():
            given = [argument.replace(word, str(place)) for argument in given]
        monkeypatch.setattr(sys, "argv", ["lightning-ort", *given])
        if (command, kind) == ("export sample", "tensor"):
            continue  # that is one
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, str), (kind, caught.value.code)  # a message, and status 1
        assert len(caught.value.code) > 10
        assert "Traceback" not in caught.value.code
        assert not (folder / "out").exists()


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_configurations(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for kind in KINDS:
        if kind == "deep json":
            continue  # libyaml ends the process, in LightningCLI too
        write(tmp_path / "config.yaml", kind)
        monkeypatch.setattr(sys, "argv", ["lightning-ort", command, "--config=config.yaml"])
        with pytest.raises(SystemExit) as caught:
            main()
        assert str(caught.value.code).startswith("--config=config.yaml: "), kind
        assert "Traceback" not in str(caught.value.code)


def doctor_of_many_findings(pipes: Any, state: str, arguments: list[str]) -> None:
    (reads, out), (hears, err) = pipes
    os.dup2(out, 1)
    os.dup2(err, 2)
    for end in (reads, out, hears, err):
        os.close(end)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    doctor.examine = lambda machine: [doctor.Finding("x", state, "y" * 1000)] * 1000
    sys.argv = ["lightning-ort", "doctor", *arguments]
    main()


@pytest.mark.parametrize("arguments", [["--json"], []])
@pytest.mark.parametrize("state", ["ok", "failed"])
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_reader_that_has_seen_enough(arguments: list[str], state: str) -> None:
    (reads, out), (hears, err) = pipes = (os.pipe(), os.pipe())
    context = multiprocessing.get_context("fork")
    process = context.Process(target=doctor_of_many_findings, args=(pipes, state, arguments))
    process.start()
    os.close(out)
    os.close(err)
    assert os.read(reads, 10)
    os.close(reads)
    with open(hears) as said:
        assert said.read() == ""
    process.join()
    assert process.exitcode == 1
