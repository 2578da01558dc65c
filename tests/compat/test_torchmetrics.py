"""Private names of torchmetrics still mean what we take them for."""

import torch
from torchmetrics import MeanMetric

from lightning_ort.compat.torchmetrics import keywords_of, set_value_of_batch, value_of_batch


def test_value_of_batch() -> None:
    metric = MeanMetric()
    assert value_of_batch(metric) is None
    first = metric(torch.tensor(1.0))
    metric(torch.tensor(3.0))
    assert value_of_batch(metric) == 3
    set_value_of_batch(metric, first)
    assert value_of_batch(metric) is first
    assert metric.compute() == 2


def test_keywords_of() -> None:
    assert keywords_of(MeanMetric(), {"weight": 2, "target": 1}) == {"weight": 2}
