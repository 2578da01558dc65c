"""The function in C draws what torch draws, to the bit; it is compiled when that pays, and never in the way."""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ort.compiler.cache.cache_folder import entries, write_sealed
from lightning_ort.compiler.executors import mask_kernel
from lightning_ort.compiler.executors.mask_kernel import MaskKernel, matches_torch

pytestmark = pytest.mark.skipif(
    bool(mask_kernel.unsupported_reason()) or not matches_torch(),
    reason=mask_kernel.unsupported_reason() or "torch draws otherwise on this processor",
)
ENOUGH = torch.empty(5000)


def used(monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> MaskKernel:
    """One that has drawn enough to be compiled, and is as far as it gets."""
    monkeypatch.setattr(mask_kernel, "_COMPILE_AFTER", ENOUGH.numel())
    kernel = MaskKernel()
    kernel.cache_dir = folder and str(folder)
    kernel.draw(ENOUGH, 0.5, torch.Generator())
    if kernel._thread is not None:
        kernel._thread.join()
    return kernel


@pytest.fixture(scope="module")
def compiled() -> MaskKernel:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernel = used(monkeypatch)
    assert kernel.is_ready, kernel.problem
    return kernel


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything is compiled."""
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled"))


@pytest.mark.parametrize("dtype", mask_kernel._ONES)
def test_draws_what_torch_draws(dtype: torch.dtype, compiled: MaskKernel) -> None:
    numbers = random.Random(str(dtype))
    sizes = [0, 1, 2, 311, 312, 313, 623, 624, 625, 1000, 32768, 100_003]
    for seed in range(60):
        count = numbers.choice(sizes)
        p = numbers.choice([0.0, 1.0, 0.9, 0.5, 1e-9, 1 - 2**-53, numbers.random()])
        torch.manual_seed(seed)
        for _ in range(numbers.randrange(3)):
            torch.rand(numbers.randrange(1, 700))  # an odd number of 32-bit numbers
        torch.randn(numbers.randrange(3))  # a normal number is kept for the next draw
        state = torch.get_rng_state()
        expected = torch.empty(count, dtype=dtype).bernoulli_(p)
        left, following = torch.get_rng_state(), (torch.rand(3), torch.randn(5))
        torch.set_rng_state(state)
        drawn = torch.empty(count, dtype=dtype)
        assert compiled.draw(drawn, p, None)
        assert torch.equal(drawn, expected)
        assert torch.equal(torch.get_rng_state(), left)
        torch.testing.assert_close((torch.rand(3), torch.randn(5)), following, rtol=0, atol=0)


def test_a_generator_that_is_passed(compiled: MaskKernel) -> None:
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    before, drawn = torch.get_rng_state(), torch.empty(5000)
    assert compiled.draw(drawn, 0.3, one)
    assert torch.equal(drawn, torch.empty(5000).bernoulli_(0.3, generator=other))
    assert torch.equal(one.get_state(), other.get_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_channels_last(compiled: MaskKernel) -> None:
    image = torch.empty(4, 16, 20, 20).to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    expected = image.clone().bernoulli_(0.4)
    torch.manual_seed(1)
    assert compiled.draw(image, 0.4, None)
    assert torch.equal(image, expected)


@pytest.mark.parametrize(
    ("out", "p"),
    [
        (torch.empty(100, 100).t(), 0.5),
        (torch.empty(200, 200)[::2], 0.5),
        (torch.empty(1, 100).expand(100, 100), 0.5),
        (torch.empty(5000, dtype=torch.int64), 0.5),
        (torch.empty(5000, dtype=torch.complex64), 0.5),
        (torch.empty(5000), 1.5),
        (torch.empty(5000), float("nan")),
    ],
)
def test_what_is_left_to_torch(out: torch.Tensor, p: float, compiled: MaskKernel) -> None:
    state = torch.get_rng_state()
    assert not compiled.draw(out, p, None)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_when_enough_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_kernel, "_COMPILE_AFTER", 12_000)
    kernel = MaskKernel()
    for _ in range(2):
        assert not kernel.draw(ENOUGH, 0.5, None)
        assert kernel._thread is None
    assert not kernel.draw(ENOUGH, 0.5, None)
    kernel._thread.join()
    assert kernel.is_ready
    assert kernel.draw(ENOUGH, 0.5, None)


def test_another_way_of_drawing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_kernel, "BITS", 24)
    assert not matches_torch.__wrapped__()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    kernel = used(monkeypatch)
    assert not kernel.is_ready
    assert kernel.problem == "no C compiler: no-such-compiler -O2 is not on the PATH"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("echo 'cannot do that' >&2; exit 1", "cannot do that"),
        ("exit 0", "No such file"),
        ('while [ "$1" != -o ]; do shift; done; echo no library > "$2"', "mask_kernel.so"),
    ],
)
def test_a_compiler_that_fails(lines: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{lines}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    kernel = used(monkeypatch)
    assert not kernel.is_ready
    assert problem in kernel.problem
    forbid(monkeypatch)
    assert not kernel.draw(ENOUGH, 0.5, None)  # and it is not tried again


def test_one_that_draws_other_masks_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = mask_kernel._SOURCE.read_text(encoding="utf-8")
    wrong = tmp_path / "mask_kernel.c"
    wrong.write_text(source.replace("y << 15", "y << 14"))
    monkeypatch.setattr(mask_kernel, "_SOURCE", wrong)
    kernel = used(monkeypatch)
    assert not kernel.is_ready
    assert kernel.problem == "it draws other masks than torch"


def later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MaskKernel:
    """One of a later process that may compile nothing, and has drawn enough to load what is kept."""
    monkeypatch.setattr(mask_kernel, "_LOAD_AFTER", ENOUGH.numel())
    forbid(monkeypatch)
    kernel = MaskKernel()
    kernel.cache_dir = str(folder)
    kernel.draw(ENOUGH, 0.5, torch.Generator())
    return kernel


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the function."""
    with monkeypatch.context() as patch:
        kernel = used(patch, tmp_path / "kept")
        assert kernel.is_ready
    return tmp_path / "kept"


def test_a_later_run_draws_with_what_is_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = later(kept, monkeypatch)
    assert kernel.is_ready
    drawn = torch.empty(5000)
    assert kernel.draw(drawn, 0.3, torch.Generator().manual_seed(5))
    assert torch.equal(drawn, torch.empty(5000).bernoulli_(0.3, generator=torch.Generator().manual_seed(5)))


def test_little_is_drawn_without_looking(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = MaskKernel()
    kernel.cache_dir = str(kept)
    assert not kernel.draw(ENOUGH, 0.5, None)
    assert not kernel.is_ready


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_another_there(path: Path) -> None:
    write_sealed(path, b"no library")


@pytest.mark.parametrize(
    "change",
    [
        flip_a_bit,
        put_another_there,
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(b""),
        lambda path: path.rename(path.with_name(f"masks-{'0' * 64}.so")),
        lambda path: path.parent.chmod(0o777),
    ],
    ids=["damaged", "another", "cut off", "empty", "of another machine", "others can write"],
)
def test_what_is_not_used(change: Callable[[Path], Any], kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = kept.iterdir()
    change(path)
    assert not later(kept, monkeypatch).is_ready


def test_one_that_is_kept_and_draws_other_masks_is_not_used(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "mask_kernel.c"
    wrong.write_text(mask_kernel._SOURCE.read_text(encoding="utf-8").replace("y << 15", "y << 14"))
    command = [*mask_kernel._compiler(), *mask_kernel._FLAGS, "-o", str(tmp_path / "wrong.so"), str(wrong)]
    subprocess.run(command, check=True)
    (path,) = kept.iterdir()
    write_sealed(path, (tmp_path / "wrong.so").read_bytes())
    with monkeypatch.context() as patch:
        assert not later(kept, patch).is_ready
    assert used(monkeypatch, kept).is_ready  # it is compiled when that pays, and replaced
    assert later(kept, monkeypatch).is_ready


def test_the_cache_knows_the_file(kept: Path) -> None:
    assert entries(kept) == list(kept.iterdir())
