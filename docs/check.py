"""Check the documentation: relative links and anchors, the table of settings, and how long it is."""

import dataclasses
import re
import sys
from pathlib import Path

from lightning_ort.config import ORTConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "benchmarks/README.md"]
# words, as `wc -w` counts them
LONGEST_README = 650
LONGEST_DOCUMENTATION = 13_000  # without docs/test_reports


def broken_links(page: Path) -> list[str]:
    """Return a message for each relative link of a page that leads nowhere."""
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    found = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" in target:
            continue
        if not file.exists():
            found.append(f"{page.relative_to(ROOT)}: broken link to {target}")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            found.append(f"{page.relative_to(ROOT)}: no heading for the link to {target}")
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def wrong_options() -> list[str]:
    """Return a message for each difference between the option table and ORTConfig, defaults included."""
    table = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, flags=re.MULTILINE))
    defaults: dict[str, object] = {
        each.name: {} if each.name == "debug" else each.default for each in dataclasses.fields(ORTConfig)
    }
    actual = {name: repr(default).replace("'", '"') for name, default in defaults.items()}
    return [
        f"docs/configuration.md: {name} has default {documented.get(name)}, ORTConfig has {actual.get(name)}"
        for name in sorted({*documented, *actual})
        if documented.get(name) != actual.get(name)
    ]


def too_long() -> list[str]:
    """Return a message for README.md, and for the pages in docs, if they have too many words."""
    limits = {LONGEST_README: [ROOT / "README.md"], LONGEST_DOCUMENTATION: sorted(ROOT.glob("docs/*.md"))}
    found = []
    for limit, pages in limits.items():
        words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
        if words > limit:
            name = "README.md" if len(pages) == 1 else "the pages in docs"
            found.append(f"{name}: {words:,} words, {limit:,} at most")
    return found


def main() -> None:
    """Print what is wrong and exit with an error if anything is."""
    problems = [message for page in PAGES for message in broken_links(page)] + wrong_options() + too_long()
    print("\n".join(problems) or f"{len(PAGES)} pages checked")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
