"""`benchmarks/gpu_check.py`: a case that fails or times out ends only itself, is on the page, and is run again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_check
from gpu_stages import STAGES, Stage
from gpu_stages.box import Cases, Needs, Row, expect, read_rows
from gpu_stages.inputs import SHAPES, llama_config
from gpu_stages.page import read_ending, write_ending, write_page

STAGE = Stage("methods", "Methods", "training:methods", 60.0)


def cases_in(folder: Path) -> Cases:
    folder.mkdir(exist_ok=True)
    return Cases(folder, on_gpu=False, num_gpus=2, seconds=60)


def lacking() -> str:
    raise Needs("needs a GPU")


def test_a_case_that_fails_ends_only_itself_and_is_the_only_one_run_again(tmp_path: Path) -> None:
    ran = []

    def good() -> str:
        ran.append("good")
        return "1e-7"

    def crash() -> str:
        raise RuntimeError("no kernel\nfor this card")

    cases = cases_in(tmp_path / "methods")
    cases.case("crashes", crash)
    cases.case("is wrong", lambda: expect(False, "2 | 3"))
    cases.case("is right", good)
    cases.case("is lacking", lacking)
    with (tmp_path / "methods" / "rows.jsonl").open("a") as rows:
        rows.write('{"case": "was being wri')
    write_ending(tmp_path / "methods", gpu_check.Ending("ended", "", 3.0))
    found = {row.case: row for row in read_rows(tmp_path / "methods")}
    assert [row.verdict for row in found.values()] == ["FAILED", "FAILED", "ok", "needs"]
    assert found["crashes"].found.startswith("RuntimeError: no kernel (test_gpu_check.py:")
    ending = read_ending(tmp_path / "methods")
    assert ending is not None
    assert not ending.is_done
    assert not ending.is_fine
    text = write_page(tmp_path / "page.md", STAGES, tmp_path, device="cpu")
    assert "**2 of 4 FAILED**, 1 lack something here" in text
    assert "| is wrong | 2 \\| 3 | **FAILED** |" in text
    assert "| is lacking | needs a GPU | – |" in text

    again = cases_in(tmp_path / "methods")
    again.case("is wrong", lambda: expect(True, "2 and 2"))
    again.case("crashes", good)
    again.case("is right", good)
    assert ran == ["good", "good"]  # once for each; the case that was right is not run again
    write_ending(tmp_path / "methods", gpu_check.Ending("ended", "", 3.0))
    ending = read_ending(tmp_path / "methods")
    assert ending is not None
    assert ending.is_done


def test_the_page_names_no_folder_of_the_machine(tmp_path: Path, repository: Path) -> None:
    cases = cases_in(tmp_path / "methods")
    for folder in (repository, Path.home()):
        cases.case(folder.name, lambda folder=folder: f"nothing at {folder}/outputs/data")
    write_ending(tmp_path / "methods", gpu_check.Ending("ended", "", 3.0))
    text = write_page(tmp_path / "page.md", STAGES, tmp_path, device="cpu")
    assert text.count("nothing at ") == 2
    assert f"{repository}/" not in text
    assert f"{Path.home()}/" not in text


@pytest.mark.parametrize(
    ("script", "kind", "why"),
    [
        ("sleep 60", "unfinished", "not finished in 1 s"),
        ("echo the driver is gone >&2; exit 3", "unfinished", "ended with status 3: the driver is gone"),
        ("exit 0", "ended", ""),
    ],
)
def test_a_stage_that_hangs_or_crashes_says_so(monkeypatch, tmp_path: Path, script: str, kind: str, why: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpu_check, "_SHORTEST", 0.0)
    ending = gpu_check.end_of(STAGE, tmp_path, True, 2, 0.6, [])
    assert (ending.kind, ending.why) == (kind, why)


def test_a_host_with_eight_gpus_lends_one_to_a_stage_for_one(monkeypatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho visible $CUDA_VISIBLE_DEVICES\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpu_check, "_SHORTEST", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1b2c,GPU-3d4e")
    assert gpu_check.end_of(STAGE, tmp_path, False, 2, 5.0, []).why == "ended with status 1: visible GPU-1b2c"
    several = Stage("methods", "Methods", "training:methods", 60.0, num_gpus=2)
    assert gpu_check.end_of(several, tmp_path, False, 2, 5.0, []).why.endswith("visible GPU-1b2c,GPU-3d4e")
    assert gpu_check.end_of(several, tmp_path, False, 1, 5.0, []).why == "needs 2 GPUs"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1b2c,GPU-3d4e"


def test_results_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    gpu_check.check_same_device(tmp_path, "NVIDIA L4")
    gpu_check.check_same_device(tmp_path, "NVIDIA L4")
    with pytest.raises(SystemExit, match=r"has results of NVIDIA L4. Fix: use --fresh"):
        gpu_check.check_same_device(tmp_path, "NVIDIA H100")


def test_every_stage_is_where_it_says() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    for stage in STAGES:
        assert callable(stage.load()), stage.name
    assert Row("a", "b", "ok", 1.0).verdict == "ok"


def test_the_largest_model_comes_first_and_nothing_twice() -> None:
    from gpu_stages.planner import LARGE, chosen

    found = chosen(on_gpu=True, default_precision="bf16")
    assert [(case.model, case.method) for case in found[:2]] == [(LARGE, "qlora"), (LARGE, "qlora")]
    assert len({case.label for case in found}) == len(found)
    for case in found:  # each can be planned, so none fails on a GPU for that reason
        assert case.setup.sequence_length == case.length
        assert case.config.hidden_size > 0


def test_utilisation_is_of_the_cards_peak(monkeypatch, tmp_path: Path) -> None:
    from gpu_stages import speed

    from accel_scale.facts import hardware
    from accel_scale.facts.device import Device
    from accel_scale.launching import machine

    h100 = hardware.Machine(hardware.find_gpu("NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(hardware, "detect_local", lambda: h100)
    monkeypatch.setattr(machine, "detect_device", lambda device_type: Device("cuda", "H100", (9, 0)))
    assert speed.utilisation("8B", 10_000.0, cases_in(tmp_path)) == pytest.approx(0.485, abs=0.005)
    monkeypatch.setattr(hardware, "detect_local", lambda: None)
    assert speed.utilisation("8B", 10_000.0, cases_in(tmp_path)) is None


def test_the_size_of_the_run_that_must_not_fit_is_the_models() -> None:
    from gpu_stages.recovery import num_parameters

    from accel_scale.planning.models.model_config import facts_from_config

    for size in SHAPES:
        if SHAPES[size][-1]:
            facts = facts_from_config(llama_config(size).to_dict(), name=size)
            assert num_parameters(size) == pytest.approx(facts.num_params, rel=0.01)


def test_a_rate_leaves_the_first_steps_out() -> None:
    from gpu_stages.speed import rate

    report = {
        "steps": [[step, 10.0 * step if step > 3 else 30.0, 0.0] for step in range(1, 6)],
        "logs": [[step, 100 * step, 2.0 - step / 10] for step in range(1, 6)],
    }
    assert rate(report) == {"tokens_per_second": 10.0, "peak_device_bytes": None, "loss": 1.5}


def test_two_threads_run_a_launch_once_and_share_the_gpus(monkeypatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from gpu_stages.many import Gpus, Once

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    gpus, ran = Gpus(8), []

    def fail(method: str, name: str) -> None:
        with gpus.taken(2) as mine:
            ran.append((method, name, mine))
            raise RuntimeError("no such launch file")

    once = Once(fail)
    with ThreadPoolExecutor(4) as pool:
        failures = [pool.submit(once, "full", name).exception() for name in ("ddp", "ddp", "fsdp2", "ddp")]
    assert [str(failure) for failure in failures] == ["no such launch file"] * 4
    assert [(method, name) for method, name, _ in ran] == [("full", "ddp"), ("full", "fsdp2")]
    with gpus.taken(3) as mine:  # all have been given back
        assert sorted(mine) == ["2", "5", "7"]
