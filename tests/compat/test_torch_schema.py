"""The schemas of ops, which the docstrings of converters repeat."""

import torch

from lightning_ort.compat.torch_graphs import schema_of


def test_schema_of() -> None:
    schema = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
    tested = torch.__version__.startswith("2.13.")
    assert schema_of(torch.ops.aten.add.Tensor) == (schema if tested else None)
