"""Make the table of :mod:`lightning_ort.compat.lightning_sources` from wheels of Lightning.

``python -m tests.compat.lightning_releases FOLDER`` reads each wheel of ``lightning`` and ``pytorch-lightning`` there.
"""

import ast
import sys
import zipfile
from pathlib import Path

from lightning_ort.compat.lightning_sources import KNOWN, digest, place_of

PACKAGES = {"lightning": "lightning/pytorch", "pytorch_lightning": "pytorch_lightning"}


def digests_of(wheel: Path) -> dict[str, str]:
    """Return the digest of each function of a release."""
    folder = PACKAGES[wheel.name.partition("-")[0]]
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in KNOWN:
            module, owner, function = place_of(name)
            text = archive.read(f"{folder}/{module.replace('.', '/')}.py").decode()
            lines, tree = text.splitlines(keepends=True), ast.parse(text)
            owners = {"": tree, **{node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}}
            # the first one: another is the setter of a property
            node = next(x for x in owners[owner].body if isinstance(x, ast.FunctionDef) and x.name == function)
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[name] = digest(lines, first, folder.replace("/", "."))
    return found


def main() -> None:
    """Print the lines of the table."""
    known: dict[str, set[str]] = {}
    for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
        for name, value in digests_of(wheel).items():
            known.setdefault(name, set()).add(value)
    for name, values in known.items():
        print(name, *sorted(values))


if __name__ == "__main__":
    main()
