"""What runs in a step: Python's functions, whose code is read later, and calls of C, which must be known."""

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_ort.compat.torch import SETTINGS
from lightning_ort.world.code import reads_of
from lightning_ort.world.handed_on import Site
from lightning_ort.world.modes import BALANCED
from lightning_ort.world.objects import kind_bases
from lightning_ort.world.places import LIGHTNING, Place, Places, root_of


@dataclass(frozen=True)
class Opening:
    """Why a step's world is open: something decides about the step that cannot be listed.

    Attributes:
        what: What the step does.
        where: The file and line, or the attribute.
    """

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what}, {self.where}" if self.where else self.what


_TENSOR: type = torch.Tensor.__mro__[1]  # whose methods are made by C
# what reads or writes a tensor without a dispatched call
_UNSEEN = {"numpy", "tolist", "data_ptr", "storage", "untyped_storage", "typed_storage", "share_memory_"}
_UNSEEN |= {"register_hook", "retain_grad", "register_post_accumulate_grad_hook", "__array__", "__dlpack__"}
_UNSEEN |= {"storage_offset", "_is_view", "is_pinned", "is_shared", "has_names", "rename"}
_UNSEEN |= {"__reduce_ex__", "__deepcopy__", "__setstate__", "backward", "_make_subclass", "as_subclass"}
# modules of known packages whose functions are open, and those of their functions that are not
_OPEN_MODULES: tuple[str, ...] = (
    "torch.random",
    "torch.serialization",
    "torch.optim",
    "torch.utils.data",
    "torch.distributed",
)
_OPEN_MODULES += (
    "torch.distributed",
    "torch._dynamo",
    "torch.jit",
    "torch.multiprocessing",
    "torch.utils.checkpoint",
    "torch.storage",
)
_OPEN_MODULES += ("torch.autograd.graph", "torch.nn.utils.clip_grad", "torch.hub", "torch.utils.tensorboard")
_OPEN_MODULES += ("torchmetrics.metric", "torchmetrics.collections", "torch.cuda.random", "torch.package")
_STILL_CLOSED = {"is_available", "is_initialized", "is_compiling", "is_scripting", "is_tracing", "is_dynamo_compiling"}
_STILL_CLOSED |= {"_engine_run_backward", "annotate", "get_default_device", "__getattr__", "is_dynamo_supported"}
_STILL_CLOSED |= {"get_rank", "get_world_size"}
# what dynamo notes of each module that is made, once somebody has used it
_NOTES_MODULES: tuple[str, ...] = ("torch._dynamo.mutation_guard", "torch._dynamo.utils", "torch.jit._builtins")
# parts of NumPy whose functions read or write what is set for a thread
_SETTINGS_OF_NUMPY: tuple[str, ...] = (
    "numpy._core._ufunc_config",
    "numpy._core.arrayprint",
    "numpy.core._ufunc_config",
)
_SETTINGS_OF_NUMPY += ("numpy.core.arrayprint",)
_WITH_A_SAY = (*_OPEN_MODULES, *LIGHTNING, "torch._tensor", "torch.autograd")
_OF_MODULES = "torch.nn.modules.module"
# what this package changes for its own calls
_VARYING_SETTINGS = {"num_threads", "num_interop_threads"}
# methods of C that read what no object holds
_OF_CLOCK_AND_PROCESS = {"now", "today", "utcnow", "fromtimestamp", "astimezone", "__subclasses__", "__sizeof__"}
_SYS = {"intern", "exc_info", "setprofile", "getprofile", "gettrace"}
_BUILTINS = {"print", "input", "open", "exec", "eval", "compile", "id", "hash", "breakpoint", "globals", "__import__"}
# methods of Lightning that only read; its properties are read again at each comparison
_OF_LIGHTNING = {"__getattr__", "__setattr__", "__getitem__", "get", "items", "forward", "__call__", "__init__"}
# modules of C that trusted packages may use, and those that the user's code may
_FOR_PACKAGES = ({"_thread", "_contextvars"}, {"_thread"})
_Code = types.CodeType


_BY_ANY_NAME = {"getattr", "hasattr", "setattr", "__dict__", "vars", "__getattribute__", "attrgetter"}
_CHANGES = {"append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "add", "discard"}
_CHANGES |= {"sort", "reverse", "move_to_end", "appendleft", "extendleft", "popleft", "rotate", "__setitem__"}
_CHANGES |= {"__delitem__", "difference_update", "intersection_update", "symmetric_difference_update"}


@dataclass
class Ran:
    """A function that ran."""

    code: types.CodeType
    namespace: dict[str, Any]
    receivers: frozenset[str]
    me: dict[int, Callable[[], Any]] = field(default_factory=dict)  # what it was called with first

    @property
    def where(self) -> str:
        """The function, for people."""
        return f"{Path(self.code.co_filename).name} line {self.code.co_firstlineno}"


@dataclass
class Other:
    """A function of a package that ran.

    Attributes:
        code: Its code.
        place: Whose it is.
        namespace: Its globals.
        kinds: Classes in which it was looked up, the last of which has it.
        says_nothing: Whether other calls say no more than the first.
    """

    code: types.CodeType
    place: Place
    namespace: dict[str, Any]
    kinds: list[type]
    says_nothing: bool


def _kinds_of(frame: types.FrameType) -> list[type]:
    """Classes in which a method was looked up, the last of which has it."""
    code = frame.f_code
    me = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    kinds = kind_bases(me if isinstance(me, type) else type(me))
    for at, kind in enumerate(kinds):
        if code.co_name in vars(kind):
            return [*kinds[: at + 1]]
    return []


class Watch:
    """The function for :func:`sys.setprofile` that notes what runs.

    Args:
        places: Whose code is which.
        step: The code of the step, whose calls are watched wherever they come from.
        remember: Called with the globals and the code of each function of the user's before it runs first.
    """

    def __init__(self, places: Places, step: _Code | None, remember: Callable[[dict[str, Any], _Code], None]) -> None:
        self.ran: dict[int, Ran] = {}  # by the identity of the code
        self.others: dict[int, Other] = {}  # by the identity of the code
        self.settings: dict[str, tuple[Callable[[], Any], Any]] = {}  # of torch, which the step read, and their values
        self.live: dict[tuple[int, str], Any] = {}  # objects of Lightning whose property the user's code read
        self.sites: dict[tuple[int, str], list[Site]] = {}  # where it did
        self.appended: list[tuple[int, Site]] = []  # to which list it appends, and where
        self.items: list[Site] = []  # where it calls item()
        self.openings: dict[Opening, None] = {}
        self.read_anyhow: set[int] = set()  # objects of which attributes are read by names that are not in code
        self.read_by_user: set[int] = set()  # those of which the user's code does
        self.changed: set[int] = set()  # containers of which a method was called that changes them
        self.is_backward = False
        self.warns = False
        self._places, self._step, self._remember = places, step, remember
        self._skipped: types.FrameType | None = None

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """Note an event; whatever that does is no matter of the step's."""
        try:
            self._note(frame, event, argument)
        except Exception as error:
            self._open(f"it cannot be watched: {type(error).__name__}: {error}", frame)

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self._skipped is not None and frame.f_code is not self._step:
            if event == "return" and frame is self._skipped:
                self._skipped = None
            return
        self._skipped = None
        known = self.others.get(id(frame.f_code))
        if event == "call":
            if known is None or not known.says_nothing:
                self._call(frame)
        elif event == "c_call":
            if getattr(argument, "__self__", None) is SETTINGS:
                self._call_setting(frame, argument)
            elif known is None or known.place is not Place.KNOWN or argument.__name__ in _UNSEEN:
                self._call_c(frame, argument)
        elif event == "c_exception":
            self._fail(frame, argument)

    def place_of(self, frame: types.FrameType | None) -> Place:
        """Whose code a frame runs."""
        if frame is None:
            return Place.OURS
        if id(frame.f_code) in self.ran:
            return Place.USER
        if (known := self.others.get(id(frame.f_code))) is not None:
            return known.place
        return self._places.of_code(frame.f_code, frame.f_globals)

    def _caller(self, frame: types.FrameType) -> Place:
        """Whose code called it, through the standard library."""
        back = frame.f_back
        while (place := self.place_of(back)) in (Place.PURE, Place.STANDARD) and back is not None:
            back = back.f_back
        return place

    def _open(self, what: str, frame: types.FrameType) -> None:
        back: types.FrameType | None = frame
        while back is not None and self.place_of(back) is not Place.USER:
            back = back.f_back
        back = back or frame
        self.openings[Opening(what, f"{Path(back.f_code.co_filename).name} line {back.f_lineno}")] = None

    def _call(self, frame: types.FrameType) -> None:
        code, place = frame.f_code, self.place_of(frame)
        if place is Place.USER:
            self._call_user(frame)
            return
        name, function = str(frame.f_globals.get("__name__")), code.co_name
        is_known = place is Place.KNOWN
        says_nothing = is_known and not name.startswith(_WITH_A_SAY) or (is_known and function[0] == "<")
        if id(code) not in self.others:
            kinds = _kinds_of(frame) if is_known or place is Place.PACKAGE else []
            self.others[id(code)] = Other(code, place, frame.f_globals, kinds, says_nothing)
        if place is Place.OURS:
            self._call_ours(frame)
        elif is_known:
            self._call_known(frame, name, function)
        elif place is Place.STANDARD and self._caller(frame) is Place.USER:
            is_read = name == "importlib._bootstrap" and function == "_handle_fromlist"  # what it imports is seen
            if not is_read and (name != "logging" or function in ("_log", "handle", "emit")):
                self._open(f"it calls {name}.{function}", frame)
        elif name in _SETTINGS_OF_NUMPY:
            self._open(f"it calls {name}.{function}", frame)
        elif function == "_showwarnmsg" and self._caller(frame) is not Place.KNOWN:
            self._open("it shows a warning", frame)
        if place in (Place.PURE, Place.PACKAGE) and not _BY_ANY_NAME.isdisjoint(code.co_names):
            names = code.co_varnames[: code.co_argcount]
            self.read_anyhow.update(id(frame.f_locals.get(name)) for name in names)

    def _call_ours(self, frame: types.FrameType) -> None:
        """What replaces a function of somebody else's is trusted, with all that it calls."""
        back = frame.f_back
        if frame.f_code.co_name == "__torch_dispatch__" or (
            back is not None
            and (self.place_of(back) in (Place.USER, Place.PACKAGE) or back.f_globals.get("__name__") == _OF_MODULES)
        ):
            self._skipped = frame

    def _call_user(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if (ran := self.ran.get(id(code))) is None:
            self._remember(frame.f_globals, code)
            ran = self.ran[id(code)] = Ran(code, frame.f_globals, frozenset(reads_of(code).receivers))
        for name in ran.receivers:
            if isinstance(of := frame.f_locals.get(name), torch.Tensor):
                self._open("it reads attributes of a tensor by names that are not in its code", frame)
            self.read_anyhow.add(id(of))
            self.read_by_user.add(id(of))
        if code.co_argcount:
            me = frame.f_locals.get(code.co_varnames[0])
            if not isinstance(me, torch.Tensor) and hasattr(type(me), "__dict__") and id(me) not in ran.me:
                try:
                    ran.me[id(me)] = weakref.ref(me)
                except TypeError:  # numbers, strings, lists
                    return

    def _call_known(self, frame: types.FrameType, name: str, function: str) -> None:
        if function[0] == "<":
            return
        if name.startswith(_OPEN_MODULES):
            if function not in _STILL_CLOSED and name not in _NOTES_MODULES:
                self._open(f"it calls {name}.{function}", frame)
        elif name in ("torch._tensor", "torch.autograd"):
            is_known = function == "__hash__" and self.place_of(frame.f_back) is Place.KNOWN  # in a set of torch's own
            if function in _UNSEEN and not is_known and not (self.is_backward and function == "backward"):
                self._open(f"it calls Tensor.{function}", frame)
        elif root_of(name) in LIGHTNING and self._caller(frame) in (Place.USER, Place.PACKAGE):
            self._call_lightning(frame, function)

    def _call_lightning(self, frame: types.FrameType, function: str) -> None:
        code = frame.f_code
        me = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        for kind in type(me).__mro__:
            if isinstance(found := vars(kind).get(function), property):
                if getattr(found.fget, "__code__", None) is code:
                    self.live[id(me), function] = me
                    if frame.f_back is not None:
                        self.sites.setdefault((id(me), function), []).append(Site.of(frame.f_back))
                    return
                break
        if function not in _OF_LIGHTNING:
            self._open(f"it calls Lightning's {function}", frame)

    def _call_c(self, frame: types.FrameType, function: Any) -> None:
        name = function.__name__
        owner = getattr(function, "__self__", None)
        kind = getattr(function, "__objclass__", None) or type(owner)
        if name in _UNSEEN:
            is_tensor = issubclass(kind, _TENSOR)
            if is_tensor and not (self.is_backward and name == "backward"):
                self._open(f"it calls Tensor.{name}", frame)
        place = self.place_of(frame)
        if place in (Place.PURE, Place.STANDARD):
            if isinstance(owner, types.ModuleType) and owner.__name__ == "builtins":
                return
            place = self._caller(frame)
        if place not in (Place.USER, Place.PACKAGE):
            return
        if owner is None or isinstance(owner, types.ModuleType):
            if kind is type(None) or owner is not None:
                module = owner.__name__ if owner is not None else getattr(function, "__module__", None)
                self._call_of_module(frame, module or "", name, place)
            return
        if name in _CHANGES:
            self.changed.add(id(owner))
        if name == "append":
            self.appended.append((id(owner), Site.of(frame)))
        elif name == "item" and isinstance(owner, torch.Tensor):
            self.items.append(Site.of(frame))
        of = self._places.of_class(owner if isinstance(owner, type) else kind)
        if (name == "pop" and issubclass(kind, set)) or name in _OF_CLOCK_AND_PROCESS:
            self._open(f"it calls {(owner if isinstance(owner, type) else kind).__name__}.{name}", frame)
        elif (
            of is Place.STANDARD
            and kind.__module__ not in _FOR_PACKAGES[place is Place.USER]
            or of is Place.PACKAGE
            and place is Place.USER
            and root_of(kind.__module__) != "numpy"
            and not kind.__flags__ & 512
        ):
            self._open(f"it calls {kind.__module__}.{kind.__name__}.{name}", frame)

    def _call_setting(self, frame: types.FrameType, function: Any) -> None:
        """What is switched for the whole process is read again at each comparison, unless a step switches it."""
        verb, _, rest = function.__name__.lstrip("_").partition("_")
        if rest in BALANCED or verb not in ("get", "set"):
            return  # among the modes
        name = f"torch._C.{function.__name__}"
        if verb == "set" or rest in _VARYING_SETTINGS:
            self._open(f"it calls {name}", frame)
        elif name not in self.settings:
            try:
                self.settings[name] = function, function()
            except TypeError:  # with arguments, which nobody tells
                self._open(f"it calls {name}", frame)

    def _call_of_module(self, frame: types.FrameType, module: str, name: str, place: Place) -> None:
        of = self._places.of_module(module)
        if (
            module in ("builtins", "")
            and name in _BUILTINS
            and (place is Place.USER or name in ("print", "input", "open"))
        ):
            self._open(f"it calls {name}", frame)
        elif module == "_warnings":
            self.warns = True
        elif module == "sys" and name in _SYS | ({"getrecursionlimit"} if place is Place.PACKAGE else set()):
            return
        elif of is Place.STANDARD and module not in _FOR_PACKAGES[place is Place.USER]:
            module = {"posix": "os", "_io": "io"}.get(module, module)
            self._open(f"it calls {module}.{name}", frame)
        elif of is Place.PACKAGE and place is Place.USER and root_of(module) != "numpy":
            self._open(f"it calls {module}.{name}", frame)

    def _fail(self, frame: types.FrameType, function: Any) -> None:
        """An error of a function of torch that somebody catches depends on the values of tensors."""
        module = getattr(getattr(function, "__self__", None), "__name__", None) or getattr(function, "__module__", "")
        if self.place_of(frame) in (Place.USER, Place.PACKAGE) and root_of(str(module)) == "torch":
            self._open(f"it catches an error of {function.__name__}", frame)
