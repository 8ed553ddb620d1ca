"""Compare claims about training at scale with this project's figures, and show each technique's costs and savings.

    python benchmarks/techniques.py                          # every row that is missing, stage by stage
    python benchmarks/techniques.py --stages cpu --again     # these stages, rows that exist too
    python benchmarks/techniques.py --page                   # only writes docs/techniques.md from the committed rows

Rows are saved to benchmarks/results/techniques.json as soon as they exist. An interrupted run continues where it
stopped, and a partial page is valid and marks missing rows. Every figure is arithmetic, predicted by the planner, or
measured; measured ones come from this machine, and times are ratios of turns in one run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCHMARKS))

from technique_page import page  # noqa: E402
from technique_rows import Stage  # noqa: E402

from accel_scale.reporting.summary import installed_versions  # noqa: E402

RESULTS = BENCHMARKS / "results" / "techniques.json"
PAGE = BENCHMARKS.parent / "docs" / "techniques.md"
STAGES = ("arithmetic", "predicted", "exact", "search", "cpu", "quality", "ranks")


def stages(names: Iterable[str] = STAGES) -> dict[str, Stage]:
    """The stages by name; a stage's libraries are imported when its work runs."""
    return {name: importlib.import_module(f"technique_{name}").STAGE for name in names}


def read_rows(path: Path = RESULTS) -> dict[str, Any]:
    """Results so far, by row."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def run(stage: Stage, rows: Mapping[str, Any], *, again: bool, save: Callable[[dict[str, Any]], None]) -> list[str]:
    """Do the work of `stage` whose rows are missing, or all of it, and pass the rows of each piece to `save`.

    Returns:
        One line for each failure; the rows of failed work are unchanged.
    """
    failed = []
    for work in stage.works:
        if not again and all(name in rows for name in work.rows):
            continue
        print(f"{stage.name}: {', '.join(work.rows)}", flush=True)
        try:
            found = work.run()
        except RuntimeError as error:  # a failed launch; others may succeed
            failed.append(f"{', '.join(work.rows)}: {error}")
            continue
        if set(found) - set(work.rows):
            raise ValueError(f"{stage.name} gave rows that it does not name: {set(found) - set(work.rows)}")
        where = _where() if stage.kind == "measured" else {}
        save({name: {"kind": stage.kind, "values": _rounded(values), **where} for name, values in found.items()})
    return failed


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Round values to six digits, enough for readers and the same on every machine."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}


def _where() -> dict[str, Any]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = installed_versions()
    return {
        "date": today,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": round(os.getloadavg()[0], 1),
        "versions": {name: versions[name] for name in ("torch", "transformers", "accelerate") if name in versions},
    }


def main() -> int:
    """Fill in missing rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--again", action="store_true", help="rows that exist too")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()

    def save(found: dict[str, Any]) -> None:
        rows = read_rows() | found  # reread, since another run may fill in other rows
        RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(stages(), rows), encoding="utf-8")

    failed = []
    if not options.page:
        for stage in stages(options.stages or STAGES).values():
            failed += run(stage, read_rows(), again=options.again, save=save)
    save({})
    print("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
