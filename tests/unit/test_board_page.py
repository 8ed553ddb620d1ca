"""The served board: every tab, control and picture in Chromium, and a server that leaks nothing else."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import yaml
from report_runs import write_run

pytest.importorskip("gradio", reason="gradio is not installed")
httpx = pytest.importorskip("httpx", reason="comes with gradio")

from served_board import ServedBoard, served  # noqa: E402
from test_board import holding  # noqa: E402

from accel_scale.cli.main import main  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
WIDTHS = (375, 800, 1600)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SECRET = "canary-4711"
# A warning of Gradio's client at the end of every upload.
FROM_GRADIO = "Method not implemented."
REFUSED_BY_GRADIO = {"ComponentProcessingError", "InvalidPathError"}
LAUNCH = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs next to a file that must stay private."""
    base = tmp_path_factory.mktemp("board")
    (base / "secret.txt").write_text(SECRET)
    write_run(base / "runs" / "guarded", steps=60, events=3, restarts=2)
    write_run(base / "runs" / "<img src=x onerror=window.hit=1>", steps=5, settings={"run_name": "</script>${7*7}"})
    live = write_run(base / "runs" / "live", steps=30, finished=False)
    (live / "run_starts.jsonl").write_text('{"start": {"step": 0, "num_steps": 100, "recipe": "sft.py"}}\n')
    (base / "runs" / "live" / "notes.txt").write_text(SECRET)
    return base


@pytest.fixture(scope="module")
def board(root: Path) -> Iterator[ServedBoard]:
    with served(root, "--runs", str(root / "runs")) as found:
        yield found
        log = found.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:5000]
    assert found.process.returncode == 0
    assert not list(root.glob("accel-scale-board-*")), "uploads and archives are gone"


# ── The server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_says_where_it_is_and_nothing_else(board: ServedBoard) -> None:
    assert re.fullmatch(r"board  http://127\.0\.0\.1:\d+/  \(Ctrl-C ends it\)\n", board.log.read_text())
    assert httpx.get(board.address).headers["content-security-policy"].startswith("default-src 'self'")


def test_nothing_is_served_that_should_not_be(board: ServedBoard, root: Path) -> None:
    secret, run = root / "secret.txt", root / "runs" / "live"
    paths = [
        *(f"/gradio_api/file={path}" for path in ("/etc/passwd", secret, run / "notes.txt", run / "metrics.jsonl")),
        *(f"/gradio_api/file={path}" for path in ("../secret.txt", "runs/live/notes.txt", "file:///etc/passwd")),
        *(f"/gradio_api/file={path}" for path in ("http://127.0.0.1:1/x", "%2Fetc%2Fpasswd", "/etc/passwd%00.png")),
        f"/gradio_api/file={next(root.glob('accel-scale-board-*'))}/../secret.txt", "/file=/etc/passwd",
        "/file//etc/passwd", "/gradio_api/proxy=http://127.0.0.1:1/", "/gradio_api/info", "/gradio_api/vibe-code",
        "/gradio_api/app_id", "/gradio_api/runs", "/monitoring", "/docs", "/openapi.json", "/gradio_api/dev/reload",
        "/static/..%2f..%2fsecret.txt", "/static/../../../../etc/passwd", "/assets/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/assets//etc/passwd", "/svelte/../../../etc/passwd", "/gradio_api/custom_component/1/client/component/x.js",
        "/gradio_api/stream/a/b/1/playlist-file", "/%00", "/gradio_api/deep_link?session_hash=x", "/../secret.txt",
    ]  # fmt: skip
    with httpx.Client(timeout=30) as client:
        for path in paths:
            answer = client.get(httpx.URL(board.address, raw_path=path.encode()))
            assert answer.status_code in (403, 404), (path, answer.status_code)
            assert SECRET not in answer.text
            assert "root:" not in answer.text
        for path in ("/gradio_api/vibe-edit", "/gradio_api/process_recording", "/gradio_api/call/_plan", "/login"):
            assert client.post(board.address + path, json={"data": []}).status_code == 404, path


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": ""},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1.evil.example:7860"},
        {"host": "[::1"},
    ],
)
def test_pages_of_other_sites_cannot_use_it(board: ServedBoard, headers: dict[str, str]) -> None:
    answer = httpx.get(board.address, headers=headers)
    assert (answer.status_code, answer.text) == (403, "This board answers to this machine only.\n")


def test_uploads_are_limited(board: ServedBoard) -> None:
    def upload(content: bytes, name: str = "launch.yaml") -> httpx.Response:
        return httpx.post(f"{board.address}/gradio_api/upload", files={"files": (name, content)}, timeout=30)

    assert upload(b"a" * (256 * 1024 + 1)).status_code == 413
    (path,) = upload(b"a: 1\n", "../../../secret.yaml").json()
    assert Path(path).parts[-1] == "secret.yaml"
    assert ".." not in path
    assert "accel-scale-board-" in path


def dropped(board: ServedBoard, content: str, name: str = "launch.yaml") -> dict[str, object]:
    """An uploaded file in the form in which a browser passes it to an event."""
    (path,) = httpx.post(f"{board.address}/gradio_api/upload", files={"files": (name, content.encode())}).json()
    return {"path": path, "orig_name": name, "meta": {"_type": "gradio.FileData"}}


def test_a_dropped_file_cannot_name_files_of_this_host(board: ServedBoard, root: Path) -> None:
    config = root / "app.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": SECRET}}))
    check = board.event("doctor-button")
    # DeepSpeed's file is looked up in every folder above the launch file.
    for name in (str(config)[1:], config.name, str(config), f"{'../' * 9}{str(config)[1:]}"):
        launch = f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {name}\n"
        answer = board.send(check, ["the file dropped below", [dropped(board, launch)], "sft", None])
        (shown,) = answer["output"]["data"]
        assert SECRET not in shown
        assert "which was not dropped with it" in shown
    flags = "".join(f"{name}: {config}\n" for name in ("deepspeed", "chat_template_path", "dataset_name", "columns"))
    answer = board.send(check, ["the file dropped below", [], "sft", dropped(board, flags, "recipe.yaml")])
    (shown,) = answer["output"]["data"]
    assert SECRET not in shown
    assert "Paths were not looked at" in shown
    stolen = {"path": str(config), "orig_name": "launch.yaml", "meta": {"_type": "gradio.FileData"}}
    answer = board.send(check, ["the file dropped below", [stolen], "sft", None])
    assert SECRET not in json.dumps(answer)
    assert not answer["success"]


def test_deepspeeds_file_is_read_where_it_was_dropped(board: ServedBoard) -> None:
    launch = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: configs/ds.json\n"
    files = [dropped(board, launch), dropped(board, '{"zero_optimization": {"stage": 7}}', "ds.json")]
    answer = board.send(board.event("doctor-button"), ["the file dropped below", files, "none", None])
    (shown,) = answer["output"]["data"]
    assert "zero7" in shown


def test_the_doctor_answers_as_the_command(board: ServedBoard) -> None:
    check = board.event("doctor-button")
    flags = "method: lora\nlearning_rat: 1.0e-4\noutput_dir: /data/out\n"
    answer = board.send(
        check, ["the file dropped below", [dropped(board, LAUNCH)], "sft", dropped(board, flags, "recipe.yaml")]
    )
    (shown,) = answer["output"]["data"]
    assert "<code>launch.yaml:4</code>" in shown
    assert "FSDP1" in shown
    assert "did you mean --learning_rate?" in shown or "did you mean learning_rate?" in shown
    assert "Paths were not looked at: <code>/data/out</code>" in shown


HOSTILE = [
    "../../../../etc/passwd", "/etc/passwd", "<script>window.hit=1</script>", "${window.hit=1}", "{{constructor}}",
    10**400, -1, 0, 1e308, None, [], ["x"] * 100, {"a": {"b": []}}, True, "\x00", "\ud800", "A" * 100_000, "9" * 5000,
    {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}, "'; DROP TABLE runs; --", "$(touch /tmp/hit)",
]  # fmt: skip


def test_fifty_clicks_at_once_and_hostile_values_are_answered(board: ServedBoard) -> None:
    plan, names = board.event("plan-button"), board.names_of(board.event("plan-button"))
    usual = board.values_of(plan)
    clicks: list[tuple[dict[str, object], list[object]]] = []
    for at, value in enumerate(HOSTILE):
        for name in ("plan-model", ("plan-num_gpus", "plan-gpu", "plan-method", "plan-no_packing")[at % 4]):
            data = list(usual)
            data[names.index(name)] = value
            clicks.append((plan, data))
    clicks += [(plan, usual)] * 8
    chosen = board.event("runs-chosen", "input")
    clicks += [(chosen, [value]) for value in HOSTILE]
    clicks += [(board.event("runs-stop"), [value]) for value in HOSTILE[:6]]
    clicks += [(board.event("runs-report"), [value]) for value in HOSTILE[:6]]
    assert len(clicks) > 80
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda click: board.send(*click), clicks))
    for (_, data), answer in zip(clicks, answers, strict=True):
        text = json.dumps(answer)
        assert "root:" not in text
        assert "Traceback" not in text
        assert answer["msg"] == "process_completed" or answer.get("status") in (400, 422, 503), (data, answer)
    assert sum("15.1 ± 2.8 GiB" in json.dumps(answer, ensure_ascii=False) for answer in answers) >= 8
    assert not Path("/tmp/hit").exists()
    log = board.log.read_text()
    assert "Traceback" not in log
    # Gradio refuses these before any code of the board sees the value.
    assert set(re.findall(r"was not answered \((\w+) at \w+\.py:\d+: ", log)) == REFUSED_BY_GRADIO


def test_another_host_is_warned_of_and_cannot_stop_runs(root: Path, tmp_path: Path) -> None:
    with served(tmp_path, "--host", "0.0.0.0", "--runs", str(root / "runs")) as open_board:
        assert open_board.log.read_text().startswith(
            "warning: whoever reaches 0.0.0.0 sees this page (plans, and the runs"
        )
        assert httpx.get(open_board.address, headers={"host": "somewhere.example"}).status_code == 200
        with pytest.raises(StopIteration):
            open_board.event("runs-yes")


def test_a_port_that_is_taken_is_one_line(board: ServedBoard, capsys: pytest.CaptureFixture[str]) -> None:
    port = board.address.rpartition(":")[2]
    with pytest.raises(SystemExit) as end:
        main(["board", "--port", port])
    assert end.value.code == 2
    line = f"accel-scale board: error: --port {port}: cannot be used (Address already in use). Fix: name another.\n"
    assert capsys.readouterr().err == line


def test_the_space_has_plans_and_the_doctor_and_no_runs(repository: Path) -> None:
    folder = repository / "spaces" / "board"
    code = (
        "import app, json; config = app.demo.get_config_file(); "
        "print(json.dumps([each['props'].get('elem_id') for each in config['components']]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    assert {"plan-button", "doctor-button"} <= set(names)
    assert not any(str(name).startswith("runs-") for name in names)
    told = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert told["sdk"] == "gradio"
    assert told["sdk_version"] == importlib.metadata.version("gradio")
    assert (folder / told["app_file"]).is_file()
    assert "accel-scale[board]" in (folder / "requirements.txt").read_text().splitlines()


# ── The page ─────────────────────────────────────────────────────────────────────────────────────────────────────────

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed") if CHROMIUM else None


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if sync_api is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_api.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextlib.contextmanager
def opened(browser: Browser, board: ServedBoard) -> Iterator[Page]:
    """The page after its first plan has appeared; it logs nothing to the console and requests nothing elsewhere."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.text != FROM_GRADIO else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(board.address)
    page.wait_for_selector("#plan-overview table")
    page.wait_for_function("document.querySelector('#plan-recipe textarea').value.length > 100")
    yield page
    assert said == []
    assert [url for url in asked if not url.startswith((board.address, "data:", "blob:"))] == []
    page.close()


def show(page: Page, tab: str, waits_for: str) -> None:
    page.get_by_role("tab", name=tab).click()
    page.wait_for_selector(waits_for)


def pick(page: Page, field: str, text: str) -> None:
    """Choose an option of a dropdown."""
    page.click(f"{field} input")
    page.get_by_role("option", name=text, exact=True).click()


@needs_chromium
def test_a_plan_is_asked_for_and_taken_away(browser: Browser, board: ServedBoard, tmp_path: Path) -> None:
    with opened(browser, board) as page:
        assert page.input_value("#plan-command textarea").startswith("accel-scale plan meta-llama/Llama-3.1-8B --gpu")
        assert page.locator("#plan-overview table").first.locator("tbody tr").count() == 6
        assert page.locator("#plan-overview .b-bar").count() == 6
        pick(page, "#plan-method", "qlora")
        page.fill("#plan-max_length input", "4096")
        page.click("#plan-button")
        page.wait_for_function("document.querySelector('#plan-command textarea').value.includes('qlora')")
        assert "--max_length 4096" in page.input_value("#plan-command textarea")
        page.wait_for_function("document.querySelector('#plan-recipe textarea').value.includes('max_length: 4096')")
        assert page.input_value("#what-if-max_length input[type=number]") == "4096"
        # Settings that were left open stay open and can be set.
        page.click("text=More settings")
        assert page.input_value("#plan-per_device_train_batch_size input") == ""
        page.fill("#plan-per_device_train_batch_size input", "2")
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('#plan-command textarea').value.includes('batch_size 2')")
        page.wait_for_function("document.querySelector('#plan-recipe textarea').value.includes('batch_size: 2')")
        # Choosing another setting of the table shows its files.
        first = page.input_value("#plan-launch textarea")
        page.click("#plan-chosen input")
        page.get_by_role("option").nth(1).click()
        page.wait_for_function("text => document.querySelector('#plan-launch textarea').value !== text", arg=first)
        with page.expect_download() as download:
            page.click("#plan-files")
        download.value.save_as(tmp_path / "plan.zip")
        assert (tmp_path / "plan.zip").read_bytes()[:2] == b"PK"
        page.click("#plan-overview summary")
        assert page.locator("#plan-overview details table tbody tr").count() >= 5


@needs_chromium
def test_what_is_asked_for_during_an_answer_is_answered_after_it(browser: Browser, board: ServedBoard) -> None:
    with opened(browser, board) as page:
        for length in range(1024, 1024 * 9, 1024):
            page.fill("#plan-max_length input", str(length))
            page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('#plan-command textarea').value.includes('max_length 8192')")
        slider = page.locator("#what-if-num_gpus input[type=range]")
        slider.focus()
        for _ in range(5):
            slider.press("ArrowRight")
            slider.dispatch_event("pointerup")
        page.wait_for_selector("#plan-what-if tbody tr:nth-child(2):has-text('num_gpus=6')")


@needs_chromium
def test_sliders_compare_and_questions_are_answered(browser: Browser, board: ServedBoard) -> None:
    with opened(browser, board) as page:
        assert page.locator("#plan-what-if tbody tr").count() == 1
        slider = page.locator("#what-if-num_gpus input[type=range]")
        slider.focus()
        slider.press("ArrowRight")
        slider.dispatch_event("pointerup")
        page.wait_for_selector("#plan-what-if tbody tr:nth-child(2)")
        row = page.inner_text("#plan-what-if tbody tr:nth-child(2)")
        assert row.startswith("num_gpus=2")
        assert "--what_if num_gpus=2" in page.inner_text("#plan-what-if code")
        page.click("#longest-button")
        page.wait_for_selector("#plan-extreme:has-text('The longest row that fits: ')")
        page.click("#largest-button")
        page.wait_for_selector("#plan-extreme:has-text('The largest micro-batch that fits: ')")


@needs_chromium
def test_what_cannot_be_planned_is_said_where_the_answer_would_be(browser: Browser, board: ServedBoard) -> None:
    with opened(browser, board) as page:
        for typed in ("<script>window.hit=1</script>", "<img src=x onerror=window.hit=1>", "${window.hit=1}{{1}}"):
            page.fill("#plan-model input", typed)
            page.keyboard.press("Tab")
            page.click("#plan-button")
            page.wait_for_selector("#plan-overview .b-refused")
            page.wait_for_function(
                "text => document.querySelector('#plan-overview').innerText.includes(text)", arg=typed
            )
            assert page.input_value("#plan-launch textarea") == ""
        assert page.evaluate("window.hit") is None


@needs_chromium
def test_the_doctor_reads_files_that_are_dropped(browser: Browser, board: ServedBoard, tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text(LAUNCH)
    (tmp_path / "recipe.yaml").write_text("method: lora\nlearning_rat: 1.0e-4\n")
    with opened(browser, board) as page:
        show(page, "Doctor", "#doctor-button")
        page.set_input_files("#doctor-launch input[type=file]", tmp_path / "launch.yaml")
        page.set_input_files("#doctor-flags input[type=file]", tmp_path / "recipe.yaml")
        page.wait_for_selector("#doctor-flags :text('recipe')")
        page.wait_for_selector("#doctor-launch :text('launch')")
        page.click("#doctor-button")
        page.wait_for_selector("#doctor-findings .b-verdict", timeout=60_000)
        text = page.inner_text("#doctor-findings")
        assert re.search(r"[1-9] errors?, ", text)
        assert "launch.yaml:4" in text
        assert "recipe.yaml:2" in text


@needs_chromium
def test_runs_are_followed_and_stopped(browser: Browser, board: ServedBoard, root: Path) -> None:
    live = root / "runs" / "live"
    with holding(live) as process, opened(browser, board) as page:
        show(page, "Runs", "#runs-details .b-chart")
        assert page.locator("#runs-overview tbody tr").count() == 3
        assert page.locator("#runs-details .b-chart path").count() >= 9
        assert page.evaluate("window.hit") is None
        pick(page, "#runs-chosen", "guarded")
        page.wait_for_selector("#runs-details h2:has-text('guarded')")
        assert page.locator("#runs-details line.mark.guard").count() >= 3
        assert page.is_disabled("#runs-stop")
        pick(page, "#runs-chosen", "live")
        page.wait_for_selector("#runs-details h2:has-text('live')")
        assert "step 30 of 100" in page.inner_text(".b-progress")
        with open(live / "metrics.jsonl", "a") as log:
            log.write('{"step": 31, "loss": 0.25, "step_seconds": 0.5}\n')
        page.wait_for_selector(".b-progress:has-text('step 31 of 100')", timeout=15_000)
        page.click("#runs-stop")
        page.wait_for_selector(f"#runs-question:has-text('Process {process.pid}')")
        page.click("#runs-no")
        page.wait_for_selector("#runs-yes", state="hidden")
        assert process.poll() is None
        page.click("#runs-stop")
        page.wait_for_selector("#runs-yes")
        page.click("#runs-yes")
        page.wait_for_selector("#runs-said:has-text('asked to save and stop')")
        assert process.wait(10) == 85
        page.wait_for_selector("#runs-details .b-state.killed", timeout=15_000)
        assert page.is_disabled("#runs-stop")
        page.click("#runs-report")
        page.wait_for_selector("#runs-file")
        with page.expect_download() as download:
            page.click("#runs-file")
        assert Path(download.value.path()).read_text().startswith("<!DOCTYPE html>")


@needs_chromium
def test_axe_finds_nothing_to_mend_and_nothing_sticks_out(browser: Browser, board: ServedBoard, root: Path) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    with holding(root / "runs" / "live"), opened(browser, board) as page:
        page.click("text=More settings")
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        for tab, waits_for in (("Plan", "#plan-button"), ("Doctor", "#doctor-button"), ("Runs", ".b-chart")):
            show(page, tab, waits_for)
            page.mouse.move(0, 0)
            for width, scheme in itertools.product(WIDTHS, SCHEMES):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                page.wait_for_timeout(300)  # until the tab has faded in and menus have moved
                background = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (background == "rgb(255, 255, 255)") == (scheme == "light"), (tab, width, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (tab, width, scheme)
                found = axe.run(page).response["violations"]
                assert [(tab, width, scheme, each["id"], each["nodes"][0]["html"][:200]) for each in found] == []
