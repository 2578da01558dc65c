"""Strategies with several processes."""
