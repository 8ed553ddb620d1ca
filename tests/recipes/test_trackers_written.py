"""What trackers received, read back from their files: figures under the same names, and the guard's events."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_recipe import OF_RECIPE, STEPS, launched
from pictures import write_model, write_pictures

TRACKERS = ("trackio", "tensorboard", "wandb", "mlflow")
MODEL = "accel_scale/assets/default/model"
PROJECT, RUN = "tracked", "first"
TOKEN = "hf_" + "SecretOfThisTest" * 2
Figures = dict[str, dict[int, float]]  # name → step → value
pytestmark = pytest.mark.slow

# The loss explodes: steps after the second are spikes, taken at a lower rate. (TensorBoard stores single precision,
# whose range the perplexity must not exceed.)
_SPIKES = "--guard lower_lr --guard_min_steps 2 --guard_window 4 --guard_threshold 0.5 --learning_rate"
# One recipe for each way of logging; the others log in the same ways.
_QUICK = ("sft", "pretrain", "grpo")
_GUARDED = {"sft": f"{_SPIKES} 1", "pretrain": f"{_SPIKES} 0.2"}


@pytest.fixture(scope="module", autouse=True)
def _all_are_here() -> None:
    for module in ("trackio", "tensorboard", "wandb", "mlflow", "alembic"):
        pytest.importorskip(module, reason="pip install -e '.[tracking]'")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in _QUICK else pytest.mark.soak) for name in OF_RECIPE],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a recipe on two processes that reports to all trackers, offline and without an account."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
            patched.delenv(name)
        patched.setenv("NETRC", str(folder / "no-netrc"))
        patched.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patched.setenv("WANDB_DIR", str(folder))
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        flags = ["--report_to", *TRACKERS, "--project", PROJECT, "--run_name", RUN]
        flags += [] if request.param == "pretrain" else ["--hub_token", TOKEN]
        flags += ["--model_name_or_path", MODEL] if request.param in ("grpo", "rloo") else []
        flags += _GUARDED.get(request.param, "").split()
        if request.param == "vision":
            write_model("llava", folder / "model")
            write_pictures(folder / "rows")
            flags += ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "rows")]
        launched("ddp", "fp32", request.param, folder / "run", *flags)
    return folder


def logged(folder: Path) -> Figures:
    """`metrics.jsonl` under the trackers' names."""
    found: Figures = {}
    for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        for name, value in line.items():
            kind = "eval" if name.startswith("eval_") or name == "perplexity" else "train"
            found.setdefault(f"{kind}/{name.removeprefix('eval_')}", {})[step] = float(value)
    return found


def only(paths: Iterator[Path]) -> Path:
    """The only path: one process has written, for one run."""
    (path,) = paths
    return path


def trackio(folder: Path) -> tuple[Figures, list[str]]:
    figures: Figures = {}
    with sqlite3.connect(only((folder / "trackio").glob("*.db"))) as database:
        for run_name, text in database.execute("SELECT run_name, metrics FROM metrics ORDER BY id"):
            assert run_name == RUN
            line = json.loads(text)
            if "train/global_step" not in line:  # TRL's timings of its own functions
                continue
            for name, value in line.items():
                figures.setdefault(name, {})[int(line["train/global_step"])] = float(value)
        alerts = [f"{title} {text}" for title, text in database.execute("SELECT title, text FROM alerts ORDER BY id")]
    return figures, alerts


def tensorboard(folder: Path) -> tuple[Figures, list[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures: Figures = {}
    alerts: list[str] = []
    for path in sorted((folder / "run" / "runs").rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            figures.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
        if "alerts/text_summary" in events.Tags()["tensors"]:
            alerts += [event.tensor_proto.string_val[0].decode() for event in events.Tensors("alerts/text_summary")]
    return figures, alerts


def wandb(folder: Path) -> tuple[Figures, list[str]]:
    from wandb.proto.wandb_internal_pb2 import Record

    figures: Figures = {}
    alerts: list[str] = []
    for content in records(only(folder.glob("wandb/offline-run-*/run-*.wandb"))):
        record = Record()
        record.ParseFromString(content)
        if record.HasField("alert"):
            alerts.append(f"{record.alert.title} {record.alert.text}")
        items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if "/" in name:
                figures.setdefault(name, {})[int(items["train/global_step"])] = float(value)
    return figures, alerts


def records(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format after a 7-byte header: blocks of 32 KiB, records in parts."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def mlflow(folder: Path) -> tuple[Figures, list[str]]:
    figures: Figures = {}
    with sqlite3.connect(folder / "mlflow.db") as database:
        (named,) = database.execute("SELECT e.name, r.name FROM runs r JOIN experiments e USING (experiment_id)")
        assert named == (PROJECT, RUN)
        for name, step, value, is_nan in database.execute("SELECT key, step, value, is_nan FROM metrics"):
            figures.setdefault(name, {})[step] = float("nan") if is_nan else value
        alerts = database.execute("SELECT value FROM tags WHERE key LIKE 'alert.step_%' ORDER BY key")
        return figures, [text for (text,) in alerts]


READERS = {"trackio": trackio, "tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_tracker_has_the_runs_figures(run: Path, tracker: str) -> None:
    expected, (figures, _) = logged(run), READERS[tracker](run)
    assert len(expected["train/loss"]) >= STEPS - 3
    assert expected.keys() <= figures.keys()
    for name, values in expected.items():
        assert figures[name] == pytest.approx(values, rel=1e-6, nan_ok=True), name


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_tracker_has_the_guards_events_as_alerts(run: Path, tracker: str) -> None:
    path = run / "run" / "guard_events.jsonl"
    events: list[dict[str, Any]] = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    assert bool(events) == run.name.startswith(tuple(_GUARDED))
    _, alerts = READERS[tracker](run)
    assert len(alerts) == len(events)
    for event, alert in zip(events, alerts, strict=True):
        assert f"step {event['step']}: {event['action']}" in alert
        assert event["reason"] in alert


def test_nothing_of_the_command_line_that_is_secret_is_kept(run: Path) -> None:
    found = [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert found == []
