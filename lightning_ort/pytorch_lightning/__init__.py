"""The same for the package ``pytorch_lightning``, whose classes are not those of ``lightning.pytorch``."""
