"""How parts of the page react to each other: never through an interface for other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradio.components import Component
    from gradio.layouts import Group


def listen(
    triggers: Sequence[object],
    answer: Callable[..., object],
    inputs: Sequence[Component],
    outputs: Sequence[Component | Group],
    *,
    queue: str,
    is_quiet: bool = False,
) -> None:
    """Call `answer` with the values of `inputs` at any of `triggers`, and give what it returns to `outputs`.

    Args:
        queue: Of all that share it, one is answered at a time.
        is_quiet: Whether nothing shows that an answer is being waited for.
    """
    import gradio as gr

    gr.on(
        list(triggers),
        answer,
        list(inputs),
        list(outputs),
        concurrency_id=queue,
        concurrency_limit=1,
        show_progress="hidden" if is_quiet else "full",
        api_visibility="private",
    )
