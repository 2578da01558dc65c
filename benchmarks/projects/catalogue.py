"""The models that ``make projects`` trains: one function each in the module of ``rows/`` that is named after the group.

A group has an environment of its own: ``.projects/GROUP``, with the packages of ``requirements/GROUP.txt``.
"""

from dataclasses import dataclass

LENGTHS = {"short": 1, "medium": 15, "long": 60, "longest": 200}  # times the steps of a row


@dataclass(frozen=True)
class Row:
    """A model of a package.

    Args:
        group: The environment, and the module in ``rows/``.
        function: What trains it, in that module.
        model: Its name for the reader.
        steps: Batches that take stock Lightning about two seconds on two cores.
        package: Its name for the reader, and for the version; the group's name if left out.
    """

    group: str
    function: str
    model: str
    steps: int
    package: str = ""

    @property
    def name(self) -> str:
        """What ``--rows`` calls it."""
        return f"{self.group}.{self.function}"


ROWS = [
    Row("neuralforecast", "patch_tst", "PatchTST", 25),
    Row("neuralforecast", "ts_mixer", "TSMixer", 80),
    Row("neuralforecast", "nbeats", "NBEATS", 45),
    Row("neuralforecast", "nhits", "NHITS", 45),
    Row("gluonts", "deep_ar", "DeepAR", 40),
    Row("gluonts", "simple_feed_forward", "SimpleFeedForward", 250),
    Row("pytorch_forecasting", "tft", "TemporalFusionTransformer", 20, "pytorch-forecasting"),
    Row("pytorch_forecasting", "nbeats", "NBeats", 25, "pytorch-forecasting"),
    Row("darts", "tft", "TFTModel", 50),
    Row("darts", "tcn", "TCNModel", 100),
    Row("chemprop", "mpnn", "MPNN", 40),
    Row("scvi", "scvi", "SCVI", 100, "scvi-tools"),
    Row("tabular", "category_embedding", "CategoryEmbedding", 120, "pytorch-tabular"),
    Row("tabular", "danet", "DANet", 8, "pytorch-tabular"),
    Row("geometric", "gcn", "GCN", 200, "torch-geometric"),
    Row("vision", "simclr", "SimCLR with a ResNet-18", 20, "lightly"),
    Row("vision", "byol", "BYOL with a ResNet-18", 15, "lightly"),
    Row("vision", "resnet", "ResNet-18", 20, "timm"),
    Row("vision", "vit", "ViT", 30, "timm"),
    Row("vision", "convnext", "ConvNeXt", 20, "timm"),
    Row("transformers", "t5", "T5", 15),
    Row("transformers", "whisper", "Whisper", 15),
    Row("transformers", "bert", "BERT", 15),
    Row("transformers", "gpt2", "GPT-2", 15),
    Row("transformers", "lora", "LoRA of a Llama", 15, "peft"),
]

# packages that are not in the table, and why
LEFT_OUT: dict[str, str] = {}
