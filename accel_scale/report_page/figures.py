"""A run's figures for readers: results, settings and how it ended."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accel_scale.report_page.reading import RunRecords, listed, number, table
from accel_scale.reporting.tables import format_count, format_seconds
from accel_scale.units import format_bytes, three_digits

ENDS = {
    "finished": "finished",
    "stopped": "stopped by a signal",
    "guard": "stopped by the guard",
    "interrupted": "interrupted",
    "error": "ended with an error",
    "running": "running",
    "killed": "ended without a word",
    "unknown": "no record of its end",
}
_WITH_REASON = ("error", "guard")  # ends shown with their reason
_INSTALLED = str(Path(__file__).resolve().parents[2]) + "/"
_LONGEST_VALUE = 600  # characters
# Different in every run of any kind.
_OWN_NAMES = frozenset({"output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "resume"})


def state_of(run: RunRecords) -> tuple[str, str]:
    """How a run ended: a key of `ENDS`, and a description with the reason if it failed."""
    words, why = ENDS.get(run.how, run.how), run.starts[-1].why if run.starts else ""
    how = run.how if run.how in ENDS else "unknown"
    return how, f"{words}: {why}" if why and how in _WITH_REASON else words


@dataclass(frozen=True)
class Setting:
    """One setting across all runs of a page.

    Attributes:
        name: Name of the flag.
        values: One value per run, as text; empty if a run does not have the setting.
        origin: Where the first run that records an origin got its value from.
        kind: ``given``, ``derived`` or ``default``.
    """

    name: str
    values: tuple[str, ...]
    origin: str
    kind: str

    @property
    def differs(self) -> bool:
        """True if the runs have different values."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class AnsweredSample:
    """A held-out question with the model's answers before and after training; None where it was not asked."""

    task: str
    question: str
    expected: str
    before: tuple[str, bool] | None
    after: tuple[str, bool] | None


def formatted(value: float, unit: str) -> str:
    """`value` as readable text; `unit` is ``bytes``, ``seconds``, ``share``, ``rate`` or ``number``."""
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value) if value >= 1 else f"{three_digits(value * 1000)} ms"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "rate":
        return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}"


def key_figures(run: RunRecords) -> dict[str, str]:
    """The run's main results; anything not measured is left out."""
    summary, series = run.summary, run.series
    found: dict[str, str | None] = {
        "Loss": _change(series.get("loss"), "number"),
        "Validation loss": _change(series.get("eval_loss"), "number"),
        "Exact match": _match(table(summary.get("exact_match"))),
        "Reward": _change(series.get("reward"), "number"),
        "Pairs preferred": _change(series.get("rewards/accuracies"), "share"),
        "Speed": _unit(summary.get("tokens_per_second"), "{} tokens/s", "rate") or _middle(run, "tokens_per_second"),
        "MFU": _unit(summary.get("mfu"), "{}", "share"),
        "Waiting for data": _unit(summary.get("data_wait_ratio"), "{} of the time", "share"),
        "Peak memory": _memory(summary),
        "Time": _unit(summary.get("seconds"), "{}", "seconds"),
        "Stopped early": _stop(summary.get("stopped_by")),
        "Step time": _step_time(run),
        "Steps": f"{number(summary.get('steps')) or run.last_step:,.0f}",
        "Tokens": _count(summary.get("tokens")),
        "Guard events": str(len(run.events)) if run.events else None,
        "Restarts": str(len(run.starts) - 1) if len(run.starts) > 1 else None,
    }
    return {name: text for name, text in found.items() if text is not None}


def facts_of(run: RunRecords) -> dict[str, str]:
    """Model, data, strategy and machine of the run."""
    summary, values = run.summary, table(run.summary.get("settings"))
    counted, machine = table(summary.get("parameters")), table(summary.get("machine"))
    total, trained = number(counted.get("total")), number(counted.get("trainable"))
    size = f"{format_count(total)} parameters" if total else None
    if total and trained is not None and trained != total:
        size = f"{size}, {format_count(trained)} of them trained"
    memory = number(machine.get("host_memory_bytes"))
    devices = [str(name) for name in listed(machine.get("devices"))]
    ranks = number(summary.get("world_size"))
    found: dict[str, object] = {
        "recipe": summary.get("recipe"),
        "model": values.get("model_name_or_path"),
        "size": size,
        "data": values.get("dataset_name") or values.get("data") or values.get("dataset_mixture"),
        "strategy": summary.get("strategy"),
        "ranks": f"{ranks:,.0f}" + (" on CPU processes, a rehearsal" if summary.get("rehearsal") else "")
        if ranks
        else None,
        "precision": summary.get("precision"),
        "attention": summary.get("attention"),
        "optimizer": summary.get("optimizer"),
        "devices": ", ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)) or None,
        "cores": machine.get("cores"),
        "host memory": format_bytes(memory) if memory else None,
        "system": machine.get("system"),
        "commit": summary.get("commit"),
        "date": dated(summary.get("date")),
    }
    return {name: text_of(value) for name, value in found.items() if value not in (None, "", [])}


def versions_of(run: RunRecords) -> dict[str, str]:
    """Version of each package."""
    return {str(name): str(version) for name, version in table(run.summary.get("versions")).items()}


def settings_of(runs: Sequence[RunRecords]) -> list[Setting]:
    """Every setting of any run: given ones first, then derived ones, then defaults."""
    tables = [table(run.summary.get("settings")) for run in runs]
    origins = [table(run.summary.get("origins")) for run in runs]
    found = []
    for name in dict.fromkeys(str(name) for values in tables for name in values):
        values = tuple(text_of(each[name]) if name in each else "" for each in tables)
        origin = next((str(each[name]) for each in origins if each.get(name)), "default")
        kind = "default" if origin == "default" else "derived" if not _is_given(origin) else "given"
        found.append(Setting(name, values, origin, kind))
    return sorted(found, key=lambda setting: (("given", "derived", "default").index(setting.kind), setting.name))


def shortened(rows: Sequence[Setting], share: float) -> Sequence[Setting]:
    """The rows with shorter values and without shared defaults, for a page that would be too large."""
    if share == 1:
        return rows
    length = int(_LONGEST_VALUE * share)
    return [
        replace(row, values=tuple(text if len(text) <= length else f"{text[:length]} …" for text in row.values))
        for row in rows
        if row.differs or row.kind != "default"
    ]


def differing(rows: Sequence[Setting]) -> list[Setting]:
    """The rows in which runs differ, except settings that are unique to every run."""
    return [row for row in rows if row.differs and row.name not in _OWN_NAMES]


def side_by_side(each: Sequence[Mapping[str, str]]) -> list[Setting]:
    """Rows of a table with one column per run."""
    names = dict.fromkeys(name for found in each for name in found)
    return [Setting(name, tuple(found.get(name, "—") for found in each), "", "") for name in names]


def samples_of(run: RunRecords) -> list[AnsweredSample]:
    """Held-out questions with the answers before and after training."""
    found: dict[str, AnsweredSample] = {}
    for when, answered in table(run.summary.get("exact_match")).items():
        for example in map(table, listed(table(answered).get("examples"))):
            task, question, expected = (_short(example.get(name)) for name in ("task", "question", "expected"))
            said = (_short(example.get("predicted")), example.get("correct") is True)
            known = found.get(question, AnsweredSample(task, question, expected, None, None))
            before, after = (said, known.after) if when == "before" else (known.before, said)
            found[question] = AnsweredSample(task, question, expected, before, after)
    return list(found.values())[:40]


def written_sample(run: RunRecords) -> str | None:
    """The text that the model wrote at the end of the run."""
    sample = run.summary.get("sample")
    return _short(sample) if isinstance(sample, str) and sample else None


def dated(value: object) -> str:
    """An ISO date as ``2026-05-04 17:03 UTC``; anything else unchanged."""
    text = text_of(value or "")
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    utc = found.astimezone(datetime.UTC) if found.tzinfo else found
    return utc.strftime("%Y-%m-%d %H:%M UTC") if found.tzinfo else text


def labels_of(runs: Sequence[RunRecords]) -> list[str]:
    """Names of the runs' folders, with as many parent folders as needed to tell them apart."""
    parts = [run.folder.resolve().parts[1:] or ("/",) for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({at})" for at, part in enumerate(parts, 1)]


def text_of(value: object) -> str:
    """A setting's value on one line; paths in the user's home begin with ``~``."""
    value = getattr(value, "value", value)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return _short(without_home(text))


def without_home(text: str) -> str:
    """`text` without the paths of the package and of the user's home, which would reveal the user."""
    text = text.replace(_INSTALLED, "")
    home = str(Path.home())
    return text.replace(home + "/", "~/") if len(home) > 1 else text


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} … ({len(text):,} characters)"


def _is_given(origin: str) -> bool:
    """True if the origin is a flag, or a file and its line."""
    return origin.startswith("--") or origin.rpartition(":")[2].isdigit()


def _change(points: Sequence[tuple[int, float]] | None, unit: str) -> str | None:
    if not points:
        return None
    first, last = (formatted(points[at][1], unit) for at in (0, -1))
    return f"{first} → {last}" if len(points) > 1 else last


def _match(found: Mapping[str, object]) -> str | None:
    shares = [number(table(found.get(when)).get("accuracy")) for when in ("before", "after")]
    known = [f"{share:.1%}" for share in shares if share is not None]
    return " → ".join(known) or None


def _middle(run: RunRecords, name: str) -> str | None:
    values = sorted(value for _, value in run.series.get(name, ()))
    return f"{formatted(values[len(values) // 2], 'rate')} tokens/s" if values else None


def _step_time(run: RunRecords) -> str | None:
    values = sorted(value for _, value in run.series.get("step_seconds", ()))
    return formatted(values[len(values) // 2], "seconds") if values else None


def _memory(summary: Mapping[str, object]) -> str | None:
    device = number(table(summary.get("peak_device_bytes")).get("allocated_bytes"))
    host = number(summary.get("peak_host_bytes"))
    if device:
        return f"{format_bytes(device)} device"
    return f"{format_bytes(host)} host" if host else None


def _unit(value: object, words: str, unit: str) -> str | None:
    found = number(value)
    return words.format(formatted(found, unit)) if found else None


def _stop(value: object) -> str | None:
    return _short(value) if isinstance(value, str) and value else None


def _count(value: object) -> str | None:
    found = number(value)
    return format_count(found) if found else None
