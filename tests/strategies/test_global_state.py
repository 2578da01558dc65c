"""What a run changes in the process: only what ``docs/how_it_works.md`` lists, while it lasts and afterwards."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from global_state import changed, functions_and_classes, global_state
from lightning.pytorch import Callback
from small_modules import Small
from torch import nn

from lightning_ort import ORTStrategy

# of the page, "What changes outside of your own objects"
WITHIN_RUNS = (
    r"logger torch\b.*",  # a log filter of dynamo
    r"torch\.utils\.data\.dataloader\._DatasetKind\.create_fetcher",  # how DataLoaders fetch batches of tensors
)
# gradients that the step takes itself; what compiles leaves out, and garbage
LOOKED_AT = (r"sys\.getprofile", r"torch\._C\._len_torch_dispatch_stack")  # as where a step is recorded
IN_STEPS = (r"torch\.autograd\._engine_run_backward", r"sys\._getframe", r"torch\.utils\._traceback\..*", "gc")
AT_ANY_TIME = (r"warnings", r"logger (lightning_ort|onnx|torch)\b.*")  # its one filter, and loggers that are loaded
OF_DYNAMO = (  # what dynamo sets up when it is loaded, and when something is compiled, as `torch.compile` does
    r"torch\.(jit|optim|compiler)\..*",
    r"torch\.fx\._symbolic_trace\.Tracer\.trace",
    r"torch\.nn\.modules\.module\.Module\.__(init|setstate)__",
    r"torch\.(_dynamo|_functorch|_inductor|_subclasses|fx\.graph)\..*",
    r"linecache|threads",
)
COUNTERS = (r"torch\.utils\.hooks\.RemovableHandle\.next_id",)


class Looks(Small):
    """Notes the state of the process in its steps and hooks."""

    def __init__(self, look: Callable[[str], None]) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.1))
        self._look = torch.compiler.disable(look)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._look(f"training_step {self.global_step}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._look(f"validation_step {batch_idx}")
        super().validation_step(batch, batch_idx)


class Hooks(Callback):
    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        self._look(f"on_before_zero_grad {trainer.global_step}")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._look(f"on_train_batch_end {trainer.global_step}")

    def on_train_end(self, *args: Any) -> None:
        self._look("on_train_end")


def states_of_a_run(strategy: Any, make_trainer: Any) -> dict[str, dict[str, Any]]:
    """Return the state of the process before, during and after a fit and a test, by moment."""
    seen: dict[str, dict[str, Any]] = {}

    def look(moment: str) -> None:
        seen[moment] = global_state()
        functions[moment] = functions_and_classes() if moment in WHOLE else {}

    functions: dict[str, dict[str, Any]] = {}
    module = Looks(look)  # which seeds
    look("before")
    trainer = make_trainer(strategy=strategy, max_epochs=2, limit_train_batches=4, callbacks=Hooks(look))
    trainer.fit(module)
    trainer.test(module, verbose=False)
    look("after")
    for moment in WHOLE[1:]:
        of_functions = changed(functions["before"], functions[moment])
        seen[moment] |= {name: pair for name, pair in of_functions.items() if name in functions["before"]}
    return seen


WHOLE = ("before", "training_step 1", "training_step 7", "after")
RANDOM = ("torch.get_rng_state", "random", "NumPy's random")
CONFIGS: dict[str, Any] = {
    "unchanged": {"engine": "torch"},
    "when it pays": {},
    "at once": {"start": "now"},
    "always": {"start": "now", "placement": "always"},
    "modules": {"start": "now", "placement": "always", "debug": {"capture": "modules"}},
    "Lightning's loop": {"debug": {"trainer_loop": "stock"}},
}


@pytest.fixture(scope="module")
def of_stock() -> dict[str, dict[str, Any]]:
    """What :func:`states_of_a_run` returns of Lightning's strategy, from the first test on."""
    return {}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_only_what_the_page_lists(config: dict[str, Any], make_trainer: Any, of_stock: dict[str, Any]) -> None:
    if not of_stock:
        make_trainer(fast_dev_run=True).fit(Small())  # loads what Lightning and NumPy load late
        of_stock |= states_of_a_run("auto", make_trainer)
    strategy = ORTStrategy(config=config)
    ours = states_of_a_run(strategy, make_trainer)
    assert ours.keys() == of_stock.keys()
    assert bool(strategy.report.graphs) == ("start" in config)
    found = {}
    for moment, now in ours.items():
        listed = [*AT_ANY_TIME, *COUNTERS, *(OF_DYNAMO if "start" in config else ())]
        listed += WITHIN_RUNS if moment != "after" else ()
        listed += IN_STEPS if "_step " in moment else ()
        listed += LOOKED_AT if moment == "training_step 0" and "start" in config else ()
        by_stock = changed(of_stock["before"], of_stock[moment])
        for name, pair in changed(ours["before"], now).items():
            is_new = name.startswith("logger") and name not in ours["before"]
            if name not in by_stock and not is_new and not re.fullmatch("|".join(listed), name):
                found[f"{moment}: {name}"] = pair
        for name in RANDOM:
            assert now[name] == of_stock[moment][name], f"{name} at {moment}"
    assert not found, [*found]


class Spread(Small):
    """Has a distribution whose mean is no number in its sixth step."""

    def loss(self, batch: Any) -> Any:
        mean = self(batch[0]) * (float("nan") if self.global_step == 5 else 1.0)
        return -torch.distributions.Normal(mean, 1.0).log_prob(torch.zeros(8, 3)).mean()


@pytest.mark.parametrize("config", [{"start": "now"}, {"start": "now", "placement": "always"}])
def test_distributions_look_at_their_arguments(
    config: dict[str, Any], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a test that calls `torch.compile` itself turns them off for the process
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    strategy = ORTStrategy(config=config)
    for each in (strategy, "auto"):
        trainer = make_trainer(strategy=each, max_epochs=2, limit_val_batches=0)
        with pytest.raises(ValueError, match="Expected parameter loc"):
            trainer.fit(Spread())
        assert trainer.global_step == 5
    assert strategy.report.graphs
