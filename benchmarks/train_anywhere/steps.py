"""python steps.py FOLDER BATCHES OUTPUT: train on the batches of a safetensors file with onnxruntime alone."""

import json
import sys
import time

START = time.time()
folder, batches, output = sys.argv[1:]
sys.path.insert(0, folder)
from training import Training, read_state  # noqa: E402

training = Training.load(folder)
steps: dict[int, dict] = {}
for key, value in read_state(batches)[0].items():
    number, _, field = key.partition("/")
    steps.setdefault(int(number), {})[field] = value
losses, times, first = [], [], 0.0
for batch in steps.values():
    start = time.perf_counter()
    losses.append(training.step(batch)["loss"])
    times.append((time.perf_counter() - start) * 1e3)
    first = first or time.time()
assert "torch" not in sys.modules
training.save(f"{output}.safetensors")
about = {"losses": losses, "times": times, "first": first, "start": START}
with open("/proc/self/status") as status:  # not ru_maxrss, which counts the process that started this one
    about["mb"] = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
with open(f"{output}.json", "w") as file:
    json.dump(about, file)
