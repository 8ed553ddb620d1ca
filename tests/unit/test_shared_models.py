"""A model shared by ranks: what each rank holds, and training compared with a single process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.errors import ConfigError
from accel_scale.optimization.fast_loss import add_fast_lm_head, language_model_loss
from accel_scale.parallel.gradient_norm import clip_gradients
from accel_scale.parallel.layout import DIMENSIONS, ParallelLayout, build_mesh
from accel_scale.parallel.model_parallel import (
    ModelParallel,
    decay_groups_of,
    model_parallel_of,
    parallelize,
    undecayed_names,
)
from accel_scale.parallel.pipelines.pipeline import Pipeline, PipelineSettings
from accel_scale.parallel.pipelines.split import stage_of
from accel_scale.training.guard.parallel_control import ParallelGate

VOCAB, LENGTH, STEPS, BATCHES, DECAY = 48, 16, 3, 4, 0.5
EPSILON = 1e-3  # otherwise Adam would normalise gradients that consist only of rounding


def model(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).train()
    with torch.no_grad():  # norms of ones would hide a wrong gradient
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    add_fast_lm_head(made)
    return made


def accelerator() -> Any:
    return SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext, scaler=None)


def rows(step: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one row with two documents each; their labels begin at different places."""
    draw = torch.Generator().manual_seed(step % 2)
    batches = []
    for index in range(BATCHES):
        ids = torch.randint(1, VOCAB, (1, LENGTH), generator=draw)
        labels = ids.clone()
        labels[:, : 2 * index] = -100
        cut = 5 + index  # the second document crosses the middle
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])[None]
        batches.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return batches


def count(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)


# ── Beside one process ───────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def expected() -> dict[str, Any]:
    """Losses, norms and weights of one process with torch's own loss, and one micro-batch's summed loss afterwards."""
    made = model()
    embedding = made.get_input_embeddings().weight
    decayed = [p for p in made.parameters() if p.ndim > 1 and p is not embedding]
    rest = [p for p in made.parameters() if p.ndim < 2 or p is embedding]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=EPSILON)

    def summed(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        cut = int(batch["position_ids"].diff().lt(0).nonzero()[0, 1]) + 1
        documents = (batch["input_ids"][:, :cut], batch["input_ids"][:, cut:])
        logits = torch.cat([made(input_ids=ids).logits for ids in documents], 1)
        return F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum")

    losses, norms = [], []
    for step in range(STEPS):
        loss = sum(summed(batch) for batch in rows(step)) / count(rows(step))
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(made.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = summed(rows(1)[2]).item()
    return {"losses": losses, "norms": norms, "evaluated": evaluated, "weights": made.state_dict()}


def trained_together(layout: ParallelLayout, settings: PipelineSettings) -> dict[str, Any]:
    """A rank's results after a plain loop over its share of the rows."""
    made, run, rank = model(), accelerator(), dist.get_rank()
    assert model_parallel_of(run) is None
    shared = parallelize(
        run, made, layout, pipeline=settings, num_micro_batches=BATCHES // layout.data_ranks, row_length=LENGTH
    )
    assert model_parallel_of(run) is shared
    optimizer = torch.optim.AdamW(decay_groups_of(shared, DECAY), lr=1e-2, eps=EPSILON)
    gate = ParallelGate(run, shared, optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        mine = [shared.local(batch) for batch in rows(step)[layout.data_rank(rank) :: layout.data_ranks]]
        tokens, factor = count(rows(step)), layout.gradient_ranks
        total = torch.zeros(())
        if shared.pipeline is not None:
            found = shared.pipeline.forward_backward(mine, tokens, factor)
            assert len(found) == (len(mine) if shared.has_loss else 0)
            total += sum(found)
        else:
            for index, batch in enumerate(mine):
                with gate.micro_batch(is_last=index == len(mine) - 1):
                    loss = language_model_loss(made, batch, tokens)
                    (loss * factor).backward()
                total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / layout.tp)
        norms.append(gate.clip(0.5))
        optimizer.step()
        gate.zero_grad()
    with torch.no_grad():
        summed = [shared.evaluate(made, shared.local(rows(1)[2])) for _ in range(2)][-1]
    assert (summed is None) == (not shared.has_loss)
    weights, copies = {}, []
    for name, tensor, is_copy in shared.tensors():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        weights[f"copy of {name}" if is_copy else name] = whole.detach()
        copies += [name] if is_copy else []
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (weights, copies, 0.0 if summed is None else summed.item()))
    known = expected()["weights"]
    for held, _, _ in everyone:
        for name, weight in held.items():
            torch.testing.assert_close(weight, known[name.removeprefix("copy of ")], rtol=1e-4, atol=1e-5)
    names = [name for held, _, _ in everyone for name in held if not name.startswith("copy")]
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": sum(one for _, _, one in everyone) / layout.tp / layout.data_ranks,
        "names": sorted(names),
        "copies": [name for _, held, _ in everyone for name in held],
        "held": sum(getattr(p, "_local_tensor", p).numel() for part in shared.parts for p in part.parameters()),
    }


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_replicate": 2}, {"dp_shard": 2, "fsdp": True}, {"sp": 2}, {"sp": 2, "fsdp": True}, {"tp": 2},
        {"pp": 2}, {"pp": 2, "schedule": "interleaved"}, {"pp": 2, "schedule": "zero_bubble"},
    ],
    ids=lambda sizes: " ".join(str(part) for pair in sizes.items() for part in pair),
)  # fmt: skip
def test_ranks_train_what_one_process_does(sizes: dict[str, Any], tmp_path: Path) -> None:
    schedule = {"schedule": "1f1b", **sizes}["schedule"]
    settings = PipelineSettings(schedule, 2 if schedule == "interleaved" else 1)
    layout = ParallelLayout(**{name: size for name, size in sizes.items() if name != "schedule"})
    wanted = expected()  # before the fork, so that the ranks have it too
    first, second = on_ranks(2, lambda: trained_together(layout, settings), tmp_path)
    for name in ("losses", "norms", "evaluated"):
        assert first[name] == second[name], f"{name}: the same on both ranks"
        assert first[name] == pytest.approx(wanted[name], rel=1e-5), name
    times = 1 if layout.pp > 1 else 2  # either both ranks know every weight, or one of two stages does
    tied_once = {name for name in wanted["weights"] if name != "lm_head.weight"}
    assert first["names"] == sorted([*tied_once] * times)
    assert first["copies"] == (["model.embed_tokens.weight"] if layout.pp > 1 else [])
    whole = sum(weight.numel() for name, weight in wanted["weights"].items() if name in tied_once)
    if layout.shards_weights:
        assert first["held"] + second["held"] == whole
    elif layout.pp == layout.tp == 1:
        assert first["held"] == second["held"] == whole


def staged(autocast: Any = contextlib.nullcontext, *, is_frozen: bool = False) -> ModelParallel:
    made, run = model(), accelerator()
    run.autocast = autocast
    made.get_input_embeddings().weight.requires_grad_(not is_frozen)
    settings = PipelineSettings("gpipe")
    return parallelize(run, made, ParallelLayout(pp=2), pipeline=settings, num_micro_batches=BATCHES)


def tied_gradient(shared: ModelParallel) -> Any:
    (part,) = shared.parts
    name = stage_of(part).tied_weight
    grad = part.get_parameter(name).grad
    return None if grad is None else grad.clone()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_tied_copies_stay_alike_and_evaluation_runs_ahead(tmp_path: Path) -> None:
    def ranks() -> dict[str, Any]:
        shared = staged()
        step = rows(0)
        shared.pipeline.forward_backward(step, count(step))
        once = tied_gradient(shared)
        shared.pipeline.forward_backward(step, count(step))
        found: dict[str, Any] = {"twice": float((tied_gradient(shared) - 2 * once).abs().max() / once.abs().max())}
        both: list[Any] = [None, None]
        dist.all_gather_object(both, once)
        found["alike"] = bool(torch.equal(*both)) and float(once.abs().max()) > 0
        sums = [shared.pipeline.evaluate(step[index % 2]) for index in range(14)]
        found["under way"] = len(shared.pipeline._sends)
        found["same"] = {str(one) for one in sums if one is not None}.__len__()
        found["training"] = shared.parts[0].training
        rounded = staged(lambda: torch.autocast("cpu", torch.bfloat16))
        found["bf16"] = [None if one is None else float(one) for one in (rounded.pipeline.evaluate(step[0]), sums[0])]
        frozen = staged(is_frozen=True)
        frozen.pipeline.forward_backward(step, count(step))
        found["frozen"] = tied_gradient(frozen) is None
        return found

    first, second = on_ranks(2, ranks, tmp_path)
    for line in (first, second):
        assert line["twice"] < 1e-5, "gradients of earlier passes are not exchanged again"
        assert line["alike"]
        assert line["training"]
        assert line["frozen"]
    assert 0 < first["under way"] <= 2 * 2 + 2, "and not all that was ever sent"
    assert (second["under way"], first["same"], second["same"]) == (0, 0, 2)
    rounded, exact = second["bf16"]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2e-2)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_a_head_that_is_sharded_by_itself_learns_from_all_rows(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    plain = model(tied=False)
    batches = rows(0)[:2]
    sum(language_model_loss(plain, batch, 10) for batch in batches).backward()
    expected = {name: p.grad.clone() for name, p in plain.named_parameters()}

    def ranks() -> float:
        made, mesh = model(tied=False), build_mesh(ParallelLayout(dp_shard=2), "cpu")
        for unit in (made.lm_head, made):
            fully_shard(unit, mesh=mesh["shard"])
        (2 * language_model_loss(made, batches[dist.get_rank()], 10)).backward()
        found = {name: p.grad.full_tensor() for name, p in made.named_parameters()}
        return max(float((found[name] - grad).abs().max()) for name, grad in expected.items())

    assert max(on_ranks(2, ranks, tmp_path)) < 1e-5


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_the_norm_of_a_sum_that_is_still_due_is_that_of_the_sum(tmp_path: Path) -> None:
    whole = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    expected = torch.stack([one.norm() for one in whole]).norm().item()

    def ranks() -> list[float]:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        mesh: Any = build_mesh(ParallelLayout(tp=2), "cpu")["tp"]
        held = [torch.nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()])) for _ in whole]
        due = whole[0] * (0.25 if dist.get_rank() == 0 else 0.75)
        held[0].grad = DTensor.from_local(due, mesh, [Partial()])
        held[1].grad = distribute_tensor(whole[1].clone(), mesh, [Shard(1)])
        held[2].grad = distribute_tensor(whole[2].clone(), mesh, [Replicate()])
        norm = clip_gradients(held, 1.0)
        clipped = [float((p.grad.full_tensor() - one / norm).abs().max()) for p, one in zip(held, whole, strict=True)]
        return [norm.item(), max(clipped)]

    for norm, difference in on_ranks(2, ranks, tmp_path):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert difference < 1e-5


# ── Which rank holds what, where the other ranks are only thought of ─────────────────────────────────────────────────


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 13, 31])
def test_a_mesh_has_every_dimension_and_the_joint_ones(rank: int) -> None:
    layout = ParallelLayout(pp=2, dp_replicate=2, dp_shard=2, sp=2, tp=2)
    joint = {"dp": ("dp_replicate", "dp_shard"), "shard": ("dp_shard", "sp")}
    joint["grad"] = ("dp_replicate", "dp_shard", "sp")
    own = layout.coordinate(rank)
    with as_rank(rank, layout.world_size):
        mesh: Any = build_mesh(layout, "cpu")
        assert (mesh.device_type, mesh.mesh_dim_names) == ("cpu", DIMENSIONS)
        for name, free in {**joint, **{one: (one,) for one in DIMENSIONS}}.items():
            fixed = {one: place for one, place in own.items() if one not in free}
            ranks = [other for other in range(32) if fixed.items() <= layout.coordinate(other).items()]
            assert dist.get_process_group_ranks(mesh[name].get_group()) == ranks, name


@pytest.mark.parametrize("sizes", [{"pp": 0}, {"dp_shard": -1}, {"tp": 0}])
def test_a_dimension_has_a_rank(sizes: dict[str, int]) -> None:
    (name,) = sizes
    with pytest.raises(ConfigError, match=f"{name} is {sizes[name]}") as refused:
        ParallelLayout(**sizes)
    assert refused.value.place == f"--{name}_size"


def shared_by(layout: ParallelLayout, **options: Any) -> ModelParallel:
    return parallelize(accelerator(), model(), layout, pipeline=PipelineSettings(), num_micro_batches=4, **options)


def test_stages_products_and_shards_of_eight_ranks() -> None:
    """Two stages of two layers; in each, two ranks share matrix products, and two share what each of those holds."""
    layout = ParallelLayout(pp=2, dp_shard=2, tp=2, fsdp=True)
    for rank in range(8):
        with as_rank(rank, 8):
            shared = shared_by(layout)
            stage, (part,) = rank // 4, shared.parts
            assert shared.has_loss == (stage == 1)
            assert shared.speaks_for_rows == (stage == 1 and rank % 2 == 0)
            assert dist.get_process_group_ranks(shared.pp_group) == [rank % 4, rank % 4 + 4]
            assert stage_of(part).layers == range(2 * stage, 2 * stage + 2)
            assert (shared.pipeline.num_stages, shared.pipeline.num_micro_batches) == (2, 4)
            assert shared.pipeline.stage_indices == [stage]
            weight: Any = part.model.layers[2 * stage].self_attn.q_proj.weight
            assert weight.placements[-1].is_shard(0)
            assert weight.to_local().shape == (16 // 4, 16)
            counted = {id(parameter) for parameter in shared.counted_parameters()}
            table = part.get_output_embeddings() if stage else part.get_input_embeddings()
            assert (id(table.weight) in counted) == (stage == 0), "the copy is not counted"
            is_copy = {name: copy for name, _, copy in shared.tensors()}
            assert is_copy.pop("model.embed_tokens.weight") == (stage == 1)
            assert not any(is_copy.values())
            groups = decay_groups_of(shared, 0.25)
            assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
            norms = 2 * 2 + (stage == 1)
            assert [len(group["params"]) for group in groups] == [2 * 7, norms + 1]


def test_a_run_without_stages_has_no_pipeline_and_keeps_rows_whole() -> None:
    with as_rank(1, 2):
        shared = shared_by(ParallelLayout(dp_shard=2))
        assert (shared.pipeline, shared.pp_group) == (None, None)
        assert shared.has_loss
        assert shared.speaks_for_rows
        batch = rows(0)[0]
        assert shared.local(batch) is batch
        shared = shared_by(ParallelLayout(sp=2))
        torch.testing.assert_close(shared.local(batch)["input_ids"], batch["input_ids"][:, LENGTH // 2 :])
        shared = shared_by(ParallelLayout(tp=2))
        assert shared.has_loss
        assert not shared.speaks_for_rows, "the first rank of a product does"


@pytest.mark.parametrize(
    "sizes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"sp": 2}]
)
def test_blocks_and_the_rest_are_units_of_shards_or_replicas(sizes: dict[str, int]) -> None:
    from torch.distributed.fsdp import FSDPModule

    layout = ParallelLayout(**sizes)
    with as_rank(0, layout.world_size):
        made = shared_by(layout).parts[0]
        units = [name for name, module in made.named_modules() if isinstance(module, FSDPModule)]
        assert units == ["", *(f"model.layers.{index}" for index in range(4))]
        weight: Any = made.model.norm.weight
        assert weight.to_local().numel() == 16 // layout.dp_shard
        assert weight.device_mesh.size() == layout.world_size
        kinds = [placement.is_shard() for placement in weight.placements if placement.is_shard()]
        assert len(kinds) <= 1


@pytest.mark.parametrize("kind", ["dp_replicate", "dp_shard", "sp"])
def test_gradients_are_averaged_over_their_ranks_and_not_over_stages(kind: str) -> None:
    layout = ParallelLayout(**{"pp": 2, kind: 2})
    with as_rank(3, 4):
        (part,) = shared_by(layout).parts
        weight: Any = part.model.layers[3].mlp.up_proj.weight
        assert weight.device_mesh.mesh.flatten().tolist() == [2, 3]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_gathered_for_a_block_and_freed_after_it(reshard: bool, dtype: torch.dtype | None) -> None:
    with as_rank(0, 2):
        made = shared_by(ParallelLayout(dp_shard=2), reshard_after_forward=reshard, compute_dtype=dtype).parts[0]
        seen = []
        layer = made.model.layers[1]
        layer.mlp.register_forward_pre_hook(lambda module, _: seen.append(module.up_proj.weight))
        made(input_ids=rows(0)[0]["input_ids"])
        assert seen[0].shape == (24, 16)
        assert seen[0].dtype == (dtype or torch.float32)
        assert hasattr(layer.mlp.up_proj.weight, "to_local") == reshard


@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_replicate": 2}])
def test_gradients_travel_with_the_last_micro_batch_only(sizes: dict[str, int], monkeypatch: Any) -> None:
    """The reductions of one backward pass, one per unit; also in fp32 when weights are gathered in bf16."""
    calls: list[torch.dtype] = []
    for name in ("reduce_scatter_single", "all_reduce"):
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            calls.append(next(iter([*args, *kwargs.values()])).dtype)
            return original(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    with as_rank(0, 2):
        shared = shared_by(ParallelLayout(**sizes), compute_dtype=torch.bfloat16)
        found = []
        for is_last in (False, True, True):
            calls.clear()
            shared.sync_gradients(is_last)
            language_model_loss(shared.parts[0], rows(0)[0], 1).backward()
            found.append(len(calls))
            assert set(calls) <= {torch.float32}
        assert found == [0, 5, 5]


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    tied, apart = undecayed_names(model()), undecayed_names(model(tied=False))
    norms = {
        f"model.layers.{i}.{name}.weight" for i in range(4) for name in ("input_layernorm", "post_attention_layernorm")
    }
    assert tied == apart == norms | {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"}  # fmt: skip
    alone = ModelParallel(ParallelLayout(), None, [model()], undecayed=tied)
    alone.parts[0].model.norm.weight.requires_grad_(False)
    sizes = {group["weight_decay"]: len(group["params"]) for group in decay_groups_of(alone, 0.25)}
    assert sizes == {0.25: 4 * 7, 0.0: 8 + 1}
    for parameter in alone.parts[0].parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    assert [group["weight_decay"] for group in decay_groups_of(alone, 0.25)] == [0.0]


# ── Steps of a pipeline ──────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_that_a_pipeline_cannot_take_are_refused() -> None:
    with as_rank(1, 2):
        pipeline: Pipeline = shared_by(ParallelLayout(pp=2)).pipeline
        with pytest.raises(ConfigError, match="made for 4 micro-batches, and got 3"):
            pipeline.forward_backward(rows(0)[:3], 1)
        short = {name: tensor[:, 1:] for name, tensor in rows(0)[0].items()}
        with pytest.raises(ConfigError, match="different shapes or fields"):
            pipeline.forward_backward([*rows(0)[:3], short], 1)
        with pytest.raises(ConfigError, match="different shapes or fields"):
            pipeline.forward_backward([*rows(0)[:3], {"input_ids": rows(0)[0]["input_ids"]}], 1)
        unlabelled = [{"input_ids": batch["input_ids"]} for batch in rows(0)]
        with pytest.raises(ConfigError, match="needs labels or shift_labels"):
            pipeline.forward_backward(unlabelled, 1)
        twice = [{**batch, "shift_labels": batch["labels"]} for batch in rows(0)]
        with pytest.raises(ConfigError, match="needs labels or shift_labels"):
            pipeline.forward_backward(twice, 1)
