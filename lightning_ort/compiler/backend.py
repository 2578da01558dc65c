"""The ``torch.compile`` backend: from a captured graph to a callable that runs on executors and torch.

``torch.compile(module, backend="ort")`` finds :func:`ort` through the entry point group ``torch_dynamo_backends``;
:class:`ORTBackend` is the same with a report to read.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from lightning_ort.compat.first_compilation import without_collections
from lightning_ort.compiler.cache.cache import Cache
from lightning_ort.compiler.cache.fingerprint import digest
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.report.data import FallbackReport, GraphReport
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.compiler.running.fallbacks import ORTFallbackError
from lightning_ort.config import ORTConfig

if TYPE_CHECKING:
    from lightning_ort.compiler.compilation import Compilation
    from lightning_ort.compiler.placement.placer import Placer

log = logging.getLogger(__name__)


class ORTBackend:
    """A backend for :func:`torch.compile` with a report.

    Args:
        config: Settings: an :class:`~lightning_ort.config.ORTConfig`, a mapping with its fields, or ``None``.
        request: Returns what is compiled now; asked once for each graph.
        loads: Whether onnxruntime is loaded now, and not with the first graph.

    Attributes:
        report: What was compiled, in order.
        available: Whether onnxruntime can be used, as far as is known; if not, every graph runs in torch.
        cache: What is kept between runs.

    Raises:
        ORTFallbackError: Under ``fallback="raise"``, if onnxruntime cannot be used.
        ValueError: If the installed onnxruntime lacks the ``providers`` or ``kernels`` that the config names, or the
            config has an ``engine`` or ``start`` for strategies.

    Example::

        backend = ORTBackend(ORTConfig(placement="always"))
        compiled = torch.compile(module, backend=backend)
        compiled(x).sum().backward()
        print(backend.report.to_text())
    """

    _num_compiled: ClassVar[int] = 0  # graphs, by all backends of the process

    def __init__(
        self,
        config: ORTConfig | Mapping[str, Any] | None = None,
        request: Callable[[], CompileRequest] = CompileRequest,
        loads: bool = True,
    ) -> None:
        self.config = ORTConfig.parse(config)
        if self.config.engine in ("auto", "torch"):
            what = "times whole training steps" if self.config.engine == "auto" else "leaves steps as they are"
            raise ValueError(
                f"engine={self.config.engine!r} {what}, which a Lightning strategy does. Without one, use engine='ort'."
            )
        if self.config.start == "amortized":
            raise ValueError(
                "start='amortized' waits until a run of the Trainer is long enough, which a Lightning strategy does."
                " Without one, use start='now'."
            )
        self.report = CompileReport()
        self.cache = Cache(self.config)
        self._request = request
        self._calls = 0
        self._has_loaded = False
        self.available = True
        self.load(loads)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compile one graph captured by dynamo, and its backward graph."""
        with self._compilation_of(gm, example_inputs, self._request()) as compilation:
            return compilation.run(example_inputs)

    def compile_graph(
        self, gm: fx.GraphModule, inputs: Sequence[Any], request: CompileRequest
    ) -> tuple[Callable[[list[Any]], Any], GraphReport]:
        """Compile one graph of ATen operations without gradients; return a boxed function, and its report."""
        with self._compilation_of(gm, inputs, request) as compilation:
            return compilation.compile_graph("step", gm, inputs), self.report.graphs[-1]

    @contextmanager
    def _compilation_of(
        self, gm: fx.GraphModule, inputs: Sequence[Any], request: CompileRequest
    ) -> "Iterator[Compilation]":
        start = perf_counter()
        number, self._calls = self._calls, self._calls + 1
        ORTBackend._num_compiled += 1
        try:
            with without_collections():
                yield self.compilation(self.placer, self.report, self.load, request, number, gm, len(inputs))
        finally:
            self.report.compile_seconds += perf_counter() - start

    def load(self, loads: bool = True) -> bool:
        """Load onnxruntime, or see whether it is installed; return whether it can be used."""
        if self.available and not self._has_loaded:
            self._has_loaded = loads
            if (reason := kernels.unavailable(loads)) is not None:
                self.available = False
                self.fall_back("onnxruntime", reason)
            elif loads:
                kernels.check_config(self.config)
        return self.available

    @staticmethod
    def compiled_in_process() -> bool:
        """Return whether any backend has compiled a graph in this process, so that what is done once has been done."""
        return ORTBackend._num_compiled > 0

    @functools.cached_property
    def compilation(self) -> "type[Compilation]":
        """What compiles a graph."""
        from lightning_ort.compiler.compilation import Compilation  # not at the top: short runs compile nothing

        return Compilation

    @functools.cached_property
    def placer(self) -> "Placer":
        """What places the regions of all graphs."""
        from lightning_ort.compiler.placement.placer import Placer

        return Placer(self.config, self.cache, self.fall_back, self.record_choice, self._agree)

    def fall_back(self, where: str, reason: Reason) -> None:
        """Report that something failed and runs in torch: by a warning, or an ``ORTFallbackError`` if asked for."""
        self.report.fallbacks.append(FallbackReport(where, reason))
        if self.config.fallback == "raise":
            raise ORTFallbackError(f"{where} cannot run on ONNX Runtime: {reason}")
        log.warning("%s runs in torch: %s", where, reason)

    def record_choice(self, where: str, reason: Reason) -> None:
        """Report, once, a choice that differs from what the config asks for."""
        if self.report.record_choice(where, reason):
            log.info("%s: %s", where, reason)

    def _agree(self, fingerprint: str, measured: dict[str, Any]) -> dict[str, Any]:
        agree = self._request().agree
        return measured if agree is None else dict(agree(digest(fingerprint), measured))


@functools.cache
def _backend_for(config: ORTConfig) -> ORTBackend:
    # one object for all graphs of the same options: to dynamo a new callable is a new backend, and it compiles again
    return ORTBackend(config)


def ort(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend behind ``torch.compile(..., backend="ort", options={...})``; options are fields of ``ORTConfig``."""
    return _backend_for(ORTConfig.parse(options))(gm, example_inputs)
