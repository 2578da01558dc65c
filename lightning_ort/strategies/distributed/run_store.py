"""What the processes of one run tell each other without waiting: :class:`RunStoreMixin`."""

import uuid
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object


class RunStoreMixin(_DDPStrategy):
    """Gives each run of the Trainer a part of its own in the store of the process group.

    The process group and its store outlive a run. A name that all processes draw anew for each run keeps what an
    earlier one has written, with another model or another configuration, out of this one.

    Attributes:
        run_store: That part; ``None`` for a single process, and between runs.

    """

    run_store: "torch.distributed.Store | None" = None

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size == 1 or not torch.distributed.is_initialized():
            return
        name = self.broadcast(uuid.uuid4().hex)
        store = torch.distributed.distributed_c10d._get_default_store()
        if store is not None:  # MPI has none
            self.run_store = torch.distributed.PrefixStore(f"lightning_ort/{name}", store)

    @override
    def teardown(self) -> None:
        self.run_store = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "run_store": None}
