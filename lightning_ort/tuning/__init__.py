"""Finds the fastest way to train a module on this machine: ``lightning-ort tune`` and :func:`lightning_ort.tune`."""
