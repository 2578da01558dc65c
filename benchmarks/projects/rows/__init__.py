"""A module for each group of :mod:`catalogue`, with a function ``(steps, **trainer)`` for each of its rows.

``trainer`` are arguments of Lightning's Trainer. The data are made up, from fixed seeds.
"""
