"""Compares the first runs of a compiled graph with eager, on their device: :class:`GraphCheck`.

Where no copy of the process can repeat a step, as on a GPU, this finds wrong kernels: results, what the graph writes to
its inputs, and gradients are compared as whole tensors. A difference counts if it is beyond what roundings explain:
eager runs again, with inputs that differ by roundings, to see how much that changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.dynamo import input_name
from lightning_ort.compiler.machine.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.running.eager_runs import RunState, gradients_by_eager, leaf_like, leaves

Tensors = Mapping[str, Any]
Written = Mapping[int, torch.Tensor]
# relative differences that need no explanation, by the least exact dtype
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}
PLAIN, ROUNDED = 0, (1, 2)  # runs of eager: as it is; with other roundings
ROUNDING = 2.0  # by which inputs differ then, at most, in units of the dtype's precision
EXPLAINED = 10.0  # a difference may be this many times what other roundings make
# of the largest root mean square: gradients that are smaller are roundings alone, as of a bias before a batch norm
SMALL = 1e-4
_SHOWN = 3  # differences in a message


class GraphDiffers(RuntimeError):
    """A compiled graph has computed something else than eager."""


@dataclass(frozen=True)
class GraphCheck:
    """What compares a graph, and whom it tells."""

    count: Callable[[float, float], None]  # gets the seconds of each comparison and the largest relative difference
    skipped: Callable[[str], None]  # gets why there was none
    names: Sequence[str] = ()  # of the graph's inputs

    @staticmethod
    def of(check: "GraphCheck | None", gm: fx.GraphModule) -> "GraphCheck | None":
        """Return the same for one graph, as dynamo captured it."""
        return check and replace(check, names=[*map(input_name, gm.graph.find_nodes(op="placeholder"))])

    def results(
        self, eager: Callable[..., Any], args: Sequence[Any], written: Written, state: RunState, own: Sequence[Any]
    ) -> None:
        """Compare what a forward pass has returned, and written to its inputs; arguments as of :meth:`gradients`."""
        dtype = least_exact([*args, *own], state.casts)

        def again(seed: int) -> Tensors:
            # copies, for which it may register hooks
            inner = leaves(rounded(_as_before(args, written), seed, dtype))
            with state.again():
                return self._results(eager(*inner), inner, written)

        self._compare(self._results(own, args, written), again, dtype, 0.0)

    def gradients(
        self,
        eager: Callable[..., Any],
        args: Sequence[Any],
        written: Written,
        state: RunState,
        gradients: Sequence[Any],
        own: Sequence[Any],
    ) -> None:
        """Compare the gradients of a graph's inputs for those of its results; raise ``GraphDiffers`` if they differ.

        ``eager`` is the graph as captured, ``written`` has the values that inputs had, by index, which it writes to,
        and ``own`` are the gradients that the compiled graph has computed.
        """
        dtype = least_exact([*args, *gradients], state.casts)

        def again(seed: int) -> Tensors:
            found = gradients_by_eager(eager, rounded(_as_before(args, written), seed, dtype), {}, state, gradients)
            return self._gradients(found)

        self._compare(self._gradients(own), again, dtype, SMALL)

    def _results(self, results: Sequence[Any], args: Sequence[Any], written: Written) -> Tensors:
        return {f"result {number}": one for number, one in enumerate(results)} | {
            f"what is written to {self.names[index]}": args[index] for index in written
        }

    def _gradients(self, found: Sequence[Any]) -> Tensors:
        return {f"the gradient of {name}": one for name, one in zip(self.names, found, strict=True)}

    def _compare(self, own: Tensors, eager: Callable[[int], Tensors], dtype: torch.dtype, small: float) -> None:
        start = perf_counter()
        try:
            found, largest = unexplained(own, eager, TOLERANCE[dtype], small)
        except Exception as error:
            if is_out_of_memory(error):
                free_memory_of(error)
                self.skipped("there is not enough memory to repeat it in eager")
            else:
                self.skipped(f"it cannot be repeated in eager: {error}")
            return
        self.count(perf_counter() - start, largest)
        if found:
            worst = sorted(found, key=found.__getitem__, reverse=True)
            shown = [f"{name} differs from eager's by {found[name]:.0%} of its size" for name in worst[:_SHOWN]]
            raise GraphDiffers("; ".join(shown) + (f", and {len(worst) - _SHOWN} more" if worst[_SHOWN:] else ""))


def unexplained(
    own: Tensors, eager: Callable[[int], Tensors], tolerance: float, small: float = 0.0
) -> tuple[dict[str, float], float]:
    """Return the relative differences that roundings do not explain, by name, and the largest one of all."""
    plain = eager(PLAIN)
    distances = distances_of(own, plain, small)
    largest = max(distances.values(), default=0.0)
    if largest <= tolerance:
        return {}, largest
    explained = dict.fromkeys(distances, 0.0)
    for command in (PLAIN, *ROUNDED):  # the first is for kernels that add up in an order of their own
        for name, distance in distances_of(eager(command), plain, small).items():
            explained[name] = max(explained[name], distance)
    found = {name: one for name, one in distances.items() if one > max(tolerance, EXPLAINED * explained[name])}
    return found, largest


@torch.no_grad()
def distances_of(one: Tensors, two: Tensors, small: float = 0.0) -> dict[str, float]:
    """Return how far tensors of two mappings are apart, by name, as a share of the larger one of each pair.

    What is no tensor in either is left out; a gradient that is missing is zero. Their device is waited for once.
    ``small``: the share of the largest root mean square that each has at least.
    """
    names = [name for name in two if isinstance(one[name], torch.Tensor) or isinstance(two[name], torch.Tensor)]
    if not names:
        return {}
    pairs = [
        (torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b)
        for a, b in ((one[name], two[name]) for name in names)
    ]
    device = pairs[0][1].device
    least = small * torch.stack([_root_mean_square(b).to(device) for _, b in pairs]).nan_to_num(0.0, 0.0).max()
    found = torch.stack([_distance(a, b, least.to(b.device)).to(device) for a, b in pairs])
    return dict(zip(names, found.tolist(), strict=True))


def _distance(one: torch.Tensor, two: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    if one.shape != two.shape or one.dtype != two.dtype:
        return torch.full((), torch.inf, dtype=torch.float64, device=one.device)
    if one.layout is not torch.strided or one.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=one.device)
    if one.is_complex():
        one, two = torch.view_as_real(one.resolve_conj()), torch.view_as_real(two.resolve_conj())
    if not one.is_floating_point():
        return (one != two).double().mean()
    size = torch.maximum(torch.maximum(_norm(one), _norm(two)), least * one.numel() ** 0.5)
    distance = _norm(one - two) / size
    # equal, as two zeros are, or neither is finite, as the gradients of a step that overflows
    same = (one == two).all() | ~(_norm(one).isfinite() | _norm(two).isfinite())
    return torch.where(same, 0.0, distance.nan_to_num(torch.inf, torch.inf))


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    return _norm(tensor) / tensor.numel() ** 0.5


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def rounded(args: Sequence[Any], seed: int, dtype: torch.dtype) -> list[Any]:
    """Return inputs that differ from these by about as much as roundings to ``dtype`` do; the same for ``PLAIN``."""
    if seed == PLAIN:
        return [*args]
    size, generators = ROUNDING * torch.finfo(dtype).eps, dict[torch.device, torch.Generator]()

    def change(arg: Any) -> Any:
        if not isinstance(arg, torch.Tensor) or not arg.is_floating_point() or arg.layout is not torch.strided:
            return arg
        if arg.device not in generators:
            generators[arg.device] = torch.Generator(arg.device).manual_seed(seed)
        plain = arg.detach()
        noise = torch.rand(plain.shape, dtype=plain.dtype, device=arg.device, generator=generators[arg.device])
        return leaf_like(arg, plain * (1 + size * (2 * noise - 1)))

    return [change(arg) for arg in args]


def least_exact(values: Sequence[Any], casts: Sequence[torch.dtype]) -> torch.dtype:
    """Return the least exact dtype of tensors, and of those that autocast casts to."""
    found = {*casts} | {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return max(found & TOLERANCE.keys() or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


def _as_before(args: Sequence[Any], written: Written) -> list[Any]:
    """Return the inputs as they were, copied where the graph writes to them."""
    return [written[index].clone() if index in written else arg for index, arg in enumerate(args)]
