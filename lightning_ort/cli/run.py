"""``lightning-ort run``: runs any script whose Trainer then knows the strategy names."""

import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

from lightning_ort.strategies.distributed.relaunch import started_by

SUMMARY = "Run a script whose Trainer then knows the strategies ort, ort_ddp, ort_zero1, ... by name."
USAGE = f"""usage: lightning-ort run SCRIPT [ARGUMENT ...]
       lightning-ort run -m MODULE [ARGUMENT ...]

{SUMMARY}

The script runs as with `python SCRIPT` or `python -m MODULE` and needs no change. All arguments after SCRIPT or MODULE
are passed to the script.

  lightning-ort run train.py fit --config config.yaml --trainer.strategy=ort
  torchrun --nproc_per_node=2 -m lightning_ort run train.py fit --trainer.strategy=ort_ddp
"""


def run(arguments: list[str]) -> None:
    """Run ``[script, ...]`` or ``["-m", module, ...]`` as ``python`` would, in this process."""
    match arguments:
        case ["-h" | "--help", *_]:
            print(USAGE, end="")
        case ["-m", module, *rest]:
            _prepare(rest, folder=Path.cwd())
            started_by("run", "-m", module)
            _execute(module, is_module=True)
        case [script, *rest] if not script.startswith("-"):
            path = Path(script).absolute()
            if not path.is_file():
                _refuse(f"{script!r} is not a file; pass a Python script, or -m and the name of a module.")
            _prepare(rest, folder=path.resolve().parent)
            started_by("run", str(path))
            _execute(str(path), is_module=False)
        case []:
            _refuse(f"pass a script to run.\n\n{USAGE}")
        case ["-m"]:
            _refuse("-m needs the name of a module.")
        case [option, *_]:
            _refuse(f"unknown option {option!r}; pass the script's own options after the script.\n\n{USAGE}")


def _refuse(message: str) -> None:
    print(f"lightning-ort run: {message}", file=sys.stderr)
    sys.exit(2)


def _prepare(arguments: list[str], folder: Path) -> None:
    """Have ``sys`` say what it would have said to the script without us."""
    sys.argv = [sys.argv[0], *arguments]  # runpy sets the first, an absolute path as in the processes Lightning starts
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11: nothing was put in front
        sys.path[0] = os.fspath(folder)


def _execute(name: str, is_module: bool) -> None:
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except BaseException as error:
        trace = _script_frames(error.__traceback__)
        if trace is None and isinstance(error, ImportError):  # runpy's own: nothing of the script has run
            sys.exit(f"lightning-ort run: {error}")
        show = sys.excepthook  # the script may have set it
        # shown when the error reaches Python itself, which after Ctrl-C ends by a signal, after exit() with its status
        sys.excepthook = lambda kind, value, _: show(kind, value.with_traceback(trace), trace)
        raise


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Leave out what is above the script: this file and runpy."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    return trace
