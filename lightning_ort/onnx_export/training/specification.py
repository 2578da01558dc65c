"""What an exported training folder holds: the one place that says so, for those who write and read one.

The runners (``runner.py``, ``runner.mjs``) are copied into each folder and run without this package. The one in Python
has the format, the keys that it asks for and the dtypes; ``tests/anywhere/test_specification.py`` compares the other
one, and an exported folder, with both.
"""

NEEDS = "1.17 or later"  # of onnxruntime: opset 18, IR version 9

ABOUT = "training.json"
STATE = "state.safetensors"  # with metadata `step` and `pending`: updates so far, and batches since the last one
FROZEN = "frozen.data"  # constants of some size of all models, if there are any
MODELS = ("training", "evaluation", "prediction")  # `<name>.onnx`; the first one is always there
RUNNERS = {"runner.py": "training.py", "runner.mjs": "training.mjs"}  # source -> name in the folder

# what else than the keys for which a runner asks is in every training.json, for people
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
