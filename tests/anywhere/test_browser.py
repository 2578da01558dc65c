"""The page of examples/browser in headless Chromium: it predicts, learns what is drawn, and its state goes back."""

import base64
import contextlib
import copy
import functools
import http.server
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ort import export_training, load_training_state
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.batch import fields_of
from tests.anywhere.chromium import CHROMIUM, SOFTWARE_GPU, page
from tests.anywhere.modules import DigitsCNN, SmallGPT, TabularMLP
from tests.anywhere.test_in_node import NODE
from tests.anywhere.test_training_export import assert_same, fit

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
RUNTIME = NODE / "node_modules" / "onnxruntime-web" / "dist"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or not RUNTIME.is_dir(), reason="Chromium, or what `make node` installs, is missing"
    ),
]
BYTES = "training().bytes().then((bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join('')))"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (given := os.environ.get("BROWSER_SITE")) is not None:
        return Path(given)
    sys.path.insert(0, str(EXAMPLE))
    import main  # type: ignore[import-not-found]

    folder = tmp_path_factory.mktemp("browser") / "site"
    main.write_site(folder, RUNTIME, epochs=3)
    return folder


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    with served(site) as address:
        yield f"{address}/index.html"


def test_the_page_learns_and_its_state_comes_back(site: Path, url: str, tmp_path: Path) -> None:
    with page(url) as tab:
        assert tab.wait("document.body?.dataset.ready") == "yes", tab.run("document.body.innerText")
        before = int(tab.run("document.body.dataset.updates"))
        tab.draw("#pad", [(0.5, 0.15), (0.5, 0.3), (0.5, 0.5), (0.5, 0.7), (0.5, 0.85)])
        tab.wait("document.body.dataset.best !== '-1'")
        # it is a one; teach that it is a seven, until the page believes it
        for round_number in range(1, 9):
            tab.run("document.querySelectorAll('#labels button')[7].click()")
            tab.wait(f"document.body.dataset.updates === '{before + 8 * round_number}'")
            tab.wait("document.querySelector('#status').textContent === 'Learned your 7.'")
            if tab.run("document.body.dataset.best") == "7":
                break
        tab.wait("document.body.dataset.best === '7'", 5)
        assert tab.run("document.querySelectorAll('#plot polyline').length") == 1
        pictures = Path(os.environ.get("BROWSER_PICTURES", tmp_path))
        for width in (1024, 390):
            tab.picture(pictures / f"browser_{width}.png", width)
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth"), width
        content = base64.b64decode(tab.run(BYTES))
        shown = tab.run("[...document.querySelectorAll('#bars span:last-child')].map((each) => each.textContent)")
        drawn = np.array(tab.run("[...pixelsOfPad()]"), np.float32).reshape(1, 1, 8, 8)
    (tmp_path / "state.safetensors").write_bytes(content)
    training = runner.Training.load(site / "model", state=tmp_path / "state.safetensors")
    assert training.updates == before + 8 * round_number
    np.testing.assert_allclose(
        np.round(100 * training.predict([drawn])["output"][0]), [int(text.split()[0]) for text in shown], atol=1
    )
    sys.path.insert(0, str(EXAMPLE))
    import main

    module = main.Digits()
    load_training_state(module, tmp_path / "state.safetensors")
    with torch.no_grad():
        assert module.eval()(torch.from_numpy(drawn)).argmax().item() == 7


def test_the_page_says_what_is_wrong(url: str) -> None:
    with page(url) as tab:
        tab.wait("document.body?.dataset.ready")
        tab.run("teachDigit(3)")
        assert tab.run("document.querySelector('#status').textContent") == "Draw a digit first."
        tab.run(
            "(() => { const list = new DataTransfer(); list.items.add(new File([new Uint8Array(99)], 'x.safetensors'));"
            " const input = document.querySelector('#open'); input.files = list.files;"
            " input.dispatchEvent(new Event('change')); })()"
        )
        tab.wait("document.querySelector('#status').classList.contains('error')")
        assert "no safetensors file, or it is damaged" in tab.run("document.querySelector('#status').textContent")


# trains on the batches of batches.safetensors, called 0/field, 1/field, ...; returns losses, state and where it was
TRAINS = """(async () => {
  const ort = await import('/onnxruntime/ort.min.mjs'), { Training, readState } = await import('/model/training.mjs');
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = 'error';
  const sessionOptions = { executionProviders: ['%s'], logSeverityLevel: 3 };
  const training = await Training.load('/model', { ort, sessionOptions });
  const steps = [], losses = [];
  const [values] = await readState(await (await fetch('/batches.safetensors')).arrayBuffer());
  for (const [key, { dtype, data, shape }] of Object.entries(values)) {
    const [number, field] = key.split('/');
    (steps[number] ??= {})[field] = new ort.Tensor(dtype, data, shape);
  }
  for (const batch of steps) losses.push((await training.step(batch)).loss);
  const places = Object.values(training.state).filter(({ type }) => type === 'float32').map(({ location }) => location);
  await training.evaluate(steps[0]);
  const bytes = btoa(Array.from(await training.bytes(), (byte) => String.fromCharCode(byte)).join(''));
  return { losses, bytes, places: [...new Set(places)], again: (await training.step(steps[0], { lr: 0 })).loss };
})()"""


@pytest.mark.parametrize(
    ("kind", "provider"),  # a GPU in software takes minutes for a transformer
    [(DigitsCNN, "wasm"), (TabularMLP, "wasm"), (SmallGPT, "wasm"), (DigitsCNN, "webgpu"), (TabularMLP, "webgpu")],
)
def test_round_trip(kind: Any, provider: str, tmp_path: Path) -> None:
    """From PyTorch into a page and back: as if it had never left; on a GPU the state stays there between steps."""
    torch.manual_seed(0)
    module, losses = kind(), {"here": [], "away": []}
    never_left = copy.deepcopy(module)
    batches = [kind.batch(16 - seed % 3, seed) for seed in range(18)]

    def trained(module: Any, name: str, batches: list[Any], **arguments: Any) -> Any:
        module.on_train_batch_end = lambda outputs, *_: losses[name].append(outputs["loss"].item())
        return fit(module, batches, **arguments)

    trained(never_left, "here", batches)
    optimizer = trained(module, "away", batches[:6]).optimizers[0]
    export_training(module, batches[0], tmp_path / "model", optimizer=optimizer)
    arrays = {
        f"{number}/{name}": value.numpy()
        for number, batch in enumerate(batches[6:12])
        for name, value in fields_of(batch).items()
    }
    runner.write_state(tmp_path / "batches.safetensors", arrays, {})
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "onnxruntime").symlink_to(RUNTIME)
    with served(tmp_path) as address, page(f"{address}/index.html", SOFTWARE_GPU) as tab:
        tab.wait("document.querySelectorAll('p').length")
        found = tab.run(TRAINS % provider)
    assert found["places"] == ["gpu-buffer" if provider == "webgpu" else "cpu"]
    losses["away"] += found["losses"]
    (tmp_path / "back.safetensors").write_bytes(base64.b64decode(found["bytes"]))
    back = kind()
    path = load_training_state(back, tmp_path / "back.safetensors").checkpoint(tmp_path / "back.ckpt")
    assert back.loss(batches[6]).item() == pytest.approx(found["again"], rel=1e-4)
    trained(back, "away", batches[12:], ckpt_path=str(path))
    np.testing.assert_allclose(losses["away"], losses["here"], rtol=1e-4)
    assert_same(never_left, {name: value.numpy() for name, value in back.state_dict().items()})
