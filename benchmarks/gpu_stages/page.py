"""The results page of gpu_check.py, and how each stage ended."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_stages import Stage
from gpu_stages.box import NEEDS, WRONG, read_rows


@dataclass(frozen=True)
class Ending:
    """How a stage's last start ended.

    Attributes:
        kind: ``ended`` if it finished, ``lacking`` if this machine is too small for it, or ``unfinished``.
        why: Reason on one line.
        seconds: Duration of that start.
        wrong: Number of failed cases.
    """

    kind: str
    why: str
    seconds: float = 0.0
    wrong: int = 0

    @property
    def is_done(self) -> bool:
        """True if the next start skips the stage; one that lacks GPUs is retried."""
        return self.kind == "ended" and not self.wrong

    @property
    def is_fine(self) -> bool:
        """True if nothing failed."""
        return self.kind != "unfinished" and not self.wrong


def write_ending(folder: Path, ending: Ending) -> None:
    """Save the ending for the next start."""
    from accel_scale.reporting.summary import _commit

    folder.mkdir(parents=True, exist_ok=True)
    wrong = sum(row.verdict == WRONG for row in read_rows(folder))
    kept = {**asdict(ending), "wrong": wrong, "commit": _commit()}
    (folder / "ending.json").write_text(json.dumps(kept))


def read_ending(folder: Path) -> Ending | None:
    """The saved ending; None before the first start has ended."""
    path = folder / "ending.json"
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    kept.pop("commit")
    return Ending(**kept)


def write_page(path: Path, stages: Sequence[Stage], out: Path, *, device: str) -> str:
    """Write the page from the saved results, without paths of this machine; returns it."""
    from accel_scale.report_page.figures import without_home
    from accel_scale.reporting.summary import _commit, installed_versions

    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    begun = [stage for stage in stages if (out / stage.name / "ending.json").is_file()]
    lines = [
        f"# `benchmarks/gpu_check.py` on {device}",
        "",
        f"{datetime.date.today().isoformat()}, commit {_commit()}; {versions}.",
        "",
        "| stage | result | seconds |",
        "|---|---|---:|",
        *(
            f"| [{stage.name}](#{stage.name}) | {verdict(out / stage.name)} | {seconds(out, stage)} |"
            for stage in begun
        ),
    ]
    for stage in begun:
        lines += ["", f"## {stage.name}", "", f"{stage.title}.", ""]
        rows = read_rows(out / stage.name)
        if rows:
            lines += ["| case | found | verdict |", "|---|---|---|"]
            lines += [f"| {cell(row.case)} | {cell(row.found)} | {emphasised(row.verdict)} |" for row in rows]
        ending = read_ending(out / stage.name)
        if ending is not None and ending.why:
            lines += ["", cell(ending.why)]
    text = without_home("\n".join(lines) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return text


def verdict(folder: Path) -> str:
    """A stage's verdict: ``7 ok``, ``2 of 9 FAILED``, or why it did not finish."""
    rows, ending = read_rows(folder), read_ending(folder)
    wrong = sum(row.verdict == WRONG for row in rows)
    lacking = sum(row.verdict == NEEDS for row in rows)
    parts = [f"**{wrong} of {len(rows)} FAILED**" if wrong else f"{len(rows) - lacking} ok" if rows else ""]
    parts += [f"{lacking} lack something here"] if lacking else []
    if ending is not None and ending.kind != "ended":
        parts.append(f"**{cell(ending.why)}**" if ending.kind == "unfinished" else ending.why)
    return ", ".join(filter(None, parts))


def seconds(out: Path, stage: Stage) -> str:
    """Seconds of the stage's cases over all starts."""
    return f"{sum(row.seconds for row in read_rows(out / stage.name)):.0f}"


def emphasised(text: str) -> str:
    """Highlight failures; missing requirements are shown as a dash, since the previous cell explains them."""
    return f"**{text}**" if text == WRONG else "–" if text == NEEDS else text


def cell(text: str) -> str:
    """`text` escaped as a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())
