"""``Trainer(strategy="ort_ddp")`` for ``lightning.pytorch``: data parallel training, one process a device."""

from typing import Any, ClassVar

from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_ort._imports import LIGHTNING, LightningNamespace
from lightning_ort.callbacks.optimizer import ORTOptimizer
from lightning_ort.config import ORTConfig
from lightning_ort.optim.registry import OptimName
from lightning_ort.precision.choose import ChoosePrecisionMixin
from lightning_ort.strategies.host_memory import HostMemory
from lightning_ort.strategies.parallel import DataParallelMixin, check_ddp_keywords

_DEFAULT = ORTConfig()


class ORTDDPStrategy(ChoosePrecisionMixin, DataParallelMixin, DDPStrategy):
    """Trains on ONNX Runtime in several processes that average their gradients.

    Args:
        config: Settings of the ONNX Runtime compiler; a mapping with the same keys will do.
        optim: What runs the optimizers that the module configures: a name, or an
            :class:`~lightning_ort.ORTOptimizer` for its further settings.
        host_memory: As for ``ort``.
        **kwargs: Of Lightning's ``DDPStrategy``, such as ``find_unused_parameters``, ``static_graph``,
            ``process_group_backend`` and ``start_method``.

    Example::

        trainer = Trainer(strategy=ORTDDPStrategy(find_unused_parameters=True), accelerator="cpu", devices=2)

    """

    strategy_name = "ort_ddp"
    namespace: ClassVar[LightningNamespace] = LIGHTNING

    def __init__(
        self,
        config: ORTConfig = _DEFAULT,
        optim: OptimName | ORTOptimizer = "auto",
        host_memory: HostMemory = "retain",
        **kwargs: Any,
    ) -> None:
        check_ddp_keywords(type(self), DDPStrategy, kwargs)
        super().__init__(config=config, optim=optim, host_memory=host_memory, **kwargs)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            for unused, find in (("", {}), ("_find_unused_parameters_true", {"find_unused_parameters": True})):
                strategy_registry.register(
                    f"{cls.strategy_name}{suffix}{unused}",
                    cls,
                    description=f"DDP on ONNX Runtime with `start_method` '{start_method}'",
                    start_method=start_method,
                    **find,
                )
