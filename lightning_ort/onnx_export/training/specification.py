"""What an exported training folder holds: the one place that says so, for those who write and read one.

The runners (``runner.py``, ``runner.mjs``) are copied into each folder and run without this package, so they repeat
what they need of it; ``tests/anywhere/test_specification.py`` compares them, and an exported folder, with this.
"""

from dataclasses import dataclass

FORMAT = 2  # of training.json; a runner reads its own alone
NEEDS = "1.17 or later"  # of onnxruntime: opset 18, IR version 9

ABOUT = "training.json"
STATE = "state.safetensors"  # with metadata `step` and `pending`: updates so far, and batches since the last one
FROZEN = "frozen.data"  # constants of some size of all models, if there are any
MODELS = ("training", "evaluation", "prediction")  # `<name>.onnx`; the first one is always there
RUNNERS = {"runner.py": "training.py", "runner.mjs": "training.mjs"}  # source -> name in the folder

# what every training.json has, and a runner asks for
KEYS = ("fields", "files", "models", "state", "optimizer", "accumulate", "threads", "needs")
# what else is in it, for people
MORE_KEYS = ("format", "module", "frozen", "float16", "clip", "versions")
MODEL_KEYS = ("file", "fields", "inputs", "outputs", "sizes", "conditions")
# of an input or output of a model, and, without `key`, of a field and of the state
PORT_KEYS = ("name", "role", "key", "dtype", "shape")

STATE_ROLES = ("parameter", "buffer", "state")  # the last of the optimizer
INPUT_ROLES = ("field", *STATE_ROLES, "setting", "random")
OUTPUT_ROLES = (*STATE_ROLES, "gradient", "loss", "logged", "result", "check")
# inputs that a runner gives a model with an optimizer
SETTINGS = {"optimizer/learning_rate": "float32", "optimizer/step": "int64", "optimizer/update": "bool"}
RANDOM = ("uniform", "normal")  # keys of inputs with the role `random`


@dataclass(frozen=True)
class Dtype:
    """A type of the tensors in a folder."""

    code: str  # its name in a safetensors file
    javascript: bool = True  # whether JavaScript has arrays of it


DTYPES = {
    "bool": Dtype("BOOL"),
    "uint8": Dtype("U8"),
    "int8": Dtype("I8"),
    "int16": Dtype("I16"),
    "int32": Dtype("I32"),
    "int64": Dtype("I64"),
    "float16": Dtype("F16", javascript=False),
    "float32": Dtype("F32"),
    "float64": Dtype("F64"),
}
