"""What ran where, why not elsewhere, and how fast."""

from lightning_ort.compiler.report.data import FallbackReport, GraphReport, RegionReport
from lightning_ort.compiler.report.report import CompileReport

__all__ = ["CompileReport", "FallbackReport", "GraphReport", "RegionReport"]
