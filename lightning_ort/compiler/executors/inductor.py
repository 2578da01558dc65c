"""Inductor, torch's own compiler, as an executor of whole graphs."""

from lightning_ort.compiler.executors.base import GraphExecutor

INDUCTOR = GraphExecutor("inductor", {"fallback_random": True})  # dropout masks are the same as in eager
