"""DDP's hooks on one rank: who owns a state, what is sent and counted, and what a dropped step undoes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scale.errors import ConfigError
from accel_scale.training.ddp import hooks, powersgd
from accel_scale.training.ddp.hooks import CastHook, DdpSettings, WholeHook, hook_figures, hook_of, register_hook
from accel_scale.training.ddp.powersgd import FactorShape, PowerSgd, first_factor

SHAPES = {"a": (12, 16), "b": (20, 10), "c": (7,), "d": (12, 16), "e": (1,)}
ALL = tuple(SHAPES)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


class Bucket:
    """The parts of DDP's bucket that a hook uses."""

    def __init__(self, index: int, names: tuple[str, ...], owned: dict[str, torch.Tensor], step: int, last: bool):
        self._index, self._owned, self._last = index, [owned[name] for name in names], last
        self._buffer = torch.cat([gradient(name, step).flatten() for name in names]).to(self._owned[0].dtype)

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.Tensor]:
        return self._owned

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([one.numel() for one in self._owned])
        return [part.view(one.shape) for part, one in zip(parts, self._owned, strict=True)]


def gradient(name: str, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + ord(name))
    return torch.randn(SHAPES[name], generator=draw)


def step(hook: Any, owned: dict[str, torch.Tensor], number: int, *layout: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A step's gradients as the hook returns them, by parameter."""
    found: dict[str, torch.Tensor] = {}
    for index, names in enumerate(layout):
        bucket = Bucket(index, names, owned, number, index == len(layout) - 1)
        value = hook.run(None, bucket).wait()
        reduced = value[0] if isinstance(value, list) else value
        parts = reduced.split([owned[name].numel() for name in names])
        found |= {name: part.clone().view(SHAPES[name]) for name, part in zip(names, parts, strict=True)}
    return found


def made(start_step: int = 3, rank: int = 2) -> tuple[PowerSgd, dict[str, torch.Tensor]]:
    owned = parameters()
    return PowerSgd(owned, rank=rank, start_step=start_step), owned


LAYOUT = (("a", "b", "c"), ("d", "e"))
LAYOUTS = [LAYOUT, (ALL,), (("e",), ("d", "c"), ("b", "a")), (("d", "a"), ("c", "b", "e"))]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-4, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(LAYOUTS), min_size=5, max_size=5))
@example([LAYOUTS[0], LAYOUTS[0], LAYOUTS[1], LAYOUTS[2], LAYOUTS[3]])
@example([LAYOUTS[3], LAYOUTS[2], LAYOUTS[3], LAYOUTS[3], LAYOUTS[0]])
def test_a_state_belongs_to_its_parameter_whatever_the_buckets(layouts: list[Any]) -> None:
    (usual, one), (moved, other) = made(), made()
    for number, layout in enumerate(layouts, start=1):
        assert_same(step(moved, other, number, *layout), step(usual, one, number, *LAYOUT))
    mine, expected = moved.state_dict(), usual.state_dict()
    assert mine["step"] == expected["step"] == 5
    assert_same(mine["errors"], expected["errors"])
    assert_same(mine["factors"], expected["factors"])


def test_what_is_not_sent_is_kept_and_added_in_the_next_step() -> None:
    hook, owned = made()
    errors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for number in range(1, 7):
        found = step(hook, owned, number, *LAYOUT)
        kept = hook.state_dict()["errors"]
        for name in ALL:
            whole = gradient(name, number) + errors[name]
            is_sent_whole = number < 3 or name in "ce"
            error = kept[name].view(SHAPES[name]) if name in kept else torch.zeros(SHAPES[name])
            torch.testing.assert_close(found[name] + error, whole, rtol=1e-4, atol=1e-5)
            assert (error.norm().item() < 1e-5) == is_sent_whole, (name, number)
            if not is_sent_whole:
                assert torch.linalg.matrix_rank(found[name], rtol=1e-3) == 2
            errors[name] = error


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "rank"),
    [((12, 16), 12, 16, 2), ((20, 10), 20, 10, 2), ((7,), 7, 1, 0), ((), 1, 1, 0), ((3, 2, 40), 3, 80, 0),
     ((8, 2, 20), 8, 40, 2), ((8, 8), 8, 8, 0), ((9, 9), 9, 9, 2), ((0, 4), 0, 0, 0)],
)  # fmt: skip
def test_which_gradients_become_factors(shape: tuple[int, ...], rows: int, columns: int, rank: int) -> None:
    """Those where P and Q have less than half of the values: 2 · (rows + columns) · 2 < rows · columns."""
    found = made()[0].shape_of(torch.zeros(shape))
    assert found == FactorShape(rows, columns, rank)
    assert found.sent_values == ((rows + columns) * rank if rank else rows * columns)


def test_bytes_are_counted_for_a_step_and_for_all() -> None:
    hook, owned = made()
    whole = sum(parameter.numel() for parameter in owned.values())
    factors = 2 * (12 + 16) * 2 + (20 + 10) * 2 + 7 + 1
    sent = 0
    for number in range(1, 5):
        step(hook, owned, number, *LAYOUT)
        values = whole if number < 3 else factors
        sent += 4 * values
        assert (hook.step_bytes, hook.sent_bytes) == (4 * values, sent)


def test_a_dropped_step_is_as_if_it_had_not_been() -> None:
    for before in (1, 2, 3, 4):
        (hook, owned), (other, others) = made(), made()
        for number in range(1, before + 1):
            step(hook, owned, number, *LAYOUT)
            step(other, others, number, *LAYOUT)
        step(hook, owned, 77, *LAYOUT)
        hook.undo()
        hook.undo()  # a second undo changes nothing
        expected = other.state_dict()["errors"]
        for name, error in hook.state_dict()["errors"].items():
            torch.testing.assert_close(error, expected.get(name, torch.zeros_like(error)), rtol=1e-4, atol=1e-5)
        for number in range(before + 1, before + 3):
            assert_same(step(hook, owned, number, *LAYOUT), step(other, others, number, *LAYOUT))
        assert hook.state_dict()["step"] == other.state_dict()["step"] == before + 2
    made()[0].undo()  # nothing to undo


def test_a_run_goes_on_from_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    hook, owned = made()
    for number in range(1, 5):
        step(hook, owned, number, *LAYOUT)
    saved = hook.state_dict()
    assert (saved["step"], saved["rank"], saved["errors"].keys()) == (4, 2, set(ALL))
    assert saved["factors"].keys() == {"a", "b", "d"}
    held = {name: tensor.clone() for name, tensor in saved["errors"].items()}
    factors = {name: tensor.clone() for name, tensor in saved["factors"].items()}
    again, others = made()
    for number in range(1, 4):  # steps of another run, which must leave no trace
        step(again, others, 50 + number, *LAYOUTS[3])
    again.load_state_dict([saved], 0)
    for number in range(5, 8):
        assert_same(step(again, others, number, *LAYOUTS[2]), step(hook, owned, number, *LAYOUT))
    assert_same(saved["errors"], held)  # the state is a copy
    assert_same(saved["factors"], factors)
    # On another number of ranks: the mean of all errors. On the same number: each rank's own.
    states = [{**saved, "errors": {n: torch.full_like(t, float(i)) for n, t in held.items()}} for i in (1, 5, 6)]
    again.load_state_dict(states, 0)
    assert {float(tensor.mean()) for tensor in again.state_dict()["errors"].values()} == {4.0}
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    again.load_state_dict(states, 1)
    assert {float(tensor.mean()) for tensor in again.state_dict()["errors"].values()} == {5.0}
    assert again.state_dict()["factors"].keys() == {"a", "b", "d"}
    again.load_state_dict([{**state, "rank": 3} for state in states], 2)
    assert again.state_dict()["factors"] == {}, "factors of another rank do not fit"
    assert {float(tensor.mean()) for tensor in again.state_dict()["errors"].values()} == {6.0}


def test_a_parameter_begins_with_a_factor_of_its_own() -> None:
    shape = FactorShape(30, 200, 4)
    like = torch.zeros(0, dtype=torch.float64)
    first = first_factor("a.weight", shape, like)
    assert (first.shape, first.dtype) == ((800,), torch.float64)
    assert torch.equal(first, first_factor("a.weight", shape, like))
    assert not torch.equal(first, first_factor("b.weight", shape, like))
    assert abs(first.mean().item()) < 0.15
    assert first.std().item() == pytest.approx(1, abs=0.1)


# ── The other hooks ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_travel_in_16_bits(dtype: torch.dtype) -> None:
    hook, owned = CastHook(dtype), parameters()
    found = step(hook, owned, 1, *LAYOUT)
    for name in ALL:
        assert torch.equal(found[name], gradient(name, 1).to(dtype).float()), name
    assert hook.step_bytes == 2 * sum(parameter.numel() for parameter in owned.values())
    assert (hook.is_stateful, hook.failed) == (False, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_gradients_are_counted(dtype: torch.dtype) -> None:
    hook, owned = WholeHook(), parameters(dtype)
    found = step(hook, owned, 1, *LAYOUT)
    assert torch.equal(found["a"], gradient("a", 1).to(dtype))
    assert hook.step_bytes == dtype.itemsize * sum(parameter.numel() for parameter in owned.values())
    step(hook, owned, 2, ("a",))
    assert hook.step_bytes == dtype.itemsize * 12 * 16
    assert (hook.is_stateful, hook.failed) == (False, False)


def test_a_bucket_that_is_not_reduced_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(powersgd, "powerSGD_hook", lost)
    cast, factors = CastHook(torch.float16), made()[0]
    cast._hook = lost
    for hook, owned in ((cast, parameters()), (factors, factors._parameters)):
        with pytest.raises(KeyboardInterrupt):
            step(hook, owned, 1, LAYOUT[0])
        assert hook.failed


class Wrapped(torch.nn.Module):
    """A model as DDP wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 2, dtype=torch.float64))
        self.module[0].bias.requires_grad_(False)
        self.registered: list[Any] = []

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.registered.append((state, hook))


def test_a_hook_is_found_from_the_model_and_from_its_wrapping() -> None:
    ddp = Wrapped()
    hook = register_hook(ddp, DdpSettings(comm_hook="powersgd", powersgd_rank=3, powersgd_start_step=7))
    assert isinstance(hook, PowerSgd)
    assert ddp.registered == [(None, hook.run)]
    assert hook._parameters.keys() == {"0.weight", "1.weight", "1.bias"}, "what is trained"
    assert (hook._powersgd.matrix_approximation_rank, hook._powersgd.start_powerSGD_iter) == (3, 6)
    assert hook_of(ddp) is hook_of(ddp.module) is hook
    assert hook_of(torch.nn.Sequential(ddp)) is hook
    hook.step_bytes = 40
    assert hook_figures(ddp) == {"sent_bytes_per_step": 40, "gradient_bytes": 4 * 600 + 8 * (60 + 2)}
    again = Wrapped()
    again.module = ddp.module
    assert register_hook(again, DdpSettings()) is None
    assert again.registered == []
    assert hook_of(again) is hook_of(again.module) is None, "that of an earlier wrapping is not its"
    assert hook_of(None) is None
    assert hook_figures(again) is None
    assert isinstance(register_hook(Wrapped(), DdpSettings(comm_hook="counted")), WholeHook)


def test_a_single_number_is_refused_by_name_before_it_is_sent() -> None:
    ddp = Wrapped()
    ddp.module.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="PowerSGD cannot send scale, which is a single number"):
        register_hook(ddp, DdpSettings(comm_hook="powersgd"))
    ddp.module.scale.requires_grad_(False)
    assert register_hook(ddp, DdpSettings(comm_hook="powersgd")) is not None


def test_accelerates_handler_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hooks, "register_hook", lambda model, given: asked.append((model, given)))
    accelerator, chosen = SimpleNamespace(ddp_handler=None), DdpSettings(comm_hook="fp16")
    hooks.use_ddp_settings(accelerator, chosen)
    accelerator.ddp_handler.register_comm_hook("model")
    assert asked == [("model", chosen)]
    assert accelerator.ddp_handler.bucket_cap_mb == 25
