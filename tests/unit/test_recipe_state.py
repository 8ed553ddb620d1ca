"""How the recipes use seeds, and the state that pretrain.py saves: batches to skip, and the guard's budget."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import AutoTokenizer

from accel_scale.data.default import default_model_path
from accel_scale.data.pretraining import load_pretraining_tokenizer, open_pretraining_data
from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.measuring.meters import ThroughputMeter
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.pretraining.report import PretrainReport
from accel_scale.pretraining.run import Run
from accel_scale.training.checkpoints.manager import CheckpointManager
from accel_scale.training.guard.guard import Guard


def recipe_module(name: str) -> Any:
    path = Path(__file__).parents[2] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_unit_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe() -> Any:
    return recipe_module("pretrain")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Begun:
    """A run of the recipe with a small model, real data, a checkpoint manager and a guard."""

    def __init__(self, recipe: Any, data: str, folder: Path) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 2)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.recipe, self.lines = recipe, []
        run: Any = Run(
            settings=SimpleNamespace(global_batch_size=4),
            start=SimpleNamespace(launch=SimpleNamespace(rank=0, local_world_size=1)),
            model_args=None,  # type: ignore[arg-type]
            data_args=SimpleNamespace(dataloader_num_workers=0),  # type: ignore[arg-type]
            args=SimpleNamespace(output_dir=str(folder), decay_from=None, per_device_train_batch_size=2, eval_rows=0),  # type: ignore[arg-type]
            parallel_args=None,  # type: ignore[arg-type]
            guard_args=None,  # type: ignore[arg-type]
            layout=ParallelLayout(),
            embedded=False,
        )
        run.accelerator = accelerator
        run.data = open_pretraining_data(data, tokenizer=load_pretraining_tokenizer("byte"), row_length=16, seed=1)
        self.run, self.guard = run, Guard(GuardSettings(policy="rollback", max_skips=3, min_steps=4))
        self.manager = CheckpointManager(accelerator, folder)
        self.manager.register("guard", self.guard)
        self.report = SimpleNamespace(rolled_back=lambda: self.lines.append("rolled back"))
        recipe.resume(run, self.manager, "auto")
        self.report.counters = PretrainReport(run, None, ThroughputMeter(), time.perf_counter()).counters  # type: ignore[arg-type]

    def draw(self) -> list[str]:
        """The row ids of the next batch that is not skipped."""
        while True:
            drawn = next(self.run.batches)
            self.run.drawn += 1
            if self.run.drawn not in self.run.avoided:
                return [name for names in drawn.row_ids for name in names]

    def step(self) -> list[str]:
        rows = self.draw()
        assert self.guard.judge(2.0, 1.0).taken
        self.run.step += 1
        return rows

    def save(self) -> None:
        self.manager.save(self.run.step, self.recipe.run_state(self.run, self.report))

    def meet_nan(self) -> str:
        """Let the next batch give NaN and carry out the guard's action, which is returned."""
        self.draw()
        action = self.guard.judge(math.nan, 1.0).action
        if action == "rollback":
            self.recipe.roll_back(self.run, self.manager, self.guard, self.report)
        return action


@pytest.fixture
def begin(recipe: Any, tmp_path: Path) -> Iterator[Callable[[], Begun]]:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"document {index} of many"} for index in range(400)])
    begun: list[Begun] = []

    def make(folder: str = "run") -> Begun:
        begun.append(Begun(recipe, data, tmp_path / folder))
        return begun[-1]

    yield make
    for one in begun:
        one.run.batches.close()
        one.manager._signals.restore()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_rollback_goes_around_the_batch_and_so_does_a_later_resume(begin: Callable[[], Begun]) -> None:
    one, other = begin("run"), begin("undisturbed")
    expected = [other.draw() for _ in range(8)]
    one.save()
    assert [one.step(), one.step()] == expected[:2]
    assert one.meet_nan() == "rollback"
    assert (one.run.step, one.run.drawn, one.run.avoided) == (0, 0, [3])
    assert one.lines == ["rolled back"]
    assert [one.step() for _ in range(4)] == [*expected[:2], *expected[3:5]], "the third batch is left out"
    one.save()
    again = begin("run")
    assert (again.run.step, again.run.drawn, again.run.avoided) == (4, 5, [3])
    assert again.step() == expected[5]
    # Even from a checkpoint that is older than the event, the batch is skipped.
    assert again.meet_nan() == "rollback"
    assert again.run.avoided == [3, 7]
    assert [again.step(), again.step()] == [expected[5], expected[7]]


def test_rollbacks_come_to_an_end(begin: Callable[[], Begun]) -> None:
    """Three events are tolerated: each rolls back to a checkpoint, which must not erase the later ones."""
    one = begin()
    one.save()
    assert [one.meet_nan() for _ in range(4)] == ["rollback", "rollback", "rollback", "stop"]
    assert one.run.avoided == [1, 2, 3]


def test_counts_and_tokens_go_on(begin: Callable[[], Begun]) -> None:
    one = begin()
    one.step()
    one.run.tokens = 640
    one.save()
    again = begin()
    assert (again.run.step, again.run.drawn, again.run.tokens) == (1, 1, 640)
    assert again.guard.num_judged == 1


# ── Seeds of recipes/sft.py ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def sft() -> Any:
    return recipe_module("sft")


def test_the_data_follows_its_seed_or_the_runs(sft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = {name: [{"prompt": f"{name}{i}", "completion": "c"} for i in range(60)] for name in "ab"}
    mixture = [f"{write_jsonl(tmp_path / f'{name}.jsonl', found)}=1" for name, found in rows.items()]

    tokenizer = AutoTokenizer.from_pretrained(default_model_path())

    def order(**values: int) -> list[str]:
        scale = SimpleNamespace(dataset_mixture=mixture, exact_match_samples=0, columns=(), on_bad_row="error")
        script = SimpleNamespace(
            dataset_name=None, dataset_config=None, dataset_train_split="train", dataset_test_split="test",
            dataset_streaming=False,
        )  # fmt: skip
        run = SimpleNamespace(
            script=script,
            settings=SimpleNamespace(scale=scale, values=values),
            tokenizer=tokenizer,
            plan=None,
        )
        sft.load_data(run)
        return list(run.data.train["prompt"])

    usual = order()
    assert order(seed=42) == usual
    assert order(seed=7) == order(seed=7) != usual
    assert order(seed=7, data_seed=3) == order(seed=8, data_seed=3) != order(seed=7)
    assert order(seed=7, data_seed=0) == order(seed=8, data_seed=0), "0 is a seed as others are"


def test_figures_of_earlier_starts_are_counted_on(begin: Callable[[], Begun]) -> None:
    one = begin("run")
    one.run.counted = {"seconds": 100.0, "data_seconds": 2.0, "timed_seconds": 8.0, "skipped_steps": 3}
    one.report.counters = PretrainReport(one.run, None, ThroughputMeter(), time.perf_counter()).counters  # type: ignore[arg-type]
    one.step()
    one.save()
    again = begin("run").report.counters()
    assert 100 < again.pop("seconds") < 200
    assert again == {"data_seconds": 2.0, "timed_seconds": 8.0, "skipped_steps": 3}
