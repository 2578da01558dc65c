"""``lightning-ort doctor``: the right diagnosis where the environment is broken. Only the environment is faked."""

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import lightning_ort.cli.doctor as doctor_command  # before anything is faked
from lightning_ort.cli import main
from lightning_ort.cli.doctor import Finding, Machine, examine
from lightning_ort.compiler.executors.ort import kernels

THIS = Machine.this()
Faked = Callable[[dict[str, str | None]], None]


@pytest.fixture
def distributions(monkeypatch: pytest.MonkeyPatch) -> Faked:
    """Installs (a version) or takes away (``None``) distributions, as far as their metadata goes."""
    real = kernels.installed

    def fake(changes: dict[str, str | None]) -> None:
        def installed(name: str) -> str | None:
            return changes[name] if name in changes else real(name)

        found = {name: version for name in kernels.DISTRIBUTIONS if (version := installed(name))}
        monkeypatch.setattr(kernels, "installed", installed)
        monkeypatch.setattr(kernels, "builds", lambda: found)

    return fake


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[dict[str, Any], int]:
    """The findings by name, and the exit status."""
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "doctor", "--json"])
    status = 0
    try:
        main()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    return {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}, status


def test_a_machine_that_works(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found, status = run(monkeypatch, capsys)
    assert status == 0
    assert found["training step"]["state"] == "ok"
    assert "100% on ONNX Runtime" in found["training step"]["text"]
    assert found["CPUExecutionProvider"]["state"] == "ok"
    assert not [finding for finding in found.values() if finding["state"] == "failed"]
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "doctor"])
    main()
    assert "ok  training step: 100%" in capsys.readouterr().out


def test_no_onnxruntime(monkeypatch: pytest.MonkeyPatch, capsys: Any, distributions: Faked) -> None:
    names = ("onnxruntime", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime-gpu")
    distributions(dict.fromkeys(names))
    found, status = run(monkeypatch, capsys)
    assert status == 1
    assert found["onnxruntime"]["state"] == "failed"
    assert "pip install onnxruntime-training-cpu" in found["onnxruntime"]["text"]
    assert "training step" not in found


def test_two_onnxruntimes(monkeypatch: pytest.MonkeyPatch, capsys: Any, distributions: Faked) -> None:
    distributions({"onnxruntime-training-cpu": "1.19.2", "onnxruntime-gpu": "1.31.1"})
    found, status = run(monkeypatch, capsys)
    assert status == 1
    text = found["onnxruntime"]["text"]
    assert "onnxruntime-gpu 1.31.1" in text
    assert "onnxruntime-training-cpu 1.19.2" in text
    assert "pip uninstall" in text


def test_onnxruntime_whose_files_went_with_another(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))  # as the folder that is left imports
    found, status = run(monkeypatch, capsys)
    assert status == 1
    assert found["onnxruntime"]["state"] == "failed"
    assert "files of onnxruntime" in found["onnxruntime"]["text"]
    assert "--force-reinstall" in found["onnxruntime"]["text"]


def test_versions_that_are_newer_than_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, distributions: Faked
) -> None:
    tested, _ = run(monkeypatch, capsys)
    assert not [finding for finding in tested.values() if "newest that was tested" in finding["text"]]
    distributions({"lightning": "9.1.0", "onnxruntime-training-cpu": "9.2.0"})
    monkeypatch.setattr(torch, "__version__", "9.0.0+cpu")
    found, status = run(monkeypatch, capsys)
    assert status == 0
    for name in ("torch 9.0.0+cpu", "lightning 9.1.0", "onnxruntime 9.2.0"):
        assert found[name]["state"] == "advice"
        assert "the newest that was tested" in found[name]["text"]


def test_a_torch_whose_steps_are_not_captured(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(doctor_command, "obstacle", lambda: "torch 9.0 has no torch._dynamo.variables.Some")
    found, status = run(monkeypatch, capsys)
    assert status == 1
    assert "torch._dynamo.variables.Some" in found["captured steps"]["text"]
    assert not {"training step", "C++ compiler"} & found.keys()
    assert found["onnxruntime"]["state"] == "ok"


def findings(**machine: Any) -> dict[str, Finding]:
    """What is found on this machine, if some facts were others."""
    return {finding.what: finding for finding in examine(dataclasses.replace(THIS, **machine))}


@pytest.mark.parametrize("number", ["3.10.18", "3.15.1"])
def test_wrong_python(number: str) -> None:
    allowed = importlib.metadata.metadata("lightning-ort")["Requires-Python"]
    found = findings(python=number)["Python"]
    assert found.state == "failed"
    assert number in found.text
    assert found.text.endswith(f"lightning-ort supports {allowed}")


@pytest.mark.parametrize("number", ["2.6.2", "2.6.3"])
def test_compromised_lightning(monkeypatch: pytest.MonkeyPatch, capsys: Any, distributions: Faked, number: str) -> None:
    distributions({"lightning": number})
    found, status = run(monkeypatch, capsys)
    assert status == 1
    assert "compromised" in found["lightning"]["text"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    found, status = run(monkeypatch, capsys)
    assert status == 0
    assert found["C++ compiler"]["state"] == "absent"
    assert "inductor" in found["C++ compiler"]["text"]
    if THIS.masks_as_torch and sys.platform == "linux":
        assert found["dropout masks"]["state"] == "absent"
        assert "no C compiler: cc is not on the PATH" in found["dropout masks"]["text"]
        assert found["dropout masks"]["todo"] == "install gcc"


@pytest.mark.parametrize(("matches", "text"), [(False, "many numbers at a time"), (True, "by a compiled function")])
def test_dropout_masks(matches: bool, text: str) -> None:
    found = findings(masks_as_torch=matches, no_mask_function="")["dropout masks"]
    assert found.state == "ok"
    assert text in found.text


def test_no_deepspeed_and_a_broken_bitsandbytes(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, distributions: Faked
) -> None:
    distributions({"deepspeed": None, "bitsandbytes": "0.50.2"})
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # its import fails
    found, status = run(monkeypatch, capsys)
    assert status == 0
    assert found["deepspeed"]["todo"] == "pip install 'lightning-ort[zero]'"
    assert "ort_zero1" in found["deepspeed"]["text"]
    assert "cannot be imported" in found["bitsandbytes"]["text"]


def test_onnxruntime_that_cannot_train(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import onnxruntime

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    monkeypatch.setattr(kernels, "_load_errors", {})
    kernels._has_training_kernel.cache_clear()
    try:
        found, status = run(monkeypatch, capsys)
    finally:
        kernels._has_training_kernel.cache_clear()
    assert status == 1
    assert found["training step"]["state"] == "failed"


def test_advice_on_a_gpu() -> None:
    found = findings(gpu=(9, 0), tf32=False, flash_attention=False)
    advice = {what: finding for what, finding in found.items() if finding.state == "advice"}
    assert advice.keys() == {"bfloat16", "TF32", "flash attention"}


def test_no_advice_that_is_followed() -> None:
    found = findings(gpu=(7, 5), tf32=True, flash_attention=True)
    assert not {"bfloat16", "TF32", "flash attention"} & found.keys()


def test_the_training_build_wants_libraries_of_its_own() -> None:
    error = "libcudnn.so.8: cannot open shared object file"
    providers = ["CUDAExecutionProvider", "PlugInExecutionProvider"]
    (finding,) = doctor_command._providers("onnxruntime-training", providers, lambda: error)
    assert (finding.what, finding.state) == ("CUDAExecutionProvider", "absent")
    assert error in finding.text
    assert "CUDA 11.8" in finding.todo
    assert "lightning-ort[gpu]" in finding.todo


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_cache_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", "/proc/nope")  # in which root may write, as far as its mode tells
    (cache,) = [finding for finding in doctor_command._memory(THIS) if finding.what == "cache"]
    assert cache.state == "absent"
    assert "LIGHTNING_ORT_CACHE_DIR" in cache.todo


def test_a_gpu_that_does_not_answer_keeps_nothing_else_from_being_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fails)
    found = {finding.what: finding for finding in examine(Machine.this())}
    assert "CUDA unknown error" in found["torch"].text
    assert {"Python", "onnxruntime", "cache"} <= found.keys()
