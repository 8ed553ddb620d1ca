"""The notebooks run from top to bottom and show what their text says; the committed outputs are current."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WARM_PYTHON = False  # a reader's kernel starts commands like a shell
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def printed(cell: Any) -> str:
    """Standard output of a code cell."""
    texts = [output.get("text", "") for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join("".join(text) for text in texts)


def source(cell: Any) -> str:
    return "".join(cell["source"])


def output(notebook: Any, of: str) -> str:
    """Standard output of the only code cell that contains `of`."""
    (found,) = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and of in source(cell)]
    return printed(found)


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(group.replace(",", "")) for group in found.groups()]


# ── What a reader sees ──


def qlora(notebook: Any) -> None:
    before, after = numbers(r"exact match +(\d+)% before, (\d+)% after", output(notebook, "run_summary.json"))
    assert after >= before + 25
    (t4,) = numbers(r"│ ([\d.]+) ± [\d.]+ GiB │", output(notebook, "--gpu T4"))
    (rtx,) = numbers(r"│ ([\d.]+) ± [\d.]+ GiB │", output(notebook, '--gpu "RTX 4090"'))
    assert 10 < t4 < 14.6
    assert 10 < rtx < 23.5
    assert "qlora in fp16" in output(notebook, "--gpu T4")
    assert "qlora in bf16" in output(notebook, '--gpu "RTX 4090"')
    (short,), (long,) = (
        numbers(rf"{card} +([\d,]+) tokens", output(notebook, "longest_row(")) for card in ("T4", "4090")
    )
    assert short >= 1024  # the rows named by the text's commands fit
    assert long >= 4096
    assert long > 2 * short


def rehearse(notebook: Any) -> None:
    assert "on 8 × H100" in output(notebook, "--top 5")
    (gib,) = numbers(r"│FSDP2.*│ ([\d.]+) ± [\d.]+ GiB │", output(notebook, "--top 5"))
    assert gib < 79.1
    assert "selective checkpointing cannot recompute under ZeRO-3" in output(notebook, "accel-scale doctor")
    assert "doctor's exit status: 1" in output(notebook, "accel-scale doctor")
    table = output(notebook, "accel-scale rehearse")
    assert table.count("passed") >= 4
    assert "FAILED" not in table
    assert "#SBATCH --gpus-per-node=8" in output(notebook, "launch-script slurm")


def trainer(notebook: Any) -> None:
    before, after = numbers(r"before: (\d+)%[\s\S]*after:  (\d+)%", output(notebook, "trainer.train()"))
    assert after >= before + 25
    assert (
        numbers(r"read back +(\d+) tensors, largest difference ([\d.]+)", output(notebook, "first_verification"))[1]
        == 0
    )
    assert "checkpoint-40 (step 40)" in output(notebook, "os.truncate")
    (again,) = numbers(r"after resuming: (\d+)%", output(notebook, "os.truncate"))
    assert again == after


def grpo(notebook: Any) -> None:
    text = output(notebook, "run_summary.json")
    before, after = numbers(r"exact match +(\d+)% before, (\d+)% after", text)
    assert after > before - 5
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", text)]
    assert rewards[-1] > rewards[0] + 0.2
    right = [int(share) for share in re.findall(r"right (\d+)%", text)]
    assert right[-1] > right[0] + 12
    plans = output(notebook, "accel-scale plan")
    memory = [float(gib) for gib in re.findall(r"│ +([\d.]+) ± [\d.]+ GiB │", plans)]
    assert len(memory) == 2
    assert memory[0] < 23.5
    assert memory[1] < 14.6
    assert "RTX 4090 (23.5 GiB each): lora in bf16" in plans
    assert "T4 (14.6 GiB each): lora in fp16" in plans


SEEN: dict[str, Callable[[Any], None]] = {
    "qlora_one_gpu": qlora,
    "rehearse_8_gpus": rehearse,
    "your_own_trainer": trainer,
    "grpo_rewards": grpo,
}


def test_every_notebook_is_checked_and_listed():
    assert sorted(SEEN) == NAMES
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", page)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_show_what_the_text_says(name):
    SEEN[name](committed(name))


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebooks_are_small_and_of_no_machine(name):
    path = FOLDER / f"{name}.ipynb"
    notebook = committed(name)
    assert path.stat().st_size < 60_000
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))  # run once, from top to bottom
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    outputs = json.dumps([cell["outputs"] for cell in code])
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users)/", outputs)
    assert "stderr" not in outputs
    assert "\\u001b" not in outputs  # escape sequences for colours
    for cell in notebook["cells"]:
        for target in _LINK.findall(source(cell)) if cell["cell_type"] == "markdown" else ():
            assert target.startswith("https://") or (FOLDER / target.partition("#")[0]).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "your_own_trainer" else pytest.mark.soak) for name in NAMES]
)
def test_it_runs_from_top_to_bottom(name, run):
    pytest.importorskip("nbclient")
    notebook = run.cleaned(run.executed(FOLDER / f"{name}.ipynb"))
    SEEN[name](notebook)
    for before, now in zip(committed(name)["cells"], notebook.cells, strict=True):
        if source(now).startswith(run.PLAN_CELLS):  # if not: python notebooks/run.py --plans
            assert printed(now) == printed(before)
