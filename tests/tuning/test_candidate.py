"""What a candidate changes in a configuration, and the comments beside it."""

from typing import Any

import pytest
import yaml

from lightning_ort._imports import LIGHTNING, PYTORCH_LIGHTNING
from lightning_ort.tuning.candidate import Candidate, commented, configured

USER = {
    "trainer": {"max_epochs": 3, "devices": 4, "strategy": "ddp", "callbacks": {"class_path": "mine.Callback"}},
    "model": {"width": 8},
    "data": {"batch_size": 32, "init_args": {}},
}
BATCH = ("data", "batch_size")


def trainer(candidate: Candidate, config: Any = USER, **more: Any) -> dict[str, Any]:
    return configured(config, candidate, BATCH, **more).config["trainer"]


def test_yours_is_unchanged() -> None:
    made = configured(USER, Candidate(), BATCH)
    assert made.config == USER
    assert made.paths == {}


def test_what_is_not_changed_stays() -> None:
    made = configured(USER, Candidate(engine="ort", accumulate=2, batch_size=16), BATCH).config
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
    made = trainer(Candidate(engine="auto", activation_memory_budget=0.1), user, ort_config=for_all)["strategy"][
        "init_args"
    ]
    assert made == {"optim": "keep", "config": {"engine": "auto", "start": "now", "activation_memory_budget": 0.1}}
    assert trainer(Candidate(engine="torch"))["strategy"]["init_args"] == {"config": {"engine": "torch"}}
    assert trainer(Candidate(engine="compile"), ort_config=for_all)["strategy"] == "auto"
    assert trainer(Candidate(engine="ort"), {"trainer": {"strategy": "ddp"}})["strategy"].keys() == {"class_path"}
    assert mine["init_args"] == {"optim": "keep", "config": {"engine": "ort"}}


def test_strategies() -> None:
    auto = trainer(Candidate(engine="auto", activation_memory_budget=0.5, host_memory="default", optim="keep"))[
        "strategy"
    ]
    assert auto == {
        "class_path": "lightning_ort.ORTStrategy",
        "init_args": {
            "config": {"engine": "auto", "activation_memory_budget": 0.5},
            "host_memory": "default",
            "optim": "keep",
        },
    }
    assert trainer(Candidate(engine="stock"))["strategy"] == "auto"
    several = trainer(Candidate(engine="ort_ddp"), devices=2)
    assert (several["strategy"]["class_path"], several["devices"]) == ("lightning_ort.ORTDDPStrategy", 2)


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
    made = configured({}, Candidate(batch_size=8), None, namespace).config
    (callback,) = made["trainer"]["callbacks"]
    assert callback["init_args"] == {"batch_size": 8}
    assert callback["class_path"].startswith("lightning_ort.")
    assert ("pytorch_lightning" in callback["class_path"]) == (namespace is PYTORCH_LIGHTNING)


def test_a_candidate_in_words() -> None:
    assert str(Candidate()) == "yours"
    assert str(Candidate(engine="ort", precision="bf16-mixed", batch_size=4, channels_last=True)) == (
        "ort bf16-mixed batch_size=4 channels_last"
    )


def test_comments_are_on_the_lines_of_their_settings() -> None:
    candidate = Candidate(engine="stock", optim="auto", batch_size=16, accumulate=2, precision="bf16-mixed", threads=1)
    made = configured(USER, candidate, BATCH)
    reasons = {name: f"because\nof {name}: #1" for name in candidate.settings}
    text = commented(made, reasons, ["Above", "all"])
    assert yaml.safe_load(text) == made.config
    lines = text.splitlines()
    assert lines[:2] == ["# Above", "# all"]
    found = {
        line.strip().partition("  # because of ")[2]: line.split(":")[0].strip() for line in lines if "  # " in line
    }
    assert found == {
        "engine: #1": "strategy",
        "precision: #1": "precision",
        "accumulate: #1": "accumulate_grad_batches",
        "optim: #1": "name",
        "threads: #1": "threads",
        "batch_size: #1": "batch_size",
    }


def commented_lines(config: Any, candidate: Candidate, **more: Any) -> dict[str, str]:
    """The setting that each line with a comment is of."""
    made = configured(config, candidate, BATCH, **more)
    text = commented(made, {name: f"because of {name}" for name in candidate.settings}, [])
    parts = (line.strip().lstrip("- ").partition("  # because of ") for line in text.splitlines())
    return {line: setting for line, _, setting in parts if setting}


def test_comments_are_beside_values_in_lists_and_arguments() -> None:
    config = {"trainer": {"plugins": ["mine.Plugin"], "callbacks": ["mine.Callback"]}}
    candidate = Candidate(
        engine="auto",
        precision="medium",
        optim="keep",
        activation_memory_budget=0.5,
        host_memory="default",
        channels_last=True,
    )
    assert commented_lines(config, candidate) == {
        "class_path: lightning_ort.ORTStrategy": "engine",
        "engine: auto": "engine",
        "level: medium": "precision",
        "optim: keep": "optim",
        "activation_memory_budget: 0.5": "activation_memory_budget",
        "host_memory: default": "host_memory",
        "channels_last: true": "channels_last",
    }
    assert commented_lines(config, Candidate(engine="ort_ddp"), devices=2) == {
        "class_path: lightning_ort.ORTDDPStrategy": "engine",
        "devices: 2": "engine",
    }
