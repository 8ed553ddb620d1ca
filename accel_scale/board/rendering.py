"""Renders parts of the page from templates that escape every value."""

from __future__ import annotations

from pathlib import Path

from accel_scale.errors import ConfigError
from accel_scale.report_page.page import templates_in

_PAGE = Path(__file__).parent / "page"


def filled(template: str, **values: object) -> str:
    """Render a template, named without its extension. Lone surrogates, which cannot be sent, are replaced."""
    return sendable(templates_in(_PAGE).get_template(f"{template}.html.j2").render(**values))


def sendable(text: str) -> str:
    """`text` with ``?`` in place of every character that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def refused(error: ConfigError) -> str:
    """A refused request: the problem, its place, and the fix."""
    from accel_scale.secrets import mask

    return filled("refused", place=error.place, problem=mask(error.problem), fix=mask(error.fix or ""))


def style() -> str:
    """The page's style sheet, used in addition to Gradio's."""
    return (_PAGE / "board.css").read_text(encoding="utf-8")
