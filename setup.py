"""What ``pyproject.toml`` cannot say: on PyPI, README.md's links have to be whole."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/lightning-ort/lightning-ort/blob/main/"

setup(
    long_description=re.sub(r"\]\((?!\w+:|#)", rf"]({REPOSITORY}", Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
