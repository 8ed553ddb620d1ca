"""BatchNorm under data parallelism and accumulation: reported with numbers, synchronised where requested."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_scale.errors import ConfigError
from accel_scale.plugin.batch_norm import settle_batch_norm
from accel_scale.plugin.plugin import ScalePlugin


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def settled(
    model: nn.Module, *, sync: bool = False, device_type: str = "cuda", num_processes: int = 1, accumulation: int = 1
) -> tuple[nn.Module, list[str]]:
    lines: list[str] = []
    facts = {"device_type": device_type, "num_processes": num_processes, "accumulation": accumulation}
    return settle_batch_norm(model, sync=sync, say=lines.append, **facts), lines


def test_batch_norm_that_sees_the_whole_batch_is_left_alone() -> None:
    model = cnn()
    assert settled(model) == (model, [])
    assert settled(nn.Linear(2, 2), num_processes=4, accumulation=4)[1] == []  # no BatchNorm in the model
    frozen = cnn().requires_grad_(False)
    assert settled(frozen, num_processes=4)[1] == []


@pytest.mark.parametrize(
    ("facts", "rows", "fix"),
    [
        ({"num_processes": 2}, "of a micro-batch on one rank,", "sync_batch_norm=True, or GroupNorm"),
        ({"accumulation": 4}, "of a micro-batch,", "larger micro-batches with less accumulation, or GroupNorm"),
        ({"num_processes": 2, "accumulation": 4, "sync": True}, "of a micro-batch,", "larger micro-batches"),
    ],
)
def test_batch_norm_that_sees_fewer_rows_is_said(facts: dict, rows: str, fix: str) -> None:
    [line] = settled(cnn(), **facts)[1]
    assert line.startswith("warning: 1 BatchNorm layers see the rows ")
    assert rows in line
    assert fix in line


def test_it_is_synchronised_over_ranks_with_its_parameters_and_statistics() -> None:
    model = cnn()
    model[1].running_mean.fill_(3.0)
    weight = model[1].weight
    found, lines = settled(model, sync=True, num_processes=2)
    assert isinstance(found[1], nn.SyncBatchNorm)
    assert found[1].weight is weight  # so an optimizer created earlier still trains it
    assert found[1].running_mean.tolist() == [3.0] * 4
    assert lines == []


def test_what_cannot_be_synchronised_is_refused() -> None:
    with pytest.raises(ConfigError, match="no SyncBatchNorm for cpu"):
        settled(cnn(), sync=True, device_type="cpu", num_processes=2)
    with pytest.raises(ConfigError, match="has no BatchNorm"):
        settled(nn.Linear(2, 2), sync=True)


def test_a_loop_is_told_by_the_plugin(capsys) -> None:
    accelerator = ScalePlugin(global_batch_size=8, micro_batch_size=2).accelerator(cpu=True)
    model = cnn()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "1 BatchNorm layers see the rows of a micro-batch, not those of the global batch" in capsys.readouterr().out
