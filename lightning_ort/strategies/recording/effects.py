"""What a step calls for its effect alone, logging and metrics, which replays do again: :class:`Effects`."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ort.recording.calls import Recorder, Refused, Value
from lightning_ort.world import HandedOn, Site, put

_OF_METRICS = ("forward", "update", "compute", "reset")


class Effect(NamedTuple):
    """A call that replays do again."""

    method: Callable[..., Any]
    args: Any  # with values of the recording, and results of other effects, in the place of tensors
    kwargs: Any

    def values(self) -> list[Value]:
        """Return the values in its arguments, in their order."""
        return values_of((self.args, self.kwargs))


def values_of(tree: Any) -> list[Value]:
    """Return the values in tuples, lists, and dictionaries."""
    if isinstance(tree, Value):
        return [tree]
    parts = tree if type(tree) in (list, tuple) else tree.values() if type(tree) is dict else ()
    return [value for part in parts for value in values_of(part)]


class ResultOf(int):
    """The result of an effect, by its number."""


class Effects:
    """Watches in a step what it logs, and calls of metrics, which run as always."""

    def __init__(self, module: nn.Module, recorder: Recorder | None) -> None:
        self.calls: list[Effect] = []
        self.tensors: list[Tensor] = []  # those of the calls, in their order
        self.sites: list[Site] = []  # where these were
        self._module, self._recorder = module, recorder
        self._results: list[Any] = []
        self._depth = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, calls are noted."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        owners = [
            (self._module, ("log", "log_dict")),
            *((one, _OF_METRICS) for one in self._module.modules() if isinstance(one, Metric)),
        ]
        for owner, names in owners:
            own = vars(owner)
            for name in names:
                replaced.append((own, name, own.get(name, self)))
                own[name] = self._noting(getattr(owner, name))
        try:
            yield
        finally:
            for own, name, before in replaced:
                if before is self:
                    del own[name]
                else:
                    own[name] = before

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def note(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return method(*args, **kwargs)
            profile, recorder = sys.getprofile(), self._recorder
            if callable(profile):  # and not one made by C, which cannot be set again
                sys.setprofile(None)
            site = Site.of(inspect.currentframe(), 1)
            self._depth += 1
            if recorder is not None:
                recorder.pauses += 1
            try:
                effect = Effect(method, self._plain(args), self._plain(kwargs))
                result = method(*args, **kwargs)
                self.calls.append(effect)
                self.sites.append(site)
                self._results.append(result)
                return result
            finally:
                self._depth -= 1
                if recorder is not None:
                    recorder.pauses -= 1
                if callable(profile):
                    sys.setprofile(profile)

        return note

    def _plain(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            for index, result in enumerate(self._results):
                if result is tree:
                    return ResultOf(index)
            self.tensors.append(tree.detach().clone())
            return tree if self._recorder is None else self._copy(tree)
        if type(tree) in (list, tuple):
            return type(tree)(map(self._plain, tree))
        if type(tree) is dict:
            return {key: self._plain(one) for key, one in tree.items()}
        return tree

    def _copy(self, tensor: Tensor) -> Any:
        assert self._recorder is not None
        try:
            return self._recorder.copy_of(tensor)
        except Refused as refused:
            self._recorder.refusal = self._recorder.refusal or str(refused)
            return Value(-1)


@contextmanager
def before_hooks(precision: Any, finish: Callable[[], None]) -> Iterator[list[bool]]:
    """Within the block, call a function before the hooks after a backward pass; what it yields is empty until then."""
    after, own = precision.post_backward, vars(precision)
    finished: list[bool] = []

    def post_backward(*args: Any, **kwargs: Any) -> Any:
        del own["post_backward"]
        finished.append(True)
        finish()
        return after(*args, **kwargs)

    if "post_backward" in own:  # somebody else's
        yield finished
        return
    own["post_backward"] = post_backward
    try:
        yield finished
    finally:
        own.pop("post_backward", None)


def hand_on(
    effects: Effects, writes: list[Any], recorder: Recorder, found: HandedOn | None
) -> dict[Value, tuple[str, ...]]:
    """Put values in the place of what a step only hands on; return them, and the names of attributes."""
    if found is None:
        return {}
    numbers = {
        (code, line, at): recorder.new_number(read)
        for (code, line), reads in found.numbers(recorder.reads).items()
        for at, read in enumerate(reads)
    }
    values: dict[Value, tuple[str, ...]] = dict.fromkeys(numbers.values(), ())

    def anew(tree: Any, site: Site, first: int) -> Any:
        sink, _ = found.at(site)
        for path, source in () if sink is None else sink.parts:
            value = numbers.get((site.code, *source))
            if source in found.live:
                value = recorder.new_number()
                values[value] = source
            if value is not None:
                tree = put(tree, path[first:] if first else (int(isinstance(path[0], str)), *path), value)
        return tree

    for at, (effect, site) in enumerate(zip(effects.calls, effects.sites, strict=True)):
        effects.calls[at] = Effect(effect.method, *anew((effect.args, effect.kwargs), site, 0))
    appended = [at for at, (write, _, _) in enumerate(writes) if write.kind == "append"]
    for owner in {id(writes[at][0].owner): writes[at][0].owner for at in appended}.values():
        own = [at for at in appended if writes[at][0].owner is owner]
        if len(sites := [site for of, site in found.appended if of == id(owner)]) == len(own):
            for at, site in zip(own, sites, strict=True):
                write, own_values, graphs = writes[at]
                writes[at] = write, anew(own_values, site, 1), graphs
        elif sites and (numbers or found.live):
            raise Refused("it appends to a list in several ways")
    return values


def repeat(effects: list[Effect], results: Callable[[Value], Tensor]) -> None:
    """Make the calls of a recording again, with the results of a replay."""
    found: list[Any] = []

    def given(tree: Any) -> Any:
        if isinstance(tree, ResultOf):
            return found[tree]
        if isinstance(tree, Value):
            return results(tree)
        if type(tree) in (list, tuple):
            return type(tree)(map(given, tree))
        return {key: given(one) for key, one in tree.items()} if type(tree) is dict else tree

    for method, args, kwargs in effects:
        found.append(method(*given(args), **given(kwargs)))
