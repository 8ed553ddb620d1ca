"""A step that runs out of memory is repeated in halves: the same gradients, samples, order and loss."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from accel_scale.ending.out_of_memory import is_out_of_memory, reason_in, smaller_batch_advice
from accel_scale.ending.user_errors import user_errors
from accel_scale.facts.exit_statuses import OUT_OF_MEMORY_STATUS
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy, apply_checkpointing
from accel_scale.modeling.packed_attention import register_packed_attention
from accel_scale.optimization.batch_splitting import halve, num_rows, split
from accel_scale.optimization.fast_loss import add_fast_lm_head
from accel_scale.settings.planned_checkpointing import full_checkpointing
from accel_scale.trainers.recovery_mixin import MemoryRecoveryMixin
from accel_scale.training.resilience.memory_recovery import MemoryRecovery

VOCAB = 64


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config._attn_implementation = register_packed_attention()
    model = LlamaForCausalLM(config).train()
    add_fast_lm_head(model)
    return model


def padded(rows: int, seed: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right, whose labels begin at different positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(rows):
        labels[row, : 1 + row] = -100
        mask[row, length - row :] = 0
        labels[row, length - row :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(lengths: list[int], seed: int = 0) -> dict:
    """One row of documents in the form of TRL's padding-free collator."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int(),
    }


class Card:
    """Has memory for `limit` rows or tokens per pass; records the samples of the passes that succeed."""

    def __init__(self, model: LlamaForCausalLM, num_items: int, *, limit: int, dimension: int = 0) -> None:
        self.model, self.num_items, self.limit, self.dimension = model, num_items, limit, dimension
        self.fails_in_backward = False
        self.seen: list[torch.Tensor] = []

    def loss(self, part: dict) -> torch.Tensor:
        fits = part["input_ids"].shape[self.dimension] <= self.limit
        if not fits and not self.fails_in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss = self.model(**part, fast_lm_head=True, num_items_in_batch=self.num_items).loss
        if not fits:
            fail_in_backward(
                self.model.model.layers[0].mlp.up_proj.weight
            )  # by then later layers have their gradients
        self.seen.append(part["input_ids"])
        return loss


def fail_in_backward(parameter: torch.nn.Parameter) -> None:
    def fail(grad: torch.Tensor) -> None:
        hook.remove()
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    hook = parameter.register_hook(fail)


def gradients(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def take_step(batches: list[dict], *, limit: int, dimension: int = 0, in_backward: bool = False):
    """Gradients, loss, samples in order, and output lines of one step on a card of `limit`."""
    model = tiny_model()
    num_items = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
    card = Card(model, num_items, limit=limit, dimension=dimension)
    card.fails_in_backward = in_backward
    lines: list[str] = []
    recovery = MemoryRecovery(Accelerator(cpu=True), model, say=lines.append, on_discard=card.seen.clear)
    loss = recovery.step(batches, card.loss)
    return gradients(model), float(loss), card.seen, lines, recovery


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert largest > 1e-2
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= 1e-6 * max(largest, 1), name


class CardForFullCheckpointing(Card):
    """Has memory for a whole pass only if every layer is recomputed."""

    def loss(self, part: dict) -> torch.Tensor:
        self.limit = 4 if self.model.is_gradient_checkpointing else 0
        return super().loss(part)


def test_layers_are_recomputed_before_passes_are_halved() -> None:
    batches = [padded(4, seed=1), padded(4, seed=2)]
    expected, loss, _, _, _ = take_step(batches, limit=4)
    model, lines = tiny_model(), []
    num_items = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in batches)
    card = CardForFullCheckpointing(model, num_items, limit=0)
    settings = SimpleNamespace(next_policies=("every_2", "full"), checkpointing="none", set_checkpointing=Mock())
    record: dict[str, str] = {}
    switch = full_checkpointing(model, settings, record, use_reentrant=False)
    recovery = MemoryRecovery(Accelerator(cpu=True), model, say=lines.append, recompute_more=switch)
    assert float(recovery.step(batches, card.loss)) == pytest.approx(loss)
    assert_same(gradients(model), expected)
    assert (recovery.level, recovery.recovered_steps) == (0, [1])
    assert lines == [
        "warning: memory ran out in step 1 on rank 0; the step is taken again, from here on with "
        "--checkpointing_policy full."
    ]
    assert record == {"checkpointing_policy": "full"}  # for the run that is resumed from here
    settings.set_checkpointing.assert_called_once_with("full", "memory ran out with none")
    assert full_checkpointing(model, SimpleNamespace(next_policies=()), {}, use_reentrant=False) is None


def test_what_cannot_be_halved_is_recomputed_first() -> None:
    batch, model = padded(1, seed=1), tiny_model()
    card = CardForFullCheckpointing(model, 8, limit=0)
    more = functools.partial(apply_checkpointing, model, CheckpointingPolicy("full"))
    recovery = MemoryRecovery(Accelerator(cpu=True), model, say=lambda line: None, recompute_more=more)
    recovery.step([batch], card.loss)
    assert recovery.recovered_steps == [1]
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("limit", "passes"), [(2, 2), (1, 4)])
@pytest.mark.slow
def test_rows_give_the_undisturbed_step(limit: int, passes: int, in_backward: bool) -> None:
    batches = [padded(1, 0), padded(4, 1), padded(3, 2)]
    expected, loss, samples, quiet, _ = take_step(batches, limit=4)
    found, recovered_loss, seen, lines, recovery = take_step(batches, limit=limit, in_backward=in_backward)
    assert_same(found, expected)
    assert recovered_loss == pytest.approx(loss, rel=1e-6)
    assert recovery.recovered_steps == [1]
    assert 2**recovery.level == passes
    assert quiet == []
    assert len(lines) == recovery.level  # one line each time the passes get smaller
    assert lines[0].startswith("warning: memory ran out in step 1 on rank 0; the step is taken again")
    # Repetitions with a loss of zero come right after the row they repeat.
    rows = [row for part in seen for row in part]
    distinct = [row for i, row in enumerate(rows) if i == 0 or not torch.equal(row, rows[i - 1])]
    assert torch.equal(torch.stack(distinct), torch.cat(samples))


def test_packed_documents_give_the_undisturbed_step() -> None:
    batches = [packed([7, 9, 4, 12], 1), packed([20, 5, 6], 2)]
    expected, loss, _, _, _ = take_step(batches, limit=64, dimension=1)
    found, recovered_loss, seen, _, recovery = take_step(batches, limit=20, dimension=1)
    assert recovery.level == 1
    assert [part.shape[1] for part in seen] == [16, 16, 20, 11]
    assert_same(found, expected)
    assert recovered_loss == pytest.approx(loss, rel=1e-6)


def test_passes_stay_small_in_the_steps_after() -> None:
    model = tiny_model()
    card = Card(model, 10, limit=2)
    recovery = MemoryRecovery(Accelerator(cpu=True), model, say=lambda line: None)
    recovery.step([padded(4, 1)], card.loss)
    card.seen.clear()
    recovery.step([padded(4, 2)], card.loss)
    assert [len(part) for part in card.seen] == [2, 2]
    assert recovery.recovered_steps == [1]


@pytest.mark.parametrize("kind", ["token_mean", "row_mean"])
def test_means_are_weighted(kind: str) -> None:
    batch = padded(3, 5)
    scores = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))

    def mean_loss(part: dict) -> torch.Tensor:
        rows = [next(i for i in range(3) if torch.equal(row, batch["input_ids"][i])) for row in part["input_ids"]]
        labelled = part["labels"][:, 1:].ne(-100)
        chosen = scores[rows][:, 1:]
        return chosen[labelled].mean() if kind == "token_mean" else (chosen * labelled).sum(1).mean()

    whole = mean_loss(batch)
    parts = split(batch, 2, loss_kind=kind)
    assert len(parts) == 4
    assert sum(part.factor for part in parts) == pytest.approx(1.0)
    assert float(sum(mean_loss(part.inputs) * part.factor for part in parts)) == pytest.approx(float(whole), rel=1e-5)


def test_a_packed_row_is_cut_between_documents() -> None:
    first, second = halve(packed([7, 9, 4, 12]))
    assert first["cu_seq_lens_q"].tolist() == [0, 7, 16]
    assert second["cu_seq_lens_k"].tolist() == [0, 4, 16]
    assert (first["max_length_q"], second["max_length_k"]) == (9, 12)
    assert second["seq_idx"].unique().tolist() == [0, 1]
    assert second["position_ids"][0, 0] == 0


def test_what_cannot_be_cut_exactly_is_not_cut() -> None:
    assert halve(packed([30])) is None
    assert halve(padded(1, 0)) is None
    labelled_start = packed([7, 9])
    labelled_start["labels"] = labelled_start["input_ids"]  # the second document's first token is predicted as well
    assert halve(labelled_start) is None
    assert halve({**padded(2, 0), "pixel_values": torch.zeros(7, 3)}) is None


def test_one_row_that_does_not_fit_stops_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    recovery = MemoryRecovery(
        Accelerator(cpu=True), model, advice=lambda level: smaller_batch_advice(8 >> level, 2 << level), program="x.py"
    )
    with pytest.raises(SystemExit) as stopped:
        recovery.step([padded(2, 0)], Card(model, 10, limit=0).loss)
    assert stopped.value.code == OUT_OF_MEMORY_STATUS == 75
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("x.py: memory ran out in step 1 on rank 0 and training cannot continue in place: ")
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 8" in line
    assert "--checkpointing_policy full" in smaller_batch_advice(1, 4)
    assert "--per_device_train_batch_size 3 --gradient_accumulation_steps 6" in smaller_batch_advice(9, 2)
    # pretrain.py has no accumulation flag.
    assert smaller_batch_advice(9, None) == "run again with --per_device_train_batch_size 3 (the same global batch)"


def test_other_errors_are_left_alone() -> None:
    def broken(part: dict) -> torch.Tensor:
        raise RuntimeError("expected scalar type Float but found Half")

    with pytest.raises(RuntimeError, match="expected scalar type"):
        MemoryRecovery(Accelerator(cpu=True), tiny_model()).step([padded(2, 0)], broken)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(ValueError("CUDA out of memory."))


def test_memory_that_really_runs_out_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with NCCL_DEBUG=INFO for details)
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (NCCL, "Cuda failure 2 'out of memory'"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", None),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
        ("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`", "CUDA error: out of memory"),
        ("HIP error: out of memory", None),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", None),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None),
        ("Triton Error [CUDA]: out of memory", None),
    ],
)
def test_memory_that_runs_out_behind_torchs_allocator_is_recognised(text: str, reason: str | None) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert reason_in(RuntimeError(text)) == (reason or text)


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error: unhandled system error, Last error: Connection refused",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
        "out of resource: shared memory, Required: 180224, Hardware limit: 101376",
    ],
)
def test_errors_that_only_sound_like_it_are_not(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_a_collective_that_runs_out_of_memory_ends_the_run_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Its process group is lost, so nothing is retried."""

    def lost(part: dict) -> torch.Tensor:
        raise torch.distributed.DistBackendError(NCCL)

    with pytest.raises(SystemExit) as ended:
        MemoryRecovery(Accelerator(cpu=True), tiny_model(), program="x.py").step([padded(2, 0)], lost)
    assert ended.value.code == OUT_OF_MEMORY_STATUS
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("x.py: memory ran out in step 1 on rank 0 (Cuda failure 2 'out of memory')")
    assert "whose group is lost" in line


class FullAtItsFirstStep(torch.optim.SGD):
    """An optimizer without memory for its states."""

    def step(self, closure=None):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_an_optimizers_first_step_that_finds_no_memory_is_one_line(tmp_path, capsys) -> None:
    from transformers import Trainer, TrainingArguments

    class Recovering(MemoryRecoveryMixin, Trainer):
        pass

    rows = [{name: tensor[0] for name, tensor in padded(1, seed).items()} for seed in range(4)]
    model = tiny_model()
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=2, per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True
    )
    optimizer = FullAtItsFirstStep(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = Recovering(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, schedule))
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == OUT_OF_MEMORY_STATUS
    [line] = [line for line in capsys.readouterr().err.splitlines() if "memory ran out" in line]
    assert (
        "memory ran out in the optimizer's step 1 on rank 0 (CUDA out of memory. Tried to allocate 2.00 GiB)" in line
    )
    assert "Fix: use --optim adamw_torch_8bit" in line


def test_a_recipe_without_recovery_says_it_in_one_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, user_errors("pretrain.py"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
    assert ended.value.code == OUT_OF_MEMORY_STATUS
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pretrain.py: memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB). Fix: use")


def test_what_has_no_rows_to_cut_is_handed_on_as_it_is():
    """GRPO's training step takes a list of rows, and so may other trainers'."""
    rows = [{"prompt": "Once"}, {"prompt": "upon"}]
    assert halve(rows) is None
    assert num_rows(rows) == 0
    (part,) = split(rows, 0, loss_kind="token_mean")
    assert part.inputs is rows
    assert [(each.inputs is rows, each.factor) for each in split(rows, 1)] == [(True, 1.0), (True, 0.0)]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, None),
        ({"optim": "lomo"}, "lomo has already changed weights in the backward pass"),
        ({"tp_enabled": True}, "rows or sequences are spread over devices"),
        ({"cp_enabled": True}, "rows or sequences are spread over devices"),
        ({"sp_enabled": True}, "rows or sequences are spread over devices"),
        ({"sp_size": 2}, "rows or sequences are spread over devices"),
        ({"n_gpu": 2}, "rows or sequences are spread over devices"),
        ({"output_router_logits": True}, "the router's balancing loss depends on the whole micro-batch"),
    ],
    ids=str,
)
def test_steps_that_cannot_be_taken_again_in_parts(other: dict[str, object], says: str | None) -> None:
    from accel_scale.optimization.fast_loss import FastLossMixin
    from accel_scale.trainers.recovery_mixin import _obstacle

    class Trainer(MemoryRecoveryMixin, FastLossMixin):
        def __init__(self) -> None:
            names = ("tp_enabled", "cp_enabled", "sp_enabled")
            parallelism = SimpleNamespace(**{name: name in other for name in names})
            self.accelerator = SimpleNamespace(parallelism_config=parallelism)
            self.args = SimpleNamespace(optim=other.get("optim", "adamw_torch"), n_gpu=other.get("n_gpu", 1))
            config = SimpleNamespace(output_router_logits="output_router_logits" in other)
            self.model, self.sp_size = SimpleNamespace(config=config), other.get("sp_size", 1)
            self._fast_loss_covers_run, self.log_token_accuracy = True, False

    assert _obstacle(Trainer()) == says


# ── What is said, told and counted ───────────────────────────────────────────────────────────────────────────────────


class Never:
    """A stop that only records its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def stop(self, line: str) -> None:
        self.lines.append(line)
        raise SystemExit(OUT_OF_MEMORY_STATUS)

    def close(self) -> None:
        self.lines.append("closed")


def recovering(**options: object) -> tuple[MemoryRecovery, LlamaForCausalLM]:
    model = tiny_model()
    recovery = MemoryRecovery(Accelerator(cpu=True), model, **options)
    recovery._stop.close()
    recovery._stop = Never()
    return recovery, model


def test_a_run_that_goes_on_counts_its_steps_and_tells_where_memory_ran_out() -> None:
    told, discarded, lines = [], [], []
    recovery, model = recovering(
        first_step=7, on_out_of_memory=told.append, on_discard=lambda: discarded.append(1), say=lines.append
    )
    assert recovery.summary(4, 3) is None
    card = Card(model, 10, limit=2)
    for seed in range(3):
        recovery.step([padded(5, seed)], card.loss)
    # Five rows do not fit, nor do three, but two do.
    assert (recovery.recovered_steps, recovery.level, recovery.step_number) == ([7], 2, 10)
    assert told == [7, 7]
    assert len(discarded) == 2
    assert "each pass has 3 of its 5 rows: 2 passes per micro-batch" in lines[0]
    assert "each pass has 2 of its 5 rows: 4 passes per micro-batch" in lines[1]
    summary = {"recovered_steps": [7], "passes_per_micro_batch": 4, "rows_per_pass": 2, "passes_per_step": 12}
    assert recovery.summary(5, 3) == summary
    recovery, model = recovering(say=lines.append)
    recovery.step([packed([7, 9, 4, 12])], Card(model, 10, limit=16, dimension=1).loss)
    assert "each pass has 1/2 of its packed documents: 2 passes" in lines[2]


def test_a_step_that_is_taken_again_leaves_no_gradient_of_the_first_try() -> None:
    """Of two micro-batches the second fails, when the first one's gradients already exist."""
    recovery, model = recovering(say=lambda line: None)
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, 5.0)
    recovery.step([padded(1, 0), padded(4, 1)], Card(model, 10, limit=2).loss)
    other = tiny_model()
    for batch in (padded(1, 0), padded(4, 1)):
        other(**batch, fast_lm_head=True, num_items_in_batch=10).loss.backward()
    assert_same(gradients(model), gradients(other))


@pytest.mark.parametrize(("every_batch", "expected"), [(False, [False, False, True]), (True, [False, False, True])])
def test_gradients_are_reduced_in_a_steps_last_pass(every_batch: bool, expected: list[bool]) -> None:
    recovery, model = recovering(say=lambda line: None)
    quiet: list[bool] = []
    seen: list[bool] = []
    accelerator = recovery._accelerator
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = every_batch
    without = accelerator.no_sync

    def no_sync(given: object) -> object:
        assert given is model
        quiet.append(True)
        return without(given)

    accelerator.no_sync = no_sync

    def loss_of(part: dict) -> torch.Tensor:
        seen.append(accelerator.sync_gradients)
        return model(**part, fast_lm_head=True, num_items_in_batch=3).loss

    try:
        recovery.step([padded(2, 0), padded(2, 1), padded(2, 2)], loss_of)
    finally:
        accelerator.gradient_state.plugin_kwargs.pop("sync_each_batch", None)
    assert seen == expected
    assert len(quiet) == (0 if every_batch else 2)


@pytest.mark.parametrize(
    ("obstacle", "recompute", "says"),
    [
        (None, None, "a pass of one row, or one packed document, cannot be halved"),
        ("the loss cannot be computed in parts", None, "the loss cannot be computed in parts"),
    ],
)
def test_a_step_that_cannot_be_taken_again_names_the_way_out(obstacle, recompute, says) -> None:
    recovery, model = recovering(obstacle=obstacle, advice=lambda level: f"level {level}")
    with pytest.raises(SystemExit):
        recovery.step([padded(4, 0)], Card(model, 10, limit=0).loss)
    (line,) = recovery._stop.lines
    level = 0 if obstacle else 2
    assert line == (
        f"memory ran out in step 1 on rank 0 and training cannot continue in place: {says}. Fix: level {level}."
    )


def test_memory_that_runs_out_around_a_whole_loop_is_one_line() -> None:
    told: list[int] = []
    recovery, _ = recovering(on_out_of_memory=told.append, first_step=4)
    with pytest.raises(SystemExit), recovery:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    line, closed = recovery._stop.lines
    assert line.startswith(
        "memory ran out outside of the passes that can be taken again on rank 0 (CUDA out of memory"
    )
    assert "a shorter --max_length" in line
    assert (closed, told) == ("closed", [4])
    recovery, _ = recovering(on_out_of_memory=told.append, first_step=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.register_step_pre_hook(fail_for_want_of_memory)
    with pytest.raises(SystemExit), recovery:
        optimizer.step()
    assert recovery._stop.lines[0].startswith("memory ran out in the optimizer's step 3 on rank 0")
    assert told == [4, 3]
    for other in (KeyError("x"), KeyboardInterrupt()):
        recovery, _ = recovering()
        with pytest.raises(type(other)), recovery:
            raise other
        assert recovery._stop.lines == ["closed"]
    with recovery:
        pass


def fail_for_want_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


# ── In a trainer ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Below:
    """The parts of a trainer that the mixin uses; its steps fit `limit` rows."""

    def __init__(self, folder, *, limit: int = 2, **args: object) -> None:
        usual = {
            "auto_find_batch_size": False, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3,
            "output_dir": str(folder), "device": torch.device("cpu"), "process_index": 0, "optim": "adamw_torch",
            "n_gpu": 1, "loss_type": "nll",
        }  # fmt: skip
        self.args, self.limit = SimpleNamespace(**{**usual, **args}), limit
        self.accelerator, self.model, self.optimizer = Accelerator(cpu=True), tiny_model(), None
        self.state, self._new_tokens, self.counted = SimpleNamespace(global_step=5), 0, []
        self.seen: list[tuple[int, float]] = []

    def compute_loss(self, model: object, inputs: dict, **options: object) -> object:
        return torch.tensor(float(len(inputs["input_ids"])))

    def training_step(self, model: object, inputs: dict, num_items: object = None) -> torch.Tensor:
        if len(inputs["input_ids"]) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = self.compute_loss(model, inputs)
        self._new_tokens += inputs["input_ids"].numel()
        self.seen.append((len(inputs["input_ids"]), float(loss)))
        if self.accelerator.sync_gradients:
            self._count_new_tokens()
        return loss

    def _count_new_tokens(self) -> None:
        self.counted.append(self._new_tokens)
        self._new_tokens = 0


Below.__module__, Below.__qualname__ = "transformers.trainer", "Trainer"


class WithRecovery(MemoryRecoveryMixin, Below):
    pass


def trainer_of(folder, **args: object) -> WithRecovery:
    made = WithRecovery(folder, **args)
    made.memory_summary_names = []
    return made


def test_a_trainers_step_in_parts_counts_each_token_once(tmp_path, capsys) -> None:
    made = trainer_of(tmp_path)
    loss = made.training_step(made.model, padded(3, 0), 10)
    # Three rows fail, then two and one succeed: their losses add up, and counts from before the failure are dropped.
    assert (float(loss), loss.device.type) == (3.0, "cpu")
    assert made.seen == [(2, 2.0), (1, 1.0)]
    assert made.counted == [36]
    assert made.memory_recovery.recovered_steps == [6], "the step after the five that were done"
    assert made.recovery_summary() == {
        "recovered_steps": [6], "passes_per_micro_batch": 2, "rows_per_pass": 2, "passes_per_step": 6,
    }  # fmt: skip
    assert (tmp_path / "out-of-memory-step-6").exists() or any("step-6" in str(p) for p in tmp_path.rglob("*"))
    made.seen.clear()
    made.training_step(made.model, padded(1, 0), 10)
    assert made.seen == [(1, 1.0), (1, 0.0)], "a repetition weighs nothing"
    assert made.counted == [36, 12], "and its tokens do not count"
    made.memory_recovery.close()


def test_tokens_counted_before_memory_ran_out_are_counted_again_and_not_twice(tmp_path) -> None:
    made = trainer_of(tmp_path)
    made.accelerator.sync_gradients = False
    made.training_step(made.model, padded(2, 0), 10)
    made.accelerator.sync_gradients = True
    made.training_step(made.model, padded(3, 0), 10)
    assert made.counted == [5 * 12], "both micro-batches of the step, the first of which was taken twice"
    made.memory_recovery.close()


def test_means_of_a_trainer_weigh_by_their_labels(tmp_path) -> None:
    made = trainer_of(tmp_path)
    labels = torch.tensor([[1, 1, 1, 1], [-100, -100, -100, 1], [-100, 1, 1, 1]])
    made.training_step(made.model, {"input_ids": labels.clamp(min=0), "labels": labels})
    assert [factor for _, factor in made.seen] == [pytest.approx(2 * 4 / 7), pytest.approx(3 / 7)]
    made.memory_recovery.close()
    assert made.compute_loss(None, padded(2, 0)) == 2.0
    made._loss_factor = 0.5
    assert made.compute_loss(None, padded(2, 0)) == 1.0
    Below.compute_loss, usual = lambda *_, **__: (torch.tensor(4.0), "outputs"), Below.compute_loss
    try:
        assert made.compute_loss(None, padded(2, 0)) == (2.0, "outputs")
    finally:
        Below.compute_loss = usual


@pytest.mark.parametrize(
    ("error", "has_begun", "stops"),
    [
        (None, True, False),
        (None, False, False),
        (torch.OutOfMemoryError("CUDA out of memory."), True, True),
        (torch.OutOfMemoryError("CUDA out of memory."), False, False),
        (ValueError("mine"), True, False),
    ],
)
def test_a_trainers_recovery_ends_with_its_training(error, has_begun, stops, monkeypatch) -> None:
    ends = []
    recovery = SimpleNamespace(close=lambda: ends.append("closed"), stop_run=lambda why, words: ends.append(why))

    def train(self, *given, **more):
        assert self.memory_recovery is None, "that of an earlier training is gone"
        self.memory_recovery = recovery if has_begun else None
        if error is not None:
            raise error
        return given, more

    monkeypatch.setattr(Below, "train", train, raising=False)
    made = WithRecovery.__new__(WithRecovery)
    made.memory_recovery = "an earlier one"
    if error is None:
        assert made.train(1, resume=2) == ((1,), {"resume": 2})
    elif stops:
        made.train()
    else:
        with pytest.raises(type(error)):
            made.train()
    assert ends == [error] * stops + ["closed"] * has_begun


def test_recovery_that_is_switched_off_leaves_the_step(tmp_path) -> None:
    made = trainer_of(tmp_path)
    made.recover_from_oom = False
    assert made.recovery_summary() is None
    with pytest.raises(torch.OutOfMemoryError):
        made.training_step(made.model, padded(3, 0), 10)
    made.training_step(made.model, padded(2, 0), 10)
    assert made.counted == [24]
    searching = trainer_of(tmp_path, auto_find_batch_size=True)
    with pytest.raises(torch.OutOfMemoryError):
        searching.training_step(searching.model, padded(3, 0), 10)
    assert made.memory_recovery is searching.memory_recovery is None


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_the_advice_is_the_largest_batch_that_fits(has_checkpoint: bool, tmp_path, capsys, monkeypatch) -> None:
    program = "mine.py" if has_checkpoint else ""
    monkeypatch.setattr("sys.argv", [f"scripts/{program}" if program else ""])
    if has_checkpoint:
        (tmp_path / "checkpoint-5").mkdir()
    made = trainer_of(tmp_path, limit=0)
    made.in_user_words = lambda advice: f"<{advice}>"
    with pytest.raises(SystemExit):
        made.training_step(made.model, packed([5, 6]), 10)  # can be halved once
    [line] = [line for line in capsys.readouterr().err.splitlines() if "memory ran out in step 6" in line]
    assert line.startswith(f"{program or 'training'}: ")
    assert "--per_device_train_batch_size 1 --gradient_accumulation_steps 12" in line
    assert ("; --resume_from_checkpoint true continues from the last checkpoint>" in line) == has_checkpoint
    made.memory_recovery.close()
