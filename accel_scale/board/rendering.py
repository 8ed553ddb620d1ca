"""Parts of the page from templates that escape everything that is put into them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import ConfigError
from accel_scale.report_page.figures import formatted

if TYPE_CHECKING:
    from jinja2 import Environment

_PAGE = Path(__file__).parent / "page"


def filled(template: str, **values: object) -> str:
    """A part of the page; `template` without its ending. Halves of characters, which cannot be sent, are replaced."""
    return sendable(_environment().get_template(f"{template}.html.j2").render(**values))


def sendable(text: str) -> str:
    """`text` with a ``?`` in the place of what UTF-8 has no form for."""
    return text.encode(errors="replace").decode()


def refused(error: ConfigError) -> str:
    """What cannot be honoured, where, and what to change."""
    from accel_scale.secrets import mask

    return filled("refused", place=error.place, problem=mask(error.problem), fix=mask(error.fix or ""))


def style() -> str:
    """The page's style sheet, beside Gradio's."""
    return (_PAGE / "board.css").read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["formatted"] = formatted
    return found
