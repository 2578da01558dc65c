"""Replaces the implementation of the optimizers that ``configure_optimizers`` returned."""
