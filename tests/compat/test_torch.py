"""Each private name of torch is still there and means the same."""

import torch

from lightning_ort.compat.torch import default_store


def test_default_store() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = default_store()
        assert found is not None
        torch.distributed.PrefixStore("mine", found).set("key", "value")
        assert torch.distributed.PrefixStore("mine", found).get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()
