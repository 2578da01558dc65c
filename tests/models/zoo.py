"""The models of docs/test_reports/supported_models.md: small, from a config with random weights, and returning a loss.

A model's function returns the network and a function that draws one batch, the network's keyword arguments. Dropout and
whatever else is random in training is left on, as each config has it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Callable[[], Batch]]

VOCABULARY = 64
CLASSES = 4
LENGTH = 12
BATCH = 2


@dataclass(frozen=True)
class Model:
    """One model of the page.

    Args:
        name: As people call it.
        library: The distribution it is of.
        make: Makes the network and the function that draws a batch.
    """

    name: str
    library: str
    make: Callable[[], Made]


MODELS: dict[str, Model] = {}


def model(name: str, library: str = "transformers") -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Put a function among the models."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        MODELS[name] = Model(name, library, make)
        return make

    return add


class Regression(nn.Module):
    """A network with a mean squared error."""

    def __init__(self, network: nn.Module, *names: str) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, target: Tensor, **inputs: Tensor) -> Batch:
        output = self.network(*(inputs[name] for name in self.names))
        output = getattr(output, "sample", output)
        return {"loss": F.mse_loss(output, target)}


class Classifier(nn.Module):
    """A network with a cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Batch:
        return {"loss": F.cross_entropy(self.network(x), labels)}


class Keywords(nn.Module):
    """A network that is always given some keyword arguments."""

    def __init__(self, network: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.network, self.keywords = network, keywords

    def forward(self, **batch: Tensor) -> Batch:
        return self.network(**batch, **self.keywords)


def tokens(*shape: int) -> Tensor:
    """Token ids without those that a config takes for special ones."""
    return torch.randint(4, VOCABULARY, shape or (BATCH, LENGTH))


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,))


def text() -> Batch:
    """Token ids with padding, which are the labels too."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[-1, LENGTH - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def images() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": labels()}


WIDTHS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


@model("BERT")
def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**WIDTHS)), text


@model("RoBERTa")
def roberta() -> Made:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(**WIDTHS)), text


@model("DistilBERT")
def distilbert() -> Made:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32
    )
    return DistilBertForMaskedLM(config), text


@model("ALBERT")
def albert() -> Made:
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(AlbertConfig(embedding_size=16, **WIDTHS)), text


@model("DeBERTa-v2")
def deberta_v2() -> Made:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        **WIDTHS,
    )
    return DebertaV2ForMaskedLM(config), text


@model("GPT-2")
def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), text


@model("GPT-NeoX")
def gpt_neox() -> Made:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**WIDTHS)), text


def llama_network() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **WIDTHS))


@model("Llama")
def llama() -> Made:
    return llama_network(), text


@model("Mistral")
def mistral() -> Made:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(num_key_value_heads=2, sliding_window=8, **WIDTHS)), text


@model("Mixtral")
def mixtral() -> Made:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **WIDTHS)
    return MixtralForCausalLM(config), text


@model("Qwen2")
def qwen2() -> Made:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **WIDTHS)), text


@model("T5")
def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), text


@model("BART")
def bart() -> Made:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
    )
    return BartForConditionalGeneration(config), text


@model("ViT")
def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: WIDTHS[key] for key in WIDTHS if key not in ("vocab_size", "max_position_embeddings")}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=CLASSES, **sizes)), images


@model("Swin")
def swin() -> Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES
    )
    return SwinForImageClassification(config), images


@model("CLIP")
def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    vision = {key: WIDTHS[key] for key in WIDTHS if key not in ("vocab_size", "max_position_embeddings")}
    config = CLIPConfig(
        text_config=dict(WIDTHS, projection_dim=16, bos_token_id=2, eos_token_id=3),
        vision_config=dict(vision, image_size=32, patch_size=8, projection_dim=16),
        projection_dim=16,
    )

    def draw() -> Batch:
        ids = tokens()
        ids[:, -1] = 3  # the end of the text, whose state is the text's
        return {"input_ids": ids, "pixel_values": images()["pixel_values"]}

    return Keywords(CLIPModel(config), return_loss=True), draw


@model("Whisper")
def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config), lambda: {
        "input_features": torch.randn(BATCH, 8, 32),
        "labels": tokens(),
    }


@model("Wav2Vec2")
def wav2vec2() -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        conv_dim=[16, 16, 16],
        conv_stride=[5, 4, 2],
        conv_kernel=[10, 4, 2],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_length=4,
        ctc_loss_reduction="mean",
        **{key: WIDTHS[key] for key in WIDTHS if key != "max_position_embeddings"},
    )
    return Wav2Vec2ForCTC(config), lambda: {"input_values": torch.randn(BATCH, 2400), "labels": tokens(BATCH, 5)}


@model("UNet2DConditionModel", "diffusers")
def unet() -> Made:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=4,
    )
    return Regression(network, "sample", "timestep", "states"), lambda: {
        "sample": torch.randn(BATCH, 4, 16, 16),
        "timestep": torch.randint(0, 1000, (BATCH,)),
        "states": torch.randn(BATCH, 6, 16),
        "target": torch.randn(BATCH, 4, 16, 16),
    }


def timm_model(name: str, **sizes: Any) -> Made:
    import timm

    network = Classifier(timm.create_model(name, num_classes=CLASSES, **sizes))
    return network, lambda: {"x": torch.randn(2 * BATCH, 3, 64, 64), "labels": torch.randint(0, CLASSES, (2 * BATCH,))}


@model("ResNet-18", "timm")
def resnet18() -> Made:
    return timm_model("resnet18")


@model("ConvNeXt", "timm")
def convnext() -> Made:
    return timm_model("convnext_atto", drop_path_rate=0.1)


@model("EfficientNet-B0", "timm")
def efficientnet() -> Made:
    return timm_model("efficientnet_b0", drop_rate=0.2, drop_path_rate=0.1)


@model("MobileNetV3", "timm")
def mobilenetv3() -> Made:
    return timm_model("mobilenetv3_small_050")


@model("Llama with LoRA", "peft")
def lora() -> Made:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama_network(), config), text


@model("nn.Transformer", "torch")
def transformer() -> Made:
    network = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    return Regression(network, "source", "given"), lambda: {
        name: torch.randn(BATCH, LENGTH, 32) for name in ("source", "given", "target")
    }


class Recurrent(nn.Module):
    """A recurrent network and a head for the last state."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x)[0][:, -1])


def series() -> Batch:
    return {"x": torch.randn(BATCH, LENGTH, 8), "labels": labels()}


@model("nn.LSTM", "torch")
def lstm() -> Made:
    return Classifier(Recurrent(nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1))), series


@model("nn.GRU", "torch")
def gru() -> Made:
    return Classifier(Recurrent(nn.GRU(8, 16, 2, batch_first=True, dropout=0.1))), series
