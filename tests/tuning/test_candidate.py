"""What a candidate changes in a configuration."""

from typing import Any

import pytest

from lightning_ort._imports import LIGHTNING, PYTORCH_LIGHTNING
from lightning_ort.tuning.candidate import Candidate, configured

USER = {
    "trainer": {"max_epochs": 3, "devices": 4, "strategy": "ddp", "callbacks": {"class_path": "mine.Callback"}},
    "model": {"width": 8},
    "data": {"batch_size": 32, "init_args": {}},
}
BATCH = ("data", "batch_size")


def trainer(candidate: Candidate, config: Any = USER, **more: Any) -> dict[str, Any]:
    return configured(config, candidate, BATCH, **more)["trainer"]


def test_yours_is_unchanged() -> None:
    assert configured(USER, Candidate(), BATCH) == USER


def test_what_is_not_changed_stays() -> None:
    made = configured(USER, Candidate(engine="ort", accumulate=2, batch_size=16), BATCH)
    assert made["model"] == USER["model"]
    assert made["data"] == {"batch_size": 16, "init_args": {}}
    assert made["trainer"] == {
        "max_epochs": 3,
        "devices": 1,
        "strategy": {"class_path": "lightning_ort.ORTStrategy"},
        "callbacks": {"class_path": "mine.Callback"},
        "accumulate_grad_batches": 2,
    }
    assert USER["data"]["batch_size"] == 32


def test_settings_of_ort_config() -> None:
    """The user's own come first, then those for all candidates, then those of the engine and of the candidate."""
    mine = {"class_path": "lightning_ort.ORTStrategy", "init_args": {"optim": "keep", "config": {"engine": "ort"}}}
    user = {"trainer": {"strategy": mine}}
    for_all = {"engine": "ort", "start": "now"}
    made = trainer(Candidate(engine="auto"), user, ort_config=for_all)["strategy"]["init_args"]
    assert made == {"optim": "keep", "config": {"engine": "auto", "start": "now"}}
    assert trainer(Candidate(engine="torch"))["strategy"]["init_args"] == {"config": {"engine": "torch"}}
    assert trainer(Candidate(engine="compile"), ort_config=for_all)["strategy"] == "auto"
    assert trainer(Candidate(engine="ort"), {"trainer": {"strategy": "ddp"}})["strategy"].keys() == {"class_path"}
    assert mine["init_args"] == {"optim": "keep", "config": {"engine": "ort"}}


def test_strategies() -> None:
    auto = trainer(Candidate(engine="auto", optim="keep"))["strategy"]
    assert auto == {
        "class_path": "lightning_ort.ORTStrategy",
        "init_args": {"config": {"engine": "auto"}, "optim": "keep"},
    }
    assert trainer(Candidate(engine="stock"))["strategy"] == "auto"


def test_one_node_is_measured() -> None:
    two = {"trainer": {"num_nodes": 2}}
    assert trainer(Candidate(engine="ort"), two)["num_nodes"] == 1
    assert trainer(Candidate(threads=1), two)["num_nodes"] == 2


def test_settings_of_the_users_own_ort_strategy_stay() -> None:
    mine = {"class_path": "lightning_ort.ORTStrategy", "init_args": {"config": {"debug": {"kernels": "standard"}}}}
    made = trainer(Candidate(engine="auto"), {"trainer": {"strategy": mine}})["strategy"]
    assert made["init_args"]["config"] == {"engine": "auto", "debug": {"kernels": "standard"}}
    assert mine["init_args"]["config"] == {"debug": {"kernels": "standard"}}


def test_precision() -> None:
    assert trainer(Candidate(precision="bf16-mixed"))["precision"] == "bf16-mixed"
    made = trainer(Candidate(precision="medium"), {"trainer": {"precision": "32-true", "plugins": "mine.Plugin"}})
    assert "precision" not in made
    assert made["plugins"] == [
        "mine.Plugin",
        {"class_path": "lightning_ort.ORTMatmulPrecision", "init_args": {"level": "medium"}},
    ]


def test_callbacks_are_added() -> None:
    made = trainer(Candidate(engine="stock", optim="auto", pin_memory=True, threads=1))
    assert made["callbacks"] == [
        {"class_path": "mine.Callback"},
        {"class_path": "lightning_ort.ORTOptimizer", "init_args": {"name": "auto"}},
        {"class_path": "lightning_ort.ORTTrainingSettings", "init_args": {"pin_memory": True, "threads": 1}},
    ]
    again = trainer(Candidate(threads=2), {"trainer": made})
    assert again["callbacks"][-1]["init_args"] == {"pin_memory": True, "threads": 2}
    assert len(again["callbacks"]) == 3


@pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=str)
def test_data_without_an_argument_for_the_batch_size(namespace: Any) -> None:
    made = configured({}, Candidate(batch_size=8), None, namespace)
    (callback,) = made["trainer"]["callbacks"]
    assert callback["init_args"] == {"batch_size": 8}
    assert callback["class_path"].startswith("lightning_ort.")
    assert ("pytorch_lightning" in callback["class_path"]) == (namespace is PYTORCH_LIGHTNING)


def test_a_candidate_in_words() -> None:
    assert str(Candidate()) == "yours"
    assert str(Candidate(engine="ort", precision="bf16-mixed", batch_size=4, channels_last=True)) == (
        "ort bf16-mixed batch_size=4 channels_last"
    )


def test_sections_that_are_empty() -> None:
    made = configured(
        {"trainer": None, "data": {"class_path": "mine.Data"}},
        Candidate(accumulate=2, batch_size=4),
        ("data", "init_args", "batch_size"),
    )
    assert made["trainer"] == {"accumulate_grad_batches": 2}
    assert made["data"] == {"class_path": "mine.Data", "init_args": {"batch_size": 4}}
