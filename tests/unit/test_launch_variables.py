"""Variables that only launchers set are refused if no launcher set them; credentials never appear in messages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from accel_scale.ending.last_word import cause_line
from accel_scale.errors import ConfigError
from accel_scale.launching.environment import check_launch_variables
from accel_scale.secrets import is_secret, mask, without_secrets

LAUNCHED = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"LOCAL_RANK": "-1"},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        LAUNCHED,
    ],
)
def test_what_launchers_set_is_accepted(env):
    check_launch_variables(env)


@pytest.mark.parametrize(
    ("env", "place", "problem"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE", "no launcher has started this process"),
        ({"RANK": "1"}, "RANK", "no launcher has started this process"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK", "no launcher has started this process"),
        ({**LAUNCHED, "MASTER_PORT": ""}, "WORLD_SIZE", "MASTER_PORT"),
        ({**LAUNCHED, "RANK": "4"}, "RANK", "rank 4 is not one of 4"),
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE", "'abc' is not a number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "'0' is not a number of processes"),
        ({"LOCAL_WORLD_SIZE": "-2"}, "LOCAL_WORLD_SIZE", "'-2' is not a number of processes"),
        ({"RANK": "first"}, "RANK", "'first' is not a rank"),
        ({"ACCELERATE_MIXED_PRECISION": "fp17"}, "ACCELERATE_MIXED_PRECISION", "'fp17' is not a precision"),
    ],
)
def test_variables_set_by_hand_are_refused(env, place, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        check_launch_variables(env)
    assert refused.value.place == place
    assert refused.value.fix


@pytest.mark.parametrize(
    "variable",
    [
        "RANK=1",
        "WORLD_SIZE=4",
        "WORLD_SIZE=abc",
        "ACCELERATE_MIXED_PRECISION=fp17",
        "ACCEL_SCALE_ORPHAN_SECONDS=soon",
    ],
)
def test_recipes_say_so_in_a_line_before_their_imports(repository, variable):
    name, _, value = variable.partition("=")
    command = [sys.executable, "recipes/pretrain.py" if name == "RANK" else "recipes/sft.py"]
    env = {**os.environ, name: value, "PYTHONPATH": str(repository)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=env, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"error: {name}: " in done.stderr
    assert " Fix: " in done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pa55@host/x is gone", "https://user:***@host/x is gone"),
        ("https://sekret@host/x", "https://***@host/x"),
        ("https://host/x?token=abc&page=2", "https://host/x?token=***&page=2"),
        ("s3://b/k?X-Amz-Signature=12ab", "s3://b/k?X-Amz-Signature=***"),
        ("no access with hf_abcdefghijklmnop", "no access with hf_***"),
        ("--hub_token=tiny rest", "--hub_token=*** rest"),
        ("--eos_token </s> --max_tokens 2500000000000000000", "--eos_token </s> --max_tokens 2500000000000000000"),
        ("remove --hub_token and set HF_TOKEN", "remove --hub_token and set HF_TOKEN"),
    ],
)
def test_messages_hold_no_credentials(text, shown):
    assert mask(text) == shown
    assert str(ConfigError(text, place=text, fix=text)) == f"{shown}: {shown} Fix: {shown}"


def test_settings_hold_no_credentials():
    values = {"hub_token": "hf_x", "eos_token": "</s>", "data": ["https://a:b@c/d"], "nested": {"wandb_api_key": "k"}}
    assert without_secrets(values) == {"eos_token": "</s>", "data": ["https://a:***@c/d"], "nested": {}}
    assert is_secret("password")
    assert not is_secret("num_tokens")


def test_the_cause_of_a_crash_fits_into_a_line():
    try:
        raise ValueError("\n first line of hf_abcdefghijklmnop\nsecond")
    except ValueError as error:
        line = cause_line("sft.py", error)
    assert line.startswith("sft.py: error: ValueError at test_launch_variables.py:")
    assert line.endswith("mnop")
