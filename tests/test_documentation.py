"""What README.md, CONTRIBUTING.md and docs/*.md show is run: Python, YAML for LightningCLI, and commands of a shell.

The blocks of a page share a namespace, in their order, and a folder. A block that cannot run here says why, in a
comment right above it: ``<!-- not run: reason -->``.
"""

import re
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ort
from lightning_ort.cli import main
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.report import CompileReport

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?P<above>[^\n]*)\n(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = "\n" + page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start("code")), match["language"], dedent(match["code"]), not skipped)
        for match in FENCE.finditer(text)
        for skipped in [NOT_RUN.fullmatch(match["above"].strip())]
    ]


class MyModule(LightningModule):
    """What the pages call "your module"."""

    def __init__(self, width: int = 32, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.example_input_array = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class MyDataModule(LightningDataModule):
    """What the pages call "your data"."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.rand(16, 1, 8, 8), torch.arange(16) % 10), self.batch_size)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def namespace() -> dict[str, Any]:
    """Names that the pages use without saying where they are from, with a Trainer that takes two steps."""
    public = {name: getattr(lightning_ort, name) for name in lightning_ort.__all__}
    return public | {
        "__name__": "__main__",
        "lightning_ort": lightning_ort,
        "torch": torch,
        "Trainer": partial(Trainer, max_epochs=1, **QUIET),
        "LightningModule": LightningModule,
        "MyModule": MyModule,
        "model": MyModule(),
        "module": MyModule(),
        "datamodule": MyDataModule(),
        "images": torch.rand(4, 1, 8, 8),
        "loader": DataLoader(torch.rand(4, 1, 8, 8), batch_size=2),
    }


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a block; a Trainer that it has made and not used trains the module, on the strategy that it asks for."""
    before = names.get("trainer")
    source = "\n" * (block.line - 1) + block.code  # a traceback names the page's own line
    source = re.sub(r"max_steps=\d{3,}", "max_steps=12", source)  # so many take minutes
    exec(compile(source, block.page, "exec"), names)
    trainer = names.get("trainer")
    if trainer is before or trainer.num_devices > 1:  # several processes start this script anew
        return
    if trainer.global_step == 0:
        trainer.fit(MyModule(), MyDataModule())
    assert trainer.global_step > 0
    if hasattr(trainer.strategy, "report") and trainer.strategy.ort_config.engine != "torch":
        # it has no bfloat16 on a CPU
        assert ran(trainer.strategy.report) or trainer.precision == "bf16-true", "nothing ran on ONNX Runtime"


def ran(report: CompileReport) -> bool:
    """Return whether ONNX Runtime ran a region, if only to time it."""
    return any(region.runs or region.ms for graph in report.graphs for region in graph.regions)


def run_yaml(block: Block, folder: Path) -> None:
    """Have LightningCLI make what the file configures."""
    (folder / "config.yaml").write_text(block.code, encoding="utf-8")
    arguments = ["--config", str(folder / "config.yaml"), "--trainer.accelerator=cpu", "--trainer.logger=false"]
    LightningCLI(MyModule, MyDataModule, args=arguments, run=False, save_config_callback=None)


def train_with_variable(assignment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a variable, and train under the bare name of the strategy: the report has to say what the variable sets."""
    name, value = ASSIGNMENT.fullmatch(assignment).groups()
    monkeypatch.setenv(name, value)
    trainer = Trainer(strategy="ort", max_epochs=1, **QUIET)
    trainer.fit(MyModule(), MyDataModule())
    report = trainer.strategy.report
    told = [note.reason.text for note in report.notes if note.reason.type is ReasonType.ENVIRONMENT]
    assert [text for text in told if text.startswith(f"{name} sets ")], f"the strategy does not read it: {assignment}"
    assert ran(report), "nothing ran on ONNX Runtime"


def run_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of this package; of others look whether what they name is there."""
    words = shlex.split(line, comments=True)
    match words:
        case ["export", assignment] if ASSIGNMENT.fullmatch(assignment):
            train_with_variable(assignment, monkeypatch)
        case [assignment, "python", "train.py"] if ASSIGNMENT.fullmatch(assignment):  # a script of the reader's
            with monkeypatch.context() as for_this_line:
                train_with_variable(assignment, for_this_line)
        case ["git", "clone", address, *_]:
            assert f'Homepage = "{address}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        case [] | ["git" | ".ci/run", *_]:
            pass
        case ["lightning-ort", *_]:
            monkeypatch.setattr("sys.argv", words)
            main()
        case ["make", target, *_]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            assert target in targets, f"no target of the Makefile: {line}"
        case ["pip", "install" | "uninstall", *rest]:
            optional = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition(".optional-dependencies]")[2]
            extras = re.findall(r"^(\w+) = \[", optional.partition("\n[")[0], re.MULTILINE)
            named = {name for word in rest for names in re.findall(r"\[(.+)\]", word) for name in names.split(",")}
            assert named <= set(extras), f"no such extra: {line}"
            ours = [word for word in rest if "lightning-ort" in word or word.startswith(".")]
            assert all(re.fullmatch(r"\.\[cpu(,\w+)*\]", word) for word in ours), f"write it as the quick start: {line}"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"no such script: {line}"
        case _:
            pytest.fail(f"no way to check this line: {line}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("captured_at_once")
def test_blocks_of_the_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "deepspeed.json").write_text("{}")
    names = namespace()
    for block in blocks_of(page):
        if not block.runs:
            continue
        try:
            if block.language == "python":
                run_python(block, names)
            elif block.language == "yaml":
                run_yaml(block, tmp_path)
            elif block.language == "bash":
                with monkeypatch.context() as shell:  # what it exports is gone with it
                    for line in block.code.splitlines():
                        run_command(line, shell)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"the block at {block}: {error!r}") from error


def test_a_wrong_block_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail, in each language, and does not where the page says why not."""
    wrong = {"python": "undefined_name", "yaml": "trainer: {no_such_argument: 1}", "bash": "make nothing_like_this"}
    for language, code in wrong.items():
        page = tmp_path / f"{language}.md"
        page.write_text(f"Text\n\n```{language}\n{code}\n```\n\n<!-- not run: wrong -->\n```{language}\n{code}\n```\n")
        failing, skipped = blocks_of(page)
        assert (failing.line, failing.runs, skipped.runs) == (4, True, False)
    with pytest.raises(NameError):
        run_python(blocks_of(tmp_path / "python.md")[0], namespace())
    with pytest.raises(SystemExit):
        run_yaml(blocks_of(tmp_path / "yaml.md")[0], tmp_path)
    with pytest.raises(AssertionError, match="no target"):
        run_command(blocks_of(tmp_path / "bash.md")[0].code, monkeypatch)
    for line, error, message in (
        ('export LIGHTNING_ORT_CONFIG=\'{"placment": "always"}\'', ValueError, "did you mean 'placement'"),
        ("LIGHTNING_ORT_CONFG='{}' python train.py", AssertionError, "does not read it"),
        ("LIGHTNING_ORT_OPTIM=keep python no_such_script.py", pytest.fail.Exception, "no way to check this line"),
        ('pip install "lightning-ort[cpu]"', AssertionError, "write it as the quick start"),
    ):
        with monkeypatch.context() as shell, pytest.raises(error, match=message):
            run_command(line, shell)
