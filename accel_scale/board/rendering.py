"""Parts of the page from templates that escape everything that is put into them."""

from __future__ import annotations

from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.report_page.page import templates_in

_PAGE = Path(__file__).parent / "page"


def filled(template: str, **values: object) -> str:
    """A part of the page; `template` without its ending. Halves of characters, which cannot be sent, are replaced."""
    return sendable(templates_in(_PAGE).get_template(f"{template}.html.j2").render(**values))


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
