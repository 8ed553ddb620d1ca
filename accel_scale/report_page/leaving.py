"""Writes a run's report however the run ends; a failure to write it never ends the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accel_scale.errors import first_line
from accel_scale.facts.exit_statuses import EXIT_STOPPED
from accel_scale.reporting.run_starts import has_open_start, size_of_starts, write_end
from accel_scale.secrets import mask

if TYPE_CHECKING:
    from accel_scale.starting.recipe_start import RecipeRun

PAGE_NAME = "report.html"


@contextlib.contextmanager
def held_folder(run: RecipeRun) -> Iterator[None]:
    """Lock the output folder of a recipe's run against other runs, and write its report there."""
    folder = run.start.folder
    with folder.taken(is_main=run.is_main), leaves_report(folder.folder, is_main=run.is_main):
        yield


@contextlib.contextmanager
def leaves_report(folder: Path, *, is_main: bool) -> Iterator[None]:
    """Wrap a run: record how it ended and write ``report.html`` into its folder, on one process.

    A run that never reached its first step writes nothing.
    """
    before = size_of_starts(folder)
    try:
        yield
    except BaseException as error:
        if is_main:
            leave_report(folder, error, since=before)
        raise
    if is_main:
        leave_report(folder, None, since=before)


def leave_report(folder: Path, error: BaseException | None, *, since: int = 0) -> None:
    """Record the end and write the report of a run that is about to end with `error`; does nothing if already done.

    Args:
        since: Size of the record of starts when this run began.
    """
    if not has_open_start(folder, since=since):
        return
    path = folder / PAGE_NAME
    with _terminated_later():
        try:
            write_end(folder, error)  # first, because the page's dependencies may be missing
            from accel_scale.report_page.page import render, write_page
            from accel_scale.report_page.reading import read_run

            write_page(render([read_run(folder)]), path)
        except Exception as failure:  # a failed page must not end the run
            why = getattr(failure, "strerror", None) or mask(f"{type(failure).__name__}: {first_line(failure)}")
            line = f"warning: {path} was not written ({why}). Fix: resolve that, then run accel-scale report {folder}."
            print(line, file=sys.stderr, flush=True)


def leave_stopped(folder: str) -> None:
    """`leave_report` for a run stopped by a signal: the launcher ends this process once another has exited."""
    leave_report(Path(folder), SystemExit(EXIT_STOPPED))


@contextlib.contextmanager
def _terminated_later() -> Iterator[None]:
    """Defer SIGTERM from a launcher that is ending all ranks until the page is written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)
