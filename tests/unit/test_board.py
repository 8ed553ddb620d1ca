"""The board without its server: the command's plans, files read safely, runs found, and runs stopped reliably."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from report_runs import write_run

from accel_scale.board import bars, plan_answers, runs
from accel_scale.board.curves import pictures_of
from accel_scale.board.doctor_answers import diagnosis
from accel_scale.board.plan_controls import CONTROLS, command_of, name_of, settings_of, start_of
from accel_scale.board.rendering import filled
from accel_scale.board.runs import folder_of, overview_row, progress_of, records_of, runs_below, stamp_of
from accel_scale.board.stopping import RunProcess, process_of, stop
from accel_scale.board.uploads import read_dropped
from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.facts.exit_statuses import CONFIG_STATUS
from accel_scale.launching.folder_lock import LOCK_FILE
from accel_scale.report_page.reading import RunRecords, read_run
from accel_scale.reporting.plan_json import as_dict

REPOSITORY = Path(__file__).parents[2]


def asked(**values: object) -> dict[str, str | bool]:
    """The settings of the controls, with `values` in place of their initial values."""
    return settings_of([values.get(name_of(control), start_of(control)) for control in CONTROLS])  # type: ignore[misc]


# ── Plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "Qwen/Qwen3-8B", "gpu": "H100", "num_gpus": 8, "method": "full", "tokens": "1B"},
        {"gpu": "24GiB", "no_packing": True, "lora_r": 64, "host_memory": "64GiB", "precision": "bf16"},
        {"recipe": "dpo", "method": "lora", "max_length": 1024, "global_batch_size": 16},
    ],
)
def test_the_page_and_the_command_that_it_shows_say_the_same(
    values: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    answered = plan_answers.answer(asked(**values))
    words = shlex.split(command_of(answered.settings, "--json"))
    assert words[:2] == ["accel-scale", "plan"]
    assert main(words[1:]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = json.loads(json.dumps(as_dict(answered.plan, answered.budget, [], None)))
    for part in ("candidates", "rejections", "num_considered", "machine", "sequence_length"):
        assert found[part] == printed[part], part
    text = plan_answers.overview(answered)
    assert answered.plan.candidates[0].memory.text in text
    assert text.count('<tr><th scope="row">') >= len(answered.shown)
    assert all(rejection.label in text for rejection in answered.plan.rejections)


def test_nothing_fits_and_the_page_says_what_would() -> None:
    answered = plan_answers.answer(asked(model="meta-llama/Llama-3.1-70B", gpu="T4", method="full"))
    assert answered.plan.best is None
    text = plan_answers.overview(answered)
    assert "Nothing fits. Nearest: " in text
    assert "would fit: " in text


@pytest.mark.parametrize(
    ("values", "place", "problem"),
    [
        ({"model": "../../etc/passwd"}, "MODEL", "is no name of a model"),
        ({"model": "/etc/passwd"}, "MODEL", "is no name of a model"),
        ({"model": "~/.ssh/id_rsa"}, "MODEL", "is no name of a model"),
        ({"model": "<script>alert(1)</script>"}, "MODEL", "is no name of a model"),
        ({"model": "accel_scale/board"}, "MODEL", "is no name of a model"),  # an existing folder
        ({"model": ""}, "MODEL", "no model is named"),
        ({"model": "a" * 5000}, "--model", "5,000 characters"),
        ({"gpu": "x" * 201}, "--gpu", "201 characters"),
        ({"gpu": True}, "--gpu", "'True'"),
        ({"gpu": "H100\x00"}, "--gpu", "cannot be printed"),
        ({"num_gpus": 10**30}, "--num_gpus", "is too large"),
        ({"num_gpus": 0}, "--num_gpus", "is not a whole number"),
        ({"num_gpus": -3}, "--num_gpus", "is not a whole number"),
        ({"max_length": "٣"}, "--max_length", "is not a whole number"),
        ({"max_length": 1e300}, "--max_length", "is not a whole number"),
        ({"price_per_gpu_hour": "2"}, "--price_per_gpu_hour", "nothing to price"),
    ],
)
def test_what_cannot_be_planned_names_its_place(
    values: dict[str, object], place: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ConfigError) as caught:
        plan_answers.answer(asked(**values))
    assert (caught.value.place, problem in caught.value.problem) == (place, True), caught.value


@pytest.mark.slow
def test_the_largest_numbers_that_are_taken_are_answered_soon() -> None:
    largest = {control.name: control.most for control in CONTROLS if control.most and control.name != "gpus_per_node"}
    began = time.perf_counter()
    for name, value in largest.items():
        try:
            plan_answers.overview(plan_answers.answer(asked(**{name: value})))
        except ConfigError:
            continue
    assert time.perf_counter() - began < 30


def test_a_change_is_compared_alone_and_one_that_cannot_be_is_a_row() -> None:
    settings = asked()
    text = plan_answers.compared(
        settings, {"max_length": "4096", "num_gpus": "3", "global_batch_size": "64", "lora_r": "16"}
    )
    assert text.count("<tr>") == 4  # header, base and two changes
    assert '<th scope="row">max_length=4096</th>' in text
    assert "a global batch of 64 does not divide among 3 GPUs" in text
    assert "--what_if max_length=4096 num_gpus=3</code>" in text


def test_questions_agree_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    settings = asked(method="qlora")
    words = ["plan", "meta-llama/Llama-3.1-8B", "--gpu", "RTX 4090", "--num_gpus", "1", "--method", "qlora"]
    assert main([*words, "--longest"]) == 0
    (length,) = (line for line in capsys.readouterr().out.splitlines() if "the longest row that fits" in line)
    assert plan_answers.longest(settings).startswith("The longest row that fits: " + length.rpartition(": ")[2][:-1])
    assert main([*words, "--max_length", "2048", "--largest_batch"]) == 0
    (batch,) = (line for line in capsys.readouterr().out.splitlines() if "the largest micro-batch that fits" in line)
    assert plan_answers.largest(settings).startswith(
        "The largest micro-batch that fits: " + batch.rpartition(": ")[2][:-1]
    )


def test_files_are_those_that_the_command_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answered = plan_answers.answer(asked(gpu="H100", num_gpus=8, method="full"))
    files = plan_answers.written(answered, answered.shown[0])
    archive = plan_answers.packed(files, tmp_path / "served")
    assert archive == plan_answers.packed(files, tmp_path / "served")  # the same archive again
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path / "taken")
        assert "README.txt" in opened.namelist()
    command = command_of(answered.settings, "--write", "plans/llama-3.1-8b")
    assert main(shlex.split(command)[1:]) == 0
    assert files.command in capsys.readouterr().out
    for name in ("launch.yaml", "recipe.yaml"):
        path = Path("plans/llama-3.1-8b") / name
        assert (tmp_path / "taken" / path).read_text() == path.read_text()


def test_bars_add_up_and_stay_inside() -> None:
    candidate = plan_answers.answer(asked()).shown[0]
    bar = bars.on_card(candidate, "one")
    assert bar.total == pytest.approx(candidate.memory.device_bytes)
    assert [each.total for each in bars.phases(candidate) if each.is_peak] == [
        pytest.approx(candidate.memory.peak_bytes)
    ]
    text = bars.drawn([bar], title="<b>one</b>", limit=24 * 2**30)
    assert "<b>" not in text
    assert "&lt;b&gt;one" in text


# ── Files that are dropped ───────────────────────────────────────────────────────────────────────────────────────────


def dropped(folder: Path, text: str | bytes, name: str = "launch.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_paths_that_lead_out_of_the_folder_are_replaced(tmp_path: Path) -> None:
    text = (
        "a: /etc/passwd\nb: '~/x'  # kept\nc: [../../up, outputs/sft, Qwen/Qwen3-8B]\nd: C:\\x\\y\n"
        "e: {f: file:///etc/shadow}\ni: |\n  /etc/x\ng: https://example.org/x\nh: /data/ds.json\n"
    )
    read = read_dropped(dropped(tmp_path, text), beside=["ds.json"])
    assert yaml.safe_load(read.text) == {
        "a": "elsewhere/passwd", "b": "elsewhere/x", "c": ["elsewhere/up", "outputs/sft", "Qwen/Qwen3-8B"],
        "d": "elsewhere/y", "e": {"f": "elsewhere/shadow"}, "i": "elsewhere/x", "g": "elsewhere/x", "h": "ds.json",
    }  # fmt: skip
    assert "# kept" in read.text
    assert list(read.replaced) == [
        "/etc/passwd", "~/x", "../../up", "C:\\x\\y", "file:///etc/shadow", "/etc/x\n", "https://example.org/x"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        (b"a: 1\n" * 100_000, "launch.yaml", "bytes are too many"),
        (b"\xff\xfe\x00", "launch.yaml", "is not text in UTF-8"),
        (b"a: &x [1]\nb: [*x, *x]\n", "launch.yaml", "anchors are not read"),
        (b"[" * 5000, "launch.yaml", "is no file of settings"),
        (b"a: 1\n", "launch.sh", "is no name of a YAML"),
        (b"a: 1\n", "..yaml", "is no name of a YAML"),
        (b"a: 1\n", "<img src=x>.yaml", "is no name of a YAML"),
    ],
)
def test_what_is_no_file_of_settings_is_refused(tmp_path: Path, text: bytes, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_dropped(dropped(tmp_path, text, name))


@pytest.mark.parametrize(
    ("status", "said", "logged"),
    [
        (CONFIG_STATUS, "accel-scale doctor: error: --x: no.", ""),
        (1, "it ended with an error.", "accel-scale board: the doctor ended with status 1 (KeyError: 'hf_***').\n"),
    ],
)
def test_a_doctor_that_fails_is_said_and_its_bugs_stay_in_the_terminal(
    status: int, said: str, logged: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = said if status == CONFIG_STATUS else f"Traceback\nKeyError: 'hf_{'a' * 30}'"
    done = subprocess.CompletedProcess([], status, "", last)
    monkeypatch.setattr("accel_scale.board.doctor_answers.subprocess.run", lambda *words, **options: done)
    with pytest.raises(ConfigError) as caught:
        diagnosis(None, [], "sft", [])
    assert caught.value.problem == f"no diagnosis: {said}"
    assert capsys.readouterr().err == logged


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_runs_are_those_below_the_folder_and_nothing_else(tmp_path: Path) -> None:
    root, outside = tmp_path / "outputs", tmp_path / "outside"
    write_run(root / "a", steps=4)
    write_run(root / "search" / "trials" / "trial-3", steps=4)
    write_run(outside, steps=4)
    (root / "link").symlink_to(outside)
    (root / "checkpoint-only").mkdir()
    assert sorted(runs_below(root)) == ["a", "search/trials/trial-3"]
    assert folder_of(root, "a") == root / "a"
    for name in ("link", "../outside", str(outside), "", "a/..", "nothing"):
        with pytest.raises(ConfigError, match="there is no run"):
            folder_of(root, name)


def test_a_file_of_a_run_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"step": 1, "loss": 4711}\n')
    run = write_run(tmp_path / "run", steps=3)
    (run / "guard_events.jsonl").symlink_to(secret)
    with pytest.raises(ConfigError, match="is a link"):
        records_of(run)
    assert overview_row(tmp_path, "run")["state"] == "is a link."


def test_records_are_read_again_when_a_line_is_added(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10, finished=False)
    before = stamp_of(run)
    assert records_of(run) is records_of(run)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 11, "loss": 0.5}\n')
    assert stamp_of(run) != before
    assert records_of(run).last_step == 11


def test_a_log_that_takes_long_is_read_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=10, finished=False)
    read_at: list[float] = []

    def slow(folder: Path) -> RunRecords:
        read_at.append(time.monotonic())
        time.sleep(0.08)
        return read_run(folder)

    monkeypatch.setattr(runs, "_read", slow)
    while len(read_at) < 3:
        with open(run / "metrics.jsonl", "a") as log:
            log.write('{"step": 11, "loss": 0.5}\n')
        records_of(run)
    assert all(later - earlier > 0.3 for earlier, later in itertools.pairwise(read_at))


def test_names_that_cannot_be_sent_are_left_out(tmp_path: Path) -> None:
    for name in (b"bad\xff", b"line\nbreak", b"good"):
        folder = os.fsencode(tmp_path) + b"/" + name
        os.mkdir(folder)
        with open(folder + b"/metrics.jsonl", "w") as log:
            log.write('{"step": 1, "loss": 2.0, "note": "\\ud800"}\n')
    assert runs_below(tmp_path) == ["good"]
    assert records_of(tmp_path / "good").last_step == 1
    assert filled("sentence", text="a\ud800b") == '<p class="b-sentence" role="status">a?b</p>'


def test_progress_says_how_long_it_will_take(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, finished=False)
    start = {"start": {"step": 0, "num_steps": 120}}
    (run / "run_starts.jsonl").write_text(json.dumps(start) + "\n")
    assert progress_of(records_of(run)).text == "step 20 of 120"  # no process holds its folder
    with holding(run):
        found = progress_of(records_of(run))
        assert found.seconds_left == pytest.approx(52, abs=1)
        assert found.text.startswith("step 20 of 120, 5")
        assert overview_row(tmp_path, "run")["how"] == "running"


def test_curves_are_those_of_the_report(tmp_path: Path) -> None:
    run = records_of(write_run(tmp_path / "run", steps=60, events=3, restarts=1))
    pictures = {picture.title: picture for picture in pictures_of(run)}
    assert set(pictures) >= {"Loss", "Learning rate", "Gradient norm", "Speed", "Step time", "Device memory"}
    loss = pictures["Loss"]
    assert [line.label for line in loss.lines] == ["training", "validation"]
    assert [kind for kind, _, _ in loss.marks].count("guard") == 3
    assert loss.lines[0].path.startswith("M0.0 ")
    assert loss.lines[0].path.count("L") == 59
    for picture in pictures.values():
        numbers = [
            float(word) for line in picture.lines for point in line.path[1:].split("L") for word in point.split()
        ]
        assert min(numbers) >= -0.1
        assert max(numbers) <= 1000.1
        assert len({tick.text for tick in picture.up}) == len(picture.up) >= 2
        assert all(0 <= tick.share <= 1 for tick in (*picture.up, *picture.across))


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1e-12, 1e12], [-5.0, -5.0]])
def test_odd_curves_are_drawn(tmp_path: Path, values: list[float]) -> None:
    lines = [json.dumps({"step": step, "loss": value, "grad_norm": abs(value) + 1e-9, "host_bytes": abs(value)})
             for step, value in enumerate(values)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    pictures = pictures_of(records_of(tmp_path))
    assert [picture.title for picture in pictures] == ["Loss", "Gradient norm", "Host memory"]


# ── Stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────────

HOLDER = """
import json, os, signal, sys, time
from pathlib import Path
from accel_scale.launching.folder_lock import held
folder, catches, user = Path(sys.argv[1]), sys.argv[2] == "catches", int(sys.argv[3])
if catches:
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(85))
with held(folder):
    if user:
        os.setuid(user)
    print("held", flush=True)
    time.sleep(600)
"""


class holding:  # lower case because it reads as a statement
    """A process that holds a run's folder the way a run does."""

    def __init__(self, folder: Path, *, catches: bool = True, user: int = 0) -> None:
        words = [sys.executable, "-c", HOLDER, str(folder), "catches" if catches else "dies", str(user)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *unused: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run_starts.jsonl").write_text('{"start": {"step": 0, "num_steps": 100}}\n')
    return folder


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that has nothing to do with any run."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal, time\nsignal.signal(15, print)\ntime.sleep(600)"]
    )
    yield process
    process.kill()
    process.wait()


def test_the_process_of_a_run_gets_the_signal(run: Path) -> None:
    with holding(run) as process:
        found = process_of(run)
        assert found.pid == process.pid
        stop(run, found)
        assert process.wait(10) == 85
    with pytest.raises(ConfigError, match="not training"):
        process_of(run)


def told(pid: int, host: str | None = None) -> str:
    return json.dumps({"pid": pid, "host": host or socket.gethostname()})


@pytest.mark.parametrize(
    ("lock", "why"),
    [
        (lambda other: told(other), "does not hold its folder"),
        (lambda other: told(other, "another-host"), "runs on another-host"),
        (lambda other: told(1), "is no run"),
        (lambda other: told(-1), "is no run"),
        (lambda other: told(2**31 - 2), "has ended"),
        (lambda other: "{}", "does not say which"),
        (lambda other: "[" * 10_000, "does not say which"),
        (lambda other: told(os.getpid()), "is no run"),
    ],
)
def test_a_number_in_a_file_is_no_proof(
    run: Path, stranger: subprocess.Popen[bytes], lock: Callable[[int], str], why: str
) -> None:
    """A run holds the lock, but the lock file names another process."""
    with holding(run) as process:
        (run / LOCK_FILE).write_text(lock(stranger.pid))
        with pytest.raises(ConfigError, match=why):
            process_of(run)
        with pytest.raises(ConfigError, match=why):
            stop(run, RunProcess(stranger.pid, 0.0))
        time.sleep(0.1)
        assert process.poll() is None
        assert stranger.poll() is None


def test_a_process_that_came_after_the_question_is_not_stopped(run: Path) -> None:
    with holding(run) as process:
        found = process_of(run)
        with pytest.raises(ConfigError, match="another process runs there by now"):
            stop(run, RunProcess(found.pid, found.began - 1))
        assert process.poll() is None


def test_what_would_die_without_saving_is_not_stopped(run: Path) -> None:
    with holding(run, catches=False) as process:
        with pytest.raises(ConfigError, match="would end without saving"):
            process_of(run)
        assert process.poll() is None


def test_another_users_run_is_not_stopped(run: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can run something as another user")
    with holding(run, user=65534) as process:
        with pytest.raises(ConfigError, match="is another user's"):
            process_of(run)
        assert process.poll() is None


def test_a_run_that_has_ended_is_not_stopped(run: Path) -> None:
    with pytest.raises(ConfigError, match="not training"):
        process_of(run)
    with holding(run), open(run / "run_starts.jsonl", "a") as starts:
        starts.write('{"end": {"how": "finished"}}\n')
        starts.flush()
        with pytest.raises(ConfigError, match="not training"):
            process_of(run)


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "0"], "--port: '0' is no port. Fix: use 1 to 65535."),
        (["--port", "http"], "--port: 'http' is no port."),
        (["--runs", "/nowhere"], "--runs /nowhere: is not there. Fix: name the folder"),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["board", *words])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main(["board"])
    assert end.value.code == 2
    line = "accel-scale board: Gradio is not installed. Fix: pip install 'accel-scale[board]'\n"
    assert capsys.readouterr().err.endswith(line)
    assert signal.getsignal(signal.SIGTERM) == before
