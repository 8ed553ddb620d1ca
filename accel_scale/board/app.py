"""The page as a Gradio app: tabs, look and server."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.board.environment import LOCAL_NAMES, prepare
from accel_scale.board.guarding import OnlyThePage
from accel_scale.board.rendering import sendable, style
from accel_scale.board.uploads import MOST_BYTES
from accel_scale.errors import ConfigError, first_line

if TYPE_CHECKING:
    from gradio import Blocks

TITLE = "accel-scale board"
_WAITING_CLICKS = 100
_FONTS = ["system-ui", "sans-serif"]  # the reader's own system fonts; none is loaded
# Gradio's light greys are too light to read.
_CONTRAST = {
    "block_info_text_color": "*neutral_600",
    "body_text_color_subdued": "*neutral_600",
    "block_label_text_color": "*neutral_700",
    "input_placeholder_color": "*neutral_600",
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_cancel_background_fill": "*neutral_100",
}
_SECONDS_KEPT = 3600


@dataclass(frozen=True)
class BoardSettings:
    """Settings of the page.

    Attributes:
        runs: The folder whose runs are shown; None leaves the tab out.
        can_stop: Whether a run can be stopped from the page.
    """

    runs: Path | None = None
    can_stop: bool = False


def build_app(settings: BoardSettings) -> Blocks:
    """Build the page without starting a server."""
    prepare()
    import gradio as gr

    from accel_scale.board.doctor_tab import add_doctor_tab
    from accel_scale.board.plan_tab import add_plan_tab
    from accel_scale.board.runs_tab import add_runs_tab

    with _board_class()(title=TITLE, analytics_enabled=False, delete_cache=(600, _SECONDS_KEPT)) as page:
        gr.HTML(f"<h1>{TITLE}</h1>")
        with gr.Tabs():
            with gr.Tab("Plan", id="plan") as plan:
                add_plan_tab(page)
            with gr.Tab("Doctor", id="doctor") as doctor:
                add_doctor_tab()
            if settings.runs is not None:
                with gr.Tab("Runs", id="runs") as runs:
                    add_runs_tab(runs, [plan, doctor], settings.runs, can_stop=settings.can_stop)
    return page


def start(
    page: Blocks, *, host: str = "127.0.0.1", port: int | None = None, hosts: Sequence[str] = LOCAL_NAMES
) -> str:
    """Serve `page` in the background; returns its address.

    Args:
        host: Interface to listen on.
        port: Port to listen on; None takes the first free one from 7860 on.
        hosts: Host names that requests may use for this server; empty allows any.

    Raises:
        ConfigError: if the port is taken, or the interface does not belong to this machine.
    """
    import gradio as gr
    from starlette.middleware import Middleware

    theme = gr.themes.Default(primary_hue="blue", font=_FONTS, font_mono=["ui-monospace", "monospace"]).set(
        **_CONTRAST
    )
    page.queue(max_size=_WAITING_CLICKS)
    try:
        _, address, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=True,
            ssr_mode=False,
            enable_monitoring=False,
            mcp_server=False,
            footer_links=[],
            max_file_size=MOST_BYTES,
            allowed_paths=[],
            app_kwargs={"middleware": [Middleware(OnlyThePage, hosts=hosts)]},
            theme=theme,
            css=style(),
        )
    except OSError as error:
        place = "--host and --port" if port is None else f"--port {port}"
        raise ConfigError(
            f"nothing can be served there ({first_line(error)}).", place=place, fix="name another."
        ) from None
    return str(address)


def wait(page: Blocks) -> None:
    """Block until Ctrl-C or SIGTERM, then close the page."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        page.close(verbose=False)


def _board_class() -> type[Blocks]:
    import gradio as gr

    class Board(gr.Blocks):
        """A page whose server reports a failed request in one line with the location of the error. Any client can send
        a malformed request, so no traceback is printed."""

        async def process_api(self, *args: object, **kwargs: object) -> dict[str, object]:
            try:
                return await super().process_api(*args, **kwargs)  # type: ignore[arg-type]
            except gr.Error as error:
                raise gr.Error(sendable(error.message), print_exception=False) from None
            except Exception as error:
                from accel_scale.secrets import mask

                where = traceback.extract_tb(error.__traceback__)[-1]
                line = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {first_line(error)}"
                print(f"accel-scale board: a request was not answered ({mask(line)}).", file=sys.stderr, flush=True)
                raise gr.Error("This cannot be answered.", print_exception=False) from None

    return Board
