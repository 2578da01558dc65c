"""The architecture of T5-3B, for `lightning-ort memory`: what would it take to train it?"""

from torch import nn
from transformers import T5Config, T5ForConditionalGeneration


def t5_3b() -> nn.Module:
    """Make T5 with 3 billion parameters, with random weights."""
    return T5ForConditionalGeneration(
        T5Config(d_model=1024, d_ff=16384, d_kv=128, num_heads=32, num_layers=24, vocab_size=32128)
    )
