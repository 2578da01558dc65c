"""Private names of torch, except those of dynamo."""

import torch


def default_store() -> "torch.distributed.Store | None":
    """Return the key-value store of the default process group; MPI has none (torch 2.13)."""
    return torch.distributed.distributed_c10d._get_default_store()
