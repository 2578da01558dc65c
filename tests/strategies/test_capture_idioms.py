"""What people write in a training_step: each idiom gives under ``ort`` what it gives under the stock strategy."""

import dataclasses
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from small_modules import Appends, Small, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Accuracy, MeanMetric, MetricCollection

from lightning_ort import ORTStrategy
from lightning_ort.compiler.reason import ReasonType

IDIOMS: dict[str, tuple[type[Small], str]] = {}


def idiom(mode: str = "step") -> Callable[[type[Small]], type[Small]]:
    """Enter a module in the table.

    Args:
        mode: How its training_step ends up being captured: "step", "modules" or "either".
    """

    def enter(module: type[Small]) -> type[Small]:
        IDIOMS[module.__name__] = (module, mode)
        return module

    return enter


@idiom()
class Plain(Small):
    pass


@idiom()
class LogsMany(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.mse_loss(logits, F.one_hot(y, 3).float())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(x))
        self.log_dict({"max": logits.max(), "half": loss / 2}, on_epoch=True, reduce_fx="max")
        self.log("number", 3)
        self.log("number", 4, prog_bar=False, logger=True)  # in effect with the same arguments
        self.log("summed", logits.sum(), on_epoch=True, reduce_fx=torch.sum)
        return loss


@idiom()
class ChangesLossAfterLogging(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = loss.detach()
        self.log("loss", value, on_epoch=True)
        value.mul_(100)
        self.log("hundredfold", value, on_epoch=True)
        if batch_idx % 2:
            batch[:] = [one[:2] for one in batch]  # the values' weights are those of the whole batch
        return self.loss(batch)


@idiom()
class ReadsTrainer(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("step", float(self.global_step), on_epoch=True)
        self.log("epoch", float(self.current_epoch), on_epoch=True)
        if self.trainer.is_global_zero and self.trainer.training and not self.trainer.sanity_checking:
            loss = loss * (1 + 0.01 * self.global_step) * (self.current_epoch + 1) / self.trainer.max_epochs
        return loss


@idiom()
class UsesBatchIdx(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            self.log("even", loss, on_epoch=True)
        if batch_idx % 3 == 0:
            loss = loss * 2
        return loss


@idiom()
class ReturnsDict(Small):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x)
        return {"loss": F.mse_loss(logits, F.one_hot(y, 3).float()), "logits": logits.detach(), "text": "kept", "x": x}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert outputs["text"] == "kept"
        assert outputs["x"] is batch[0]
        assert not outputs["logits"].requires_grad
        self.losses.append(outputs["logits"].sum().item())


@idiom()
class SkipsSomeBatches(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 2 else self.loss(batch)


class DictBatches(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "y": index % 3, "id": "item" * (index // 8) + str(index)}


@idiom()
class DictBatchWithStrings(Small):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss((batch["x"], batch["y"])), "id": batch["id"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert outputs["id"] == batch["id"]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(DictBatches(), batch_size=8)


@idiom("either")
class LengthOfStrings(DictBatchWithStrings):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss((batch["x"], batch["y"])) * (1 + len(batch["id"][0]) / 100)
        return {"loss": loss, "id": batch["id"]}


@idiom("modules")
class AppendsToList(Appends):
    def on_train_end(self) -> None:
        self.losses += [kept.item() for kept in self.kept]


@idiom("modules")
class ChangesFloatAttribute(Small):
    def __init__(self) -> None:
        super().__init__()
        self.average = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.log("average", self.average, on_epoch=True)
        return loss / self.average


@idiom()
class CountsSteps(Small):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(me, batch: Any, batch_idx: int) -> Tensor:  # changed after it has logged, by any name
        me.seen += len(batch[0])
        me.log("seen", me.seen.float(), on_epoch=True)
        me.count += 1
        me.log("count", me.count, on_epoch=True)
        return me.loss(batch) / me.count


@idiom()
class FunctionalMetric(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torchmetrics.functional import mean_squared_error

        x, y = batch
        logits = self(x)
        self.log("mse", mean_squared_error(logits.detach(), F.one_hot(y, 3).float()), on_epoch=True)
        return F.mse_loss(logits, F.one_hot(y, 3).float())


@idiom()
class ModuleMetric(Small):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=3)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.mse_loss(logits, F.one_hot(y, 3).float())
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return loss


@idiom()
class MetricLoggedTwice(Small):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("first", self.accuracy, on_step=True, on_epoch=False)
        self.accuracy(logits, (y + 1) % 3)
        self.log("second", self.accuracy, on_step=True, on_epoch=False)
        self.log("value", self.accuracy.compute(), on_step=True)
        return F.mse_loss(logits, F.one_hot(y, 3).float())


@idiom()
class Collection(Small):
    def __init__(self) -> None:
        super().__init__()
        metrics = {"micro": Accuracy("multiclass", num_classes=3, average="micro"), "mean": MeanMetric()}
        self.metrics = MetricCollection({"micro": metrics["micro"]}, prefix="train_")
        self.extra = nn.ModuleDict({"mean": metrics["mean"]})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.metrics(logits, y)
        self.log_dict(self.metrics, on_step=True, on_epoch=True)
        self.log_dict({"mean": self.extra["mean"](logits.mean()), "plain": logits.max()}, on_epoch=True)
        return F.mse_loss(logits, F.one_hot(y, 3).float())


@idiom()
class NestedMetric(Small):
    def __init__(self) -> None:
        super().__init__()
        self.nested = {"a": {"b": [MeanMetric()]}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.nested["a"]["b"][0].update(loss)
        self.log("mean", self.nested["a"]["b"][0].compute())
        return loss


@idiom()
class OverridesLog(Small):
    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        super().log(f"my/{name}", value, **kwargs)


@idiom()
class LogsInHelper(Small):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("inside", loss, on_epoch=True)
        self.shrink(batch)
        return loss

    @torch.compiler.disable
    def shrink(self, batch: Any) -> None:
        batch[:] = [one[: 1 + self.global_step % 3] for one in batch]


@idiom()
class Prints(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.print("batch", batch_idx)
        return loss * 2


@idiom("either")
class UsesLogger(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logger is not None:
            self.logger.log_metrics({"direct": loss.item()}, step=self.global_step)
            self.logger.experiment.log_metrics({"raw": 1.0}, step=self.global_step)
        return loss


@idiom()
class CustomForwardHooks(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(lambda module, args, output: output * 1.5)


@idiom()
class GradientsInStep(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = self(x).softmax(-1)
        return F.mse_loss(self(x), target + F.one_hot(y, 3))


@idiom()
class DrawsOutsideTorch(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.from_numpy(np.random.rand(*x.shape)).float() + random.random()
        return self.loss((F.dropout(x + noise, 0.1), y))


@idiom()
class PacksSequences(Small):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 4, bidirectional=True, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 4, 2), y + 1, batch_first=True, enforce_sorted=False)
        _, state = self.rnn(packed)
        return self.loss((torch.cat([*state], -1) * x, y))


@idiom()
class PartialLastBatch(Small):
    def train_dataloader(self) -> DataLoader:
        return loader(30)


@idiom()
class Inherited(Small):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs) * 2


@idiom()
class Keywords(Small):
    def training_step(self, batch: Any, *rest: int, **kwargs: Any) -> Tensor:
        return self.loss(batch) * (1 + sum(rest) + len(kwargs))


@idiom("either")
class DataloaderIterator(Small):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss


@idiom()
class LogsItems(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        value = loss.item()
        self.log("value", value, on_epoch=True)
        self.log_dict({"rounded": round(value, 3), "float": float(loss * 2), "more": value * 2 + 1}, on_epoch=True)
        self.log("array", loss.detach().cpu().numpy().item())
        return loss


@idiom()
class SlicesByValue(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(batch) + x[: max(1, int(y.sum()) % 4)].mean()


@idiom()
class MetricsInContainers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.by_stage = {"train": Accuracy("multiclass", num_classes=3)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("accuracy", self.by_stage["train"](self(x), y), on_epoch=True)
        return self.loss(batch)


@idiom()
class Hyperparameters(Small):
    def __init__(self, alpha: float = 0.5, more: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters({"alpha": alpha, "more": {"beta": 2}})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.hparams.alpha * self.hparams["more"]["beta"] * self.hparams.get("none", 1)


@idiom()
class ReadsDevice(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("lr", lr)
        return loss + torch.zeros(3, device=self.device, dtype=self.dtype).sum() + self.trainer.world_size


@idiom()
class WarmsUp(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1 + min(1.0, self.current_epoch / 10))


@idiom()
class DictOrTuple(DictBatchWithStrings):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        pair = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return {"loss": self.loss(pair), "id": batch["id"]}


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor
    scale: int = 3

    def to(self, device: Any, **kwargs: Any) -> "Pair":
        return Pair(self.x.to(device), self.y.to(device), self.scale)


@idiom()
class DataclassBatch(Small):
    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        return self.loss((batch.x, batch.y)) * batch.scale

    def train_dataloader(self) -> DataLoader:
        return DataLoader([Pair(*batch) for batch in loader()], batch_size=None)


@idiom()
class Distributions(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        normal = torch.distributions.Normal(out, F.softplus(out) + 0.1)
        prior = torch.distributions.Normal(torch.zeros_like(out), torch.ones_like(out))
        choice = torch.distributions.Categorical(logits=out)
        loss = -normal.log_prob(normal.rsample()).mean() - choice.log_prob(y).mean()
        return loss + torch.distributions.kl_divergence(normal, prior).mean()


@idiom()
class CopiesByIndex(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        copy = torch.zeros_like(out).index_copy(0, torch.arange(len(out)), out)
        return copy.square().mean()


@idiom()
class LogsToLogger(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logger is not None:
            self.logger.log_metrics({"direct": loss.item()}, step=self.global_step)
        return loss


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@idiom()
class ManualOptimization(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss, on_epoch=True)
        return loss


@idiom()
class ManualWithScheduler(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        self.log("lr", optimizer.param_groups[0]["lr"], on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@idiom()
class ManualRawOptimizer(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


@idiom()
class ManualAccumulation(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


@idiom("modules")
class ManualClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses.append(loss.item())
            return loss

        optimizer.step(closure=closure)


class TwoOptimizers(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), lr=0.01), torch.optim.SGD(self.second.parameters(), lr=0.1)]


@idiom()
class Toggled(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = self.optimizers()
        x, y = batch
        target = F.one_hot(y, 3).float()
        self.toggle_optimizer(first)
        loss = F.mse_loss(self.second(self(x)), target)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = F.l1_loss(self.second(self(x)), target)
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.untoggle_optimizer(second)
        self.log_dict({"loss": loss, "other": other}, on_epoch=True)
        return other


@idiom("modules")
class ToggledInContext(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        target = F.one_hot(y, 3).float()
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                loss = F.mse_loss(self.second(self(x)), target)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
        return loss


@idiom("either")
class Alternates(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        loss = F.mse_loss(self.second(self(batch[0])), F.one_hot(batch[1], 3).float())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss


class ReadsWhatIsLogged(Callback):
    """Reads logged values in a hook that a step with manual optimization calls."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.log("read", trainer.callback_metrics["now"] * 2, on_epoch=True)


@idiom("either")
class HooksLogAndRead(ManualOptimization):
    def configure_callbacks(self) -> Any:
        return ReadsWhatIsLogged()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("now", loss)
        self.log("norm", loss * 3, on_step=False, on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class FromTrainer:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def read(self) -> Tensor:
        return self.trainer.logged_metrics["now"]


@idiom()
class ReadsLoggedValues(Small):
    """By a property, and by an object of its own."""

    @property
    def weight(self) -> Tensor:
        return 1 + getattr(self.trainer, "callback_" + "metrics")["now"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("now", loss)
        self.log_dict(UserDict(later=loss * 2))
        return loss * self.weight * FromTrainer(self.trainer).read()


@idiom("either")
class ArraysInPlace(Small):
    def __init__(self) -> None:
        super().__init__()
        self.prior, self.count = np.full(3, 1 / 3), np.array(0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.prior *= 0.9
        self.prior += 0.1 * self(batch[0]).softmax(-1).detach().numpy().mean(0)
        self.count += 1
        return self.loss(batch) * float(self.prior[0]) * float(self.count)


@idiom("either")
class CountsByText(Small):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"class 0": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for label in batch[1].tolist():
            self.counts[f"class {label}"] = self.counts.get(f"class {label}", 0) + 1
        return self.loss(batch) * self.counts["class 0"]


@idiom("either")
class ListInTuple(Small):
    def __init__(self) -> None:
        super().__init__()
        self.history = ([1], "training")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.history[0].append(batch_idx)
        return self.loss(batch) * sum(self.history[0])


class OneOfAKind(type):
    def __call__(cls, *args: Any) -> Any:
        if "one" not in vars(cls):
            cls.one = super().__call__(*args)
        return cls.one


@idiom()
class Singleton(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        counter = self.counter()
        counter.steps += 1
        return self.loss(batch) * counter.steps

    def __init__(self) -> None:
        super().__init__()
        self.counter = OneOfAKind("Counter", (), {"steps": 0})


@idiom("either")
class EvaluatesText(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = F.mse_loss(self(x), F.one_hot(y, 3).float())  # noqa: F841
        second = F.l1_loss(self(x), F.one_hot(y, 3).float())  # noqa: F841
        print(end="")
        return eval("first + 0.1 * second")


@idiom()
class DropsNothing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.none, self.later = nn.Dropout(0.0), nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone()
        same = self.none(x)
        same += 1
        same = F.dropout(x, 0.5, False)
        same *= 2
        return self.loss((self.later(x), batch[1]))


def fit(module: Small, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> Any:
    trainer = make_trainer(strategy=strategy, max_epochs=2, num_sanity_val_steps=0, limit_val_batches=0, **kwargs)
    trainer.fit(module)
    return trainer


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


# those that compile many times
SLOW = ("Alternates", "ChangesFloatAttribute", "ManualOptimization", "Toggled", "ToggledInContext", "UsesLogger")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in IDIOMS]
)
def test_idiom(name: str, make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture, tmp_path: Any) -> None:
    make, mode = IDIOMS[name]
    printed, trainers, modules = [], [], []
    for strategy in ("auto", ORTStrategy(config={"placement": "always"})):
        logger = CSVLogger(tmp_path, name=str(len(printed)))
        torch._dynamo.reset()
        modules.append(make())
        trainers.append(fit(modules[-1], strategy, make_trainer, logger=logger, log_every_n_steps=1))
        printed.append(capsys.readouterr().out)
        logged = tmp_path / str(len(printed) - 1) / "version_0" / "metrics.csv"
        printed[-1] += logged.read_text().splitlines()[0] if logged.exists() else ""
    (stock, ours), (plain, captured) = trainers, modules

    assert len(captured.losses) == len(plain.losses) > 0
    assert captured.losses == pytest.approx(plain.losses, rel=1e-3)
    assert numbers(ours.callback_metrics) == pytest.approx(numbers(stock.callback_metrics), rel=1e-3, abs=1e-6)
    assert numbers(ours.logged_metrics) == pytest.approx(numbers(stock.logged_metrics), rel=1e-3, abs=1e-6)
    assert numbers(ours.progress_bar_metrics) == pytest.approx(numbers(stock.progress_bar_metrics), rel=1e-3)
    assert printed[1] == printed[0]
    assert ours.global_step == stock.global_step
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(captured.state_dict()[key], value, rtol=1e-3, atol=1e-5)
    assert vars(captured).keys() == vars(plain).keys()

    report = ours.strategy.report
    assert report.ort_runs > 0
    kinds = [note.reason.type for note in (*report.notes, *report.fallbacks)]
    if mode == "step":
        assert not {ReasonType.RECOMPILING, ReasonType.CAPTURE_FAILED, ReasonType.PYTHON_STATE}.intersection(kinds)
    elif mode == "modules":
        assert kinds.count(ReasonType.RECOMPILING) + kinds.count(ReasonType.CAPTURE_FAILED) == 1


# graph breaks and frames that compile again in six steps of two epochs
COMPILATIONS = {
    "Plain": (0, 0),
    "LogsMany": (0, 0),
    "LogsItems": (2, 1),  # NumPy runs outside of graphs, the item is another one each time
    "SlicesByValue": (0, 0),
    "Hyperparameters": (0, 0),
    "ReadsDevice": (0, 0),
    "DictOrTuple": (0, 0),
    "DataclassBatch": (0, 0),
    "Distributions": (5, 0),  # arguments are checked in Python
    "CopiesByIndex": (0, 0),
    "WarmsUp": (0, 1),  # the second epoch
    "LogsToLogger": (0, 1),  # the step as a symbol
    "MetricsInContainers": (1, 0),  # a metric runs outside of graphs
    "ModuleMetric": (2, 0),
    "MetricLoggedTwice": (3, 0),
    "Collection": (2, 0),
}


@pytest.mark.parametrize("name", COMPILATIONS)
def test_compilations_of_an_idiom(name: str, make_trainer: Callable[..., Any], tmp_path: Any) -> None:
    strategy = ORTStrategy(config={"placement": "always"})
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(strategy=strategy, max_epochs=2, max_steps=6, limit_val_batches=0, logger=logger)
    trainer.fit(IDIOMS[name][0]())
    report = strategy.report
    assert (report.graph_breaks, report.recompiles) == COMPILATIONS[name], report.to_text()
    if name == "MetricsInContainers":  # whose `forward` it was
        assert [note for note in report.notes if "`MulticlassAccuracy.forward`" in note.reason.text]
    assert report.ort_runs > 0
    assert not report.fallbacks
