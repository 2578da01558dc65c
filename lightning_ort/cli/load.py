"""Find the object that a command line names."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.tuning.project import Project

_SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path")  # LightningCLI's


def load(path: str, argument: str) -> Any:
    """Import what ``package.module:name`` or ``path/to/file.py:name`` names; exit with a message if that fails."""
    source, _, name = path.rpartition(":")
    if not source or not all(part.isidentifier() for part in name.split(".")):
        sys.exit(f"{argument}={path!r}: write it as package.module:name or path/to/file.py:name.")
    try:
        found: Any = _module_of(Path(source)) if source.endswith(".py") else _import(source)
        for part in name.split("."):
            if not hasattr(found, part) and (close := difflib.get_close_matches(part, vars(found), n=1)):
                sys.exit(f"{argument}={path!r}: {source} has no {part!r}; did you mean {close[0]!r}?")
            found = getattr(found, part)
    except Exception as error:  # the user's code is run
        sys.exit(f"{argument}={path!r}: {described(error)}")
    return found


def check_source(given: Namespace) -> None:
    """Exit with a message unless a command's arguments name something to train, and name it once."""
    config = given.config
    if given.module is None and config is None:
        sys.exit("Nothing to train: name a module, as package.module:name or path/to/file.py:name, or give --config.")
    if config is not None and (given.args or given.data_args):
        sys.exit(
            "--args and --data-args cannot be combined with --config, which has the arguments of the module and data."
        )
    if config is not None and not config.is_file():
        sys.exit(f"--config={config}: there is no such file.")


def load_project(command: str, given: Namespace, **more: Any) -> "Project":
    """Load what a command is to train; exit with a message if something is missing. ``more`` is of the project."""
    from lightning_ort.tuning.project import Project  # needs torch

    check_source(given)
    module, data, config = given.module, given.data, given.config
    settings = _configuration(config) if config is not None else None
    if settings is not None and module is None and "class_path" not in (settings.get("model") or {}):
        sys.exit(
            f"--config={config}: its model has no class_path, so name the class that main.py passes to LightningCLI, as"
            f" in: lightning-ort {command} main.py:Model --data main.py:Data --config config.yaml"
        )
    project = Project(
        module=load(module, "module") if module else None,
        args=given.args or {},
        data=load(data, "data") if data else None,
        data_args=given.data_args or {},
        config=settings,
        accelerator=given.accelerator,
        seed=given.seed,
        **more,
    )
    if project.lacks_data:
        sys.exit(
            f"lightning-ort {command}: there is no data to train with: name a LightningDataModule, or a function that"
            " returns a DataLoader, as --data package.module:name or --data path/to/file.py:name."
        )
    return project


def _configuration(path: Path) -> dict[str, Any]:
    from jsonargparse import get_loader

    for folder in ("", str(path.parent.resolve())):  # for what its class_path entries name
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        found = get_loader("yaml")(path.read_text(encoding="utf-8"))  # as LightningCLI reads it
    except Exception as error:  # of the loader, whichever it is
        sys.exit(f"--config={path}: {type(error).__name__}: {error}")
    sections = [found.get(name) or {} for name in ("trainer", "model", "data")] if isinstance(found, dict) else [None]
    if not all(isinstance(section, dict) for section in sections):
        sys.exit(f"--config={path}: this is no LightningCLI configuration: pass a file with trainer, model and data.")
    for name in found:
        if name not in _SECTIONS and (close := difflib.get_close_matches(str(name), _SECTIONS, n=1)):
            sys.exit(f"--config={path}: there is no section {name!r}; did you mean {close[0]!r}?")
    return found


def call(make: Any, path: str, args: dict[str, Any]) -> Any:
    """Call what :func:`load` found at ``path``; exit with a message if that fails."""
    try:
        return make(**args)
    except Exception as error:  # the user's code is run
        sys.exit(f"calling {path} with {args} failed: {described(error)}")


def _import(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


def _module_of(file: Path) -> ModuleType:
    """Import a file, under its own name where nothing else has that."""
    file = file.resolve()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # for what it imports
    name = file.stem
    for taken in (name, other := f"{name}_{hashlib.sha256(bytes(file)).hexdigest()[:8]}"):
        if (module := sys.modules.get(taken)) is not None and _is_of(module, file):
            return module
    # by the name under which others, and other processes, import it too: unless they would find something else
    return importlib.import_module(name) if _finds(name, file) else _execute(other, file)


def _finds(name: str, file: Path) -> bool:
    if not name.isidentifier() or name in sys.modules:
        return False
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _is_of(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and Path(origin).resolve() == file


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def described(error: Exception) -> str:
    """Return an error, and where the user's code raised it, in a line."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, (ImportError, AttributeError, FileNotFoundError)):
        return text
    where = ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename not in (__file__, "<frozen importlib._bootstrap>"):
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {text}{where}"
