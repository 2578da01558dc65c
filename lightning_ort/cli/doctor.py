"""``lightning-ort doctor``: can this machine train on ONNX Runtime, what is missing, and what lies unused."""

import copy
import dataclasses
import importlib
import io
import json
import logging
import os
import platform
import sys
import tempfile
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import metadata
from typing import Literal

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn

from lightning_ort._imports import NAMESPACES
from lightning_ort._text import say
from lightning_ort.compat.deepspeed import without_gpu_search
from lightning_ort.compat.onnxruntime import cuda_provider_error
from lightning_ort.compat.torch import cpu_has_fast_bfloat16, uses_tf32
from lightning_ort.compiler.cache.cache_folder import default_folder, untrusted_reason
from lightning_ort.compiler.executors.mask_kernel import matches_torch
from lightning_ort.compiler.executors.mask_kernel import unsupported_reason as mask_unsupported_reason
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.executors.ort.providers import CUDA, provider_of
from lightning_ort.strategies.capture.capture import obstacle
from lightning_ort.strategies.environment import read_environment
from lightning_ort.strategies.host_memory import unsupported_reason as malloc_unsupported_reason
from lightning_ort.strategies.lean.known import unknown_parts

COMPROMISED = ("2.6.2", "2.6.3")
# the newest versions of docs/test_reports/versions.md
TESTED = {"torch": "2.15.0", "lightning": "2.6.6", "pytorch-lightning": "2.6.6", "onnxruntime": "1.32.0"}
_OPTIONAL = {  # import package: what it is for, and the extra that installs it
    "deepspeed": ("ort_zero1", "zero"),
    "bitsandbytes": ("8-bit optimizers", "bnb"),
    "torchao": ("optimizers of torchao", "torchao"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, what was found, and what to do about it."""

    what: str
    state: Literal["ok", "absent", "advice", "failed"]  # only "failed" keeps training from running on ONNX Runtime
    text: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.state:>6}  {self.what}: {self.text}" + (f"\n        -> {self.todo}" if self.todo else "")


@dataclass(frozen=True)
class Machine:
    """What findings are drawn from; everything else they find out themselves."""

    python: str
    gpu: tuple[int, int] | None  # the compute capability of the GPU; ``None`` if there is none
    tf32: bool  # whether products in float32 use TF32
    flash_attention: bool  # whether torch has it
    masks_as_torch: bool  # whether large dropout masks are the same when a compiled function draws them
    no_mask_function: str  # why none can be compiled here; nothing if one can

    @classmethod
    def this(cls) -> "Machine":
        """Return the facts of this machine."""
        return cls(
            platform.python_version(),
            _capability(),
            uses_tf32(),
            torch.backends.cuda.is_flash_attention_available(),
            matches_torch(),
            mask_unsupported_reason(),
        )


def _capability() -> tuple[int, int] | None:
    try:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    except Exception:  # a broken driver, of which `_torch` tells
        return None


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`doctor` takes."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def doctor(given: Namespace) -> None:
    """Check this machine and its packages; exits with status 1 if training on ONNX Runtime cannot work."""
    findings = examine(Machine.this())
    if given.json:
        say(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        say("\n".join(map(str, findings)))
    if any(finding.state == "failed" for finding in findings):
        sys.exit(1)


def examine(machine: Machine) -> list[Finding]:
    """Look at everything, in the order in which one thing needs the other."""
    findings: list[Finding] = []
    for look in (_system, _torch, _lightning, _onnxruntime, _packages, _compiler, _masks, _memory, _settings, _advice):
        try:
            findings += look(machine)
        except Exception as error:  # a broken installation must not keep the rest from being looked at
            findings.append(Finding(look.__name__.strip("_"), "failed", f"{type(error).__name__}: {error}"))
    return findings


def _system(machine: Machine) -> Iterator[Finding]:
    python = machine.python
    text = f"{python} on {platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    allowed = metadata("lightning-ort")["Requires-Python"] if kernels.installed("lightning-ort") else ""
    if SpecifierSet(allowed).contains(python, prereleases=True):
        yield Finding("Python", "ok", text)
    else:
        todo = "create an environment with a supported Python"
        yield Finding("Python", "failed", f"{text}; lightning-ort supports {allowed}", todo)


def _torch(machine: Machine) -> Iterator[Finding]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    vectors = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads, {vectors}, {device}")
    yield from _untested("torch", torch.__version__)
    if reason := obstacle():
        todo = "all else works; install another torch for ONNX Runtime"
        yield Finding("captured steps", "failed", f"steps are not captured: {reason}", todo)


def _untested(name: str, number: str | None) -> Iterator[Finding]:
    tested = TESTED[name]
    if number and Version(number).release > Version(tested).release:
        text = f"{number} is newer than {tested}, the newest that was tested"
        yield Finding(f"{name} {number}", "advice", text, "where something fails that did not before, install that one")


def _lightning(machine: Machine) -> Iterator[Finding]:
    found = {namespace.distribution: kernels.installed(namespace.distribution) for namespace in NAMESPACES}
    installed = {name: number for name, number in found.items() if number}
    if not installed:
        yield Finding("Lightning", "absent", "the strategies need it", "pip install lightning")
    for name, number in installed.items():
        if number in COMPROMISED:
            todo = f"pip install -U {name}, and change every secret that was stored on this machine"
            yield Finding(name, "failed", f"{number} is a compromised release", todo)
        else:
            namespace = next(each for each in NAMESPACES if each.distribution == name)
            with quiet():
                stock = unknown_parts(namespace)
            yield Finding(
                name, "ok", number if "" in stock else f"{number}; the Trainer's loop does only what somebody asked for"
            )
            yield from _untested(name, number)
            for part, reason in stock.items():
                yield Finding("Trainer's loop", "absent", f"Lightning's own for {part or 'all runs'}: {reason}")


def _onnxruntime(machine: Machine) -> Iterator[Finding]:
    reason = kernels.unavailable()
    if reason is not None:
        yield Finding("onnxruntime", "failed", reason.text)
        return
    name, number = next(iter(kernels.builds().items()))
    yield Finding("onnxruntime", "ok", f"{name} {number}")
    yield from _untested("onnxruntime", number)
    yield from _providers(name, kernels.available_providers())
    if not obstacle():
        yield _training_step()


def _providers(
    name: str, providers: Iterable[str], cuda_error: Callable[[], str | None] = cuda_provider_error
) -> Iterator[Finding]:
    """Look at the execution providers of a build; ``cuda_error`` says what the one for CUDA cannot load."""
    for provider in providers:
        if provider == CUDA and (missing := cuda_error()):
            text = f"this build contains it, but it does not load: {missing}"
            todo = "install the versions of CUDA and cuDNN that this build needs"
            if name == "onnxruntime-training":  # 1.19.2, the last one
                todo += ", CUDA 11.8 and cuDNN 8; pip install 'lightning-ort[gpu]' instead is for today's"
            yield Finding(provider, "absent", text, todo)
        elif provider_of(provider).by_default:
            available = kernels.Kernels("auto", (provider,), kernels.current_device((provider,)))
            found = [op for op in kernels.TRAINING_OPS if available.has_training(op)]
            text = f"{len(found)} of {len(kernels.TRAINING_OPS)} gradient kernels"
            todo = (
                ""
                if found
                else "standard kernels are used; onnxruntime-training-cpu (Python 3.12 or older) has gradient kernels"
            )
            yield Finding(provider, "ok", text, todo)


def _training_step() -> Finding:
    """Train a small module for a step on ONNX Runtime, and compare its gradients with torch's."""
    from lightning_ort.compiler.backend import ORTBackend  # not at the top: not every torch has what it needs
    from lightning_ort.compiler.request import CompileRequest

    with torch.random.fork_rng():
        module, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(8, 16)
    reference = copy.deepcopy(module)
    backend = ORTBackend({"placement": "always", "cache_dir": None}, lambda: CompileRequest(logs_graphs=False))
    torch.compile(module, backend=backend)(x).square().sum().backward()
    reference(x).square().sum().backward()
    report = backend.report
    if not report.ort_runs or report.fallbacks:
        why = "; ".join(f"{entry.where}: {entry.reason}" for entry in report.fallbacks) or "nothing ran on ONNX Runtime"
        return Finding("training step", "failed", why)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        if ours.grad is None or theirs.grad is None or not torch.allclose(ours.grad, theirs.grad, 1e-4, 1e-4):
            return Finding("training step", "failed", "the gradients differ from torch's")
    return Finding("training step", "ok", f"{report.ort_node_fraction:.0%} on ONNX Runtime, gradients match torch's")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep to itself what a package says while it is imported, on each channel; what is wrong raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    silence = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(silence), redirect_stderr(silence):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _packages(machine: Machine) -> Iterator[Finding]:
    for name, (purpose, extra) in _OPTIONAL.items():
        todo = f"pip install 'lightning-ort[{extra}]'"
        if not (number := kernels.installed(name)):
            yield Finding(name, "absent", f"for {purpose}", todo)
            continue
        try:
            with without_gpu_search(), quiet():
                importlib.import_module(name)
        except Exception as error:
            yield Finding(name, "absent", f"{number} cannot be imported: {error}", todo)
        else:
            yield Finding(name, "ok", number)


def _compiler(machine: Machine) -> Iterator[Finding]:
    if obstacle():  # nobody needs one
        return
    from lightning_ort.compiler.executors.inductor import cpp_compiler, cpp_compiler_name

    if (found := cpp_compiler()) is not None:
        yield Finding("C++ compiler", "ok", found)
    else:
        text = f"no {cpp_compiler_name()} on the PATH; inductor and DeepSpeed's optimizers need one"
        yield Finding("C++ compiler", "absent", text, "install g++")


def _masks(machine: Machine) -> Iterator[Finding]:
    if not machine.masks_as_torch:
        yield Finding("dropout masks", "ok", "PyTorch draws many numbers at a time on this processor")
    elif reason := machine.no_mask_function:
        todo = "install gcc" if "C compiler" in reason else ""
        yield Finding("dropout masks", "absent", f"PyTorch draws them: {reason}", todo)
    else:
        yield Finding("dropout masks", "ok", "large ones can be drawn by a compiled function")


def _memory(machine: Machine) -> Iterator[Finding]:
    reason = malloc_unsupported_reason()
    text = "freed memory can be kept for the next step" if reason is None else f"host_memory has no effect: {reason}"
    yield Finding("host memory", "ok" if reason is None else "absent", text)
    folder = default_folder()
    above = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if folder.is_dir() and (obstacle := untrusted_reason(folder)) is not None:
        yield Finding("cache", "absent", obstacle)
        return
    try:
        with tempfile.TemporaryDirectory(dir=above):  # the mode of a folder does not tell, as of /proc
            pass
        yield Finding("cache", "ok", str(folder))
    except OSError as error:
        todo = "set LIGHTNING_ORT_CACHE_DIR to a writable folder"
        yield Finding("cache", "absent", f"{folder} is not writable ({error.strerror})", todo)


def _settings(machine: Machine) -> Iterator[Finding]:
    try:
        for text in read_environment().describe():
            yield Finding("settings", "ok", f"{text}, where a strategy is not given it")
    except ValueError as error:
        yield Finding("settings", "failed", str(error), "correct the environment variable, or unset it")


def _advice(machine: Machine) -> Iterator[Finding]:
    if machine.gpu is not None:
        if machine.gpu[0] >= 8:
            yield Finding("bfloat16", "advice", "this GPU supports it", 'Trainer(precision="bf16-mixed")')
            if not machine.tf32:
                yield Finding("TF32", "advice", "off", 'Trainer(plugins=[ORTMatmulPrecision("high")]) for float32 runs')
        if not machine.flash_attention:
            yield Finding("flash attention", "advice", "not in this build of torch", "install a build that has it")
    elif cpu_has_fast_bfloat16():
        todo = 'Trainer(precision="bf16-mixed"), or plugins=[ORTMatmulPrecision("medium")] for float32 weights'
        yield Finding("bfloat16", "advice", "this CPU multiplies bfloat16 matrices faster than float32", todo)
