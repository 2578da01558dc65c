"""DeepSpeed's ZeRO stage 1 with compiled steps, on CPU too, with plain checkpoints: :class:`DeepSpeedZeRO1Mixin`."""

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from typing_extensions import override

from lightning_ort._arguments import check_choice, check_integer
from lightning_ort._imports import LightningNamespace
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.optim.registry import runs
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.strategies.capture.shims import MISSING, restore_attribute
from lightning_ort.strategies.deepspeed import config as settings
from lightning_ort.strategies.deepspeed.states import PARAMETER_NAMES, FlatShards, read_directory, why_not_flat

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.strategies.registry import _StrategyRegistry
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies import DeepSpeedStrategy as _DeepSpeedStrategy
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from lightning_ort.compiler.report import CompileReport
else:
    _DeepSpeedStrategy = object

# earlier ones count accumulated gradients themselves
_DEEPSPEED = RequirementCache("deepspeed>=0.19")

CheckpointForm = Literal["file", "directory"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class DeepSpeedZeRO1Mixin(_DeepSpeedStrategy):
    """Lifts limits of Lightning's ``DeepSpeedStrategy`` that ZeRO stage 1 need not have.

    It runs on CPUs, saves and loads plain checkpoints, keeps the hooks of the module in evaluation, and counts
    accumulated gradients once (Lightning 2.6 and DeepSpeed both divide by their number).

    Args:
        deepspeed_config: DeepSpeed's configuration, or the path of a JSON file with it. What the Trainer says too must
            be the same there, or ``"auto"``.
        offload_optimizer: Keep the optimizer's states, and its step, on the CPU.
        checkpoint: ``"file"``: plain, as a stock Trainer's; ``"directory"``: DeepSpeed's, each process its part.
        start_method: How processes are started: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        stage: Of ZeRO.
        overlap_comm: As for Lightning's strategy.
        contiguous_gradients: As there; ``None`` for what suits the device.
        reduce_bucket_size: As there, in elements; ``None`` for what suits the device.
        **kwargs: For the strategy.

    Raises:
        ValueError: If the configuration asks for another stage than 1, or for what this strategy does not do.

    """

    namespace: ClassVar[LightningNamespace]

    if TYPE_CHECKING:
        report: CompileReport
        _swap: Any

    def __init__(
        self,
        deepspeed_config: "_PATH | dict[str, Any] | None" = None,
        offload_optimizer: bool = False,
        checkpoint: CheckpointForm = "file",
        start_method: StartMethod = "popen",
        # here and not in `kwargs`: command lines pass on the defaults of what they find in Lightning's signature
        stage: Literal[1] = 1,
        overlap_comm: bool = False,
        contiguous_gradients: bool | None = None,
        reduce_bucket_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if checkpoint not in get_args(CheckpointForm):
            raise ValueError(f"checkpoint={checkpoint!r}: choose 'file' or 'directory'.")
        check_choice("start_method", start_method, get_args(StartMethod))
        for name, value in {"offload_optimizer": offload_optimizer, "overlap_comm": overlap_comm}.items():
            check_choice(name, value, (True, False))
        check_choice("contiguous_gradients", contiguous_gradients, (True, False, None))
        if reduce_bucket_size is not None:
            reduce_bucket_size = check_integer("reduce_bucket_size", reduce_bucket_size, 1)
        settings.check_stage(stage)
        try:
            deepspeed_config = settings.read(deepspeed_config)
        except FileNotFoundError as error:
            raise self.namespace.misconfiguration(str(error)) from None
        if kwargs.get("exclude_frozen_parameters") and checkpoint == "file":
            raise ValueError("exclude_frozen_parameters=True is for checkpoint='directory'; a file has all parameters.")
        # several times faster on CPUs: no copy of each gradient, and buckets that fit the cache
        suits = (True, 200_000_000) if torch.cuda.is_available() else (False, 5_000_000)
        with kernels.spare_deepspeed_the_search():
            super().__init__(
                config=deepspeed_config,
                stage=1,
                offload_optimizer=offload_optimizer,
                overlap_comm=overlap_comm,
                contiguous_gradients=suits[0] if contiguous_gradients is None else contiguous_gradients,
                reduce_bucket_size=suits[1] if reduce_bucket_size is None else reduce_bucket_size,
                **kwargs,
            )
        if not _DEEPSPEED:
            raise self.namespace.misconfiguration(f"{_DEEPSPEED}. Install it with `pip install 'lightning-ort[zero]'`")
        self._put_back: list[Callable[[], None]] = []
        self._start_method = start_method
        self._checkpoint_form = checkpoint
        self._shards: FlatShards | None = None
        assert isinstance(self.config, dict)
        self.config = settings.stage_one(self.config)
        if offload_optimizer:
            self.config["zero_optimization"].setdefault("offload_optimizer", {"device": "cpu"})
        self._given_config = copy.deepcopy(self.config)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: "_StrategyRegistry") -> None:
        name = cls.strategy_name
        strategy_registry.register(name, cls, description="DeepSpeed's ZeRO stage 1 on ONNX Runtime")
        strategy_registry.register(
            f"{name}_offload",
            cls,
            description="DeepSpeed's ZeRO stage 1 on ONNX Runtime, optimizer states on the CPU",
            offload_optimizer=True,
        )

    @property
    def _ddp(self) -> "DDPStrategy":
        """The methods that Lightning's ``DeepSpeedStrategy`` inherits, and overrides with what is not for here."""
        stock = next(base for base in type(self).__mro__ if base.__name__ == "DeepSpeedStrategy")
        return super(stock, self)  # type: ignore[return-value]

    @property
    def _offloads(self) -> bool:
        assert isinstance(self.config, dict)
        device = self.config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        return device != "none"

    # processes and devices

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed asks for the index

    @override
    def setup_environment(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_environment()
            return
        self._use_deepspeed_on_cpu()
        self._ddp.setup_environment()

    def _use_deepspeed_on_cpu(self) -> None:
        """Set what DeepSpeed keeps for the whole process, until the teardown of this run."""
        import deepspeed
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        operations = deepspeed.ops.__compatible_ops__
        settings_of_process: tuple[tuple[dict[str, Any], str, Any], ...] = (
            # also on a machine with a GPU that this run does not use
            (vars(real_accelerator), "ds_accelerator", CPU_Accelerator()),
            # a collective of its inference engine, which would be compiled here and now
            (operations, "deepspeed_shm_comm", False),
        )
        for holder, name, value in settings_of_process:
            before = holder.get(name, MISSING)
            holder[name] = value
            self._put_back.append(functools.partial(restore_attribute, holder, name, before))

    @override
    def setup_distributed(self) -> None:
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        import deepspeed

        self._ddp.setup_distributed()
        self._set_node_environment_variables()
        deepspeed.init_distributed(self._process_group_backend, verbose=False, dist_init_required=False)

    # DeepSpeed's configuration and the Trainer's arguments

    @property
    @override
    def precision_plugin(self) -> "Precision":
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: "Precision | None") -> None:
        deepspeeds = importlib.import_module(f"{self.namespace.package}.plugins.precision").DeepSpeedPrecision
        if plugin is not None and not isinstance(plugin, deepspeeds):
            raise self.namespace.misconfiguration(
                f"DeepSpeed scales losses and clips gradients itself, and works with no precision plugin but"
                f" DeepSpeedPrecision; got {type(plugin).__name__}. Use Trainer(precision='bf16-mixed')."
            )
        self._precision_plugin = plugin

    @override
    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        if reason := settings.precision_conflict(self.config, self.precision_plugin.precision):
            raise self.namespace.misconfiguration(reason)
        if self.precision_plugin.precision.startswith("16") and self.root_device.type == "cpu":
            raise self.namespace.misconfiguration(
                f"DeepSpeed has no float16 on CPUs, and the Trainer has precision={self.precision_plugin.precision!r}."
                " Use 'bf16-mixed'."
            )
        super()._format_config()

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        if self.lightning_module is None:
            return
        trainer = self.lightning_module.trainer
        fits = trainer.fit_loop._data_source.is_defined()
        reason = settings.take_trainer_arguments(
            self.config,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            batch_size=self._auto_select_batch_size() if fits else None,
            world_size=self.world_size,
        )
        if reason:
            raise self.namespace.misconfiguration(reason)
        super()._format_batch_size_and_grad_accum_config()
        # Lightning calls for a step when it is due, and has divided the loss by then
        self.config["gradient_accumulation_steps"] = 1
        self.config["managed_gradient_accumulation"] = False

    @override
    def _auto_select_batch_size(self) -> int:
        try:
            return super()._auto_select_batch_size()
        except AttributeError:  # a loader without a batch sampler
            return 1

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return False

    # optimizers

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        assert isinstance(self.config, dict)
        if "optimizer" not in self.config:
            self._ddp.setup_optimizers(trainer)
            if len(self.optimizers) != 1 or len(self.lr_scheduler_configs) > 1:
                raise self.namespace.misconfiguration(
                    "DeepSpeed drives one optimizer and at most one scheduler; `configure_optimizers` returned"
                    f" {len(self.optimizers)} and {len(self.lr_scheduler_configs)}. Use strategy='ort_zero1_native'."
                )
            self._check_groups(self.optimizers[0])
            return
        if self._swap.name not in ("auto", "keep"):
            raise ValueError(
                f"optim={self._swap.name!r} changes what `configure_optimizers` returns, and the DeepSpeed"
                f" configuration has an optimizer of its own, {self.config['optimizer']}. Choose in one place."
            )
        super().setup_optimizers(trainer)

    @staticmethod
    def _check_groups(optimizer: "Optimizer") -> None:
        for index, group in enumerate(optimizer.param_groups):
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            if not trained:
                raise ValueError(
                    f"Parameter group {index} has no parameter that requires a gradient, and DeepSpeed cannot flatten"
                    " none. Leave the group out."
                )
            if len(dtypes := {str(parameter.dtype) for parameter in trained}) > 1:
                raise ValueError(
                    f"Parameter group {index} has parameters of {' and '.join(sorted(dtypes))}, and DeepSpeed flattens"
                    " them into one tensor. Make a group for each dtype."
                )

    @override
    def _init_optimizers(self) -> tuple["Optimizer", Any]:
        (optimizer,) = self.optimizers
        if reason := why_not_flat(optimizer):
            raise ValueError(
                f"DeepSpeed gives the optimizer one flat piece of each parameter group, and {runs(optimizer)} {reason}."
                " Use torch's Adam, AdamW or SGD, or the strategy 'ort_ddp'."
            )
        return optimizer, self.lr_scheduler_configs[0] if self.lr_scheduler_configs else None

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        assert isinstance(self.config, dict)
        groups = [list(group["params"]) for group in self.optimizers[0].param_groups] if self.optimizers else None
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # a fused torch optimizer is as fast
        super()._initialize_deepspeed_train(model)
        zero = self.optimizers[0]
        self._shards = FlatShards(zero, groups or zero.round_robin_bit16_groups)  # type: ignore[attr-defined]
        where = ", on the CPU" if self._offloads else ""
        note = f"states split over {self.world_size} processes by DeepSpeed{where}"
        self.report.optimizers = [
            dataclasses.replace(entry, reason="; ".join(filter(None, (entry.reason, note))))
            for entry in self.report.optimizers
        ]

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        # without gradients there is nothing to split, and an engine would take the user's hooks off the module
        if self.precision_plugin.precision.startswith(("bf16", "16")):
            model.to(self.precision_plugin._desired_dtype)  # type: ignore[attr-defined]
        self.model = model
        self.model_to_device()

    def wrapper_hooks(self) -> list["RemovableHandle"]:
        """The hooks that DeepSpeed put on the module, for itself and not for the user."""
        handles = (getattr(self.model, f"module_forward_{when}_hook", None) for when in ("pre", "post"))
        return [handle for handle in handles if handle is not None]

    # checkpoints

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def optimizer_state(self, optimizer: "Optimizer") -> dict[str, Tensor]:
        """The whole states on rank 0, and nothing on the others."""
        if self._checkpoint_form == "directory" or self._shards is None:
            return {}
        return self._shards.state_dict()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's, with the weights that the optimizer keeps in float32 in place of their rounded copies."""
        state_dict = super().lightning_module_state_dict()
        rounded = self.precision_plugin.precision != "32-true"
        if self._shards is None or self._checkpoint_form == "directory" or not rounded:
            return state_dict
        weights = self._shards.master_weights()
        if weights is None:
            return state_dict
        assert self.lightning_module is not None
        names = dict(self.lightning_module.named_parameters(remove_duplicate=False))
        return {name: weights.get(id(names.get(name)), value) for name, value in state_dict.items()}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: "_PATH", storage_options: Any | None = None
    ) -> None:
        if self._checkpoint_form == "file":
            self._ddp.save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.lightning_module is not None
        assert self._shards is not None
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        groups = [[names[id(parameter)] for parameter in group] for group in self._shards.groups]
        super().save_checkpoint({**checkpoint, PARAMETER_NAMES: groups}, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: "_PATH", weights_only: bool | None = None) -> dict[str, Any]:
        """Load a plain checkpoint, or DeepSpeed's directory; both for any number of processes."""
        if Path(checkpoint_path).is_dir():
            try:
                return read_directory(Path(checkpoint_path), trust=weights_only is False)
            except NotTrusted as error:
                advice = "If you know where it comes from, pass weights_only=False to the Trainer's method."
                raise ValueError(f"{error} {advice}") from None
        return self._ddp.load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._ddp.load_model_state_dict(checkpoint, strict)
        if self._shards is None:
            return
        assert self.lightning_module is not None
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        weights = checkpoint["state_dict"]
        self._shards.load_master_weights(lambda parameter: weights.get(names.get(id(parameter))))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._shards is not None
        (saved,) = checkpoint["optimizer_states"]
        self._shards.load_state_dict(saved)

    @override
    def teardown(self) -> None:
        super().teardown()
        while self._put_back:
            self._put_back.pop()()
        # the states stay, for `trainer.save_checkpoint` after the fit; the configuration does not, since what the next
        # Trainer says may differ
        self.config, self._config_initialized = copy.deepcopy(self._given_config), False
