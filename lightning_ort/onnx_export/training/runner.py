"""Trains the model of this folder with numpy and onnxruntime alone; `lightning-ort export --training` has put it here.

    from training import Training          # this file

    training = Training.load("classifier_training")
    for batch in batches:                  # a dict of arrays, or a tuple in the order of training.fields
        print(training.step(batch, lr=1e-3)["loss"])
    print(training.evaluate(batch), training.predict(batch))
    training.save()                        # state.safetensors, which Training.load and lightning_ort read

Numbers are in float32. What a step draws (dropout, noise) is drawn here, by numpy, from the distributions that the
module draws from; the numbers are not PyTorch's. A step that fails leaves the state as it was. One thread may call a
Training at a time.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# onnxruntime's training build imports torch, if it is installed, for a module that is not used here
_hidden = "onnxruntime" not in sys.modules and "onnxruntime.training" not in sys.modules
if _hidden:
    sys.modules["onnxruntime.training"] = None  # type: ignore[assignment]
try:
    import onnxruntime
finally:
    if _hidden and sys.modules.get("onnxruntime.training", 0) is None:
        del sys.modules["onnxruntime.training"]

FORMAT = 2
KEYS = ("fields", "files", "models", "state", "optimizer", "accumulate", "threads", "needs")
LARGEST = float(np.finfo(np.float32).max)
Arrays = dict[str, Any]  # arrays by name
_CODES = "bool:BOOL uint8:U8 int8:I8 int16:I16 int32:I32 int64:I64 float16:F16 float32:F32 float64:F64"
DTYPES = dict(pair.split(":") for pair in _CODES.split())


class TrainingError(Exception):
    """A folder or a state cannot be used; the text says why."""


class Training:
    """A model that trains: its parameters, buffers and optimizer states, which a step replaces.

    Attributes:
        about: What training.json says.
        fields: What a batch has, by name: dtype and shape, in which a name stands for a size that may change.
        updates: How many updates of the parameters there have been.
        gradients: Those of the last step, if the model has no optimizer.
    """

    def __init__(self, folder: Path, about: dict[str, Any], state: Arrays, counts: tuple[int, int], **options: Any):
        self.folder, self.about = folder, about
        self.updates, self._pending = counts
        self._threads, self._providers = options["threads"], list(options["providers"])
        self.fields = {field["name"]: (field["dtype"], tuple(field["shape"])) for field in about["fields"]}
        self.gradients: Arrays = {}
        self._checks: Arrays = {}  # what has to be true
        self._front: Arrays = state
        self._back: Arrays = {}  # a step reads one and writes the other
        self._sessions: dict[str, Any] = {}  # by model
        self._bindings: dict[int, Any] = {}  # of training.onnx, by the state that is read
        self._inputs, self._results = Arrays(), Arrays()
        self.draws: Sequence[Any] | None = None  # random numbers to take instead of new ones
        self._random = np.random.default_rng(options["seed"])
        self._rates = [group["learning_rate"] for group in (about["optimizer"] or {}).get("groups", ())]
        self._settings: Arrays = {
            "optimizer/learning_rate": np.array(self._rates, np.float32),
            "optimizer/step": np.array(0, np.int64),
            "optimizer/update": np.array(True),
        }

    @classmethod
    def load(
        cls,
        folder: str | Path | None = None,
        state: str | Path | None = None,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        seed: int | None = None,
    ) -> Training:
        """Load a folder, by default the one that this file is in.

        Args:
            folder: The folder.
            state: Another file than its state.safetensors.
            threads: Of onnxruntime; by default as many as the model is large enough for.
            providers: Execution providers of onnxruntime, in order of preference.
            seed: Of the random numbers; None for others each time.
        """
        folder = Path(folder) if folder is not None else Path(__file__).resolve().parent
        about = _read_about(folder)
        values, metadata = read_state(Path(state) if state is not None else folder / "state.safetensors")
        _check_state(values, about)
        numbers = [str(metadata.get(name, "0")) for name in ("step", "pending")]
        if not all(number.isdecimal() for number in numbers):
            raise TrainingError(f"{state or folder}: the state's number of steps is damaged.")
        counts = int(numbers[0]), int(numbers[1])
        training = cls(folder, about, values, counts, threads=threads, providers=providers, seed=seed)
        training._session("training")
        return training

    def step(self, batch: Any, lr: Any = None, update: bool | None = None) -> dict[str, float]:
        """Train on a batch, and return the loss and what the module logs, by name.

        Args:
            batch: The fields, as a dict of arrays or in order.
            lr: The learning rate: a number, one for each parameter group, or None for those of the export.
            update: Whether to update the parameters now, where the model adds up gradients of several batches;
                by default after as many as it was exported for.
        """
        values = self._checked(batch, "training")
        if self.about["optimizer"]:
            self._settings["optimizer/learning_rate"][...] = self._learning_rates(lr)
        elif lr is not None:
            raise ValueError("lr: this model has no optimizer; it returns gradients")
        count = self.about["accumulate"]
        if update is None or count == 1:
            update = self._pending + 1 >= count
        self._settings["optimizer/step"][...] = self.updates + 1
        self._settings["optimizer/update"][...] = update
        self._train(values)
        _refuse_failed(self._checks)
        self._front, self._back = self._back, self._front
        self._pending = 0 if update else self._pending + 1
        self.updates += bool(update)
        return {name: float(array) for name, array in self._results.items()}

    def fit(
        self, batches: Iterable[Any], lr: Any = None, progress: Callable[[int, dict[str, float]], Any] | None = None
    ) -> float:
        """Train on some batches, and return the mean loss.

        Args:
            batches: An iterable of batches.
            lr: As in `step`, or a function of the number of updates so far.
            progress: Called after each step with its number and results; if it returns False, the training ends.
        """
        losses = []
        for number, batch in enumerate(batches):
            results = self.step(batch, lr(self.updates) if callable(lr) else lr)
            losses.append(results["loss"])
            if progress is not None and progress(number, results) is False:
                break
        return sum(losses) / len(losses) if losses else math.nan

    def evaluate(self, *batch: Any) -> dict[str, float]:
        """Return what the module's validation step logs for a batch."""
        return self.run("evaluation", *batch)

    def predict(self, *inputs: Any) -> Arrays:
        """Return the results of the module's forward, by name; the inputs are a dict of arrays or in order."""
        return self.run("prediction", *inputs)

    def run(self, name: str, *batch: Any) -> Arrays:
        """Run the model "evaluation" or "prediction" on a batch, or on its fields one by one."""
        feeds = self._checked(batch[0] if len(batch) == 1 else batch, name)
        session = self._session(name)
        for each in self._model(name)["inputs"]:
            if each["role"] not in ("field", "random"):
                feeds[each["name"]] = self._front[each["key"]]
        outputs = self._model(name)["outputs"]
        results = session.run([output["name"] for output in outputs], feeds)
        found: dict[str, Arrays] = {"check": {}, "logged": {}, "result": {}}
        for output, value in zip(outputs, results, strict=True):
            found[output["role"]][output["key"]] = value
        _refuse_failed(found["check"])
        return found["result"] | {key: float(value) for key, value in found["logged"].items()}

    @property
    def state(self) -> Arrays:
        """Copies of the parameters, buffers and optimizer states, by name."""
        return {name: array.copy() for name, array in self._front.items()}

    def set_state(self, values: Arrays) -> None:
        """Replace some parameters, buffers or states."""
        for name, value in values.items():
            if name not in self._front:
                raise ValueError(f"there is no {name!r} in the state")
            array = _as(value, self._front[name].dtype, f"state {name!r}")
            if array.shape != self._front[name].shape:
                raise ValueError(f"state {name!r} has shape {self._front[name].shape}, not {array.shape}")
        for name, value in values.items():
            self._front[name][...] = value

    def save(self, path: str | Path | None = None) -> Path:
        """Write the state, by default over the folder's; a file of that name stays until the new one is complete."""
        path = Path(path) if path is not None else self.folder / "state.safetensors"
        for name, role in ((each["name"], each["role"]) for each in self.about["state"]):
            wrong = np.isnan(self._front[name]) if role == "buffer" else ~np.isfinite(self._front[name])
            if wrong.any():
                text = f"{name!r} has {self._front[name][wrong][0]}: the training has failed, and nothing is saved"
                raise TrainingError(f"{text}. Load the last state, and take a smaller learning rate.")
        write_state(path, self._front, {"step": str(self.updates), "pending": str(self._pending)})
        return path

    def _session(self, name: str) -> Any:
        if name not in self._sessions:
            model = self._model(name)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self._threads or min(self.about["threads"], os.cpu_count() or 1)
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            options.log_severity_level = 4  # an error is raised
            try:
                path = str(self.folder / model["file"])
                self._sessions[name] = onnxruntime.InferenceSession(path, options, providers=self._providers)
            except Exception as error:  # onnxruntime's own classes
                text = f"{self.folder / model['file']} cannot be loaded by onnxruntime {onnxruntime.__version__}"
                raise TrainingError(f"{text}, which has to be {self.about['needs']}: {error}") from error
        return self._sessions[name]

    def _model(self, name: str) -> dict[str, Any]:
        if name not in self.about["models"]:
            raise TrainingError(f"{self.folder} was exported without {name}.onnx")
        return self.about["models"][name]

    def _train(self, values: Arrays) -> None:
        """Run training.onnx with inputs and outputs bound to arrays: nothing is allocated from step to step."""
        arrays = self._inputs
        if not self._bindings or any(arrays[name].shape != value.shape for name, value in values.items()):
            arrays = self._inputs = {name: np.empty_like(value, order="C") for name, value in values.items()}
            self._bindings = {}
        for name, value in values.items():
            np.copyto(arrays[name], value)
        key = id(self._front)
        is_new = key not in self._bindings
        if is_new:
            self._bindings[key] = self._with_outputs()
        binding = self._bindings[key]
        if is_new or self._providers != ["CPUExecutionProvider"]:  # others copy inputs when they are bound
            for each in self._model("training")["inputs"]:
                name = each["name"]
                array = next(group[name] for group in (arrays, self._settings, self._front) if name in group)
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._session("training").run_with_iobinding(binding)

    def _with_outputs(self) -> Any:
        binding = self._session("training").io_binding()
        places = {"gradient": self.gradients, "check": self._checks, "loss": self._results, "logged": self._results}
        for output in self._model("training")["outputs"]:
            place, key = places.get(output["role"], self._back), output["key"]
            if key not in place:
                place[key] = np.empty(output["shape"], output["dtype"])
            array = place[key]
            binding.bind_output(output["name"], "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for key, array in self._front.items():
            self._back.setdefault(key, array)  # what no step writes
        return binding

    def _learning_rates(self, lr: Any) -> list[float]:
        if lr is None:
            return self._rates
        rates = [lr] * len(self._rates) if np.ndim(lr) == 0 else list(lr)
        if len(rates) != len(self._rates):
            raise ValueError(f"lr={lr!r}: pass a number, or {len(self._rates)} of them, one for each parameter group")
        if not all(isinstance(rate, (int, float, np.number)) and 0 <= rate <= LARGEST for rate in rates):
            raise ValueError(f"lr={lr!r}: a learning rate must be a number of float32 that is not negative")
        return rates

    def _checked(self, batch: Any, name: str) -> Arrays:
        """Return the fields of a batch, and random numbers, as a model's inputs, or say what is wrong."""
        model = self._model(name)
        expected = {each["name"]: each for each in model["fields"]}
        if not isinstance(batch, dict):
            parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
            if len(parts) != len(expected):
                raise ValueError(f"the batch has {len(parts)} fields; expected are {_listed(expected)}")
            batch = dict(zip(expected, parts, strict=True))
        if set(batch) != set(expected):
            raise ValueError(f"the batch has the fields {', '.join(map(str, batch))}; expected are {_listed(expected)}")
        sizes: dict[str, int] = {}
        arrays: Arrays = {}
        for field, about in expected.items():
            arrays[field] = _as(batch[field], np.dtype(about["dtype"]), f"field {field!r}")
            _check_shape(arrays[field].shape, about, sizes)
        if (reason := refused(sizes, model)) is not None:
            raise ValueError(f"the batch has {reason}")
        found = {each["name"]: arrays[each["key"]] for each in model["inputs"] if each["role"] == "field"}
        for each in model["inputs"]:
            if each["role"] == "random":
                found[each["name"]] = self._drawn(each, [computed(size, sizes) for size in each["shape"]])
        return found

    def _drawn(self, about: dict[str, Any], shape: list[Any]) -> Any:
        if self.draws is not None:
            return self.draws[int(about["name"].partition("/")[2])]
        draw = self._random.random if about["key"] == "uniform" else self._random.standard_normal
        return draw(shape, np.float32)


_NAMES = "+:add *:mul //:floordiv %:mod **:pow ==:eq !=:ne <:lt <=:le >:gt >=:ge and:and_ or:or_"
_OPERATORS: dict[str, Callable[..., Any]] = {"max": max, "min": min}
_OPERATORS |= {key: getattr(operator, name) for key, name in (pair.split(":") for pair in _NAMES.split())}


def computed(formula: Any, sizes: dict[str, int]) -> Any:
    """Return what a formula of training.json is for some sizes."""
    if isinstance(formula, str):
        return sizes[formula]
    if not isinstance(formula, list):
        return formula
    parts = [computed(part, sizes) for part in formula[1:]]
    return not parts[0] if formula[0] == "not" else functools.reduce(_OPERATORS[formula[0]], parts)


def _written(formula: Any) -> str:
    if not isinstance(formula, list):
        return str(formula)
    parts = [f"({_written(part)})" if isinstance(part, list) else str(part) for part in formula[1:]]
    return f" {formula[0]} ".join(parts) if len(parts) > 1 else f"{formula[0]} {parts[0]}"


def refused(sizes: dict[str, int], model: dict[str, Any]) -> str | None:
    """Return why a model is not right for some sizes, or None."""
    for name, size in sizes.items():
        lowest, highest = model["sizes"].get(name, (1, None))
        if size < lowest or (highest is not None and size > highest):
            bounds = f"at least {lowest}" if size < lowest else f"at most {highest}"
            return f"{name} {size}; it must be {bounds}"
    for each in model["conditions"]:
        if not computed(each["formula"], sizes):
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            where = f" ({each['line']})" if each["line"] else ""
            return (
                f"{listed}; the model is right where {_written(each['formula'])}, the module does something else{where}"
            )
    return None


def _refuse_failed(checks: Arrays) -> None:
    for line, value in checks.items():
        if not value.all():
            raise ValueError(f"the step raises an error for this batch, at {line.partition(': ')[2]}")


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {each['dtype']}{each['shape']}" for name, each in fields.items())


def _as(value: Any, dtype: Any, what: str) -> Any:
    try:
        array = np.asarray(value)
    except ValueError as error:  # such as lists of several lengths
        raise ValueError(f"{what} is no array: {error}") from None
    if array.dtype == dtype:
        return array
    if not np.can_cast(array.dtype, dtype, "safe"):
        raise TypeError(f"{what} is {array.dtype}, but the model takes {dtype}: convert it")
    return array.astype(dtype)


def _check_shape(shape: Sequence[int], about: dict[str, Any], sizes: dict[str, int]) -> None:
    expected = about["shape"]
    pairs = zip(shape, expected, strict=False)
    known = [size == (each if isinstance(each, int) else sizes.setdefault(each, size)) for size, each in pairs]
    if len(shape) != len(expected) or not all(known):
        seen = f" with {sizes}" if sizes else ""
        raise ValueError(f"field {about['name']!r} has shape {list(shape)}, but the model takes {expected}{seen}")


# files


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "training.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(
            f"{folder} has no training.json: it is not a folder of `lightning-ort export --training`."
        ) from None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        got = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise TrainingError(
            f"{path} has format {got}; this file reads format {FORMAT}. Take training.py from the folder."
        )
    if missing := [key for key in KEYS if key not in about]:
        raise TrainingError(f"{path} has no {missing[0]!r}: it is damaged. Export again.")
    names = [*about["files"], *(model["file"] for model in about["models"].values())]
    if outside := [name for name in names if Path(name).name != name or "\\" in name]:
        raise TrainingError(
            f"{path} names {outside[0]!r}, which is not in the folder: it is damaged, or not to be trusted."
        )
    for name, expected in about["files"].items():
        file = folder / name
        if not file.is_file():
            raise TrainingError(f"{file} is missing: export again.")
        found = file.stat().st_size
        if found != expected["bytes"]:
            raise TrainingError(
                f"{file} has {found} bytes instead of {expected['bytes']}: it is damaged, or of another export."
            )
        if found < 1 << 24 and hashlib.sha256(file.read_bytes()).hexdigest() != expected["sha256"]:
            raise TrainingError(f"{file} is damaged, or of another export: its content is not what training.json says.")
    return about


def _check_state(values: Arrays, about: dict[str, Any]) -> None:
    expected = {each["name"]: (each["dtype"], tuple(each["shape"])) for each in about["state"]}
    found = {name: (array.dtype.name, array.shape) for name, array in values.items()}
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise TrainingError(
                f"the state is of another model: {name!r} is {found.get(name, 'missing')} in the state and"
                f" {expected.get(name, 'unknown')} in training.json"
            )


def read_state(path: str | Path) -> tuple[Arrays, dict[str, str]]:
    """Return the arrays of a safetensors file, and its metadata."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}") from None
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > len(data) - 8:
            raise ValueError("it ends too early")
        header = json.loads(data[8 : 8 + length].decode("utf-8"))
        metadata = header.pop("__metadata__", {})
        start, end, arrays = 8 + length, 8 + length, {}
        numpy_names = {code: name for name, code in DTYPES.items()}
        for name, about in header.items():
            dtype, shape = np.dtype(numpy_names[about["dtype"]]), tuple(about["shape"])
            first, last = about["data_offsets"]
            size = math.prod(shape)
            if last - first != size * dtype.itemsize or not 0 <= first <= last <= len(data) - start:
                raise ValueError(f"the bytes of {name!r} are not there")
            array = np.frombuffer(data, dtype, size, start + first).reshape(shape)
            arrays[name] = array.copy()
            end = max(end, start + last)
        if end != len(data):
            raise ValueError("it has bytes that belong to nothing")
        if metadata.get("sha256", checksum := _checksum(arrays)) != checksum:
            raise ValueError("its content is not what its metadata's sha256 says; what changes it must write that anew")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} is no safetensors file, or it is damaged: {error}") from None
    return arrays, metadata


def _checksum(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {DTYPES[arrays[name].dtype.name]} {list(arrays[name].shape)} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def write_state(path: str | Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write arrays and metadata as a safetensors file, which gets its name when it is complete."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "sha256": _checksum(arrays)}}
    offset = 0
    for name, array in arrays.items():
        last = offset + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, last]}
        offset = last
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    path = Path(path)
    _remove_rests(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_rests(path: Path) -> None:
    """Remove what processes have left that were killed while they wrote this file."""
    for rest in path.parent.glob(f".{glob.escape(path.name)}.*.part") if os.name == "posix" else ():
        try:
            os.kill(int(rest.name.split(".")[-2]), 0)  # asks whether it runs
        except ProcessLookupError:
            rest.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue
