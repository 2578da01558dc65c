"""DeepSpeed's ZeRO stage 1."""
