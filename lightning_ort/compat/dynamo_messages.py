"""What torch's compiler says to its developers, and how a user reads it here."""

import logging
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightning_ort.compat.dynamo import explanation

# Loggers below these names are torch's compiler. A warning belongs to the module whose code raises it; left out are
# those in which torch runs the operations of a user's step: what arises there is about the step (torch 2.13).
_LOGGERS = ("_dynamo", "_functorch", "_guards", "_inductor", "_logging", "_subclasses", "fx")
_INTERNALS = r"torch\.(_dynamo(?!\.utils$)|_functorch|_guards|_higher_order_ops|_inductor|_logging|fx|utils\._pytree)\b"
# whose code a user cannot change
_PACKAGES = ("torch", "lightning", "pytorch_lightning", "lightning_ort", "torchmetrics")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")

# what a message says, how it reads, and what to do
_PLAIN: tuple[tuple[str, str, str], ...] = (
    (r"Guard failed on the same frame", "while it runs, it changes what its graph depends on", ""),
    (r"found no exception handler", "it raises an exception, or calls `warnings.warn`", "do that outside of the step"),
    (r"Tensor\.item\(\)|_local_scalar_dense", "a tensor becomes a Python number", "keep it a tensor"),
    (
        r"[Dd]ata-dependent (?:branching|expression|guard)|generic_jump|GuardOnDataDependent",
        "the value of a tensor decides what runs next",
        "use torch.where",
    ),
    (r"\(reason: ([\w.]+) runs outside of graphs\)", "`{0}` runs outside of graphs", ""),
    (r"torch\.compiler\.disable", "it calls a function that is marked with `torch.compiler.disable`", ""),
    (r"torch\.jit\.", "it calls a TorchScript module, which no graph can hold", "use the module it was made from"),
    (r"`([\w.]+)`'s output shape depends", "the size of the result of `{0}` depends on values", ""),
    (r"builtin `[\w.]*pybind11", "it calls a function of a C++ extension, which no graph can hold", ""),
    (r"the (?:Python )?builtin `(?:<unknown module>\.)?([\w.]+?)\.?`", "it calls `{0}`, which no graph can hold", ""),
    (r"builtin operator `(\w+)`", "it calls `{0}` in a way that no graph can hold", ""),
    (r"the function `([^`]+)`.*? should not be traced", "it calls `{0}`, which no graph can hold", ""),
    (r"Backend compiler `.*?` failed with ([\w.]+?)\.?(?:\s|$)", "no graph can hold `{0}` or its gradient", ""),
    (r"^step_unsupported$", "the rest of the function runs outside of graphs", ""),
    (r"graph break in a for/while loop", "it leaves the graph within a loop", "move the loop's body into a function"),
)


@contextmanager
def without_internal_warnings() -> Iterator[None]:
    """Ignore warnings that torch's compiler raises, whatever the filters say, and no others (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=_INTERNALS)
        # an operation that cannot be traced, as of a sparse gradient: AOTAutograd traces with anomaly detection
        warnings.filterwarnings("ignore", message=r"Error detected in \w+Backward\d*\. ")
        yield


def internal_loggers() -> Iterator[logging.Logger]:
    """Yield the loggers of torch's compiler that there are now (torch 2.13)."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        package, _, rest = name.partition(".")
        if package == "torch" and rest.partition(".")[0] in _LOGGERS and isinstance(logger, logging.Logger):
            yield logger


def is_about_numbers(error: BaseException) -> bool:
    """Return whether dynamo failed at a number that is made from a tensor (torch 2.13)."""
    return re.search(r"[Uu]nbacked|[Dd]ata.?[Dd]ependent|\b(?:u|zuf|zf)\d+\b", str(error)) is not None


def is_known(graph_break: str) -> bool:
    """Return whether a graph break is somebody's wish, or is reported elsewhere as a backend's (torch 2.13)."""
    wished = ("Call to `torch._dynamo.graph_break()`", "DDPOptimizer intentional")  # the buckets of ddp, for inductor
    return graph_break.startswith((*wished, "Backend compiler exception"))


def plain_reason(message: str) -> str:
    """Return one of dynamo's long messages in a few words of ours, with the user's line and what to do (torch 2.13)."""
    text = _plain_text(message)
    _, _, stack = message.partition("from user code:")
    where = user_line(re.findall(r'File "(.+?)", line (\d+)', stack))
    return f"{where}: {text}" if where else text


def _plain_text(message: str) -> str:
    for pattern, text, advice in _PLAIN:
        if found := re.search(pattern, message, re.DOTALL):
            return text.format(*found.groups()) + (f" ({advice})" if advice else "")
    text = re.sub(r"This is a bug.*", "", re.sub(r"\bDynamo\b", "torch.compile", explanation(message)))
    text = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())[0]
    return text if len(text) <= 200 else f"{text[:197]}..."


def user_line(frames: Iterable[tuple[str, object]]) -> str:
    """Return file and line of the innermost of these that is not torch's, Lightning's, Python's or ours, or ""."""
    found = ""
    for file, line in frames:
        *_, installed = file.split(_INSTALLED)
        if installed != file:
            if installed.partition(os.sep)[0] not in _PACKAGES:
                found = f"{installed}:{line}"
        elif not is_installed(file):
            found = f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
    return found


def is_installed(file: str) -> bool:
    """Return whether a file of code is a package's, Python's or ours, or is no file."""
    return _INSTALLED in file or file.startswith((_STANDARD, _OURS, "<"))
