"""A run's report: it is complete, stays small, and escapes everything that a run writes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import SETTINGS, example, write_run

from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import EXIT_STOPPED, GUARD_STATUS
from accel_scale.launching.folder_lock import held
from accel_scale.measuring.meters import ThroughputMeter, logged_figures
from accel_scale.report_page.leaving import PAGE_NAME, leave_report, leaves_report
from accel_scale.report_page.page import MOST_BYTES, render
from accel_scale.report_page.reading import read_run
from accel_scale.report_page.thinning import thinned
from accel_scale.reporting.run_starts import STARTS_NAME, end_of, write_start

RECIPES = Path(__file__).parents[2] / "recipes"
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--<script>'\"{{ 7 * 7 }}&lt;"


class Parsed(HTMLParser):
    """A page as a browser parses it: tags, text outside scripts, and the scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and self.rawdata:
            self.scripts[-1] += data
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def page_of(*folders: Path) -> str:
    return render([read_run(folder) for folder in folders])


def charts_of(page: str) -> dict[str, dict]:
    return {chart["title"]: chart for chart in Parsed(page).data["charts"]}


def test_everything_a_run_left_is_on_its_page(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "llama", events=3, restarts=2))
    charts, text = charts_of(page), Parsed(page).text
    assert list(charts) == [
        *("Loss", "Learning rate", "Gradient norm", "Speed", "Waiting for data", "Step time", "Device memory"),
        *("Host memory", "mean token accuracy"),
    ]
    loss = charts["Loss"]
    assert [series["label"] for series in loss["series"]] == ["training", "validation"]
    assert (loss["series"][0]["x"][0], loss["series"][0]["x"][-1]) == (1, 60)
    assert loss["series"][0]["y"][-1] == pytest.approx(1 + 2 * math.exp(-3), abs=0.1)
    assert [(mark["kind"], mark["step"]) for mark in loss["marks"]] == [
        *(("start", step) for step in (20, 40)),
        *(("guard", step) for step in (15, 30, 45)),
    ]
    levels = {level["label"]: level["value"] for level in charts["Device memory"]["levels"]}
    assert levels["memory of the card, RTX 4090"] == 24 * 2**30
    assert 16 * 2**30 < levels["predicted"] < 21 * 2**30
    assert charts["Step time"]["levels"][0]["value"] == 0.5
    # A NaN norm has no point; the other two do.
    assert charts["Gradient norm"]["series"][1]["y"] == [81.0, 82.0]
    for words in ("0.0% → 100.0%", "2 + 2 =", "✗ wrong", "✓ right", "--learning_rate", "recipe.yaml:4", "optimizer"):
        assert words in text, words
    for words in ("RTX 4090", "ended without a word", "loss is not finite", "8.03B parameters", "torch"):
        assert words in text, words
    for words in ("for 2,000 of 2,048 positions", "-3.9%", "-3.8%"):  # errors of memory and step time
        assert words in text, words
    # The terms of each phase are stacked, with widths proportional to their sizes.
    assert page.count('<svg viewBox="0 0 1000 20"') == 5


def test_nothing_that_a_run_says_becomes_part_of_the_page(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", events=2, questions=("a", "b"), settings={"note": "c"})
    # Everywhere a run stores text: settings, questions, metrics, events, the folder's name.
    hostile = write_run(
        tmp_path / HOSTILE.replace("/", ""), events=2, questions=(HOSTILE, HOSTILE + "2"), settings={HOSTILE: HOSTILE}
    )
    for name, old in (("guard_events.jsonl", "loss 9.5"), ("run_summary.json", "sft.py")):
        path = hostile / name
        path.write_text(path.read_text().replace(old, json.dumps(HOSTILE)[1:-1]))
    with open(hostile / "metrics.jsonl", "a") as log:
        log.write(json.dumps({"step": 61, HOSTILE: 1.0, "loss": 1.0}) + "\n")
    expected, page = Parsed(page_of(plain)), page_of(hostile)
    found = Parsed(page)
    assert found.tags.count("script") == expected.tags.count("script") == 3
    assert set(found.tags) == set(expected.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.scripts[1:] == expected.scripts[1:]
    assert found.data["labels"] == [hostile.name]
    assert any(chart["title"] == HOSTILE.replace("_", " ") for chart in found.data["charts"])
    assert "\u2028" not in found.scripts[0] + "".join(found.scripts[1:])
    assert "{{ 7 * 7 }}" in found.text  # displayed, not evaluated


def test_a_browser_runs_these_scripts_and_no_other(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    found = Parsed(page)
    policy = next(value for name, value in found.attributes if name == "content" and value and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    sources = [text for _, text in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL)]
    assert len(sources) == 3
    for source in sources:
        assert base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() in policy
    loaded = [value for name, value in found.attributes if name in ("src", "href") and value]
    assert loaded == ["data:,", "#plots"]


@pytest.mark.slow
def test_a_long_run_is_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    steps, spike, dip = 100_000, 54_321, 77_777
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "a", "b", "c", "d", "e")
    with open(tmp_path / "metrics.jsonl", "w") as log:
        for step in range(1, steps + 1):
            loss = 37.5 if step == spike else 0.015625 if step == dip else 2 + (step % 7) / 10
            others = ", ".join(f'"{name}": {1 + step % 1000 / 977:.9f}' for name in names[1:])
            log.write(f'{{"step": {step}, "loss": {loss}, {others}}}\n')
    page = page_of(tmp_path)
    assert len(page.encode()) < MOST_BYTES / 2
    (series,) = charts_of(page)["Loss"]["series"]
    assert (series["x"][0], series["x"][-1]) == (1, steps)
    assert series["y"][series["x"].index(spike)] == 37.5
    assert series["y"][series["x"].index(dip)] == 0.015625
    assert 1000 < len(series["x"]) <= 2000


@pytest.mark.slow
def test_many_runs_with_many_figures_and_long_settings_stay_within_the_limit(tmp_path: Path) -> None:
    for at in range(8):
        folder = tmp_path / f"run{at}"
        folder.mkdir()
        lines = ({"step": step, **{f"figure{n}": at + n / step for n in range(40)}} for step in range(1, 200))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = {f"setting{n}": f"{at}{n}" + "x" * 5000 for n in range(400)}
        (folder / "run_summary.json").write_text(json.dumps({"settings": settings}))
    folders = sorted(tmp_path.iterdir())
    assert len(page_of(*folders).encode()) <= MOST_BYTES
    with pytest.raises(ConfigError, match=r"200 runs: the page would have .* Fix: compare fewer runs"):
        page_of(*folders * 25)


def test_stretches_keep_both_extremes_in_order() -> None:
    points = [(step, float((step * 7919) % 104_729)) for step in range(5000)]
    kept = thinned(points, 100)
    assert len(kept) <= 100
    assert list(kept) == sorted(kept)
    assert {points[0], points[-1]} <= set(kept)
    assert {min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])} <= set(kept)
    assert thinned(points[:100], 100) == points[:100]


def test_damaged_lines_are_named_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines()
    huge = f'{{"step": 61, "loss": 1e999, "grad_norm": {"9" * 5000}, "learning_rate": "nan", "x": [1], "y": true}}'
    lines[2:2] = ["not json", "[1, 2]", '{"loss": 1.0}', huge, "[" * 100_000]
    log.write_text("\n".join([*lines, '{"step": 62, "lo']))
    run = read_run(folder)
    assert [note.removeprefix(f"{log}:") for note in run.notes] == [
        "3: the line is not a JSON object, nor are 3 others; left out.",
        "5: the line has no step; left out.",
    ]
    assert len(run.series["loss"]) == 60
    assert run.last_step == 60
    assert "x" not in run.series
    assert f"{log}:3: the line is not a JSON object" in Parsed(page_of(folder)).text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "{folder}: holds no run: there is no metrics.jsonl and no run_summary.json."),
        ({"metrics.jsonl": "\x00\xff torn\nagain\n"}, "{folder}/metrics.jsonl:1: the line is not a JSON object"),
        ({"run_summary.json": '{"steps": 3,\n "x": }'}, "{folder}/run_summary.json:2: is not JSON (Expecting value)"),
        ({"run_summary.json": "[]"}, "{folder}/run_summary.json:1: is not a JSON object."),
        ({"sft/metrics.jsonl": "{}\n"}, "name one of the runs in it, as {folder}/sft."),
    ],
)
def test_a_folder_without_a_run_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.format(folder=tmp_path) in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / PAGE_NAME).exists()


def test_secrets_and_the_home_folder_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    secret = "hf_" + "abcdefghijklmnopqrstuvwx"
    settings = {"hub_token": secret, "model_name_or_path": "/home/ada/models/llama", "url": f"https://u:{secret}@h/x"}
    folder = write_run(tmp_path / "run", settings=settings)
    # A summary from another program, not cleaned by anyone.
    summary = json.loads((folder / "run_summary.json").read_text())
    summary["settings"] |= settings
    (folder / "run_summary.json").write_text(json.dumps(summary))
    page = page_of(folder)
    assert secret not in page
    assert "/home/ada" not in page
    assert "~/models/llama" in page


def test_runs_beside_each_other_show_first_what_differs(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / f"a/{at}/run", rate=rate, settings={"output_dir": f"out{at}", "seed": 7 + at // 2})
        for at, rate in enumerate((1e-4, 1e-3, 1e-3))
    ]
    page = page_of(*folders)
    found = Parsed(page)
    first = page[page.index('id="differ"') : page.index('id="came"')]
    assert re.findall(r'<th scope="row"><code>(\w+)</code>', first) == ["learning_rate", "seed"]
    assert re.findall(r"<td><code>([^<]+)</code></td>", first) == ["0.0001", "0.001", "0.001", "7", "7", "8"]
    assert found.data["labels"] == ["0/run", "1/run", "2/run"]
    series = charts_of(page)["Loss"]["series"]
    assert [(line["label"], line["run"], line["dashed"]) for line in series[:3]] == [
        ("0/run, training", 0, False),
        ("0/run, validation", 0, True),
        ("1/run, training", 1, False),
    ]


def test_a_run_that_changed_its_settings_shows_the_last_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    write_start(folder, step=60, content={"settings": {**SETTINGS, "learning_rate": 5.0}, "origins": {}})
    run = read_run(folder)
    assert [start.step for start in run.starts] == [0, 60]
    assert run.summary["settings"]["learning_rate"] == 5.0


def test_how_it_ended_is_said(tmp_path: Path) -> None:
    killed = write_run(tmp_path / "killed", finished=False)
    assert read_run(killed).how == "killed"
    with held(killed):
        assert read_run(killed).how == "running"
    assert "ended without a word" in page_of(killed)
    stopped = write_run(tmp_path / "stopped", finished=False, end=SystemExit(EXIT_STOPPED))
    assert read_run(stopped).how == "stopped"
    broken = write_run(tmp_path / "broken", finished=False, end=RuntimeError("CUDA error: <b>\nmore"))
    assert "ended with an error: RuntimeError: CUDA error: &lt;b&gt;" in page_of(broken)
    assert end_of(SystemExit(GUARD_STATUS))[0] == "guard"
    assert end_of(SystemExit(0)) == end_of(None) == ("finished", "")
    assert end_of(KeyboardInterrupt())[0] == "interrupted"


def test_a_run_leaves_its_page_however_it_ends(tmp_path: Path) -> None:
    def train() -> None:
        with leaves_report(tmp_path, is_main=True):
            write_run(tmp_path, steps=3, finished=False)
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        train()
    assert "ZeroDivisionError: division by zero" in (tmp_path / PAGE_NAME).read_text()
    before = (tmp_path / STARTS_NAME).read_bytes()
    # A run that is refused before its first step leaves the page and the record unchanged.
    with pytest.raises(ConfigError), leaves_report(tmp_path, is_main=True):
        raise ConfigError("no.")
    leave_report(tmp_path, None)
    assert (tmp_path / STARTS_NAME).read_bytes() == before
    with leaves_report(tmp_path / "other", is_main=False):
        write_run(tmp_path / "other", steps=3, finished=False)
    assert not (tmp_path / "other" / PAGE_NAME).exists()


def test_a_page_that_cannot_be_written_is_a_line(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_disk / "run"
    with leaves_report(folder, is_main=True):
        write_run(folder, steps=3, finished=False)
        filler = small_disk / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"0" * 4096):
                pass
        os.truncate(filler, filler.stat().st_size - 8192)  # leaves a little room for the record of the end
    (line,) = [line for line in capsys.readouterr().err.splitlines() if PAGE_NAME in line]
    assert line == (
        f"warning: {folder / PAGE_NAME} was not written (No space left on device). Fix: resolve that, then "
        f"run accel-scale report {folder}."
    )
    assert not list(folder.glob("report.html*"))
    filler.unlink()
    assert main(["report", str(folder)]) == 0
    assert (folder / PAGE_NAME).is_file()


def test_a_page_that_cannot_be_made_does_not_cost_the_record_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "accel_scale.report_page.page", None)  # as if a library it needs were missing
    with leaves_report(tmp_path, is_main=True):
        write_run(tmp_path, steps=3, finished=False)
    assert json.loads((tmp_path / STARTS_NAME).read_text().splitlines()[-1])["end"]["how"] == "finished"
    assert f"{PAGE_NAME} was not written (ModuleNotFoundError: " in capsys.readouterr().err


def test_a_signal_waits_until_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append("after"))
    try:
        write_run(tmp_path, steps=3, finished=False)
        render_page = render
        module = "accel_scale.report_page.page.render"

        def slow(runs: list) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            received.append("while writing")
            return render_page(runs)

        monkeypatch.setattr(module, slow)
        leave_report(tmp_path, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == ["while writing", "after"]
    assert (tmp_path / PAGE_NAME).is_file()


def test_the_command_writes_where_it_is_told_and_replaces_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", rate=2e-4)
    assert main(["report", "one"]) == 0
    assert re.fullmatch(r"written  one/report\.html: \d+ KiB\n", capsys.readouterr().out)
    assert main(["report", "one", "two"]) == 0
    assert "2 runs side by side" in (tmp_path / "comparison.html").read_text()
    assert main(["report", "two", "-o", "comparison.html"]) == 0  # a page that we wrote
    assert "side by side" not in (tmp_path / "comparison.html").read_text()
    (tmp_path / "notes.html").write_text("mine")
    for where, said in (("notes.html", "is not a page of"), ("one", "is a folder"), ("no/x", "cannot be written")):
        with pytest.raises(SystemExit):
            main(["report", "one", "-o", where])
        assert said in capsys.readouterr().err
    assert (tmp_path / "notes.html").read_text() == "mine"
    assert not (tmp_path / "notes.html.partial").exists()


def test_an_answer_is_shown_before_and_after(tmp_path: Path) -> None:
    found = example("1 + 1 =", "3", expected="2")
    assert found["correct"] is False
    folder = write_run(tmp_path / "run", questions=("1 + 1 =",))
    summary = json.loads((folder / "run_summary.json").read_text())
    summary["exact_match"] = {"before": {"accuracy": 0.0, "examples": [found]}}
    summary["sample"] = "Once▸ upon"
    (folder / "run_summary.json").write_text(json.dumps(summary))
    text = Parsed(page_of(folder)).text
    assert "expected 2 before 3 ✗ wrong" in text
    assert "Once▸ upon" in text


def test_figures_of_the_log_are_those_of_the_steps_since_the_last_line() -> None:
    meter, paces = ThroughputMeter(), []
    for seconds in (0.01, 0.04):
        for _ in range(4):
            meter.start_step()
            meter.fetched()
            meter.add_tokens(100)
            time.sleep(seconds)
            meter.end_step()
        paces.append(meter.pace())
    assert meter.pace() is None
    first, second = paces
    assert first is not None
    assert second is not None
    assert 0.01 <= first.step_seconds < 0.03 < second.step_seconds
    assert second.tokens_per_second == pytest.approx(100 / second.step_seconds)
    meter.add_tokens(0)
    assert logged_figures(meter).keys() == {"host_bytes"}


@pytest.mark.parametrize("name", sorted({path.stem for path in RECIPES.glob("*.py")} - {"tune"}))
def test_every_recipe_leaves_one(name: str) -> None:
    """A search leaves the reports of its trials."""
    assert "with held_folder(run)" in (RECIPES / f"{name}.py").read_text()
