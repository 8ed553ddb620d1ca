"""How ranks combine their numbers: norms of shards and copies, and one decision for all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_scale.flags.guard_settings import GuardSettings
from accel_scale.parallel.gradient_norm import clip_gradients, global_grad_norm
from accel_scale.training.guard.events import read_events
from accel_scale.training.guard.guard import Guard
from accel_scale.training.guard.verdict import StepJudge, joined


class Ranks:
    """The parts of an `Accelerator` that are used here, with known losses and norms of the other ranks."""

    def __init__(self, *others: tuple[float, float]) -> None:
        self.others, self.device, self.process_index = torch.tensor(others).reshape(-1, 2), torch.device("cpu"), 0
        self.is_main_process = True

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, self.others])


def judged(others: list[tuple[float, float]], loss: float, norm: float | None, folder: Path, **settings: Any) -> Any:
    judge = StepJudge(Ranks(*others), settings.pop("guard", None), folder, say=lambda line: None)
    usual = {"step_number": 3, "loss_factor": 2.0, "has_loss_scaler": False}
    return judge.judge(torch.tensor(loss), norm, settings.pop("parts", ()), **{**usual, **settings})


def test_the_loss_is_the_mean_and_the_norm_the_largest(tmp_path: Path) -> None:
    outcome, decision = judged([(2.0, 0.5), (6.0, 0.75)], 1.0, 0.625, tmp_path)
    assert (outcome.loss, outcome.grad_norm) == (3.0, 0.75)
    assert (outcome.action, decision.is_event) == ("stepped", False)
    outcome, _ = judged([(2.0, 0.5)], 1.0, None, tmp_path)
    assert (outcome.loss, outcome.grad_norm) == (1.5, None)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ((1.0, math.nan), (1.0, 1.0)),
        ((1.0, 1.0), (1.0, math.inf)),
        ((math.nan, 1.0), (1.0, 1.0)),
        ((1.0, 1.0), (math.inf, 1.0)),
    ],
)
def test_a_number_that_one_rank_lacks_is_lacking_for_all(mine, other, tmp_path: Path) -> None:
    guard = Guard(GuardSettings(policy="skip"))
    outcome, decision = judged([other], *mine, tmp_path, guard=guard)
    assert outcome.action == "skipped"
    assert decision.is_event
    bad = outcome.grad_norm if math.isfinite(outcome.loss) else outcome.loss
    assert not math.isfinite(bad)
    assert [event["step"] for event in read_events(tmp_path)] == [3]


def test_infinities_of_both_signs_are_no_number(tmp_path: Path) -> None:
    outcome, _ = judged([(-math.inf, 1.0), (1.0, 1.0)], math.inf, 1.0, tmp_path, guard=Guard(GuardSettings()))
    assert math.isnan(outcome.loss)
    assert (outcome.action, outcome.is_overflow, outcome.lr_factor) == ("skipped", False, 1.0)


def test_an_event_names_rows_and_losses_without_the_factor(tmp_path: Path) -> None:
    from accel_scale.training.guard.verdict import MicroBatch

    part = MicroBatch(losses=[torch.tensor(3.0), torch.tensor(1.0)], row_ids=[torch.tensor([4, 5]), "a"])
    judged([], math.nan, 1.0, tmp_path, guard=Guard(GuardSettings(policy="skip")), parts=[part])
    (event,) = read_events(tmp_path)
    assert event["micro_batches"] == [{"rank": 0, "loss": 2.0, "rows": [4, 5, "a"]}]
    assert event["rows"] == [4, 5, "a"]


def test_ranks_that_share_rows_add_up_and_a_repetition_does_not() -> None:
    def part(rank: int, loss: float, *rows: str) -> dict[str, Any]:
        return {"rank": rank, "loss": loss, "rows": list(rows)}

    found = joined([part(0, 1.0, "a"), part(0, 2.0, "b"), part(1, 4.0, "a"), part(1, 8.0, "c"), part(0, 16.0, "a")])
    assert [(one["rank"], one["loss"], one["rows"]) for one in found] == [
        (0, 5.0, ["a"]), (0, 2.0, ["b"]), (1, 8.0, ["c"]), (0, 16.0, ["a"]),
    ]  # fmt: skip
    assert len(joined([part(0, 1.0), part(1, 2.0)])) == 2, "rows that nobody named are not the same"


# ── Norms of sharded gradients ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def reductions() -> Iterator[list[tuple[int, ...]]]:
    """Rank 0 of four; records which ranks each reduction covers, and assumes that the others hold the same values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    asked: list[tuple[int, ...]] = []

    def all_reduce(total: torch.Tensor, group: Any = None) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        asked.append(ranks)
        total.mul_(len(ranks))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", all_reduce)
        yield asked
    dist.destroy_process_group()


def sharded(mesh: Any, *placements: Any, value: float = 1.0, size: int = 8) -> torch.nn.Parameter:
    from torch.distributed.tensor import DTensor

    def of(value: float) -> Any:
        local = torch.full((size,), value)
        return DTensor.from_local(local, mesh, placements, run_check=False)

    parameter = torch.nn.Parameter(of(0.0))
    parameter.grad = of(value)
    return parameter


def test_shards_add_up_and_copies_count_once(reductions: list[tuple[int, ...]]) -> None:
    """Eight ones on each of four ranks: 32 if all shards differ, 16 with two copies, 8 with four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements, total in (
        ((Shard(0), Shard(0)), 32), ((Replicate(), Shard(0)), 16), ((Shard(0), Replicate()), 16),
        ((Replicate(), Replicate()), 8),
    ):  # fmt: skip
        assert global_grad_norm([sharded(mesh, *placements)]).item() == pytest.approx(math.sqrt(total))
    assert set(reductions) == {(0, 1), (0, 2)}
    reductions.clear()
    both = [sharded(mesh, Shard(0), Shard(0)), sharded(mesh, Replicate(), Shard(0), value=2.0)]
    assert global_grad_norm([*both, both[0]]).item() == pytest.approx(math.sqrt(32 + 4 * 16))
    plain = torch.nn.Parameter(torch.zeros(3))
    plain.grad = torch.full((3,), 2.0)
    assert global_grad_norm([*both, plain]).item() == pytest.approx(math.sqrt(32 + 64 + 12)), "the same on all ranks"
    assert len(reductions) == 4, "one number for each dimension of the mesh"


def test_a_rank_without_a_gradient_takes_part(reductions: list[tuple[int, ...]]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (4,))
    parameter = sharded(mesh, Shard(0))
    parameter.grad = None
    assert global_grad_norm([parameter]).item() == 0
    assert reductions == [(0, 1, 2, 3)]


def test_no_gradient_is_no_norm() -> None:
    assert global_grad_norm([]).item() == 0
    frozen = torch.nn.Parameter(torch.ones(2))
    empty = torch.nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    assert clip_gradients([frozen], 1.0).item() == 0
    three = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    three.grad = torch.full((3,), 300.0, dtype=torch.float16)
    assert global_grad_norm(iter([frozen, three])).item() == pytest.approx(300 * math.sqrt(3)), "summed in fp32"
    assert clip_gradients([three], 3.0).dtype == torch.float32
    assert three.grad.tolist() == pytest.approx([math.sqrt(3)] * 3, rel=1e-2)


def test_stages_add_up(reductions: list[tuple[int, ...]]) -> None:
    plain = torch.nn.Parameter(torch.zeros(3))
    plain.grad = torch.full((3,), 2.0)
    pair = dist.new_group([0, 1])
    assert global_grad_norm([plain], pair).item() == pytest.approx(math.sqrt(24))
    assert reductions == [(0, 1)]
    assert clip_gradients([plain], 1.0, pair).item() == pytest.approx(math.sqrt(24))
    assert plain.grad.tolist() == pytest.approx([2 / math.sqrt(24)] * 3, rel=1e-5)


def test_clipping_scales_each_shard(reductions: list[tuple[int, ...]]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    parameter = sharded(init_device_mesh("cpu", (4,)), Shard(0), value=3.0)
    before = clip_gradients([parameter], math.inf)
    assert before.item() == pytest.approx(3 * math.sqrt(32))
    assert parameter.grad.to_local().tolist() == [3.0] * 8
    clip_gradients([parameter], 100.0)
    assert parameter.grad.to_local().tolist() == [3.0] * 8, "a norm below the bound is left alone"
    clip_gradients([parameter], 1.0)
    assert global_grad_norm([parameter]).item() == pytest.approx(1.0, rel=1e-5)
