"""Faster traces: operations are remembered, and a second process runs some of the sizes; both change no byte."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from accel_scale.planning.models.training_setup import TrainingSetup
from accel_scale.tracing import recording, remembered
from accel_scale.tracing.blanks import by_mode
from accel_scale.tracing.service import _quiet, facts_of
from accel_scale.tracing.step import FakeStep

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "state_size": 8, "chunk_size": 32},
    "jamba": {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "gemma2": {},
    "rwkv": {"attention_hidden_size": 64},
}  # fmt: skip
SETUPS = {
    "full": TrainingSetup(method="full", checkpointing="full", micro_batch_size=2, sequence_length=256, packing=False),
    "lora": TrainingSetup(method="lora", checkpointing="none", micro_batch_size=2, sequence_length=256, packing=False),
}


def facts_for(model_type: str):
    config = AutoConfig.for_model(model_type, **{**SMALL, **MODELS[model_type]}).to_dict()
    return facts_of(json.loads(json.dumps(config, default=str)), name=model_type, place="here")


# ── Operations ───────────────────────────────────────────────────────────────────────────────────────────────────────

OPERATIONS = {
    "a sum": lambda x, y: x + y,
    "a sum in place": lambda x, y: x.add_(y),
    "a broadcast sum": lambda x, y: x + y[:, :1],
    "a product": lambda x, y: x @ y.mT,
    "a number of another type": lambda x, y: (x * 1, x * 1.0, x * True),
    "a view": lambda x, y: x.view(-1)[3:],
    "a view of a view": lambda x, y: x[1:].t()[2:].unsqueeze(0),
    "the same shape elsewhere": lambda x, y: (x[:2], x[1:3], x[2:]),
    "several views": lambda x, y: y.split([2, 4], dim=-1),
    "several results": lambda x, y: torch.native_dropout(x, 0.5, True),
    "the largest": lambda x, y: x.max(-1),
    "a copy of a piece": lambda x, y: x.copy_(x.clone()[:, :1].expand(4, 6)),
    "another type": lambda x, y: x.to(torch.bfloat16),
    "another type, on a device": lambda x, y: x.to("cpu", torch.bfloat16),
    "a norm in 16 bits": lambda x, y: torch.native_layer_norm(
        x.bfloat16(), [6], y[0].bfloat16(), y[1].bfloat16(), 1e-5
    ),
    "joined": lambda x, y: torch.cat([x, y[:, :2]], dim=1),
    "no operand with memory": lambda x, y: torch.cat([x[:0], y[:0]]),
    "a view of one row": lambda x, y: x[:1].unsqueeze(2).view(1, 2, 3, 1),
    "new": lambda x, y: (torch.zeros(3, 5), x.new_empty(2), torch.arange(7)),
    "strided": lambda x, y: x.t().contiguous().t() + x,
    "nothing": lambda x, y: x[:0].sum(),
    "complex": lambda x, y: torch.view_as_complex(x.view(4, 3, 2)) * torch.view_as_complex(y.view(4, 3, 2)).conj(),
    "conjugated": lambda x, y: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)).conj().resolve_conj()),
    "an imaginary part": lambda x, y: torch.view_as_complex(x.view(4, 3, 2)).conj().imag + 1,
    "another shape in place": lambda x, y: (x.clone().t_(), x.clone().unsqueeze_(0), x.t_(), x.t_() + 1),
    "a value": lambda x, y: x * torch.tensor(2.0),
}


def several(result) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def shape_of(t: torch.Tensor) -> tuple:
    """Shape, memory layout and bytes."""
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_remembered_operation_gives_what_the_operation_gives(name: str) -> None:
    """Shapes, strides, bytes, and whose memory it is, at two sizes, each for the first and the second time."""
    for width in (6, 6, 8, 6):
        real = torch.empty(4, 6), torch.empty(4, 6)
        expected = several(OPERATIONS[name](*real))
        with FakeTensorMode() as mode, recording.Recorder(mode, adds_in_place=False, is_padded=False):
            fake = torch.empty(4, width)[:, :6].contiguous(), torch.empty(4, 6)
            found = several(OPERATIONS[name](*fake))
            assert list(map(shape_of, found)) == list(map(shape_of, expected))
        for part, same in zip(found, expected, strict=True):
            for operand, twin in zip(fake, real, strict=True):
                is_shared = part.untyped_storage() is operand.untyped_storage()
                assert is_shared == (same.untyped_storage().data_ptr() == twin.untyped_storage().data_ptr())
                assert (part is operand) == (same is twin)


def test_a_step_of_another_size_hardly_needs_the_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shapes are new, but nearly all of their results come from the meta device."""
    operations = {"all": 0, "of the mode": 0}

    def counted(kind, function):
        def count(*args, **kwargs):
            operations[kind] += 1
            return function(*args, **kwargs)

        return count

    with _quiet():
        step = FakeStep(facts_for("gemma2"), SETUPS["full"], is_cuda=True, is_tracked=False)
        step.run(2, 32)
        monkeypatch.setattr(recording, "computed", counted("all", recording.computed))
        monkeypatch.setattr(FakeTensorMode, "dispatch", counted("of the mode", FakeTensorMode.dispatch))
        step.run(3, 48)
    assert operations["all"] > 500
    assert operations["of the mode"] < 0.05 * operations["all"]


def test_torch_asks_no_tensor_of_a_step_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fake tensors on another device, it asks twice for every operation."""
    asked: list[object] = []
    dispatch = recording.Recorder.__torch_dispatch__

    def counted(self, func, types, args=(), kwargs=None):
        asked.extend([func] if func is torch.ops.prim.device.default else [])
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(recording.Recorder, "__torch_dispatch__", counted)
    with _quiet():
        FakeStep(facts_for("gemma2"), SETUPS["full"], is_cuda=True, is_tracked=False).run(2, 32)
    assert asked == []


PLACES = {
    "select": lambda a, place: a.select(1, place),
    "negative select": lambda a, place: a.select(-1, place - 4),
    "slice": lambda a, place: a[:, place:],
    "as_strided": lambda a, place: torch.as_strided(a, (2,), (1,), place),
    "as_strided here": lambda a, place: torch.as_strided(a, (2,), (1,)),
    "view of values": lambda a, place: a.view(torch.bfloat16),
    "sum": lambda a, place: a + a,
}


@pytest.mark.parametrize("name", PLACES)
def test_a_remembered_operation_knows_where_its_operand_begins(name: str) -> None:
    """Views at several places of one tensor are operands of the same shape, as in a loop over tokens."""
    for place in (0, 3, 1, 3):
        real = torch.empty(9, 4)[place : place + 5]
        expected = PLACES[name](real, place)
        with FakeTensorMode() as mode, recording.Recorder(mode, adds_in_place=False, is_padded=False):
            found = PLACES[name](torch.empty(9, 4)[place : place + 5], place)
            assert shape_of(found) == shape_of(expected)
            assert (found.storage_offset(), found.dtype) == (expected.storage_offset(), expected.dtype)


def test_a_place_outside_is_refused_as_by_torch() -> None:
    with FakeTensorMode() as mode:
        whole = torch.empty(5, 4)
        recorder = recording.Recorder(mode, adds_in_place=False, is_padded=False)
        with recorder, pytest.raises(IndexError, match="out of range"):
            whole.select(0, 5)


def test_gradients_of_places_have_the_size_of_the_whole() -> None:
    with FakeTensorMode() as mode, recording.Recorder(mode, adds_in_place=False, is_padded=False):
        for place in (0, 2, 1):
            whole = torch.empty(5, 4, requires_grad=True)
            (whole[place] + whole[place:, 0].sum()).sum().backward()
            assert whole.grad is not None
            assert shape_of(whole.grad) == shape_of(torch.empty(5, 4))


def test_a_tensor_made_from_memory_is_like_one_that_torch_makes() -> None:
    with FakeTensorMode() as mode, recording.Recorder(mode, adds_in_place=False, is_padded=False):
        made, again = (torch.ones(3, 5).t() + 1 for _ in range(2))
    assert type(again) is type(made)
    assert again.__dict__ == made.__dict__
    assert torch._C._dispatch_keys(again) == torch._C._dispatch_keys(made)


def test_tensors_with_values_are_not_remembered() -> None:
    """A constant keeps its value, and another constant of the same shape its own."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for value in (2, 5):
            constant = torch.tensor(value)
            made = remembered.computed(torch.ops.aten.mul.Tensor, (constant, constant), {}, mode)
            assert made.item() == value * value


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_step_has_the_same_events_with_torchs_own_cache(
    model_type: str, setup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events() -> dict[str, list[int]]:
        step = FakeStep(facts_for(model_type), SETUPS[setup], is_cuda=True, is_tracked=False)
        # What autocast's cache holds is freed in no fixed order.
        return {name: sorted(found) if name == "leave" else found for name, found in step.run(2, 16).items()}

    events()
    found = events()
    monkeypatch.setattr(recording, "computed", by_mode)
    assert found == events()


# ── The helper ───────────────────────────────────────────────────────────────────────────────────────────────────────


BEGIN = """
import functools, os, signal, sys, time
from accel_scale.tracing import helper
with helper.allowed():
    second = helper.started("accel_scale.tracing.service")
    if second is None:
        sys.exit(77)
    print(second._process.pid, flush=True)
"""
SHARE = """
    sys.path.insert(0, FOLDER)
    from test_tracing_helper import SETUPS, facts_for
    from accel_scale.tracing.service import traced_fit
    facts = facts_for("gemma2")
    calls = [
        functools.partial(traced_fit, facts, setup, is_cuda=True, is_tracked=False) for setup in SETUPS.values()
    ]
    # The last fails, one ends the helper, and the others come too late for it.
    calls = [*calls, functools.partial(os.kill, second._process.pid, 9), *calls, functools.partial(int, "no number")]
    second.share(calls)
    while not second._is_taken[3]:
        time.sleep(0.01)
    assert second.result_of(5) is None
    assert second.result_of(4) == calls[4]()
    assert second.result_of(3) == calls[3]()
    assert second.result_of(2) is None
    for index in (1, 0):  # made here, now or while the third was waited for
        assert second.result_of(index) in (None, calls[index]())
    assert second.result_of(99) is None
    print("done")
"""
WAIT = """
    import threading
    second._calls = [functools.partial(int, str(number)) for number in range(3)]
    second._take(1)  # as if the helper had begun it
    def end():
        with second._changed:
            second._results[1] = "from the helper"
            second._changed.notify_all()
    threading.Timer(2, end).start()
    assert second.result_of(1) == "from the helper"
    assert second._results == {0: 0, 1: "from the helper", 2: 2}
    print("done")
"""
PLAN = """
import os, sys
from accel_scale.cli.main import main
from accel_scale.tracing.helper import SecondProcess
taken, result_of = [], SecondProcess.result_of
def counted(self, index):
    result = result_of(self, index)
    taken.append(result is not None)
    return result
SecondProcess.result_of = counted
if ALONE:
    os.sched_getaffinity = lambda process: {0}
status = main(["plan", MODEL, "--gpu", "24GiB", "--method", "auto", "--max_length", "512"])
print(status, sum(taken), len(taken), file=sys.stderr)
"""


def script_of(folder: Path, *parts: str, **values: object) -> list[str]:
    script, text = folder / "asks.py", "".join(parts)
    for name, value in {"FOLDER": str(Path(__file__).parent), **values}.items():
        text = text.replace(name, repr(value))
    script.write_text(text)
    return [sys.executable, str(script)]


@pytest.mark.slow
def test_a_helper_makes_the_last_calls_and_its_end_costs_nothing_but_time(tmp_path: Path) -> None:
    done = subprocess.run(script_of(tmp_path, BEGIN, SHARE), capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip("one core, or not Linux")
    assert done.returncode == 0, done.stderr
    number, *rest = done.stdout.split()
    assert rest == ["done"]
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.slow
def test_while_the_helper_makes_a_call_the_others_are_made(tmp_path: Path) -> None:
    done = subprocess.run(script_of(tmp_path, BEGIN, WAIT), capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("one core, or not Linux")
    assert done.stdout.endswith("done\n"), done.stderr


@pytest.mark.slow
def test_a_helper_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    command = script_of(tmp_path, BEGIN, "    time.sleep(60)\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.skip("one core, or not Linux")
        process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(line)}").exists():
        assert time.monotonic() < deadline, "the helper is still there"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_plan_by_two_processes_is_that_of_one(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba2", **{**SMALL, **MODELS["mamba2"]}).save_pretrained(tmp_path / "model")
    shown = []
    for is_alone in (False, True):
        command = script_of(tmp_path, PLAN, MODEL=str(tmp_path / "model"), ALONE=is_alone)
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / f"cache{is_alone}")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        status, num_taken, _ = map(int, done.stderr.split())
        assert status == 0
        if not is_alone and num_taken == 0:
            pytest.skip("one core, or not Linux")
        assert not is_alone or num_taken == 0
        shown.append(done.stdout)
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(tmp_path: Path) -> None:
    AutoConfig.for_model("ernie4_5", **SMALL).save_pretrained(tmp_path / "model")
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    script = f"from accel_scale.cli.main import main; main(['plan', {str(tmp_path / 'model')!r}, '--gpu', '24GiB'])"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shown = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=child,
            text=True,
            env=environment,
            check=True,
        )
        assert "one GPU" in done.stdout
        shown.append(os.read(parent, 65536).decode() if select.select([parent], [], [], 0.1)[0] else "")
    first, second = shown
    assert re.search(r"\| 0/\d settings", first)
    assert first.split("\r")[-2].strip() == "", "the bar's line is cleared"
    assert second == "", "nothing is traced again"
