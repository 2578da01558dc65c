"""What torch's compiler says to its developers is recognised, and read in our words."""

import contextlib
import logging
import os
import warnings
from pathlib import Path

import pytest
import torch

from lightning_ort.compat import dynamo_messages
from lightning_ort.compat.dynamo_messages import plain_reason, user_line

SITE = f"{os.sep}env{os.sep}site-packages{os.sep}"


def reason_of(function: object, x: torch.Tensor) -> str:
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(function, backend="eager", fullgraph=True)(x)
    return plain_reason(str(caught.value))


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("mine")


@torch.compiler.disable
def disabled(x: torch.Tensor) -> torch.Tensor:
    return x


def calls_disabled(x: torch.Tensor) -> torch.Tensor:
    return disabled(x)


def copies(x: torch.Tensor) -> torch.Tensor:
    import copy

    return copy.copy({"x": x})["x"]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (branches, "the value of a tensor decides what runs next"),
        (raises, "it raises an exception"),
        (calls_disabled, "marked with `torch.compiler.disable`"),
        (copies, "`dict.copy`"),
    ],
)
def test_plain_reason_of_what_torch_says_today(function: object, text: str) -> None:
    reason = reason_of(function, torch.ones(2))
    assert text in reason
    assert "\n" not in reason
    assert f"{Path(__file__).name}:" in reason
    assert "Dynamo" not in reason


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            "AssertionError: Guard failed on the same frame it was created. This is a bug - please create an issue.",
            "while it runs, it changes what its graph depends on",
        ),
        (
            "Attempted to call function marked as skipped\n  Explanation: Dynamo developers have intentionally marked"
            " that the function `stack` in file `/usr/inspect.py` should not be traced.\n  Hint: none",
            "it calls `stack`, which no graph can hold",
        ),
        (
            "Attempted to call function marked as skipped\n  Explanation: Dynamo does not know how to trace the builtin"
            " `torch._C.pybind11_detail_function_record_v1_abi_1.call_boxed.` This function is a builtin.",
            "it calls a function of a C++ extension, which no graph can hold",
        ),
        ("x\n Explanation: Dynamo does not know this. Ask somebody.", "torch.compile does not know this."),
        ("Something broke. This is a bug - please create an issue", "Something broke."),
        ("x" * 500, "x" * 197 + "..."),
        ("", "no message"),
    ],
)
def test_plain_reason(message: str, text: str) -> None:
    assert plain_reason(message) == text


def test_user_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    mine, other = str(tmp_path / "train.py"), f"{os.sep}elsewhere{os.sep}model.py"
    torchs, package = f"{SITE}torch{os.sep}nn.py", f"{SITE}forecasting{os.sep}model.py"
    assert user_line([(mine, 3), (torchs, 5)]) == "train.py:3"
    assert user_line([(mine, 3), (other, 4), (os.__file__, 5)]) == f"{other}:4"
    assert user_line([(mine, 3), (package, 7)]) == f"forecasting{os.sep}model.py:7"
    assert user_line([(mine, 3), (dynamo_messages.__file__, 5), ("<string>", 1)]) == "train.py:3"
    assert user_line([(torchs, 5)]) == user_line([]) == ""


def test_a_function_whose_rest_is_left_as_it_is() -> None:
    def leaves(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        x = x * 2
        with contextlib.ExitStack() as stack:  # where no graph can begin again
            stack.callback(print, end="")
            torch._dynamo.graph_break()
        return x

    before = len(torch._dynamo.utils.graph_break_reasons)
    torch.compile(leaves, backend="eager")(torch.ones(2))
    reasons = [plain_reason(entry.reason) for entry in torch._dynamo.utils.graph_break_reasons[before:]]
    assert "the rest of the function runs outside of graphs" in reasons


def test_is_about_numbers() -> None:
    assert dynamo_messages.is_about_numbers(ValueError("Could not guard on data-dependent expression Eq(u0, 1)"))
    assert dynamo_messages.is_about_numbers(ValueError("unbacked symbol"))
    assert not dynamo_messages.is_about_numbers(ValueError("not for tracing, you0"))


def test_is_known() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    before = len(torch._dynamo.utils.graph_break_reasons)
    torch.compile(breaks, backend="eager")(torch.ones(2))
    (entry,) = torch._dynamo.utils.graph_break_reasons[before:]
    assert dynamo_messages.is_known(entry.reason)
    assert dynamo_messages.is_known("DDPOptimizer intentional graph-break (See Note [DDPOptimizer]).")
    assert not dynamo_messages.is_known("Data-dependent branching")


def test_internal_loggers() -> None:
    names = {logger.name for logger in dynamo_messages.internal_loggers()}
    assert {"torch._dynamo", "torch._dynamo.convert_frame", "torch._dynamo.exc", "torch._guards"} <= names
    assert not {name for name in names if name.startswith(("torch.distributed", "torch.utils", "lightning"))}
    logging.getLogger("torch._dynamo.new_one")
    assert "torch._dynamo.new_one" in {logger.name for logger in dynamo_messages.internal_loggers()}


def warn_from(module: str) -> None:
    exec("import warnings; warnings.warn('from there', stacklevel=1)", {"__name__": module})


def test_without_internal_warnings() -> None:
    inside = ("torch._dynamo.variables.functions", "torch._inductor.utils", "torch.fx.graph", "torch.utils._pytree")
    outside = ("__main__", "torch.nn.functional", "torch._dynamo.utils", "torch.fxs", "my.torch._dynamo")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        with dynamo_messages.without_internal_warnings():
            for module in (*inside, *outside):
                warn_from(module)
        assert len(seen) == len(outside)
        assert list(warnings.filters) == filters
        for module in inside:
            warn_from(module)
        assert len(seen) == len(outside) + len(inside)


def test_what_tracing_fails_at_is_not_shown() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with dynamo_messages.without_internal_warnings():
            warnings.warn("Error detected in EmbeddingBackward0. No forward pass information available.", stacklevel=1)
            warnings.warn("Error detected in the data.", stacklevel=1)
    assert [str(one.message) for one in seen] == ["Error detected in the data."]
