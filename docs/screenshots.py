"""Make the pictures of the documentation again: ``make screenshots``.

A report at two widths, one in each theme, and the console from the start of a fit to the verdict. Chromium takes the
pictures of the page: ``CHROMIUM`` names it, or it is on the ``PATH``. Look at them before you commit them.
"""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lightning_ort.compiler.report import CompileReport
from lightning_ort.compiler.report.page import render

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
HEIGHTS = {1280: 1750, 390: 2900}
THEMES = {1280: "light", 390: "dark"}
COLUMNS = 100
TRAIN = """
import sys
sys.path.insert(0, "benchmarks")
import logging, warnings
warnings.simplefilter("ignore")
import lightning_ort, zoo
from lightning.pytorch import Trainer, seed_everything
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
from lightning.pytorch.callbacks import TQDMProgressBar
seed_everything(0, verbose=False)
strategy = lightning_ort.ORTStrategy(config={"start": "now", "cache_dir": None, "report": sys.argv[1]})
quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
bar = TQDMProgressBar(refresh_rate=5)
trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=60, callbacks=[bar], **quiet)
print("$ python train.py")
trainer.fit(zoo.SmallGPT())
print("$ python -c 'print(trainer.strategy.report)'")
print(strategy.report)
"""


def train(report: Path) -> str:
    """Train a small GPT in a terminal of its own, and return what that shows in the end."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    # other programs on the machine slow down several threads more than one, and PyTorch's more than ONNX Runtime's
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", TRAIN, str(report)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # Linux: the other end is closed
        pass
    assert process.wait() == 0, shown.decode()
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    # a bar is written over itself
    written = [next((part for part in reversed(line.split("\r")) if part.strip()), "") for line in lines]
    return "\n".join(line for line in written if re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).strip())


def picture(page: Path, name: str, width: int, theme: str) -> None:
    """Take a picture of a page; Chromium's windows have at least 500 pixels, so the page is in a frame of the width."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Install Chromium, or let CHROMIUM name it.")
    frame = page.with_name("frame.html")
    style = f"border: 0; width: {width}px; height: {HEIGHTS[width]}px"
    scheme = f'<meta name="color-scheme" content="{theme}">'
    frame.write_text(f'{scheme}<body style="margin: 0"><iframe src="{page.name}" style="{style}"></iframe>')
    output = IMAGES / f"{name}_{width}_{theme}.png"
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={int(theme == 'light')}", f"--screenshot={output}"]
    command += [f"--window-size={max(width, 500)},{HEIGHTS[width]}", frame.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    crop(output, width)
    print(output.relative_to(ROOT))


def crop(path: Path, width: int) -> None:
    """Cut a picture to the page: its width, and its height up to what is empty."""
    from PIL import Image, ImageChops

    with Image.open(path) as taken:
        image = taken.convert("RGB").crop((0, 0, width, taken.height))
    empty = Image.new("RGB", image.size, image.getpixel((1, 1)))
    *_, bottom = ImageChops.difference(image, empty).getbbox() or (0, 0, 0, image.height)
    image.crop((0, 0, width, min(image.height, bottom + 16))).quantize(64).save(path, optimize=True)


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        shown = train(report)
        found = CompileReport.from_dict(json.loads(report.read_text(encoding="utf-8")))
        (folder / "report.html").write_text(render(found, report.name), encoding="utf-8")
        for width, theme in THEMES.items():
            picture(folder / "report.html", "report", width, theme)
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown))
    console.save_svg(os.fspath(IMAGES / "console.svg"), title="lightning-ort")
    print("docs/images/console.svg")


if __name__ == "__main__":
    main()
