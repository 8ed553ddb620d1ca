"""Hooks of the documentation site (mkdocs.yml): links that leave docs/, and Markdown that a forge reads more freely.

The pages are written for a forge, where `../benchmarks/results/x.md` leads to a file of the repository. On the site
such a link leads to the repository where `repo_url` is set in mkdocs.yml, and otherwise to a copy below `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"  # folder of the site with copies of files outside docs/
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_NAMED_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+:|//|#")
_ITEM = re.compile(r"( *)(?:[-*+]|\d+\.) ")
_PUBLIC_NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
_FENCE = re.compile(r" *(```|~~~)")


def linked_file(target: str, source: str) -> tuple[str, str] | None:
    """``(path, fragment)`` of a link in the file `source`, both paths from the root; None where it is no such link."""
    if _ELSEWHERE.match(target):
        return None
    path, _, fragment = target.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), fragment


def place_on_site(path: str) -> str:
    """Where a file of the repository is on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"


def site_link(target: str, source: str, repo_url: str | None) -> str:
    """What a link of the file `source` is on the site; `source` is its path from the root."""
    linked = linked_file(target, source)
    if linked is None:
        return target
    path, fragment = linked
    if repo_url and not path.startswith("docs/"):
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        link = f"{repo_url.rstrip('/')}/{kind}/main/{path}"
    else:
        link = posixpath.relpath(place_on_site(path), posixpath.dirname(place_on_site(source)) or ".")
    return f"{link}#{fragment}" if fragment else link


def nowhere(target: str, source: str, repo_url: str | None) -> bool:
    """Whether a link leads to a folder that the site does not have: its name stays, without the link."""
    linked = linked_file(target, source)
    return linked is not None and not repo_url and (ROOT / linked[0]).is_dir()


def for_site(markdown: str, source: str, repo_url: str | None) -> str:
    """A page of a forge as Python-Markdown needs it: links of the site, lists and tables after an empty line.

    A nested list is indented by four spaces. Code blocks are left alone.
    """
    lines: list[str] = []
    fence: str | None = None
    block = ""  # "list" or "table" from its first line to the next empty one
    for line in markdown.splitlines():
        mark = _FENCE.match(line)
        if mark and fence in (None, mark[1]):
            fence = mark[1] if fence is None else None
        elif fence is None:
            item = _ITEM.match(line)
            kind = "list" if item else "table" if line.startswith("|") else block
            if not line.strip():
                kind = ""
            elif kind != block and lines and lines[-1].strip():
                lines.append("")
            block = kind
            if item and len(item[1]) in (2, 3):
                line = "    " + line.lstrip()
            line = _NAMED_LINK.sub(lambda found: found[1] if nowhere(found[2], source, repo_url) else found[0], line)
            line = _LINK.sub(lambda found: site_link(found[1], source, repo_url), line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def linked_outside(pages: dict[str, str]) -> Iterator[str]:
    """Files outside docs/ that pages link to, and that those link to; `pages` are paths from the root and texts."""
    todo, seen = list(pages.items()), set(pages)
    while todo:
        source, text = todo.pop()
        for target in _LINK.findall(text):
            linked = linked_file(target, source)
            if linked is None or linked[0] in seen or not (ROOT / linked[0]).is_file():
                continue
            seen.add(linked[0])
            if not linked[0].startswith("docs/"):
                yield linked[0]
                if linked[0].endswith(".md"):
                    todo.append((linked[0], (ROOT / linked[0]).read_text(encoding="utf-8")))


def _path(src_uri: str) -> str:
    """The repository's path of a file of the site."""
    inside = PurePosixPath(src_uri)
    return str(inside.relative_to(COPIES)) if inside.parts[0] == COPIES else f"docs/{src_uri}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add copies of the files that pages link to, where the repository's address is not known."""
    from mkdocs.structure.files import File, InclusionLevel

    if not config.repo_url:
        pages = {_path(file.src_uri): file.content_string for file in files.documentation_pages()}
        for path in linked_outside(pages):
            copy = File.generated(
                config, place_on_site(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(copy)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Every page, the copies too; the page of public names gets what mkdocstrings reads in their docstrings."""
    if page.file.src_uri == "api.md":
        directives = [f"::: accel_scale.{name}" for name in _PUBLIC_NAME.findall(markdown)]
        markdown = "\n\n".join([markdown, "## Signatures", *directives])
    return for_site(markdown, _path(page.file.src_uri), config.repo_url)
