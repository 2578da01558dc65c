"""Back into PyTorch: :func:`load_training_state`, and a checkpoint that a Trainer goes on from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ort._arguments import check_path, check_type, check_writable
from lightning_ort._imports import namespace_of
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.folder import ABOUT, STATE
from lightning_ort.onnx_export.training.optimizers import configured
from lightning_ort.strategies.checkpoints import save_atomically


@dataclass(frozen=True)
class TrainingState:
    """What was loaded into a module, and the optimizer's part of it.

    Args:
        module: The module.
        steps: Updates of the parameters so far, those before the export included.
        states: The optimizer's states, by kind and then by parameter.
    """

    module: nn.Module = field(repr=False)
    steps: int
    states: Mapping[str, Mapping[str, Tensor]] = field(repr=False)

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the states into an optimizer of the module's; ``ValueError`` if it is not the exported one."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        wanted = {name for values in self.states.values() for name in values}
        found = {names.get(id(each)) for group in optimizer.param_groups for each in group["params"]}
        if missing := sorted(wanted - found):
            raise ValueError(f"The optimizer does not update {', '.join(missing)}, for which there are states.")
        is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
        if self.states and is_adam != ("exp_avg" in self.states):
            kinds = ", ".join(self.states)
            raise ValueError(f"{type(optimizer).__name__} has other states than those that were exported: {kinds}.")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = {
                    key: values[name] for key, values in self.states.items() if (name := names[id(parameter)]) in values
                }
                step = own.pop("step", torch.tensor(float(self.steps)))
                if own and step:  # torch has no states of what was never updated
                    state = {"step": step.clone()} if is_adam else {}
                    state |= {key: value.clone().to(parameter.device) for key, value in own.items()}
                    optimizer.state[parameter] = state

    def checkpoint(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> Path:
        """Write a Lightning checkpoint, with which ``Trainer.fit(module, ckpt_path=path)`` goes on.

        It has the module's weights, hyperparameters, the state of the optimizer and the number of steps; nothing of
        epochs, callbacks or schedules, since there were none.

        Args:
            path: The file.
            optimizer: The optimizer; by default that of ``configure_optimizers``.
        """
        check_writable("path", check_path("path", path), is_folder=False)
        namespace = namespace_of(type(self.module))
        if namespace is None:
            raise TypeError(f"{type(self.module).__name__} is no LightningModule; save its state_dict() instead.")
        if optimizer is None:
            optimizer, _ = configured(self.module)
        self.load_into(optimizer)
        content: dict[str, Any] = {
            "epoch": 0,
            "global_step": self.steps,
            "pytorch-lightning_version": namespace.load().__version__,
            "state_dict": self.module.state_dict(),
            "callbacks": {},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
            "loops": {"fit_loop": _steps_made(self.steps)},
        }
        hparams = getattr(self.module, "hparams_initial", None)
        if hparams:
            content |= {"hparams_name": "kwargs", "hyper_parameters": dict(hparams)}
        self.module.on_save_checkpoint(content)  # type: ignore[operator]
        save_atomically(content, Path(path).absolute())
        return Path(path)


def _steps_made(count: int) -> dict[str, Any]:
    """The state of a Trainer's loops that has made so many steps of the first epoch's."""
    none = {"ready": 0, "completed": 0}
    optimizer = {
        "step": {"total": {"ready": count, "completed": count}, "current": none},
        "zero_grad": {"total": {**none, "started": 0}, "current": {**none, "started": 0}},
    }
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": count},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
    }


def load_training_state(module: nn.Module, folder: str | Path) -> TrainingState:
    """Load what was trained elsewhere into the module that was exported.

    Args:
        module: The LightningModule, as it was exported: of the same class and hyperparameters.
        folder: The exported folder, or the ``state.safetensors`` of it, which a runner saved.

    Returns:
        The optimizer's part, for an optimizer or a checkpoint.

    Raises:
        ValueError: If the state is damaged, or of another module; the module is then as it was.

    Example::

        state = load_training_state(module, "classifier_training")
        trainer.fit(module, ckpt_path=state.checkpoint("back.ckpt"))
    """
    check_type("module", module, nn.Module, "the LightningModule that was exported")
    path = Path(check_path("folder", folder, allowed="an exported folder, or a state.safetensors"))
    file = path / STATE if path.is_dir() else path
    try:
        values, metadata = runner.read_state(file)
    except runner.TrainingError as error:
        raise ValueError(str(error)) from None
    roles = _roles(path if path.is_dir() else path.parent, values)
    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {name: value for name, value in values.items() if roles.get(name) != "state"}
    _check(module, own, targets, file)
    with torch.no_grad():
        for name, value in own.items():
            targets[name].copy_(torch.from_numpy(value))
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in values.items():
        if roles.get(name) == "state":
            key, _, parameter = name.partition("/")
            states.setdefault(key, {})[parameter] = torch.from_numpy(value)
    states.pop("gradient_sum", None)
    return TrainingState(module, int(metadata.get("step", 0)), states)


def _roles(folder: Path, values: Mapping[str, np.ndarray]) -> dict[str, str]:
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        return {each["name"]: each["role"] for each in about["state"]}
    except (OSError, ValueError, KeyError, TypeError):  # a state that was saved alone
        kinds = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step", "gradient_sum")
        return {name: "state" for name in values if name.partition("/")[0] in kinds}


def _check(module: nn.Module, own: Mapping[str, np.ndarray], targets: Mapping[str, Tensor], file: Path) -> None:
    name = type(module).__name__
    for key, value in own.items():
        if key not in targets:
            raise ValueError(f"{file} is of another module: {name} has no {key!r}.")
        if tuple(targets[key].shape) != value.shape:
            shape = list(targets[key].shape)
            raise ValueError(f"{file} is of another module: {key!r} has shape {list(value.shape)}, in {name} {shape}.")
    if missing := [key for key, value in module.named_parameters() if value.requires_grad and key not in own]:
        raise ValueError(f"{file} is of another module: it has no {missing[0]!r}, which {name} trains.")
