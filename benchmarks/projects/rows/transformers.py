"""Models of transformers with random weights, and a LoRA of peft."""

from typing import Any

import lightning.pytorch as pl
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

VOCABULARY, LENGTH, EXAMPLES, BATCH = 2000, 64, 64, 4


class LanguageModel(pl.LightningModule):
    """A model that returns its own loss.

    Args:
        network: The model.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        """Return the model's loss."""
        loss = self.network(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def _tokens(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (EXAMPLES, length), generator=torch.Generator().manual_seed(seed))


def _fit(network: nn.Module, columns: dict[str, Tensor], steps: int, trainer: dict[str, Any]) -> None:
    examples = [{name: values[k] for name, values in columns.items()} for k in range(EXAMPLES)]
    pl.Trainer(max_steps=steps, max_epochs=-1, **trainer).fit(
        LanguageModel(network), DataLoader(examples, batch_size=BATCH, shuffle=True)
    )


def t5(steps: int, **trainer: Any) -> None:
    """An encoder and a decoder with relative positions."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8, decoder_start_token_id=0
    )
    columns = {"input_ids": _tokens(0), "labels": _tokens(1, 32)}
    _fit(transformers.T5ForConditionalGeneration(config), columns, steps, trainer)


def whisper(steps: int, **trainer: Any) -> None:
    """An encoder of spectrograms and a decoder of text."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_source_positions=100,
        num_mel_bins=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    spectrograms = torch.randn(EXAMPLES, 40, 200, generator=torch.Generator().manual_seed(0))
    columns = {"input_features": spectrograms, "labels": _tokens(1, 32)}
    _fit(transformers.WhisperForConditionalGeneration(config), columns, steps, trainer)


def bert(steps: int, **trainer: Any) -> None:
    """A masked language model."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    columns = {"input_ids": _tokens(0), "attention_mask": torch.ones(EXAMPLES, LENGTH).long(), "labels": _tokens(1)}
    _fit(transformers.BertForMaskedLM(config), columns, steps, trainer)


def gpt2(steps: int, **trainer: Any) -> None:
    """A causal language model."""
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes)
    tokens = _tokens(0)
    _fit(transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, steps, trainer)


def lora(steps: int, **trainer: Any) -> None:
    """Adapters of low rank in a Llama."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    adapters = peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    network = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    tokens = _tokens(0)
    _fit(network, {"input_ids": tokens, "labels": tokens}, steps, trainer)
