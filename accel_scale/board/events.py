"""Event wiring between parts of the page; no handler is exposed as an API to other programs."""

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
    """Call `answer` with the values of `inputs` on any of `triggers`, and write its result to `outputs`.

    During an answer, the latest event waits and is answered next; Gradio would drop it by default.

    Args:
        queue: Events that share a queue are handled one at a time.
        is_quiet: Whether to hide the progress indicator.
    """
    import gradio as gr

    gr.on(
        list(triggers),
        answer,
        list(inputs),
        list(outputs),
        concurrency_id=queue,
        concurrency_limit=1,
        trigger_mode="always_last",
        show_progress="hidden" if is_quiet else "full",
        api_visibility="private",
    )
