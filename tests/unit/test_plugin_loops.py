"""A `ScalePlugin` in a plain loop, line by line: which batch counts, what is verified, which rates are peaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from peft import LoraConfig
from test_plugin import bare, tiny
from torch.optim.lr_scheduler import OneCycleLR

from accel_scale.errors import ConfigError
from accel_scale.plugin import scaled_accelerator
from accel_scale.plugin.loop_settings import require_parts, set_accumulation
from accel_scale.plugin.plugin import ScalePlugin
from accel_scale.plugin.preparing import adapt_optimizer, step_once_per_update
from accel_scale.plugin.replacing import replace_optimizer
from accel_scale.training.saving.verification import CheckpointMismatch, VerifyResult


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("fields", "split", "sizes", "accumulation", "global_batch"),
    [
        ({"global_batch_size": 16}, False, [4], 2, 16),
        ({"global_batch_size": 16}, True, [4], 4, 16),  # the loader's batch is that of both processes
        ({"global_batch_size": 16}, False, [None, 4, 8], 2, 16),  # the first loader that has a batch size
        ({"global_batch_size": 16, "micro_batch_size": 2}, False, [], 4, 16),
        ({"global_batch_size": 16, "micro_batch_size": 4}, False, [4], 2, 16),
        ({"micro_batch_size": 4}, False, [4], 3, 24),
        ({}, False, [], 3, 0),
        ({"global_batch_size": 16}, False, [], 3, 0),
    ],
    ids=str,
)
def test_accumulation_follows_from_the_first_loader(
    fields: dict[str, Any], split: bool, sizes: list[int | None], accumulation: int, global_batch: int
) -> None:
    script = 3 if accumulation == 3 else 1
    accelerator = SimpleNamespace(split_batches=split, num_processes=2, gradient_accumulation_steps=script)
    loaders = [SimpleNamespace(batch_size=size) for size in sizes]
    assert set_accumulation(ScalePlugin(**fields), accelerator, loaders) == global_batch
    assert accelerator.gradient_accumulation_steps == accumulation
    if global_batch:
        assert set_accumulation(ScalePlugin(**fields), accelerator, [SimpleNamespace(batch_size=1)]) == global_batch


def test_a_micro_batch_of_another_size_than_the_loaders_is_refused() -> None:
    accelerator = SimpleNamespace(split_batches=False, num_processes=2, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match="micro_batch_size 2 and the data loader's batch of 4 differ") as refused:
        set_accumulation(ScalePlugin(micro_batch_size=2), accelerator, [SimpleNamespace(batch_size=4)])
    assert refused.value.place == "ScalePlugin(micro_batch_size=)"


def test_an_adapter_needs_one_model_one_optimizer_and_a_name_for_the_new_one() -> None:
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    plugin, one, two = ScalePlugin(adapter=adapter, optimizer="sgd"), [object()], [object(), object()]
    require_parts(plugin, one, one, [])
    require_parts(plugin, [], [], [])
    for models, optimizers in ((two, one), (one, two)):
        with pytest.raises(ConfigError, match="which of several models or optimizers") as refused:
            require_parts(plugin, models, optimizers, [])
        assert refused.value.place == "ScalePlugin(adapter=)"
    with pytest.raises(ConfigError, match="holds the weights that the adapter freezes"):
        require_parts(ScalePlugin(adapter=adapter), one, one, [])


def test_a_launch_that_fell_apart_is_noticed_on_an_accelerator_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ScalePlugin()
    monkeypatch.setattr(plugin, "launch", type(plugin.launch)(plugin.launch.parallel, None, 2, 2, 0, 0))
    with pytest.raises(ConfigError, match="2 processes, but each believes it is alone"):
        plugin.prepare(Accelerator(cpu=True), *bare())


def test_a_schedule_of_the_plugins_starts_from_the_peak_of_what_it_replaces() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=1.0)
    OneCycleLR(optimizer, max_lr=[1e-2, 1e-3], total_steps=8)
    plugin = ScalePlugin(lr_schedule="constant", num_training_steps=4)
    made = adapt_optimizer(plugin, Accelerator(cpu=True), optimizer, models=[model], global_batch_size=1)
    assert made is optimizer
    assert [group["lr"] for group in made.param_groups] == pytest.approx([1e-2, 1e-3])
    assert not any({"initial_lr", "max_lr", "min_lr"} & group.keys() for group in made.param_groups)


def test_8_bit_states_of_the_plugins_optimizer_leave_out_embeddings() -> None:
    from bitsandbytes.optim import GlobalOptimManager

    model = torch.nn.Sequential(torch.nn.Embedding(128, 64), torch.nn.Linear(64, 128, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = ScalePlugin(optimizer="adamw_bnb_8bit")
    model, made = plugin.prepare(Accelerator(cpu=True), model, optimizer)
    try:
        model(torch.arange(4)).sum().backward()
        made.step()
        kept = [made.optimizer.state[parameter]["state1"].dtype for parameter in model.parameters()]
        assert kept == [torch.float32, torch.uint8]
    finally:
        GlobalOptimManager.get_instance().initialize()  # one for all optimizers of a process


def test_a_prepared_schedule_steps_once_per_update() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    _, prepared = accelerator.prepare(optimizer, schedule)
    step_once_per_update(prepared)
    for _ in range(3):
        optimizer.step()
        prepared.step()
    assert schedule.last_epoch == 3
    assert prepared.split_batches


def test_names_of_parameters_go_where_an_adapter_joins_a_group() -> None:
    model, new = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1.0)
    made = replace_optimizer(optimizer, "sgd", adapter_parameters=[new], device_type="cpu", strategy="single")
    (group,) = made.param_groups
    assert "param_names" not in group
    assert [id(parameter) for parameter in group["params"]] == [id(model.weight), id(model.bias), id(new)]


def test_an_optimizer_is_refused_where_its_strategy_has_no_use_for_it() -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    assert replace_optimizer(optimizer, "adamw_bnb_8bit", device_type="cpu", strategy="ddp")
    with pytest.raises(ConfigError, match="adamw_bnb_8bit"):
        replace_optimizer(optimizer, "adamw_bnb_8bit", device_type="cpu", strategy="fsdp2")


def test_what_was_read_back_of_several_models_is_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [VerifyResult(3, 0.5, 1.0, "a"), VerifyResult(4, 0.25, 2.0, "b")]
    monkeypatch.setattr(scaled_accelerator, "verify_checkpoint", lambda model, folder: results.pop(0))
    found = scaled_accelerator._verify([torch.nn.Linear(1, 1)] * 2, tmp_path)
    assert found == VerifyResult(7, 0.5, 3.0, "a + b")


def test_the_first_state_is_read_back_of_every_model_and_no_later_one(tmp_path: Path) -> None:
    accelerator = ScalePlugin().accelerator(cpu=True)
    one, other = tiny(), torch.nn.Linear(2, 3)
    accelerator.prepare(one, other)
    assert accelerator.first_verification is None
    accelerator.save_state(str(tmp_path / "step_1"))
    found = accelerator.first_verification
    assert found is not None
    assert found.num_tensors == len(list(one.parameters())) + 2
    assert (found.max_abs_diff, found.source) == (0.0, "model.safetensors + model.safetensors")
    accelerator.save_state(str(tmp_path / "step_2"))
    assert accelerator.first_verification is found
    AcceleratorState._reset_state(reset_partial_state=True)
    losing = ScalePlugin().accelerator(cpu=True)
    losing.prepare(torch.nn.Linear(2, 3))
    losing.register_save_state_pre_hook(lambda models, weights, folder: weights[0].pop("bias"))
    with pytest.raises(CheckpointMismatch, match="bias is missing") as mismatch:
        losing.save_state(str(tmp_path / "lost"))
    assert " verify_first_checkpoint=false saves" in str(mismatch.value), "a field, and no flag"
    assert not (tmp_path / "lost").exists()
    AcceleratorState._reset_state(reset_partial_state=True)
    unasked = ScalePlugin(verify_first_checkpoint=False).accelerator(cpu=True)
    unasked.prepare(torch.nn.Linear(2, 3))
    unasked.save_state(str(tmp_path / "other"))
    assert unasked.first_verification is None


def test_the_end_of_training_lets_go_of_what_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, done = ScalePlugin().accelerator(cpu=True), []
    accelerator.memory_recovery = SimpleNamespace(close=lambda: done.append("recovery"))  # type: ignore[assignment]
    accelerator.schedule_lengths = [SimpleNamespace(end=lambda: done.append("schedule"))]  # type: ignore[list-item]
    accelerator.end_training()
    assert done == ["recovery", "schedule"]


def test_accumulation_that_a_launch_file_leaves_to_the_script_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    plugin = GradientAccumulationPlugin(num_steps=5)
    for given, steps in (
        ({}, 1), ({"gradient_accumulation_steps": 3}, 3), ({"gradient_accumulation_plugin": plugin}, 5)
    ):  # fmt: skip
        AcceleratorState._reset_state(reset_partial_state=True)
        assert ScalePlugin().accelerator(cpu=True, **given).gradient_accumulation_steps == steps
