"""The private names of torch that we use still exist and mean the same."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ort.compat import torch as compat

aten = torch.ops.aten
_FOR_ALL_MODULES = (
    torch.nn.modules.module.register_module_forward_hook,
    torch.nn.modules.module.register_module_forward_pre_hook,
    torch.nn.modules.module.register_module_full_backward_hook,
    torch.nn.modules.module.register_module_full_backward_pre_hook,
)


def test_aten_op_names() -> None:
    assert {"aten.gelu", "aten.gelu.default", "aten.add.Tensor", "aten.mm"} <= compat.aten_op_names()
    assert not {"aten", "aten.", "gelu", "aten.add.default"} & compat.aten_op_names()


def test_is_zero_tensor() -> None:
    assert compat.is_zero_tensor(aten._efficientzerotensor([2]))
    assert not compat.is_zero_tensor(torch.zeros(2))


def test_tree_map() -> None:
    assert compat.tree_map(lambda x: x + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


def test_default_store(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        store = compat.default_store()
        assert isinstance(store, torch.distributed.Store)
        torch.distributed.PrefixStore("test", store).set("key", "value")
        assert store.get("test/key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


def test_cpu_has_fast_bfloat16() -> None:
    assert isinstance(compat.cpu_has_fast_bfloat16(), bool)


def test_hooks_of_all_modules() -> None:
    handles = [register(lambda *args: None) for register in _FOR_ALL_MODULES]
    assert {*itertools.chain(*compat.HOOKS_OF_ALL_MODULES)} == {handle.id for handle in handles}
    for handle in handles:
        handle.remove()
    assert not any(compat.HOOKS_OF_ALL_MODULES)


@pytest.mark.new_torch
def test_float32_matmul_precision() -> None:
    before, backend = torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul
    kept = backend.fp32_precision  # type: ignore[attr-defined]
    try:
        assert compat.float32_matmul_precision() == before
        backend.fp32_precision = "bf16"  # type: ignore[attr-defined]
        changed = compat.float32_matmul_precision()
        assert changed.endswith("/bf16")
        compat.set_float32_matmul_precision("medium")
        compat.set_float32_matmul_precision(changed)
        assert backend.fp32_precision == "bf16"  # type: ignore[attr-defined]
    finally:
        backend.fp32_precision = kept  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(before)


def test_what_fetches_batches_is_replaced_and_put_back() -> None:
    def make(dataset: Any, fetch: Any) -> Any:
        return lambda indices: (fetch(indices), dataset)

    data, own = torch.arange(4), DataLoader(torch.arange(4), batch_size=2, collate_fn=list)
    undo = compat.replace_fetch(make, lambda: tuple)
    try:
        ((batch, dataset), _) = DataLoader(data, batch_size=2)
        assert batch == (0, 1)
        assert dataset is data
        assert list(own) == [[0, 1], [2, 3]]
    finally:
        undo()
    assert [batch.tolist() for batch in DataLoader(data, batch_size=2)] == [[0, 1], [2, 3]]
    assert compat.fetches_tensors_as_usual()
    assert compat.collates_as_usual()
