"""`accel-scale report`: rebuilds a run's page from its folder, or shows several runs side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = (
    "Write report.html for a run again, also for one that is running or was killed, or one page that compares several "
    "runs: what differs in their settings, their curves, what they came to. The page loads nothing and sends nothing."
)
_COMPARISON = "comparison.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the runs and the output file."""
    parser.description = DESCRIPTION
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"where to. Default: report.html in the run's folder; {_COMPARISON} here",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, print its path, and warn about anything that could not be read."""
    from accel_scale.errors import ConfigError, first_line
    from accel_scale.report_page.leaving import PAGE_NAME
    from accel_scale.report_page.page import render, write_page
    from accel_scale.report_page.reading import read_run
    from accel_scale.units import format_bytes

    runs = [read_run(folder) for folder in dict.fromkeys(args.runs)]
    default = Path(args.runs[0]) / PAGE_NAME if len(runs) == 1 else Path(_COMPARISON)
    path = default if args.output is None else Path(args.output)
    refuse_other_file(path)
    for note in (note for each in runs for note in each.notes):
        print(f"warning: {note}", file=sys.stderr)
    try:
        size = write_page(render(runs), path)
    except OSError as error:
        raise ConfigError(
            f"cannot be written ({error.strerror or first_line(error)}).", place=str(path), fix="name another file."
        ) from None
    print(f"written  {path}: {format_bytes(size)}")
    return 0


def refuse_other_file(path: Path) -> None:
    """Refuse to overwrite a file that is not a report page.

    Raises:
        ConfigError: if `path` is such a file or a folder.
    """
    from accel_scale.errors import ConfigError
    from accel_scale.report_page.page import GENERATOR

    if path.is_dir():
        raise ConfigError("is a folder.", place=str(path), fix="name a file, like comparison.html.")
    if path.is_file():
        with open(path, "rb") as file:
            if GENERATOR.encode() not in file.read(1000):
                raise ConfigError("is not a page of this command.", place=str(path), fix="name another file.")
