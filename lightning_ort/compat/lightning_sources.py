"""What the functions of Lightning look like that :mod:`lightning_ort.strategies.lean` does without (2.5, 2.6).

A function is known by its source without comments and empty lines. ``KNOWN`` has its digests in all releases that were
read; :mod:`tests.compat.lightning_releases` makes it from their wheels.
"""

import functools
import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterator
from typing import Any

from lightning_ort._imports import LightningNamespace

# module: class ("" for the module itself): functions and properties
FUNCTIONS: dict[str, dict[str, str]] = {
    "loops.training_epoch_loop": {
        "_TrainingEpochLoop": "done run advance on_run_start on_advance_end _is_training_done"
        " _num_ready_batches_reached _accumulated_batches_reached _should_accumulate update_lr_schedulers"
        " _update_learning_rates _should_check_val_fx _save_loggers_on_train_batch_end _build_kwargs global_step"
    },
    "loops.optimization.closure": {"AbstractClosure": "__init__ consume_result"},
    "loops.optimization.automatic": {
        "Closure": "__init__ closure __call__",
        "_AutomaticOptimization": "run _make_closure _make_step_fn _make_zero_grad_fn _make_backward_fn _optimizer_step"
        " _on_before_zero_grad _optimizer_zero_grad _training_step",
    },
    "loops.optimization.manual": {"_ManualOptimization": "run advance on_run_start on_run_end"},
    "loops.evaluation_loop": {
        "_EvaluationLoop": "on_run_start _evaluation_step _build_kwargs _build_step_args_from_hook_kwargs"
        " _store_dataloader_outputs _is_sequential num_dataloaders"
    },
    "loops.prediction_loop": {
        "_PredictionLoop": "on_run_start _predict_step _build_kwargs _build_step_args_from_hook_kwargs num_dataloaders"
    },
    "loops.fetchers": {
        "_DataFetcher": "__next__ __iter__ reset",
        "_PrefetchDataFetcher": "__next__ __iter__ reset",
    },
    "loops.progress": {
        "_Progress": "increment_ready increment_started increment_processed increment_completed",
        "_BatchProgress": "increment_by",
    },
    "loops.loop": {"_Loop": "restarting"},
    "utilities.combined_loader": {
        "CombinedLoader": "__next__",
        "_MaxSizeCycle": "__next__",
        "_Sequential": "__next__ _load_current_iterator _use_next_iterator",
    },
    "trainer.call": {"": "_call_lightning_module_hook _call_callback_hooks _call_strategy_hook"},
    "trainer.trainer": {"Trainer": "_results _active_loop"},
    "trainer.connectors.data_connector": {"_DataHookSelector": "get_instance"},
    "trainer.connectors.logger_connector.logger_connector": {
        "_LoggerConnector": "should_update_logs log_metrics update_eval_step_metrics update_eval_epoch_metrics"
        " update_train_step_metrics update_train_epoch_metrics on_batch_start epoch_end_reached on_epoch_end"
        " on_batch_end should_reset_tensors reset_metrics reset_results metrics callback_metrics logged_metrics"
        " progress_bar_metrics teardown"
    },
    "trainer.connectors.logger_connector.result": {
        "_ResultMetric": "update forward reset _wrap_compute",
        "_ResultCollection": "_extract_batch_size log update_metrics _get_cache valid_items metrics reset",
        "_Metadata": "sync",
    },
    "core.module": {
        "LightningModule": "log log_dict _call_batch_hook _on_before_batch_transfer _apply_batch_transfer_handler"
        " optimizer_step optimizer_zero_grad configure_gradient_clipping clip_gradients backward"
    },
    "core.hooks": {
        "ModelHooks": "on_train_batch_start on_train_batch_end on_validation_batch_start on_validation_batch_end"
        " on_test_batch_start on_test_batch_end on_predict_batch_start on_predict_batch_end on_before_zero_grad"
        " on_before_backward on_after_backward on_before_optimizer_step",
        "DataHooks": "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
    },
    "callbacks.callback": {
        "Callback": "on_train_batch_start on_train_batch_end on_validation_batch_start on_validation_batch_end"
        " on_test_batch_start on_test_batch_end on_predict_batch_start on_predict_batch_end on_before_zero_grad"
        " on_before_backward on_after_backward on_before_optimizer_step"
    },
    "plugins.precision.precision": {"Precision": "pre_backward post_backward _after_closure _clip_gradients"},
    "strategies.strategy": {"Strategy": "batch_to_device on_train_batch_start post_training_step"},
    "callbacks.progress.tqdm_progress": {
        "TQDMProgressBar": "on_train_batch_end on_validation_batch_end on_test_batch_end on_predict_batch_end"
        " _should_update",
    },
    "callbacks.progress.rich_progress": {
        "RichProgressBar": "on_train_batch_end on_validation_batch_end on_test_batch_end on_predict_batch_end"
    },
}

_DECORATED = (  # by Lightning with decorators of torch's
    "loops.optimization.automatic.Closure.closure",
    "trainer.connectors.logger_connector.result._ResultCollection.log",
    "trainer.connectors.logger_connector.result._ResultCollection.update_metrics",
)


def functions(namespace: LightningNamespace) -> Iterator[tuple[str, Any]]:
    """Find them in what is imported; ``None`` for one that does not exist."""
    for module, classes in FUNCTIONS.items():
        found = namespace.submodule(module)
        for owner, names in classes.items():
            for name in names.split():
                value = vars(getattr(found, owner, None) or found).get(name)
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                yield ".".join(part for part in (module, owner, name) if part), value


def digest(lines: list[str], first: int, package: str) -> str:
    """Return a digest of the function that begins in a line; the same in both namespaces, whatever its comments are.

    Args:
        lines: Those of the file.
        first: Counted from 1: the first decorator, or the ``def``.
        package: The import package that the file is in.

    """
    depth, kept, in_body = len(lines[first - 1]) - len(lines[first - 1].lstrip()), [], False
    for line in lines[first - 1 :]:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        deeper = len(line) - len(line.lstrip()) > depth
        if in_body and not deeper and not text.startswith(")"):
            break
        in_body = in_body or (not deeper and text.startswith("def "))
        kept.append(text)
    return hashlib.sha256("\n".join(kept).replace(package, "lightning.pytorch").encode()).hexdigest()[:12]


def unknown_function(namespace: LightningNamespace) -> str:
    """Return the name of the first function that is not as in a known release, or nothing."""
    return _unknown(namespace, tuple(functions(namespace)))


@functools.lru_cache(4)
def _unknown(namespace: LightningNamespace, found: tuple[tuple[str, Callable[..., Any]], ...]) -> str:
    for name, function in found:
        try:
            code = (inspect.unwrap(function) if name in _DECORATED else function).__code__
            found_digest = digest(linecache.getlines(code.co_filename), code.co_firstlineno, namespace.package)
        except (AttributeError, IndexError):
            return name
        if found_digest not in KNOWN[name]:
            return name
    return ""


_TABLE = """
loops.training_epoch_loop._TrainingEpochLoop.global_step 3cac9d4802c6
loops.training_epoch_loop._TrainingEpochLoop._is_training_done 6fc521c96d7a
loops.training_epoch_loop._TrainingEpochLoop.done 44e889fa828c
loops.training_epoch_loop._TrainingEpochLoop.run 9ff091c84cd7
loops.training_epoch_loop._TrainingEpochLoop.on_run_start 191c4391cfad 9ea75a6f963a
loops.training_epoch_loop._TrainingEpochLoop.advance 419c08cd10df a89952bfe388 b77340a10ed2
loops.training_epoch_loop._TrainingEpochLoop.on_advance_end 8edd3ae96599
loops.training_epoch_loop._TrainingEpochLoop._accumulated_batches_reached b84f6e62bcbd
loops.training_epoch_loop._TrainingEpochLoop._num_ready_batches_reached 079d2d506e0c
loops.training_epoch_loop._TrainingEpochLoop._should_accumulate 42ce6d2cb72b
loops.training_epoch_loop._TrainingEpochLoop.update_lr_schedulers 22b3ea647a97
loops.training_epoch_loop._TrainingEpochLoop._update_learning_rates 43eb2aa3b36b
loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx 524906344c23 6f9d313fc2a9
loops.training_epoch_loop._TrainingEpochLoop._save_loggers_on_train_batch_end 703d8cef542e
loops.training_epoch_loop._TrainingEpochLoop._build_kwargs c124a40f361f
loops.optimization.closure.AbstractClosure.__init__ 5e34974d5cfd
loops.optimization.closure.AbstractClosure.consume_result 024e3eb1fb07
loops.optimization.automatic.Closure.__init__ ce39b1ae9c8f
loops.optimization.automatic.Closure.closure b0f3e4cf86a9
loops.optimization.automatic.Closure.__call__ 0c99af873b3f
loops.optimization.automatic._AutomaticOptimization.run 2f8e8f756d6b
loops.optimization.automatic._AutomaticOptimization._make_closure e7d8a1f3974f
loops.optimization.automatic._AutomaticOptimization._make_step_fn f9aa4820ee92
loops.optimization.automatic._AutomaticOptimization._make_zero_grad_fn 7d81213d07cf
loops.optimization.automatic._AutomaticOptimization._make_backward_fn a4549aebf103
loops.optimization.automatic._AutomaticOptimization._optimizer_step 012d5c18bfec
loops.optimization.automatic._AutomaticOptimization._on_before_zero_grad cbbcf9909e70
loops.optimization.automatic._AutomaticOptimization._optimizer_zero_grad f778c9102552
loops.optimization.automatic._AutomaticOptimization._training_step d2394d36b08c
loops.optimization.manual._ManualOptimization.run f8904bd88575
loops.optimization.manual._ManualOptimization.on_run_start 731903ddfa0d
loops.optimization.manual._ManualOptimization.advance f4cc59b495d3
loops.optimization.manual._ManualOptimization.on_run_end 53c6ffbd9f1c
loops.evaluation_loop._EvaluationLoop.num_dataloaders 4779709d94a1
loops.evaluation_loop._EvaluationLoop._is_sequential 3d6cacaeba62
loops.evaluation_loop._EvaluationLoop.on_run_start f22589252609
loops.evaluation_loop._EvaluationLoop._store_dataloader_outputs 6b5ea99630e4
loops.evaluation_loop._EvaluationLoop._evaluation_step a2f5504c0b30
loops.evaluation_loop._EvaluationLoop._build_kwargs e032b7157bda
loops.evaluation_loop._EvaluationLoop._build_step_args_from_hook_kwargs b5aa70cc7789
loops.prediction_loop._PredictionLoop.num_dataloaders 4779709d94a1
loops.prediction_loop._PredictionLoop.on_run_start b55102a84883
loops.prediction_loop._PredictionLoop._predict_step 78401d8e4f16
loops.prediction_loop._PredictionLoop._build_kwargs 3d14a3500d34
loops.prediction_loop._PredictionLoop._build_step_args_from_hook_kwargs a79272f71ad3
loops.fetchers._DataFetcher.__iter__ 68bff003adbe
loops.fetchers._DataFetcher.__next__ e40395a802bc
loops.fetchers._DataFetcher.reset 830b15b2a835
loops.fetchers._PrefetchDataFetcher.__iter__ 544f6aeb1c5b
loops.fetchers._PrefetchDataFetcher.__next__ b197e030618b
loops.fetchers._PrefetchDataFetcher.reset 580e681cbd6b
loops.progress._Progress.increment_ready 37bc96c43ebb
loops.progress._Progress.increment_started c68d0430fb33
loops.progress._Progress.increment_processed e85e345d77ec
loops.progress._Progress.increment_completed a83c4c72ef16
loops.progress._BatchProgress.increment_by ffa5b4f4616b
loops.loop._Loop.restarting 685836fa2fcb
utilities.combined_loader.CombinedLoader.__next__ f3da7576dafb
utilities.combined_loader._MaxSizeCycle.__next__ 2da00fc237e7
utilities.combined_loader._Sequential.__next__ 03f30d4c23fd
utilities.combined_loader._Sequential._load_current_iterator b260cd695e7f
utilities.combined_loader._Sequential._use_next_iterator ebd714997371
trainer.call._call_lightning_module_hook 160281faa0f9
trainer.call._call_callback_hooks db53c7410f78
trainer.call._call_strategy_hook ecbeca072455
trainer.trainer.Trainer._active_loop 9d145025f1e5
trainer.trainer.Trainer._results ac9b8c0b4784
trainer.connectors.data_connector._DataHookSelector.get_instance 60888b1ec21a
trainer.connectors.logger_connector.logger_connector._LoggerConnector.should_update_logs b847a6fd9d0d
trainer.connectors.logger_connector.logger_connector._LoggerConnector.log_metrics 4766809d9815 5d49cd6ce247 782b65541b37
trainer.connectors.logger_connector.logger_connector._LoggerConnector.update_eval_step_metrics c9a6aea0b920
trainer.connectors.logger_connector.logger_connector._LoggerConnector.update_eval_epoch_metrics cddb2873fc75
trainer.connectors.logger_connector.logger_connector._LoggerConnector.update_train_step_metrics 60aefb4bedf9
trainer.connectors.logger_connector.logger_connector._LoggerConnector.update_train_epoch_metrics 1cf73252d8f0
trainer.connectors.logger_connector.logger_connector._LoggerConnector.on_batch_start b86eeef7d7e3
trainer.connectors.logger_connector.logger_connector._LoggerConnector.epoch_end_reached 234a054e5421
trainer.connectors.logger_connector.logger_connector._LoggerConnector.on_epoch_end 2f8de9aa3568
trainer.connectors.logger_connector.logger_connector._LoggerConnector.on_batch_end 910e37278afb
trainer.connectors.logger_connector.logger_connector._LoggerConnector.should_reset_tensors 505b3eaf1990
trainer.connectors.logger_connector.logger_connector._LoggerConnector.reset_metrics a0d3779dc407
trainer.connectors.logger_connector.logger_connector._LoggerConnector.reset_results ee8e971689ed
trainer.connectors.logger_connector.logger_connector._LoggerConnector.metrics 5eab748c7ce5
trainer.connectors.logger_connector.logger_connector._LoggerConnector.callback_metrics 97e9b07d7aa9
trainer.connectors.logger_connector.logger_connector._LoggerConnector.logged_metrics 38a92d2cb730
trainer.connectors.logger_connector.logger_connector._LoggerConnector.progress_bar_metrics bdbad370efb8
trainer.connectors.logger_connector.logger_connector._LoggerConnector.teardown b139d79df7b9
trainer.connectors.logger_connector.result._ResultMetric.update 2770475813ee
trainer.connectors.logger_connector.result._ResultMetric.reset cd591443069b
trainer.connectors.logger_connector.result._ResultMetric.forward c8ddf57aea2f
trainer.connectors.logger_connector.result._ResultMetric._wrap_compute 2a3ce71f9c80
trainer.connectors.logger_connector.result._ResultCollection._extract_batch_size d04d943823cf
trainer.connectors.logger_connector.result._ResultCollection.log d5d04fbe96e0
trainer.connectors.logger_connector.result._ResultCollection.update_metrics 958c9ee448f9
trainer.connectors.logger_connector.result._ResultCollection._get_cache eaebee29486a
trainer.connectors.logger_connector.result._ResultCollection.valid_items 510dfc10b180
trainer.connectors.logger_connector.result._ResultCollection.metrics 6a7f15d68406
trainer.connectors.logger_connector.result._ResultCollection.reset 8429e6fc269d
trainer.connectors.logger_connector.result._Metadata.sync 39f68552a8d3
core.module.LightningModule._call_batch_hook a7e0b7357cb2
core.module.LightningModule._on_before_batch_transfer c04d105756fb
core.module.LightningModule._apply_batch_transfer_handler 168f5bf65759
core.module.LightningModule.log 6c5bf8c7d4fd c36b7eb7d313
core.module.LightningModule.log_dict 86cbf6a1fa47 d79cc52318ca
core.module.LightningModule.backward de9d2b8c03cd
core.module.LightningModule.clip_gradients 3f510c2a650e
core.module.LightningModule.configure_gradient_clipping 2c0747c308ba
core.module.LightningModule.optimizer_step 7bedde1c0feb
core.module.LightningModule.optimizer_zero_grad 99d54234f54c
core.hooks.ModelHooks.on_train_batch_start 1d4dc6afbd61 d01ba47e0e45
core.hooks.ModelHooks.on_train_batch_end 72090624dd4b
core.hooks.ModelHooks.on_validation_batch_start 828fe666f802
core.hooks.ModelHooks.on_validation_batch_end 5ed426632e36
core.hooks.ModelHooks.on_test_batch_start 0bb528b3a6eb
core.hooks.ModelHooks.on_test_batch_end aa3e08502694
core.hooks.ModelHooks.on_predict_batch_start c66c58eaf36b
core.hooks.ModelHooks.on_predict_batch_end 4e553c769b6e
core.hooks.ModelHooks.on_before_zero_grad db9927606750
core.hooks.ModelHooks.on_before_backward cf61c5820e95
core.hooks.ModelHooks.on_after_backward b1a2a7e6402b
core.hooks.ModelHooks.on_before_optimizer_step 9ff37f5a3e50
core.hooks.DataHooks.transfer_batch_to_device c4664e138ffb
core.hooks.DataHooks.on_before_batch_transfer f3f3f0cce6fe
core.hooks.DataHooks.on_after_batch_transfer 043ecb2d69f6
callbacks.callback.Callback.on_train_batch_start b8612f4c4fb1
callbacks.callback.Callback.on_train_batch_end 3ac7e0509735
callbacks.callback.Callback.on_validation_batch_start 06d186cd7c88
callbacks.callback.Callback.on_validation_batch_end 63093bfd344c
callbacks.callback.Callback.on_test_batch_start b86d5df1ed57
callbacks.callback.Callback.on_test_batch_end 5ca355aef3de
callbacks.callback.Callback.on_predict_batch_start 27d95bed45dc
callbacks.callback.Callback.on_predict_batch_end 5503b8cf0fba
callbacks.callback.Callback.on_before_backward fe5ff8b67c42
callbacks.callback.Callback.on_after_backward a4e6b9c5d332
callbacks.callback.Callback.on_before_optimizer_step f6c54686e46f
callbacks.callback.Callback.on_before_zero_grad 1755a8be4711
plugins.precision.precision.Precision.pre_backward 9b167d0b9b21
plugins.precision.precision.Precision.post_backward b7c3b7ff4628
plugins.precision.precision.Precision._after_closure 9cb08fca04c0
plugins.precision.precision.Precision._clip_gradients 6cc3d4a24f22
strategies.strategy.Strategy.batch_to_device c726a3515f1b
strategies.strategy.Strategy.post_training_step 07708d2bfe40
strategies.strategy.Strategy.on_train_batch_start b025976d52b6
callbacks.progress.tqdm_progress.TQDMProgressBar.on_train_batch_end d3ba700e6b21 fe86c4a9d94c
callbacks.progress.tqdm_progress.TQDMProgressBar.on_validation_batch_end 72715f52f4eb 819442ad07f2
callbacks.progress.tqdm_progress.TQDMProgressBar.on_test_batch_end 406142654a21 85971d7ac4a6
callbacks.progress.tqdm_progress.TQDMProgressBar.on_predict_batch_end 4b48ff830a99 8acfffb1963e
callbacks.progress.tqdm_progress.TQDMProgressBar._should_update a7abcb3c7d7f
callbacks.progress.rich_progress.RichProgressBar.on_train_batch_end a09a7ade52e6 ac8b882305de d6cd44f62724
callbacks.progress.rich_progress.RichProgressBar.on_validation_batch_end 29a7e5e5a7d3 943450c6a4d4 d038d01a48d8
callbacks.progress.rich_progress.RichProgressBar.on_test_batch_end 2cd9a375f802 747cf005e5a4 8d301f1fda63
callbacks.progress.rich_progress.RichProgressBar.on_predict_batch_end 028d89584ae6 2ac589a219d7 7312eb20c6be
"""
KNOWN = {name: frozenset(digests) for name, *digests in map(str.split, _TABLE.strip().splitlines())}
