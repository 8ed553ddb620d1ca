"""The "Runs" tab: live runs of a folder, and a button that stops a run after it has saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.board.curves import pictures_of
from accel_scale.board.environment import served_folder
from accel_scale.board.events import listen
from accel_scale.board.rendering import filled, refused
from accel_scale.board.runs import (
    folder_of,
    overview_row,
    progress_of,
    records_of,
    runs_below,
    shown_stamp,
    strategy_of,
)
from accel_scale.board.stopping import RunProcess, process_of, stop
from accel_scale.errors import ConfigError
from accel_scale.report_page.figures import key_figures, state_of, without_home
from accel_scale.report_page.leaving import PAGE_NAME
from accel_scale.report_page.page import event_row, render, start_rows, write_page

if TYPE_CHECKING:
    from gradio import Tab

_SECONDS = 2.0
_MOST_EVENTS = 50


def add_runs_tab(tab: Tab, others: Sequence[Tab], root: Path, *, can_stop: bool) -> None:
    """Lay out `tab`, which is being built; it refreshes every two seconds unless one of `others` is shown."""
    import gradio as gr

    view = RunsView(root)
    overview = gr.HTML(elem_id="runs-overview")
    with gr.Row(elem_classes="b-controls"):
        chosen = gr.Dropdown([], label="Run", elem_id="runs-chosen", interactive=True)
        make = gr.Button("Make its report", elem_id="runs-report")
        ask = gr.Button("Stop this run", variant="stop", elem_id="runs-stop", visible=can_stop, interactive=False)
    file = gr.DownloadButton("Download report.html", elem_id="runs-file", visible=False)
    with gr.Group(visible=False, elem_id="runs-confirm") as confirm:
        question = gr.HTML(elem_id="runs-question")
        with gr.Row():
            yes = gr.Button("Save and stop", variant="stop", elem_id="runs-yes")
            no = gr.Button("Keep it running", elem_id="runs-no")
    said = gr.HTML(elem_id="runs-said")
    details = gr.HTML(elem_id="runs-details")
    seen, asked = gr.State(None), gr.State(None)
    clock = gr.Timer(_SECONDS, active=False)

    shown = [overview, chosen, details, ask, seen]
    listen([tab.select], view.first, [chosen], [*shown, clock], queue="runs")
    listen([clock.tick], view.again, [chosen, seen], shown, queue="runs", is_quiet=True)
    listen([other.select for other in others], lambda: gr.Timer(active=False), [], [clock], queue="runs")
    listen([chosen.input], view.chosen, [chosen], [*shown, file, confirm, said], queue="runs")
    listen([make.click], view.report, [chosen], [file, said], queue="runs")
    if can_stop:
        listen([ask.click], view.asked, [chosen], [confirm, question, asked, said], queue="runs")
        listen([no.click], view.kept, [], [confirm, asked, said], queue="runs")
        listen([yes.click], view.stopped, [asked], [confirm, asked, said], queue="runs")


class RunsView:
    """Handlers of the tab for the runs in a folder.

    Args:
        root: The folder that holds the runs.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def first(self, name: str | None) -> list[object]:
        """Show everything and start the clock."""
        import gradio as gr

        return [*self.again(name, None), gr.Timer(active=True)]

    def again(self, name: str | None, seen: object) -> list[object]:
        """Update the parts that have changed since `seen` was returned."""
        import gradio as gr

        names = runs_below(self._root)
        name = name if name in names else (names[0] if names else None)
        rows = [overview_row(self._root, each) for each in names]
        now = repr((name, [(each, shown_stamp(self._root / each)) for each in names]))
        if now == seen:
            return [gr.skip()] * 5
        overview = filled("runs", rows=rows, folder=without_home(str(self._root)))
        stop = gr.Button(interactive=any(row["run"] == name and row["how"] == "running" for row in rows))
        return [overview, gr.Dropdown(choices=names, value=name), self._details(name), stop, now]

    def chosen(self, name: str | None) -> list[object]:
        """Switch to another run and clear the messages about the previous one."""
        import gradio as gr

        return [*self.again(name, None), gr.DownloadButton(visible=False), gr.Group(visible=False), ""]

    def report(self, name: str | None) -> list[object]:
        """The page that `accel-scale report` writes, as a file to download."""
        import gradio as gr

        try:
            folder = folder_of(self._root, name or "")
            target = served_folder() / "reports" / folder.relative_to(self._root) / PAGE_NAME
            target.parent.mkdir(parents=True, exist_ok=True)
            write_page(render([records_of(folder)]), target)
        except ConfigError as error:
            return [gr.DownloadButton(visible=False), refused(error)]
        return [gr.DownloadButton(value=str(target), visible=True), ""]

    def asked(self, name: str | None) -> list[object]:
        """Ask for confirmation to stop a run, if it can be stopped."""
        import gradio as gr

        try:
            process = process_of(folder_of(self._root, name or ""))
        except ConfigError as error:
            return [gr.Group(visible=False), "", None, refused(error)]
        question = filled("stop", name=name, pid=process.pid)
        return [gr.Group(visible=True), question, (name, process), ""]

    def kept(self) -> list[object]:
        """Close the confirmation without stopping the run."""
        import gradio as gr

        return [gr.Group(visible=False), None, ""]

    def stopped(self, asked: tuple[str, RunProcess] | None) -> list[object]:
        """Send the signal, but only to the process that the confirmation was about."""
        import gradio as gr

        if asked is None:
            return [gr.Group(visible=False), None, ""]
        name, process = asked
        try:
            stop(folder_of(self._root, name), process)
            said = filled("sentence", text=f"{name} was asked to save and stop: its state will say when it has.")
        except ConfigError as error:
            said = refused(error)
        return [gr.Group(visible=False), None, said]

    def _details(self, name: str | None) -> str:
        if name is None:
            return ""
        try:
            run = records_of(self._root / name)
        except ConfigError as error:
            return refused(error)
        how, state = state_of(run)
        return filled(
            "run",
            name=name,
            how=how,
            state=state,
            what=strategy_of(run),
            progress=progress_of(run),
            key=key_figures(run),
            pictures=pictures_of(run),
            events=[event_row(event) for event in run.events[-_MOST_EVENTS:]],
            num_events=len(run.events),
            starts=start_rows(run),
            notes=[without_home(note) for note in run.notes],
        )
