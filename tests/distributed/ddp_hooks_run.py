"""DDP's communication hooks on two processes: bytes, losses, torch's own arithmetic, resume, dropped steps, a trainer.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 ddp_hooks_run.py --output_dir D

All runs train the same model on the same rows. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accel_scale import CheckpointManager, Guard, GuardedStep, GuardSettings
from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.launching.rehearsal import enable_rehearsal_if_needed
from accel_scale.trainers.ddp_mixin import DdpHookMixin
from accel_scale.training.ddp.hooks import DdpSettings, hook_of, use_ddp_settings
from accel_scale.training.ddp.powersgd import PowerSgd

STEPS, START, RANK, ROWS, LENGTH, VOCABULARY = 10, 4, 2, 4, 16, 256
POWERSGD = DdpSettings(1, "powersgd", RANK, START)


def make_model() -> LlamaForCausalLM:
    """A model of 0.7M parameters: three buckets of 1 MB."""
    set_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
        )
    )


def rows(step: int, rank: int) -> torch.Tensor:
    """Counting sequences."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    first = torch.randint(0, VOCABULARY, (ROWS, 1), generator=generator)
    stride = torch.randint(1, 4, (ROWS, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH)) % VOCABULARY


class Training:
    """A freshly prepared model with its optimizer."""

    def __init__(self, accelerator: Accelerator, settings: DdpSettings, register: Any = None) -> None:
        accelerator.free_memory()
        accelerator.ddp_handler = None
        use_ddp_settings(accelerator, settings)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        if register is not None:
            register(self.model)
        self.step = GuardedStep(accelerator, self.model, self.optimizer, guard=None)

    def run(self, first: int, last: int, step: GuardedStep | None = None, bad: tuple[int, ...] = ()) -> list[float]:
        """Train steps `first` to `last`, those in `bad` with a loss of NaN; returns the losses over all ranks."""
        step, losses = step or self.step, []
        for number in range(first, last + 1):
            batch = rows(number, self.accelerator.process_index)
            with step.micro_batch(is_last=True):
                loss = self.model(input_ids=batch, labels=batch).loss
                if number in bad:
                    loss = loss * math.nan
                step.backward(loss)
            step.finish()
            losses.append(float(self.accelerator.gather(loss.detach()[None]).mean()))
        return losses

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the bytes that this process passes to `all_reduce` in Python, where the hooks call it."""
    sent, real = [0], dist.all_reduce

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0
        return real(tensor, *args, **kwargs)

    dist.all_reduce = count
    try:
        yield sent
    finally:
        dist.all_reduce = real


def bytes_and_losses(accelerator: Accelerator) -> dict[str, Any]:
    """For every hook: bytes of one step counted in two ways, losses, and whether the ranks agree."""
    found = {}
    for name in ("none", "counted", "bf16", "fp16", "powersgd"):
        training = Training(accelerator, DdpSettings(1, name, RANK, START))
        losses = training.run(1, STEPS - 1)
        hook = hook_of(training.model)
        before = hook.sent_bytes if hook else 0
        with counted() as sent:
            losses += training.run(STEPS, STEPS)
        weights = training.weights()
        others = accelerator.gather(weights[None])
        found[name] = {
            "sent_bytes": sent[0],
            "hook_bytes": hook.sent_bytes - before if hook else 0,
            "losses": losses,
            "ranks_agree": bool((others == weights).all()),
            "buckets": len(training.model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")),
        }
    found["params"] = sum(p.numel() for p in make_model().parameters())
    return found


def torchs_own(accelerator: Accelerator) -> float:
    """Largest weight difference between torch's hook, registered directly, and ours."""

    def register(ddp: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, RANK, START - 1, orthogonalization_epsilon=1e-8)
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        begins = PowerSgd(dict(ddp.module.named_parameters()), rank=RANK, start_step=START)

        def one_at_a_time(state, bucket):
            index = bucket.index()
            if state.iter >= START - 1 and index not in state.p_memory_dict:  # random factors, but our own
                begins._arrange(index, tuple(names[id(p)] for p in bucket.parameters()))
                for kept in ("p_memory_dict", "q_memory_dict"):
                    getattr(state, kept)[index] = getattr(begins._powersgd, kept)[index]
            future = powerSGD_hook.powerSGD_hook(state, bucket)
            future.wait()
            return future

        ddp.register_comm_hook(state, one_at_a_time)

    theirs = Training(accelerator, DdpSettings(1), register)
    theirs.run(1, STEPS)
    expected = theirs.weights()
    ours = Training(accelerator, POWERSGD)
    ours.run(1, STEPS)
    return float((ours.weights() - expected).abs().max())


def resumed(accelerator: Accelerator, folder: str) -> dict[str, float]:
    """Weight differences after an interruption: with the hook's state, and without it."""
    whole = Training(accelerator, POWERSGD)
    whole.run(1, STEPS)
    expected = whole.weights()
    found = {}
    # In the middle of PowerSGD, right before its first step, and without the state.
    for name, last in (("with state", START + 2), ("before the first", START - 1), ("without", START + 2)):
        manager = CheckpointManager(accelerator, f"{folder}/{name}")
        first = Training(accelerator, POWERSGD)
        first.run(1, last)
        manager.save(last, {})
        second = Training(accelerator, POWERSGD)
        if name != "without":
            assert manager.resume("auto") is not None
        else:
            second.model.load_state_dict(first.model.state_dict())
            second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.run(last + 1, STEPS)
        found[name] = float((second.weights() - expected).abs().max())
        manager.close()
    return found


def from_three_ranks(accelerator: Accelerator) -> float:
    """Deviation of the errors from their mean after three ranks saved and two resume."""
    training = Training(accelerator, POWERSGD)
    training.run(1, START + 1)
    hook = hook_of(training.model)
    mine = hook.state_dict()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, mine)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in mine["errors"].items()}
    hook.load_state_dict([*states, {**mine, "errors": nothing}], accelerator.process_index)
    expected = {name: (states[0]["errors"][name] + states[1]["errors"][name]) / 3 for name in nothing}
    taken = hook.state_dict()["errors"]
    assert max(float(tensor.abs().max()) for tensor in expected.values()) > 0
    return max(float((taken[name] - expected[name]).abs().max()) for name in expected)


def dropped(accelerator: Accelerator, folder: str) -> dict[str, float]:
    """Weight differences from a run without the bad steps: PowerSGD's first step, and a later one."""
    found = {}
    for bad in (START, START + 3):
        clean = Training(accelerator, POWERSGD)
        for number in (n for n in range(1, STEPS + 1) if n != bad):
            clean.run(number, number)
        expected = clean.weights()
        guarded = Training(accelerator, POWERSGD)
        guard = Guard(GuardSettings())
        step = GuardedStep(accelerator, guarded.model, guarded.optimizer, guard=guard, output_dir=f"{folder}/{bad}")
        guarded.run(1, STEPS, step, bad=(bad,))
        found[str(bad)] = float((guarded.weights() - expected).abs().max())
    return found


class HookedTrainer(DdpHookMixin, Trainer):
    """Hugging Face's own trainer with our hook."""


def trainer_weights(folder: str, *, steps: int, resume: str | None = None) -> torch.Tensor:
    """Weights of a trainer after `steps`, resumed from the checkpoint `resume` if given."""
    args = TrainingArguments(
        folder,
        max_steps=steps,
        save_steps=6,
        per_device_train_batch_size=ROWS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_bucket_cap_mb=1,
    )
    args.ddp_comm_hook, args.powersgd_rank, args.powersgd_start_step = "powersgd", RANK, START
    data = [{"input_ids": row, "labels": row} for step in range(40) for row in rows(step, 0)]
    trainer = HookedTrainer(model=make_model(), args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    assert hook_of(trainer.model_wrapped).sent_bytes > 0
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args()
    enable_rehearsal_if_needed()
    accelerator = Accelerator(project_dir=args.output_dir)
    found: dict[str, Any] = {"hooks": bytes_and_losses(accelerator)}
    found["torchs_own"] = torchs_own(accelerator)
    found["resumed"] = resumed(accelerator, f"{args.output_dir}/resumed")
    found["dropped"] = dropped(accelerator, f"{args.output_dir}/dropped")
    found["from_three_ranks"] = from_three_ranks(accelerator)
    whole = trainer_weights(f"{args.output_dir}/trainer", steps=STEPS)
    again = trainer_weights(f"{args.output_dir}/again", steps=STEPS, resume=f"{args.output_dir}/trainer/checkpoint-6")
    found["trainer_resumed"] = float((again - whole).abs().max())
    if accelerator.is_main_process:
        print("REPORT " + json.dumps(found), flush=True)
    let_go_of_collectives()
    accelerator.end_training()


if __name__ == "__main__":
    main()
