"""Checkpoints, the guard and trainers when forked ranks share a model: DeepSpeed's ZeRO, FSDP2 and our own.

tests/distributed launches more of each; here each line of the code runs once, in tenths of a second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from forked_ranks import on_ranks
from test_saving import make_trainer
from torch import nn

from accel_scale.errors import ConfigError
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
from accel_scale.modeling.gathering import gather_whole, named_tensors

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}  # fmt: skip
LAUNCHES = {
    "single": {},
    "ddp": {},
    "fsdp2 whole": {**FSDP2, "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"},
    "fsdp2 sharded": {**FSDP2, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
    **{
        f"zero{stage}": {
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
            "ACCELERATE_GRADIENT_CLIPPING": "auto",
        }
        for stage in (1, 2, 3)
    },
}  # fmt: skip


def launch(name: str) -> None:
    """Set, in a rank and before Accelerate is used, the variables that `accelerate launch` would set."""
    os.environ.update({"ACCELERATE_MIXED_PRECISION": "no", **LAUNCHES[name]})
    enable_rehearsal_if_needed()


def needs(name: str) -> str:
    """Import DeepSpeed once, in the parent process, if the strategy needs it."""
    if "zero" in name:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        pytest.importorskip("deepspeed")
    return name


# --- a plain loop's checkpoints ---


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_loop_under_zero_goes_on_bit_for_bit_and_on_one_rank(strategy: str, tmp_path: Path) -> None:
    import checkpoint_run as script

    needs(strategy)

    def run(name: str, num_ranks: int, *flags: str) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        report = folder / "report.json"

        def rank() -> None:
            launch(strategy)
            sys.argv = ["checkpoint_run.py", "--output_dir", str(tmp_path / "run"), "--report", str(report), *flags]
            assert not script.main()

        on_ranks(num_ranks, rank, folder)
        return json.loads(report.read_text())  # type: ignore[no-any-return]

    whole = run("whole", 2, "--num_steps", "4", "--save_at", "2")
    again, alone = run("again", 2, "--num_steps", "4"), run("alone", 1, "--num_steps", "4")
    assert (whole["resumed"], again["resumed"], alone["resumed"]) == (None, 2, 2)
    assert again["state"] == {"rows": 8}
    assert again["learning_rate"] == whole["learning_rate"] == alone["learning_rate"]
    for step in ("3", "4"):
        assert again["losses"][step] == whole["losses"][step]
        assert again["draws"][step] == whole["draws"][step]
        assert alone["losses"][step] == pytest.approx(whole["losses"][step], rel=1e-6)
    assert not (tmp_path / "run" / ".partial").exists(), "what was converted is removed"


# --- a trainer's ---


def digests(model: Any) -> dict[str, str]:
    """A digest of every weight as a whole."""
    return {
        name: hashlib.blake2b(tensor.detach().cpu().numpy().tobytes()).hexdigest()
        for name, tensor in gather_whole(named_tensors(model))
    }


SOURCES = {
    "ddp": "model.safetensors", "fsdp2 whole": "model.safetensors", "fsdp2 sharded": "pytorch_model_fsdp_0",
    "zero1": "model.safetensors", "zero3": "model.safetensors",
}  # fmt: skip


@pytest.mark.parametrize("strategy", SOURCES)
def test_a_trainers_run_goes_on_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    """A four-step run is resumed from checkpoint 2 and verified; every rank detects a flipped bit in it."""
    import saving_run as script

    needs(strategy)

    def first() -> dict[str, Any]:
        launch(strategy)
        trainer = make_trainer(tmp_path / "run", use_cpu=False, per_device_train_batch_size=1)
        trainer.train()
        found = trainer.first_verification
        return {
            "digests": digests(trainer.model),
            "verified": [found.num_tensors, found.max_abs_diff, found.source],
            "flipped": script.corrupted_is_caught(trainer, tmp_path / "run" / "checkpoint-4"),
        }

    def second() -> dict[str, Any]:
        launch(strategy)
        trainer = make_trainer(tmp_path / "run", use_cpu=False, per_device_train_batch_size=1)
        trainer.train(resume_from_checkpoint="auto")
        return {"digests": digests(trainer.model), "step": trainer.resumed.manifest.step, "said": trainer.counters()}

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    expected = on_ranks(2, first, tmp_path / "one")
    assert expected[0]["digests"] == expected[1]["digests"]
    for line in expected:
        assert line["verified"][1:] == [0.0, SOURCES[strategy]]
        assert line["verified"][0] in (20, 21), "tied embeddings once, or under both of their names"
        assert "differs by up to" in line["flipped"]
    manifest = json.loads((tmp_path / "run" / "checkpoint-2" / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["strategy"]) == (2, strategy.split()[0])
    ending = {"fsdp2 whole": "/FULL_STATE_DICT", "fsdp2 sharded": "/SHARDED_STATE_DICT"}
    assert manifest["layout"] == f"trainer{ending.get(strategy, '')}"
    assert {"random_states_0.pt", "random_states_1.pt"} <= manifest["files"].keys()
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    again = on_ranks(2, second, tmp_path / "other")
    assert [line["step"] for line in again] == [2, 2]
    assert [line["digests"] for line in again] == [line["digests"] for line in expected]


@pytest.mark.parametrize("strategy", ["fsdp2 sharded", "zero2"])
def test_a_trainers_run_goes_on_with_another_number_of_ranks(strategy: str, tmp_path: Path) -> None:
    """FSDP2 reads the layout of the checkpoint, whichever layout it writes itself."""
    needs(strategy)

    def run(num_ranks: int, resume: str | None, *, strategy: str = strategy) -> dict[str, list[float]]:
        def rank() -> dict[str, list[float]]:
            launch(strategy)
            batch = {"per_device_train_batch_size": 2 // num_ranks, "max_steps": 3, "save_steps": 2}
            trainer = make_trainer(tmp_path / "run", use_cpu=False, **batch)
            trainer.train(resume_from_checkpoint=resume)
            return {name: whole.flatten()[:8].tolist() for name, whole in gather_whole(named_tensors(trainer.model))}

        folder = tmp_path / f"{num_ranks} {resume}"
        folder.mkdir()
        return on_ranks(num_ranks, rank, folder)[0]  # type: ignore[no-any-return]

    expected = run(2, None)
    shutil.rmtree(tmp_path / "run" / "checkpoint-3", ignore_errors=True)
    found = run(1, "auto", strategy="fsdp2 whole" if strategy == "fsdp2 sharded" else strategy)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


# --- the guard ---


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2 sharded"])
def test_a_guarded_loop_is_the_one_that_never_saw_the_bad_batches(strategy: str, tmp_path: Path) -> None:
    """NaN in the first step, infinity and a spike, one of them on the other rank; each policy on two ranks."""
    import guard_run as script

    needs(strategy)
    script.NUM_STEPS = 10
    script.POISON = {1: (0, 0, math.nan), 3: (1, 1, math.inf), 8: (1, 0, 400.0)}
    script.SPIKES = {8}
    script.SETTINGS = {"window": 8, "min_steps": 4}
    entries: list[dict[str, Any]] = []
    script.report = lambda accelerator, entry: entries.append(entry)

    def rank() -> list[dict[str, Any]]:
        launch(strategy)
        sys.argv = ["guard_run.py", "--output_dir", str(tmp_path)]
        script.main()
        return entries

    for ordinary, skip, lower_lr, stop in on_ranks(2, rank, tmp_path):
        assert ordinary["loss"] < ordinary["first_loss"]
        assert skip["actions"] == {"1": "skipped", "3": "skipped", "8": "skipped"}
        assert skip["difference"] == 0
        assert lower_lr["actions"] == {"1": "skipped", "3": "skipped", "8": "lowered"}
        assert lower_lr["difference"] == 0
        assert stop["actions"] == {"1": "stop"}
        assert stop["difference"] == 0
        assert [event["step"] for event in skip["events"]] == [1, 3, 8]
    assert [(tmp_path / f"status.{rank}").read_text() for rank in range(2)] == ["65", "65"]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_step_that_is_dropped_is_one_that_the_engine_has_skipped(strategy: str, tmp_path: Path) -> None:
    """The engine skips it as after an overflow: it frees the gradients and counts the step."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from accel_scale import Guard, GuardedStep, GuardSettings

    needs(strategy)

    def rank() -> list[int]:
        launch(strategy)
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        plain = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
        step = GuardedStep(accelerator, model, optimizer, guard=Guard(GuardSettings()), output_dir=tmp_path)
        for factor in (1.0, math.nan, 1.0):
            with step.micro_batch(is_last=True):
                step.backward(model(torch.ones(2, 4)).mean() * factor)
            step.finish()
        engine = accelerator.deepspeed_engine_wrapped.engine
        return [engine.global_steps, engine.skipped_steps]

    assert on_ranks(1, rank, tmp_path) == [[3, 1]]


def test_a_guarded_loop_of_ranks_that_share_matrix_products(tmp_path: Path) -> None:
    """Two ranks with half of each matrix and two micro-batches: clipped, and as if bad steps had not occurred."""
    import tensor_parallel_run as script
    from accelerate import Accelerator

    from accel_scale import Guard, GuardedStep, GuardSettings
    from accel_scale.optimization.fast_loss import language_model_loss
    from accel_scale.optimization.loss import count_loss_tokens
    from accel_scale.parallel.model_parallel import parallelize
    from accel_scale.training.guard.events import read_events

    def train(numbers: list[int], bad: set[int], largest: float | None, folder: str) -> tuple[list[Any], Any]:
        accelerator, model = Accelerator(cpu=True), script.build("llama")
        parallelize(accelerator, model, script.ParallelLayout(tp=2))
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
        step = GuardedStep(
            accelerator, model, optimizer, guard=Guard(GuardSettings()), max_grad_norm=largest,
            output_dir=tmp_path / folder,
        )  # fmt: skip
        outcomes = []
        for number in numbers:
            batch = script.micro_batch(number, packed=False)
            tokens = int(count_loss_tokens(batch["labels"]))
            for index in (0, 1):
                half = {name: value[index : index + 1] for name, value in batch.items()}
                with step.micro_batch(is_last=index == 1, row_ids=[f"{number}.{index}"]):
                    loss = language_model_loss(model, half, tokens) * step.loss_factor
                    step.backward(loss * (math.nan if number in bad else 1.0))
            outcomes.append(step.finish())
        assert all(parameter.grad is None for parameter in model.parameters())
        return outcomes, model

    def rank() -> dict[str, Any]:
        outcomes, model = train([0, 1, 2, 3, 4, 5], {1, 4}, 0.1, "bad")
        clean, other = train([0, 2, 3, 5], set(), 0.1, "clean")
        unclipped, third = train([0, 2, 3, 5], set(), None, "unclipped")
        assert [one.loss for one in outcomes if one.taken] == [one.loss for one in clean]
        assert clean[0].grad_norm == unclipped[0].grad_norm > 0.1, "the norm before it is clipped"
        return {
            "actions": [outcome.action for outcome in outcomes],
            "digests": [digests(one) for one in (model, other, third)],
        }

    for line in on_ranks(2, rank, tmp_path):
        assert line["actions"] == ["stepped", "skipped", "stepped", "stepped", "skipped", "stepped"]
        bad, clean, unclipped = line["digests"]
        assert bad == clean != unclipped
    events = read_events(tmp_path / "bad")
    assert [(event["step"], event["rows"]) for event in events] == [(2, ["1.0", "1.1"]), (5, ["4.0", "4.1"])]


def parts_of_a_pipeline() -> Any:
    """A stage with a weight of norm 5, and another with a copy that the norm leaves out."""
    counted, copied = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    counted.weight.grad, copied.weight.grad = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0, 20.0]])
    said: list[bool] = []
    return SimpleNamespace(
        parts=[counted, copied, nn.Linear(2, 1)], pipeline=None, pp_group=None, sync_gradients=said.append, said=said,
        counted_parameters=lambda: [counted.weight], layout=SimpleNamespace(gradient_ranks=1, pp=2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("largest", "own", "copied"),
    [(1.0, [0.6, 0.8], [2.0, 4.0]), (5.5, [3.0, 4.0], [10.0, 20.0]), (None, [3.0, 4.0], [10.0, 20.0]),
     (0, [3.0, 4.0], [10.0, 20.0])],
)  # fmt: skip
def test_copies_of_another_stages_weight_are_clipped_by_the_same_factor(
    largest: float | None, own: list[float], copied: list[float]
) -> None:
    from accel_scale.training.guard.parallel_control import ParallelGate

    shared, state = parts_of_a_pipeline(), SimpleNamespace(scaler=None, sync_gradients=None)
    gate = ParallelGate(state, shared, SimpleNamespace(step=None))
    assert gate.clip(largest) == pytest.approx(5.0)
    assert shared.parts[0].weight.grad.tolist() == [pytest.approx(own, rel=1e-5)]
    assert shared.parts[1].weight.grad.tolist() == [pytest.approx(copied, rel=1e-5)]
    gate.zero_grad()
    assert all(parameter.grad is None for part in shared.parts for parameter in part.parameters())
    for pipeline, is_last, said in (
        (None, True, [True]),
        (None, False, [True, False]),
        (object(), True, [True, False]),
    ):
        shared.pipeline = pipeline
        with gate.micro_batch(is_last=is_last):
            assert (state.sync_gradients, shared.said) == (is_last, said)
    state.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConfigError, match="loss scaling of fp16 is not agreed upon") as refused:
        ParallelGate(state, shared, SimpleNamespace(step=None))
    assert refused.value.place == "--precision"


# --- distributed checkpoints, compared and taken up ---


def test_shards_are_compared_where_they_are_held(tmp_path: Path) -> None:
    """One row more than ranks, fewer rows than ranks, a tied weight under one of two names; all report differences."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from accel_scale.training.saving import verification_sharded as sharded

    def rank() -> list[Any]:
        mesh = init_device_mesh("cpu", (2,))

        def held(*shape: int, at: int | None = None, value: float = 9.5) -> torch.Tensor:
            whole = torch.arange(float(math.prod(shape))).view(shape)
            if at is not None:
                whole.view(-1)[at] = value
            return distribute_tensor(whole, mesh, [Shard(0)])

        stored = {"w": held(3, 2), "thin": held(1, 2), "plain": torch.ones(2)}
        folder = tmp_path / "pytorch_model_fsdp_0"
        dist_cp.save({"model": stored}, checkpoint_id=folder)
        usual = {"w": held(3, 2), "thin": held(1, 2), "plain": torch.ones(2)}
        tied = {**usual, "again": usual["w"]}
        cases = [
            usual, tied, {**usual, "w": held(3, 2, at=5)}, {**usual, "w": held(3, 2, at=0, value=math.nan)},
            {**usual, "new": held(2, 2)}, {name: usual[name] for name in ("w", "plain")},
            {**usual, "w": held(4, 2)}, {**usual, "plain": torch.tensor([1.0, 0.75])},
        ]  # fmt: skip
        found: list[Any] = [sharded.compare_sharded(case, folder) for case in cases]
        sharded.CHUNK_BYTES = 1  # one tensor at a time
        found.append(sharded.compare_sharded({**usual, "w": held(3, 2, at=5)}, folder))
        dist.barrier()
        if dist.get_rank() == 0:
            (shards,) = folder.glob("__1_0.distcp")
            shards.write_bytes(shards.read_bytes()[:10])
        dist.barrier()
        found.append(sharded.compare_sharded(usual, folder))
        return found

    for lines in on_ranks(2, rank, tmp_path):
        *usual, broken = lines
        assert usual == [
            [3, 0.0, []],
            [3, 0.0, []],
            [3, 4.5, ["w differs by up to 4.5"]],
            [3, math.inf, ["w differs by up to inf"]],
            [3, 0.0, ["new is missing"]],
            [2, 0.0, ["thin is unexpected"]],
            [2, 0.0, ["w has shape [3, 2] instead of [4, 2]"]],
            [3, 0.25, ["plain differs by up to 0.25"]],
            [3, 4.5, ["w differs by up to 4.5"]],
        ]
        _, _, (problem, *_) = broken
        assert problem.startswith("pytorch_model_fsdp_0 cannot be read (")
        assert "\n" not in problem


def test_chunks_are_closed_when_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.training.saving import verification_sharded as sharded

    monkeypatch.setattr(sharded, "CHUNK_BYTES", 32)
    tensors = {str(index): torch.zeros(4) for index in range(8)}  # 16 bytes each
    assert [list(chunk) for chunk in sharded._local_chunks(tensors)] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]
    assert list(sharded._local_chunks({})) == []
    assert [len(chunk) for chunk in sharded._local_chunks({"a": torch.zeros(9)})] == [1]


class Alone:
    """The parts of an `Accelerator` that are used here, with one model and one optimizer."""

    is_main_process = True

    def __init__(
        self, model: nn.Module, rate: Any = 0.1, optimizer: type = torch.optim.AdamW, **settings: Any
    ) -> None:
        self._models = [model]
        self._optimizers = [SimpleNamespace(optimizer=optimizer(model.parameters(), lr=rate, **settings))]

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool) -> nn.Module:
        assert not keep_torch_compile
        return model

    def step(self, count: int = 1) -> Alone:
        for _ in range(count):
            self._models[0](torch.ones(2, 3)).square().sum().backward()
            self._optimizers[0].optimizer.step()
            self._optimizers[0].optimizer.zero_grad()
        return self

    def held(self) -> Iterator[torch.Tensor]:
        yield from self._models[0].state_dict().values()
        for state in self._optimizers[0].optimizer.state.values():
            yield from state.values()


class Twice(nn.Module):
    """A weight under two names, and a buffer."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(size)
        self.one = nn.Linear(3, size)
        self.other = nn.Linear(3, size)
        self.other.weight = self.one.weight
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = self.other(x) + self.one(x)
        return result


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("copy", [True, False])
def test_weights_that_are_stored_by_their_plain_names_go_on_as_they_were(copy: bool, tmp_path: Path) -> None:
    from accel_scale.training.checkpoints.parallel import ParallelContents

    manifest: Any = None
    first = Alone(Twice()).step(2)
    contents = ParallelContents(first)
    assert contents.refuse_asynchronous() is None
    write = contents.capture(copy=copy, group=None)
    expected = [tensor.clone() for tensor in first.held()]
    if copy:
        first.step()  # training continues
    write(tmp_path)
    stored = dist_cp.FileSystemReader(tmp_path / "model_parallel").read_metadata().state_dict_metadata
    assert sorted(stored) == [
        *(f"model.{name}" for name in ("one.bias", "one.weight", "other.bias", "seen")),
        *(f"optimizer.{name}.{key}" for name in ("one.bias", "one.weight", "other.bias")
          for key in ("exp_avg", "exp_avg_sq", "step")),
    ], "a weight with two names once"  # fmt: skip
    first = Alone(Twice()).step(3)
    for stepped in (0, 1):
        again = Alone(Twice(), rate=0.5).step(stepped)
        again._optimizers[0].optimizer.param_groups[0]["initial_lr"] = 0.7
        ParallelContents(again).load(tmp_path, manifest, tmp_path)
        found = list(again.held())
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        group = again._optimizers[0].optimizer.param_groups[0]
        assert (group["lr"], group["initial_lr"]) == (0.1, 0.7), "rates that were not stored stay"
        again.step()
        assert all(torch.equal(one, other) for one, other in zip(again.held(), first.held(), strict=True))
    rate = torch.tensor(0.5)
    tensor_rate = Alone(Twice(), rate=rate, capturable=False, foreach=False)
    tensor_rate._optimizers[0].optimizer.param_groups[0]["lr"] = rate
    ParallelContents(tensor_rate).load(tmp_path, manifest, tmp_path)
    assert tensor_rate._optimizers[0].optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    with pytest.raises(ConfigError, match=r"does not fit this model and optimizer \(") as refused:
        ParallelContents(Alone(Twice(4))).load(tmp_path, manifest, tmp_path)
    assert refused.value.place == "resume"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_has_not_stepped_is_taken_up_without_states(tmp_path: Path) -> None:
    from accel_scale.training.checkpoints.parallel import ParallelContents

    first = Alone(Twice())
    first._optimizers[0].optimizer.param_groups[0]["initial_lr"] = 0.3
    ParallelContents(first).capture(copy=False, group=None)(tmp_path)
    groups = json.loads((tmp_path / "optimizer_groups.json").read_text())
    assert groups == {"has_stepped": False, "rates": {"lr": 0.1, "initial_lr": 0.3}}
    again = Alone(Twice(), rate=0.5).step(2)
    ParallelContents(again).load(tmp_path, None, tmp_path)  # type: ignore[arg-type]
    assert not again._optimizers[0].optimizer.state
    assert again._models[0].seen == 0
    assert again._optimizers[0].optimizer.param_groups[0]["initial_lr"] == 0.3
    other = Alone(Twice())
    other.is_main_process = False
    ParallelContents(other).capture(copy=False, group=None)(tmp_path / "other")
    assert not (tmp_path / "other" / "optimizer_groups.json").exists(), "rank 0 writes it"
    counting = Alone(Twice()).step()
    next(iter(counting._optimizers[0].optimizer.state.values()))["count"] = 3
    with pytest.raises(ConfigError, match="state 'count' is no tensor") as refused:
        ParallelContents(counting).capture(copy=False, group=None)
    assert refused.value.place == "--optim"
    torch.save(counting, tmp_path / "model_parallel" / "planted.pt")
    with pytest.raises(ConfigError, match=r"planted\.pt holds .*, which only an unrestricted unpickler reads"):
        ParallelContents(again).load(tmp_path, None, tmp_path)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_copy_of_another_stages_weight_is_not_stored_and_loaded_as_that_one(tmp_path: Path) -> None:
    from accel_scale.training.checkpoints.parallel import ParallelContents

    def contents(*tensors: tuple[str, torch.Tensor, bool]) -> Any:
        made = ParallelContents(Alone(nn.Linear(3, 3)))
        made._shared = SimpleNamespace(tensors=lambda: iter(tensors))  # type: ignore[assignment]
        return made

    weight, copied, other = (nn.Parameter(torch.full((2,), float(value))) for value in (1, 2, 3))
    contents(("w", weight, False), ("v", copied, True)).capture(copy=False, group=None)(tmp_path)
    contents(("w", other, True)).load(tmp_path, None, tmp_path)
    assert other.tolist() == [1, 1]
    with pytest.raises(ConfigError, match="does not fit"):
        contents(("v", other, True)).load(tmp_path, None, tmp_path)


# --- DeepSpeed's engine, without one ---


class Engine:
    """Stands in for DeepSpeed's engine: writes folders, files and a script."""

    def __init__(self, *fails: str) -> None:
        self.done: list[str] = []
        self.checkpoint_engine = SimpleNamespace(
            save=lambda name: self.do("save", name), makedirs=lambda name: self.do("makedirs", name), name="torch"
        )
        self._copy_recovery_script = lambda path: self.do("script", path)
        self.fails = fails

    def do(self, what: str, name: str) -> None:
        self.done.append(what)
        if what in self.fails:
            raise OSError(28, f"no space for {what} {name}")


def test_what_an_engine_cannot_write_is_raised_when_every_rank_has_written() -> None:
    from accel_scale.training.checkpoints.zero import errors_kept_for_later

    for fails, said in (
        ((), None),
        (("save",), "save b"),
        (("makedirs", "save"), "makedirs a"),
        (("script",), "script c"),
    ):
        engine = Engine(*fails)
        own, script = engine.checkpoint_engine, engine._copy_recovery_script
        outcome = pytest.raises(OSError, match=f"no space for {said}") if said else _nothing()
        with outcome, errors_kept_for_later(engine) as same:
            assert same is engine
            engine.checkpoint_engine.makedirs("a")
            engine.checkpoint_engine.save("b")
            engine._copy_recovery_script("c")
            assert engine.checkpoint_engine.name == "torch"
        assert engine.done == ["makedirs", "save", "script"]
        assert engine.checkpoint_engine is own
        assert engine._copy_recovery_script is script
    broken = Engine()
    broken.checkpoint_engine.save = lambda name: [][1]
    with pytest.raises(IndexError), errors_kept_for_later(broken):
        broken.checkpoint_engine.save("b")


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def zero_accelerator(stage: int, *models: Any) -> Any:
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), _models=list(models), num_processes=2)


def test_what_deepspeed_cannot_hold_or_load_is_refused(tmp_path: Path) -> None:
    from accel_scale.trainers import checkpoint_trainer as trainers
    from accel_scale.training.checkpoints.zero import ZeroContents, load_engine

    for stage in (1, 2, 3):
        contents = ZeroContents(zero_accelerator(stage))
        assert contents.layout == f"zero{stage}"
        assert "while all ranks wait" in str(contents.refuse_asynchronous())
    for stage in (0, 4):
        with pytest.raises(ConfigError, match=f"ZeRO-{stage} partitions nothing") as refused:
            ZeroContents(zero_accelerator(stage))
        assert refused.value.place == "zero_stage"
    for models in ((), (1, 2)):
        with pytest.raises(ConfigError, match=f"DeepSpeed holds {len(models)} models"):
            ZeroContents(zero_accelerator(2, *models)).load(tmp_path, None, tmp_path)  # type: ignore[arg-type]
    asked: dict[str, Any] = {}

    def load_checkpoint(folder: str, *, tag: str, load_module_strict: bool) -> tuple[str | None, dict[str, Any]]:
        asked.update(folder=folder, tag=tag, strict=load_module_strict)
        return ("loaded" if (tmp_path / tag).is_dir() else None), {}

    accelerator = zero_accelerator(2, SimpleNamespace(load_checkpoint=load_checkpoint))
    with pytest.raises(ConfigError, match=f"found nothing to load in {tmp_path.name}"):
        load_engine(accelerator, tmp_path, "tag", tmp_path, written_by=2)
    (tmp_path / "tag").mkdir()
    load_engine(accelerator, tmp_path, "tag", tmp_path, written_by=2)
    assert asked == {"folder": str(tmp_path), "tag": "tag", "strict": True}
    trainer = SimpleNamespace(
        accelerator=accelerator, args=SimpleNamespace(output_dir=str(tmp_path), world_size=2), model=SimpleNamespace()
    )
    for text in (None, "", "other"):
        if text is not None:
            (tmp_path / "latest").write_text(text)
        with pytest.raises(ConfigError, match="holds no state of DeepSpeed's"):
            trainers.load_zero(trainer, tmp_path, None, place="here")
    (tmp_path / "latest").write_text("tag\n")
    for model, strict in ((SimpleNamespace(), True), (SimpleNamespace(peft_config={}), False)):
        trainer.model = model
        trainers.load_zero(trainer, tmp_path, None, place="here")
        assert (asked["tag"], asked["strict"]) == ("tag", strict), "an adapter's base is in no checkpoint"


def test_groups_and_steps_of_a_converted_checkpoint_are_each_ones_own(tmp_path: Path) -> None:
    from accel_scale.training.checkpoints.zero import _load_buffers, _separate_groups

    one, other, shared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), torch.tensor(5.0)
    optimizer = torch.optim.AdamW([{"params": [one]}, {"params": [other]}], lr=1.0)
    optimizer.state = {one: {"step": shared}, other: {"step": shared}, "third": {"step": 7}}  # type: ignore[assignment]
    _separate_groups(optimizer, tmp_path / "none")
    steps = [state["step"] for state in optimizer.state.values()]
    assert steps[0] is not steps[1]
    assert [float(step) for step in steps] == [5, 5, 7]
    groups = [{"params": [0], "lr": 0.1, "weight_decay": 0.3}, {"params": [1], "lr": 0.2, "weight_decay": 0.0}]
    torch.save({"optimizer_state_dict": {"param_groups": groups}}, tmp_path / "stage3")
    torch.save({"base": 1}, tmp_path / "stage2")
    for name, expected in (("stage2", [(1.0, 0.01)] * 2), ("stage3", [(0.1, 0.3), (0.2, 0.0)])):
        _separate_groups(optimizer, tmp_path / name)
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == expected
        assert [group["params"] for group in optimizer.param_groups] == [[one], [other]]
    model = Twice()
    accelerator = SimpleNamespace(_models=[model], unwrap_model=lambda model: model)
    for rank, seen in ((1, 8.0), (0, 4.0)):
        stored = {"seen": torch.tensor(seen), "one.weight": torch.full((3, 3), 9.0)}
        torch.save({"module": stored}, tmp_path / f"mp_rank_0{rank}_model_states.pt")
    before = model.one.weight.detach().clone()
    _load_buffers(accelerator, tmp_path)
    assert (model.seen.item(), torch.equal(model.one.weight, before)) == (4.0, True)
    accelerator._models = [nn.Linear(2, 2)]
    _load_buffers(accelerator, tmp_path / "nowhere")  # nothing to load


def test_errors_of_deepspeeds_writer_wait_until_every_rank_is_through() -> None:
    from accel_scale.training.checkpoints.zero import errors_kept_for_later

    calls: list[Any] = []

    def fails(error: Exception) -> Any:
        def call(*args: Any, **options: Any) -> None:
            calls.append((*args, options))
            raise error

        return call

    writer = SimpleNamespace(save=fails(OSError("disk full")), makedirs=fails(RuntimeError("no folder")), name="w")
    copy_script = fails(OSError("no script"))
    engine = SimpleNamespace(checkpoint_engine=writer, _copy_recovery_script=copy_script)

    def write() -> None:
        with errors_kept_for_later(engine) as kept:
            assert (kept, kept.checkpoint_engine.name) == (engine, "w")
            kept.checkpoint_engine.save("state", path="p")
            kept.checkpoint_engine.makedirs("folder", exist_ok=True)
            kept._copy_recovery_script("script")

    with pytest.raises(OSError, match="disk full"):
        write()
    assert calls == [("state", {"path": "p"}), ("folder", {"exist_ok": True}), ("script", {})]
    assert (engine.checkpoint_engine, engine._copy_recovery_script) == (writer, copy_script)
    with pytest.raises(KeyError), errors_kept_for_later(engine):
        raise KeyError
    assert engine.checkpoint_engine is writer
    with errors_kept_for_later(engine):
        pass
