"""The pretraining recipe's flags: lengths in steps, branches of a trunk, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.flags.pretraining import (
    PretrainArguments,
    PretrainDataArguments,
    PretrainModelArguments,
)
from accel_scale.optimization.schedules import create_schedule
from accel_scale.pretraining.resolve import (
    decay_groups,
    refuse_contradictions,
    run_length,
    schedule_settings,
)
from accel_scale.pretraining.trunk import check_trunk, schedule_record
from accel_scale.settings.resolve import resolve
from accel_scale.settings.resolved import LaunchFacts
from accel_scale.units import parse_duration

CLASSES = (PretrainModelArguments, PretrainDataArguments, PretrainArguments)


def parsed(line: str):
    return parse_flags(CLASSES, line.split(), program="pretrain.py")


def resolved(line: str, **launch):
    settings = resolve(parsed(line), LaunchFacts(**launch))
    for cls in CLASSES:
        settings.values = {**vars(settings.build(cls)), **settings.values}
    return settings


def length_of(line: str, **options):
    return run_length(resolved(line), **{"trunk_step": None, "num_params": 1_000_000, **options})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num_params 1M --model_config c.json --data a", "--model_config and --num_params both say which model"),
        ("--num_params 1M --tokenizer byte", "nothing to train it on"),
        ("--num_params 1M --data a", "a model from nothing has no tokenizer"),
        ("--method lora --data a", "adapters need a trained base"),
        ("--lora_r 4", "does nothing without adapters"),
        ("--train_tokenizer --tokenizer byte", "another is to be trained"),
        ("--vocab_size 300", "add --train_tokenizer"),
        ("--model_name_or_path m --data a --tokenizer byte", "belongs to its own tokenizer"),
        ("--max_steps 3 --max_tokens 3k", "both say how long"),
        ("--max_train_time soon", "90m or 11h30m"),
        ("--decay_from c", "add --decay_steps"),
        ("--decay_from c --decay_steps 5 --max_steps 9", "is the trunk's"),
        ("--decay_from c --decay_steps 5 --lr_scheduler_type cosine", "only WSD has branches"),
        ("--decay_from c --decay_steps 5 --resume elsewhere", "both name a checkpoint"),
        ("--validation_data v --validation_share 0.1", "both say what is held out"),
        ("--max_grad_norm 0", "always clipped"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_by_name(line, message):
    with pytest.raises(ConfigError, match=message) as refused:
        refuse_contradictions(parsed(line))
    assert refused.value.fix
    assert refused.value.place


def test_tokens_become_steps_of_the_global_batch():
    line = "--max_tokens 1M --max_length 256 --global_batch_size 16 --per_device_train_batch_size 4"
    assert length_of(line).num_steps == math.ceil(1_000_000 / (256 * 16))


def test_a_run_of_no_length_is_told_chinchilla_s():
    with pytest.raises(ConfigError, match=r"0\.02B"):
        length_of("--max_length 128")


def test_validations_and_checkpoints_are_ten_in_a_run_unless_given():
    length = length_of("--max_steps 200 --save_steps 0")
    assert (length.eval_steps, length.save_steps, length.seconds) == (20, 0, None)
    assert length_of("--max_steps 5 --max_train_time 1h30m").seconds == 5400


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("11h30m", 41400), ("45 s", 45), ("2d", 172800), ("7", 7)]
)
def test_lengths_of_time(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-3m", "0", "3 weeks", "nan", "1h banana"])
def test_what_is_no_length_of_time(text):
    with pytest.raises(ConfigError):
        parse_duration(text)


def rates(line: str, *, start: int = 0, **options) -> list[float]:
    """The learning rate that the schedule gives at every step."""
    settings = resolved(line)
    length = run_length(settings, **{"trunk_step": None, "num_params": 1, **options})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = create_schedule(optimizer, **schedule_settings(settings, length))
    found = []
    for _ in range(length.num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found[start:]


def test_two_branches_of_one_trunk_follow_it_and_then_the_published_decay():
    """1 − √x over the branch's own steps (Hägele et al. 2024, section 3), however long the trunk is."""
    trunk = rates("--max_steps 100 --lr_scheduler_type wsd --decay_ratio 0 --warmup_steps 10")
    assert trunk[:10] == [pytest.approx((i + 1) / 10) for i in range(10)]
    assert set(trunk[10:]) == {1.0}
    for step, decay in ((40, 20), (80, 50)):
        branch = rates(f"--decay_from c --decay_steps {decay}", start=step, trunk_step=step)
        assert branch == [pytest.approx(1 - math.sqrt(i / decay)) for i in range(decay)]


def test_a_branch_leaves_the_trunk_where_its_rate_is_at_the_peak():
    settings = resolved("--max_steps 100 --lr_scheduler_type wsd --decay_ratio 0.2 --warmup_steps 10")
    length = run_length(settings, trunk_step=None, num_params=1)
    record = schedule_record(schedule_settings(settings, length))
    assert record == {"name": "warmup_stable_decay", "warmup_steps": 10, "decay_begins": 80}
    for step in (10, 50, 80):
        check_trunk(record, step, place="--decay_from")
    with pytest.raises(ConfigError, match=r"warm-up.*between steps 10 and 80"):
        check_trunk(record, 9, place="--decay_from")
    with pytest.raises(ConfigError, match="own decay"):
        check_trunk(record, 81, place="--decay_from")
    with pytest.raises(ConfigError, match=r"cosine.*no stable phase"):
        check_trunk({"name": "cosine", "warmup_steps": 0, "decay_begins": 9}, 3, place="--decay_from")


def test_matrices_decay_and_norms_biases_and_embeddings_do_not():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32))
    decayed, kept = decay_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for p in decayed["params"]) == 2 * 12 * 32 * 32 + 32 * 32  # plus the learned positions
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
