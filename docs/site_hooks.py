"""Hooks of the documentation site: pages that stand outside of docs/ are part of it, with their links rewritten."""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "plugins/example_backend/README.md": "example-backend.md",
}
"""Where pages of the repository stand in the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/."""
    root = posixpath.dirname(config["docs_dir"])
    for path, page in OUTSIDE.items():
        with open(posixpath.join(root, path), encoding="utf-8") as file:
            files.append(File.generated(config, page, content=file.read()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site; links to source files become their path as text."""
    sources = {site: path for path, site in OUTSIDE.items()}
    path = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link.group(1), link.group(2), link.group(3) or ""
        if target.startswith(("https://", "http://", "mailto:")) or not target:
            return link.group(0)
        repository_path = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        site_path = OUTSIDE.get(repository_path)
        if site_path is None and repository_path.startswith("docs/"):
            site_path = repository_path.removeprefix("docs/")
        if site_path is None:
            return f"{text} (`{repository_path}`)"
        return f"[{text}]({posixpath.relpath(site_path, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s#]*)(#[^)\s]+)?\)", rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show names that docstrings mark as Sphinx does, such as :class:`~gtrain.Store`, as code."""
    return re.sub(r":(?:class|func|meth|mod|data|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", html)
