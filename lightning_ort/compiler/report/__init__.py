"""What ran where, why not elsewhere, and how fast."""

from lightning_ort.compiler.report.report import CompileReport, FallbackReport, GraphReport, RegionReport

__all__ = ["CompileReport", "FallbackReport", "GraphReport", "RegionReport"]
