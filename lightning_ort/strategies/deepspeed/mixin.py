"""DeepSpeed's ZeRO stage 1 with compiled steps, on CPUs too, with plain checkpoints: :class:`DeepSpeedZeRO1Mixin`."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_ort._arguments import check_choice, check_integer
from lightning_ort._imports import LightningNamespace, absence
from lightning_ort.compat import deepspeed as compat
from lightning_ort.compat.lightning import deepspeed_dtype, has_training_data
from lightning_ort.compat.lightning_deepspeed import DeepSpeedNames
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.strategies.deepspeed import config as settings
from lightning_ort.strategies.deepspeed.states import PARAMETER_NAMES, DeepSpeedStates, check_optimizer, read_directory
from lightning_ort.strategies.parallel import StartMethod

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_ort.compiler.report import CompileReport
    from lightning_ort.optim.swap import OptimizerSwap

# earlier versions count accumulated gradients themselves
_DEEPSPEED = RequirementCache("deepspeed>=0.19")

CheckpointForm = Literal["file", "directory"]


class DeepSpeedZeRO1Mixin(DeepSpeedNames):
    """Removes limits of Lightning's ``DeepSpeedStrategy`` that do not apply to ZeRO stage 1.

    It runs on CPUs, saves and loads plain checkpoints, keeps the hooks of the module in evaluation, and divides the
    gradients by the number of accumulated batches once (with Lightning 2.6 both Lightning and DeepSpeed do so).

    Args:
        deepspeed_config: DeepSpeed's configuration, or the path of a JSON file with it. An entry that the Trainer has
            an argument for must have the same value, or ``"auto"``.
        offload_optimizer: Keep the optimizer's states, and its step, on the CPU.
        checkpoint: ``"file"`` saves checkpoints like a stock Trainer's; ``"directory"`` saves DeepSpeed's, to which
            each process writes its part.
        start_method: How processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        stage: Must be 1.
        overlap_comm: Must be false, which is not the default of Lightning's ``DeepSpeedStrategy``.
        contiguous_gradients: As in ``DeepSpeedStrategy``. ``None`` is true on GPUs and false on CPUs, where that is
            several times faster.
        reduce_bucket_size: As in ``DeepSpeedStrategy``, in elements. ``None`` is 200 million on GPUs and 5 million on
            CPUs.
        **kwargs: Further arguments of ``DeepSpeedStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        ValueError: If the configuration has another stage than 1, or options that this strategy does not support.
    """

    namespace: ClassVar[LightningNamespace]
    handles_gradient_accumulation = False
    lightning_restore_optimizer = True
    restore_checkpoint_after_setup = False  # before it, as elsewhere: after it Lightning 2.6 forgets `weights_only`

    if TYPE_CHECKING:
        config: dict[str, Any]
        lightning_module: pl.LightningModule
        _swap: OptimizerSwap

        @property
        def report(self) -> CompileReport:
            """That of ``ORTMixin``."""

    def __init__(
        self,
        deepspeed_config: str | Path | dict[str, Any] | None = None,
        offload_optimizer: bool = False,
        checkpoint: CheckpointForm = "file",
        start_method: StartMethod = "popen",
        # not in `kwargs`: command lines pass on the defaults that they find in Lightning's signature
        stage: Literal[1] = 1,
        overlap_comm: bool = False,
        contiguous_gradients: bool | None = None,
        reduce_bucket_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not _DEEPSPEED:  # before Lightning's own check, which names another command
            install = "pip install 'lightning-ort[zero]'"
            raise self.namespace.misconfiguration(f"{absence(_DEEPSPEED)} Install it with `{install}`")
        check_choice("checkpoint", checkpoint, get_args(CheckpointForm))
        check_choice("start_method", start_method, get_args(StartMethod))
        check_choice("offload_optimizer", offload_optimizer, (True, False))
        check_choice("overlap_comm", overlap_comm, (True, False))
        check_choice("contiguous_gradients", contiguous_gradients, (True, False, None))
        settings.check_stage(stage)
        if kwargs.get("exclude_frozen_parameters") and checkpoint == "file":
            raise ValueError("exclude_frozen_parameters=True needs checkpoint='directory'; a file has all parameters.")
        # the defaults for CPUs are several times faster there: no copy of each gradient, and buckets that fit the cache
        has_gpu = torch.cuda.is_available()
        if reduce_bucket_size is None:
            reduce_bucket_size = 200_000_000 if has_gpu else 5_000_000
        try:
            deepspeed_config = settings.read(deepspeed_config)
        except FileNotFoundError as error:
            raise self.namespace.misconfiguration(str(error)) from None
        with compat.without_gpu_search():
            super().__init__(
                config=deepspeed_config,
                stage=1,
                offload_optimizer=offload_optimizer,
                overlap_comm=overlap_comm,
                contiguous_gradients=has_gpu if contiguous_gradients is None else contiguous_gradients,
                reduce_bucket_size=check_integer("reduce_bucket_size", reduce_bucket_size, 1),
                **kwargs,
            )
        self._process_settings = ExitStack()
        self.start_processes_by(start_method)
        self._checkpoint_form = checkpoint
        self._states: DeepSpeedStates | None = None  # of the last fit
        self._starts = False  # no batch since the start of training
        self.config = settings.stage_one(self.config, offload_optimizer)
        self._given_config = copy.deepcopy(self.config)

    @property
    def _ddp(self) -> "DDPStrategy":
        """The methods that Lightning's ``DeepSpeedStrategy`` overrides in ways that do not fit here."""
        stock = next(base for base in type(self).__mro__ if base.__name__ == "DeepSpeedStrategy")
        return super(stock, self)  # type: ignore[return-value]

    # processes and devices

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed asks for the index

    @override
    def setup_environment(self) -> None:
        self._states = None
        if self.root_device.type != "cpu":
            super().setup_environment()
            return
        self._process_settings.enter_context(compat.on_cpu())
        self._ddp.setup_environment()

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        import deepspeed

        self._ddp.setup_distributed()
        self.tell_node()
        deepspeed.init_distributed(self.process_group_backend, verbose=False, dist_init_required=False)

    # DeepSpeed's configuration and the Trainer's arguments

    @property
    @override
    def precision_plugin(self) -> "Precision":
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: "Precision | None") -> None:
        kind: Any = self.namespace.submodule("plugins.precision").DeepSpeedPrecision
        if plugin is not None and not isinstance(plugin, kind):
            raise self.namespace.misconfiguration(
                f"DeepSpeed scales losses and clips gradients itself, and only works with the precision plugin"
                f" DeepSpeedPrecision; got {type(plugin).__name__}. Use Trainer(precision='bf16-mixed')."
            )
        if plugin is not None and type(plugin) is kind:  # a subclass of the user's stays
            plugin = self.namespace.classes.ORTDeepSpeedPrecision(plugin.precision)
        self.take_precision(plugin)

    @override
    def check_configuration(self) -> None:
        if reason := settings.precision_conflict(self.config, self.precision_plugin.precision):
            raise self.namespace.misconfiguration(reason)
        if self.precision_plugin.precision.startswith("16") and self.root_device.type == "cpu":
            raise self.namespace.misconfiguration(
                "DeepSpeed does not support float16 on CPUs, but the Trainer has precision="
                f"{self.precision_plugin.precision!r}. Use 'bf16-mixed'."
            )

    @override
    def complete_batch_sizes(self, complete: Callable[[], None]) -> None:
        if self.lightning_module is None:
            return
        trainer = self.lightning_module.trainer
        batch_size = self.batch_size if has_training_data(trainer) else None
        if reason := settings.trainer_conflict(self.config, trainer, batch_size, self.world_size):
            raise self.namespace.misconfiguration(reason)
        for key in ("gradient_accumulation_steps", "train_batch_size"):  # the same as the Trainer's
            self.config.pop(key, None)
        self.config.setdefault("gradient_clipping", 0.0)  # not the Trainer's: hooks ask for it in each step
        complete()
        # Lightning asks for a step when it is due, and has divided the loss by the number of batches
        self.config["gradient_accumulation_steps"] = 1
        self.config["managed_gradient_accumulation"] = False

    # optimizers

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        if "optimizer" not in self.config:
            self._ddp.setup_optimizers(trainer)
            if len(self.optimizers) != 1 or len(self.lr_scheduler_configs) > 1:
                raise self.namespace.misconfiguration(
                    "DeepSpeed supports one optimizer and at most one scheduler, but `configure_optimizers` returned"
                    f" {len(self.optimizers)} and {len(self.lr_scheduler_configs)}. Use strategy='ort_zero1_native'."
                )
        elif self._swap.name in ("auto", "keep"):
            super().setup_optimizers(trainer)
        else:
            raise ValueError(
                f"optim={self._swap.name!r} replaces the optimizer that `configure_optimizers` returns, but the"
                f" DeepSpeed configuration has its own optimizer, {self.config['optimizer']}. Choose only one of them."
            )

    @override
    def optimizer_and_scheduler(self) -> tuple[Optimizer, Any]:
        check_optimizer(self.optimizers[0], deepspeed_dtype(self.precision_plugin))
        return self.optimizers[0], next(iter(self.lr_scheduler_configs), None)

    @override
    def start_training(self, start: Callable[[nn.Module], None], model: nn.Module) -> None:
        finder = self.namespace.submodule("callbacks").LearningRateFinder
        if any(isinstance(callback, finder) for callback in self.lightning_module.trainer.callbacks):  # type: ignore[attr-defined]
            raise self.namespace.misconfiguration(
                "LearningRateFinder puts a scheduler on the optimizer, but DeepSpeed's is none of torch's. Find the"
                " learning rate with strategy='ort_ddp', and then train with it."
            )
        groups = [list(group["params"]) for group in self.optimizers[0].param_groups] if self.optimizers else None
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # a fused torch optimizer is as fast
        with compat.broadcasting_any_shape():
            start(model)
        self._states = DeepSpeedStates(self.optimizers[0], groups)
        offload = self.config["zero_optimization"].get("offload_optimizer", {})
        where = ", on the CPU" if offload.get("device", "none") != "none" else ""
        note = f"states split over {self.world_size} processes by DeepSpeed{where}"
        self.report.optimizers = [
            dataclasses.replace(entry, reason="; ".join(filter(None, (entry.reason, note))))
            for entry in self.report.optimizers
        ]

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._starts = True

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        # after the user's hooks, which may have set weights: before the first step, and between epochs
        if self._states is not None and (self._starts or batch_idx == 0):
            self._states.take_changed_weights()
        self._starts = False

    @override
    def start_inference(self, model: nn.Module) -> None:
        # no engine: it would remove the user's hooks from the module, and without gradients there is nothing to split
        if self.precision_plugin.precision.startswith(("bf16", "16")):
            model.to(deepspeed_dtype(self.precision_plugin))
        self.model = model
        self.model_to_device()

    def wrapper_hooks(self) -> list[RemovableHandle]:
        """Return the hooks that DeepSpeed, not the user, has registered on the module."""
        return compat.forward_hooks(self.model)

    # checkpoints

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the states of all parameters on rank 0, and nothing on the others."""
        return self._states.state_dict() if self._states and self._checkpoint_form == "file" else {}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with the optimizer's float32 weights instead of the module's rounded copies."""
        state_dict = super().lightning_module_state_dict()
        rounded = self.precision_plugin.precision != "32-true"
        weights = self._states.master_weights() if self._states and self._checkpoint_form == "file" and rounded else {}
        if not weights:
            return state_dict
        names = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        return {name: weights.get(id(names.get(name)), value) for name, value in state_dict.items()}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._checkpoint_form == "file":
            self._ddp.save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self._states is not None
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        groups = [[names[id(parameter)] for parameter in group] for group in self._states.groups]
        super().save_checkpoint({**checkpoint, PARAMETER_NAMES: groups}, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a plain checkpoint or DeepSpeed's directory, which may be of any number of processes."""
        if Path(checkpoint_path).is_dir():
            try:
                return read_directory(Path(checkpoint_path), trust=weights_only is False)
            except NotTrusted as error:
                advice = "If you trust it, pass weights_only=False to the Trainer's method."
                raise ValueError(f"{error} {advice}") from None
        return self._ddp.load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._ddp.load_model_state_dict(checkpoint, strict)
        self._load_master_weights(checkpoint)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._states is not None
        (saved,) = checkpoint["optimizer_states"]
        self._states.load_state_dict(saved)
        self._load_master_weights(checkpoint)  # the module's, which were loaded before, may have been rounded since

    def _load_master_weights(self, checkpoint: Mapping[str, Any]) -> None:
        if self._states is not None:
            weights, parameters = checkpoint["state_dict"], self.lightning_module.named_parameters()
            self._states.load_master_weights({id(p): weights[name] for name, p in parameters if name in weights})

    @override
    def teardown(self) -> None:
        super().teardown()
        self._process_settings.close()
        # The states stay, for `trainer.save_checkpoint` after the fit. The configuration is reset, because the next
        # Trainer may have other arguments.
        self.reset_configuration(copy.deepcopy(self._given_config))
