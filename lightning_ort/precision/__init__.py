"""Precision plugins; :mod:`lightning_ort.lightning` and :mod:`lightning_ort.pytorch_lightning` have their classes.

- :mod:`~lightning_ort.precision.mixed`: mixed precision for every optimizer, with overflows counted
- :mod:`~lightning_ort.precision.matmul`: faster float32 matrix products with less precision
- :mod:`~lightning_ort.precision.bfloat16`: bfloat16 weights that learn from small updates
"""
