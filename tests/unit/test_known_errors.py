"""Library errors about a bad file, name or setting become one line; a fault in the program keeps its traceback."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_scale.ending.known_errors import as_setting
from accel_scale.ending.user_errors import user_errors


def raised(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig

    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x10" + bytes(40))

    def read(filename: Path) -> object:
        return safe_open(filename, framework="pt").__enter__()

    known = as_setting(raised(lambda: read(weights)))
    assert known is not None
    assert known.place == str(weights)
    (tmp_path / "config.json").write_text("{")
    assert as_setting(raised(lambda: AutoConfig.from_pretrained(tmp_path))) is None  # `load_config` reports this
    for number in (errno.EACCES, errno.EROFS, errno.ENAMETOOLONG):
        known = as_setting(OSError(number, "no", "/some/file"))
        assert known is not None
        assert known.place == "/some/file"
        assert known.fix


def test_settings_that_a_library_checks_are_its_refusal() -> None:
    from transformers import TrainingArguments

    weight = torch.nn.Parameter(torch.zeros(2))
    known = as_setting(raised(lambda: torch.optim.SGD([weight], lr=-1.0)))
    assert known is not None
    assert "Invalid learning rate: -1.0" in known.problem
    known = as_setting(raised(lambda: TrainingArguments("x", load_best_model_at_end=True)))
    assert known is not None
    assert known.place == "transformers"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("loss"),
        AttributeError("'NoneType' object has no attribute 'type'"),
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        FileNotFoundError(errno.ENOENT, "no such file", "x"),
        ValueError("not from a library"),
        json.JSONDecodeError("of our own", "{", 0),
    ],
)
def test_a_fault_of_the_program_stays_what_it_is(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert as_setting(raised(fail)) is None
    with pytest.raises(type(error)), user_errors("sft.py"):
        fail()
