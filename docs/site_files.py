"""Hook of MkDocs: what the pages link to outside of ``docs/`` belongs to the site too.

The pages' links are those of the repository, where ``docs/`` is a folder beside ``examples/`` and ``benchmarks/``. In
the site the pages of ``docs/`` are at the root, and the files that any page links to keep their places.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]+)?\)")


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site; a README.md at its root would replace index.md."""
    return "readme.md" if path == "README.md" else path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Return where a file of the site is in the repository."""
    if path == "readme.md":
        return "README.md"
    return f"docs/{path}" if (ROOT / "docs" / path).exists() else path


def linked(page: str, target: str) -> str | None:
    """Return the file of the repository that a page's link leads to; ``None`` if it leads out of it."""
    return None if "://" in target else posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files, and those to which they link in turn."""
    waiting = [repository_path(file.src_uri) for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for match in LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
            path = linked(page, match[1])
            if path and (ROOT / path).is_file() and not files.get_file_from_path(site_path(path)):
                files.append(File.generated(config, site_path(path), abs_src_path=os.fspath(ROOT / path)))
                if path.endswith(".md"):
                    waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the repository's links into the site's; a folder has no page, so its name alone stays."""
    here = repository_path(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        path = linked(here, match[2])
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return match[1]
        target = posixpath.relpath(site_path(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"[{match[1]}]({target}{match[3] or ''})"

    if here == "README.md":  # pictures in HTML, which MkDocs leaves alone; the page is a folder of its own
        markdown = markdown.replace('="docs/images/', '="../images/')
    return re.sub(r"\[([^\]]*)" + LINK.pattern, replace, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the marks of docstrings, which are for Python's own tools, into HTML on the page that is made of them."""
    html = re.sub(r":\w+:<code>~?(?:[\w.]+\.)?(\w+(?:\(\))?)</code>", r"<code>\1</code>", html)
    return html.replace("Example::", "Example:")
