"""Preparations of the recipes before training: the run's tokenizer and the dtype of the gradients."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.flags.pretraining import PretrainDataArguments, PretrainModelArguments
from accel_scale.parallel.data_parallel import _policy, apply_data_parallel, blocks_of
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.parallel.model_parallel import model_parallel_of
from accel_scale.pretraining.model import TOKENIZER_FOLDER, run_tokenizer
from accel_scale.training.ddp.gradient_numbers import loss_scale_of, use_gradient_numbers
from accel_scale.training.ddp.hooks import DdpSettings, use_ddp_settings

EMBEDDED = str(default_model_path())


def tokenizer_of(folder: Path, data: str = "", **flags: Any) -> Any:
    model_args, data_args = PretrainModelArguments(**flags), PretrainDataArguments(data=[data] if data else [])
    return run_tokenizer(model_args, data_args, str(folder), default=EMBEDDED)


def test_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abba cab " * 200)
    embedded = tokenizer_of(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(EMBEDDED, other)
    for flags in ({"tokenizer": str(other)}, {"model_name_or_path": str(other)}, {"model_config": str(other)}):
        found = tokenizer_of(tmp_path, **flags)
        assert (found.name_or_path, found.get_vocab()) == (str(other), embedded.get_vocab()), flags
    config = {"model_config": str(other / "config.json"), "model_name_or_path": None}
    assert tokenizer_of(tmp_path, **config).name_or_path == str(other)
    both = tokenizer_of(tmp_path, tokenizer=EMBEDDED, model_name_or_path=str(other), model_config=str(other))
    assert both.name_or_path == EMBEDDED, "what is named as the tokenizer comes first"
    assert tokenizer_of(tmp_path, tokenizer="byte")("é", add_special_tokens=False)["input_ids"] == list("é".encode())
    assert not (tmp_path / TOKENIZER_FOLDER).exists(), "only what was made from the data is kept"


@pytest.mark.parametrize("flags", [{"tokenizer": "char"}, {"train_tokenizer": True, "vocab_size": 260}], ids=str)
def test_a_tokenizer_of_the_data_is_found_again(flags: dict[str, Any], tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("abba cab " * 200)
    other.write_text("xyz " * 200)
    made = tokenizer_of(tmp_path / "run", str(text), **flags)
    again = tokenizer_of(tmp_path / "run", str(other), **flags)  # from the same folder, whatever the data are now
    assert made.get_vocab() == again.get_vocab()
    assert again.decode(again("abba", add_special_tokens=False)["input_ids"]) == "abba"
    assert tokenizer_of(tmp_path / "else", str(other), **flags).get_vocab() != made.get_vocab()
    if "vocab_size" in flags:
        with pytest.raises(ConfigError, match="from an earlier run") as caught:
            tokenizer_of(tmp_path / "run", str(text), **{**flags, "vocab_size": len(made) - 1})
        assert caught.value.place == "--vocab_size"
        assert len(tokenizer_of(tmp_path / "run", str(text), **{**flags, "vocab_size": len(made)})) == len(made)


def launched(kind: DistributedType, **plugins: Any) -> Any:
    """An `Accelerator`'s description of a launch."""
    names = {"deepspeed_plugin": None, "fsdp_plugin": None, **plugins}
    return SimpleNamespace(
        distributed_type=kind, is_fsdp2=kind == DistributedType.FSDP, num_processes=2, scaler=None, ddp_handler=None,
        device=torch.device("cpu"), state=SimpleNamespace(**names), deepspeed_engine_wrapped=None,
    )  # fmt: skip


def asked(loss_scale: float | None = None, reduce_dtype: str | None = None) -> Any:
    return SimpleNamespace(loss_scale=loss_scale, reduce_dtype=reduce_dtype)


def test_gradients_travel_in_the_dtype_asked_for() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for policy in (given, None):
        plugin = SimpleNamespace(mixed_precision_policy=policy)
        accelerator = launched(DistributedType.FSDP, fsdp_plugin=plugin)
        assert model_parallel_of(accelerator) is None
        use_gradient_numbers(accelerator, asked(reduce_dtype="fp32"))
        changed = plugin.mixed_precision_policy
        assert changed.reduce_dtype == torch.float32
        assert (changed.param_dtype, changed.output_dtype) == (
            (torch.bfloat16, torch.float32) if policy else (None, None)
        )
        use_gradient_numbers(accelerator, asked())
        assert plugin.mixed_precision_policy is changed, "unasked nothing is touched"
    zero = SimpleNamespace(zero_stage=2, deepspeed_config={})
    use_gradient_numbers(launched(DistributedType.DEEPSPEED, deepspeed_plugin=zero), asked(reduce_dtype="bf16"))
    assert zero.deepspeed_config == {"communication_data_type": "bf16"}
    ddp = launched(DistributedType.MULTI_CPU)
    use_gradient_numbers(ddp, asked(reduce_dtype="bf16"))  # its communication hook takes care of it
    assert ddp.ddp_handler is None


def test_the_loss_scale_starts_where_it_is_asked_to() -> None:
    zero = SimpleNamespace(zero_stage=2, deepspeed_config={"fp16": {"enabled": True, "hysteresis": 2}})
    accelerator = launched(DistributedType.DEEPSPEED, deepspeed_plugin=zero)
    use_gradient_numbers(accelerator, asked(loss_scale=1024.0))
    assert zero.deepspeed_config["fp16"] == {"enabled": True, "hysteresis": 2, "initial_scale_power": 10}
    unsaid = SimpleNamespace(zero_stage=2, deepspeed_config={})
    use_gradient_numbers(launched(DistributedType.DEEPSPEED, deepspeed_plugin=unsaid), asked(loss_scale=1024.0))
    assert unsaid.deepspeed_config["fp16"] == {"enabled": True, "initial_scale_power": 10}
    with pytest.raises(ConfigError, match="a power of two, which 1000 is not") as caught:
        use_gradient_numbers(accelerator, asked(loss_scale=1000.0))
    assert (caught.value.place, caught.value.fix) == ("--loss_scale", "use 1024.")
    plain = launched(DistributedType.NO)
    plain.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert loss_scale_of(plain) == 8.0
    use_gradient_numbers(plain, asked(loss_scale=512.0))
    assert loss_scale_of(plain) == 512.0
    plain.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert loss_scale_of(plain) is None
    without = launched(DistributedType.NO)
    without.scaler = None
    use_gradient_numbers(without, asked(loss_scale=512.0))
    assert without.scaler is loss_scale_of(without) is None
    for scaled in (True, False):
        engine = SimpleNamespace(fp16_enabled=lambda scaled=scaled: scaled, optimizer=SimpleNamespace(loss_scale=64))
        accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)
        assert loss_scale_of(accelerator) == (64.0 if scaled else None)


def test_ddp_gets_buckets_and_keeps_what_it_was_given() -> None:
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = launched(DistributedType.MULTI_CPU)
    accelerator.ddp_handler = given = DistributedDataParallelKwargs(static_graph=True, bucket_cap_mb=7)
    use_ddp_settings(accelerator, DdpSettings())
    assert accelerator.ddp_handler is given, "nothing was asked for"
    use_ddp_settings(accelerator, DdpSettings(comm_hook="bf16"))
    assert (accelerator.ddp_handler.static_graph, accelerator.ddp_handler.bucket_cap_mb) == (True, 7)
    use_ddp_settings(accelerator, DdpSettings(bucket_cap_mb=3))
    assert (accelerator.ddp_handler.static_graph, accelerator.ddp_handler.bucket_cap_mb) == (True, 3)
    flags = SimpleNamespace(ddp_comm_hook=None, ddp_bucket_cap_mb=5, powersgd_rank=None, powersgd_start_step=20)
    assert DdpSettings.of(flags) == DdpSettings(bucket_cap_mb=5, powersgd_start_step=20)
    hooks = [DdpSettings(comm_hook=name).make_hook(None) for name in ("bf16", "fp16")]
    assert [hook._hook.__name__ for hook in hooks] == ["bf16_compress_hook", "fp16_compress_hook"]
    assert DdpSettings().make_hook(None) is None


def test_weights_are_gathered_in_the_computes_dtype_and_reduced_in_fp32() -> None:
    policy = _policy(torch.bfloat16)["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert _policy(None) == {}
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    model._no_split_modules = ["Linear"]
    assert blocks_of(model) == [model[0], model[2]]


class KeptHook:
    """A hook that remembers the states it is given."""

    def __init__(self, *, is_stateful: bool = True) -> None:
        self.is_stateful, self.given = is_stateful, None

    def load_state_dict(self, states: list[Any], rank: int) -> None:
        self.given = ([state["number"] for state in states], rank)


def test_every_models_hook_gets_the_states_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.training.checkpoints import hook_states
    from accel_scale.training.checkpoints.contents import numbered, write_tensors

    hooks = [KeptHook(), None, KeptHook(is_stateful=False), KeptHook(), KeptHook()]
    monkeypatch.setattr(hook_states, "hook_of", lambda index: hooks[index])
    for index, ranks in ((0, 3), (2, 1), (3, 1)):
        for rank in range(ranks):
            state = {"number": torch.tensor(10 * index + rank)}
            write_tensors(state, tmp_path / numbered(hook_states.STATE_FILE.format(rank=rank), index))
    hook_states.load_hook_states(SimpleNamespace(_models=range(5), process_index=1), tmp_path)
    assert [hook and hook.given for hook in hooks] == [([0, 1, 2], 1), None, None, ([30], 1), None]


def test_a_schedule_that_counts_ranks_is_refused_on_others() -> None:
    from accel_scale.training.checkpoints.strategies import check_schedules

    found = SimpleNamespace(manifest=SimpleNamespace(world_size=2), folder=Path("checkpoint-3"))
    for ranks, with_optimizer, split, is_refused in (
        (4, True, False, True), (2, True, False, False), (4, False, False, False), (4, True, True, False),
    ):  # fmt: skip
        schedule = SimpleNamespace(step_with_optimizer=with_optimizer, split_batches=split)
        accelerator = SimpleNamespace(num_processes=ranks, _schedulers=[SimpleNamespace(), schedule])
        if is_refused:
            with pytest.raises(ConfigError, match="counts 2 at every step of checkpoint-3 and would now count 4"):
                check_schedules(accelerator, found)
        else:
            check_schedules(accelerator, found)


class CountingHook(KeptHook):
    """A hook whose state changes after it was captured."""

    def __init__(self, number: int, *, is_stateful: bool = True) -> None:
        super().__init__(is_stateful=is_stateful)
        self.number = torch.tensor(number)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"number": self.number}


@pytest.mark.parametrize("copy", [True, False])
def test_states_of_hooks_are_those_of_the_moment_they_were_captured(
    copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accel_scale.training.checkpoints import hook_states

    hooks = [CountingHook(5), None, CountingHook(6, is_stateful=False), CountingHook(7)]
    monkeypatch.setattr(hook_states, "hook_of", lambda index: hooks[index])
    for rank in range(2):
        accelerator = SimpleNamespace(_models=range(4), process_index=rank)
        write = hook_states.capture_hook_states(accelerator, copy=copy)
        hooks[0].number += 10
        write(tmp_path)
    names = {hook_states.STATE_FILE.format(rank=rank) for rank in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == names | {
        f"{name.rpartition('.')[0]}_3.{name.rpartition('.')[2]}" for name in names
    }
    hook_states.load_hook_states(accelerator, tmp_path)
    assert hooks[0].given == ([5, 15] if copy else [15, 25], 1)
    assert hooks[3].given == ([7, 7], 1)
    assert hooks[2].given is None
    for path in tmp_path.iterdir():
        path.unlink()
    hooks[0].given = None
    hook_states.load_hook_states(accelerator, tmp_path)
    assert hooks[0].given is None, "without a file it begins anew"


def test_one_rank_of_gradients_needs_no_mesh() -> None:
    part = nn.Sequential(nn.Linear(2, 2))
    apply_data_parallel(part, None, ParallelLayout(tp=2))
    assert type(part) is nn.Sequential
    with pytest.raises(TypeError):
        apply_data_parallel(part, None, ParallelLayout(dp_shard=2))
