"""The training loops that pretrain_side_by_side.py compares, each run in its own process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import StepClock

REPOSITORY = Path(__file__).resolve().parents[1]
# The shape in transformers' terms; vocabulary and length follow from the flags.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARM_UP_STEPS = 10


def step_clock(job: dict[str, Any]) -> StepClock:
    return StepClock(*job["pipes"], warm_up=WARM_UP_STEPS)


def read_rows(job: dict[str, Any]) -> Any:
    import numpy

    return numpy.load(job["rows"])


def hf_model(job: dict[str, Any], attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    config = LlamaConfig(
        **SHAPE, vocab_size=job["vocab_size"], max_position_embeddings=job["length"], tie_word_embeddings=False
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config).train()


def bare(job: dict[str, Any], *, fast: bool) -> dict[str, Any]:
    """A bare training loop."""
    import torch

    from accel_scale.modeling.packed_attention import register_packed_attention
    from accel_scale.optimization.fast_loss import add_fast_lm_head

    torch.set_flush_denormal(True)
    model = hf_model(job, register_packed_attention() if fast else "sdpa")
    if fast:
        add_fast_lm_head(model)
    rows = torch.from_numpy(read_rows(job)[:, :-1]).long()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    clock, size = step_clock(job), job["micro_batch"]
    options = {"fast_lm_head": True} if fast else {}
    for step in range(job["steps"]):
        ids = rows[step * size : (step + 1) * size]
        with torch.autocast("cpu", torch.bfloat16, enabled=job["bf16"]):
            loss = model(input_ids=ids, labels=ids, use_cache=False, **options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick(loss.item())
    return clock.result()


def hf_trainer(job: dict[str, Any]) -> dict[str, Any]:
    """transformers' Trainer as in its documentation, with the fused optimizer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rows, clock = torch.from_numpy(read_rows(job)[:, :-1]).long(), step_clock(job)

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                clock.losses.append(logs["loss"])

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": rows[index], "labels": rows[index]}

    args = TrainingArguments(
        output_dir=job["folder"], per_device_train_batch_size=job["micro_batch"], max_steps=job["steps"],
        learning_rate=ADAM["lr"], adam_beta1=0.9, adam_beta2=0.95, weight_decay=ADAM["weight_decay"],
        optim="adamw_torch_fused", bf16=job["bf16"], use_cpu=True, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    Trainer(model=hf_model(job, "sdpa"), args=args, train_dataset=Rows(), callbacks=[Clock()]).train()
    return clock.result()


def ours(job: dict[str, Any], *, compiled: bool) -> dict[str, Any]:
    """The recipe as run from its command line, starting from text."""
    sys.path.insert(0, str(REPOSITORY / "recipes"))
    import pretrain

    from accel_scale.pretraining import report as pretrain_report

    clock, stepped = step_clock(job), pretrain_report.PretrainReport.stepped

    def timed(self: Any, outcome: Any, *args: Any, **kwargs: Any) -> None:
        stepped(self, outcome, *args, **kwargs)
        clock.tick(outcome.loss)

    pretrain_report.PretrainReport.stepped = timed
    flags = {
        "model_config": job["config"], "tokenizer": job["tokenizer"], "data": job["text"], "output_dir": job["folder"],
        "max_length": job["length"], "per_device_train_batch_size": job["micro_batch"], "max_steps": job["steps"],
        "precision": "bf16" if job["bf16"] else "fp32", "learning_rate": ADAM["lr"], "lr_scheduler_type": "constant",
        "weight_decay": ADAM["weight_decay"], "logging_steps": 1, "eval_steps": 0, "save_steps": 0,
        "sample_tokens": 0, "torch_compile": compiled, "isolate_documents": False,
    }  # fmt: skip
    pretrain.main([part for name, value in flags.items() for part in (f"--{name}", str(value))])
    return clock.result()


def litgpt(job: dict[str, Any]) -> dict[str, Any]:
    """litgpt's own `pretrain.setup`; only the data module, with the rows in memory, is ours."""
    import litgpt.pretrain
    import torch
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.config import Config
    from litgpt.data import DataModule

    sys.argv = ["litgpt", "pretrain", "same-shape"]  # it reads the command line when it saves
    rows, clock = torch.from_numpy(read_rows(job)).long(), step_clock(job)

    class Rows(DataModule):
        def connect(self, *args: Any, **kwargs: Any) -> None: ...
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows, batch_size=job["micro_batch"])

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(rows[:8], batch_size=job["micro_batch"])

    original = litgpt.pretrain.RunningMean.compute

    def ticking(self: Any) -> Any:
        value = original(self)
        clock.tick(float(value))  # called once per logged step
        return value

    litgpt.pretrain.RunningMean.compute = ticking
    config = Config(
        name="same-shape", block_size=job["length"], padded_vocab_size=job["vocab_size"], n_layer=6, n_head=4,
        n_embd=256, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=704, lm_head_bias=False,
    )  # fmt: skip
    optimizer = {
        "class_path": "torch.optim.AdamW",
        "init_args": {"lr": ADAM["lr"], "betas": ADAM["betas"], "eps": ADAM["eps"], "weight_decay": 0.1},
    }
    litgpt.pretrain.setup(
        "same-shape",
        model_config=config,
        out_dir=Path(job["folder"]) / "litgpt",
        precision="bf16-mixed" if job["bf16"] else "32-true",
        data=Rows(),
        train=TrainArgs(
            save_interval=None, log_interval=1, global_batch_size=job["micro_batch"],
            micro_batch_size=job["micro_batch"], max_tokens=job["steps"] * job["micro_batch"] * job["length"],
            max_norm=1.0, lr_warmup_steps=0, min_lr=ADAM["lr"], tie_embeddings=False,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, initial_validation=False, final_validation=False),
        optimizer=optimizer,
        devices=1,
        logger_name="csv",
    )  # fmt: skip
    return clock.result()


CONTESTANTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "bare loop": lambda job: bare(job, fast=True),
    "ours": lambda job: ours(job, compiled=False),
    "ours, --torch_compile": lambda job: ours(job, compiled=True),
    "bare loop, HF loss": lambda job: bare(job, fast=False),
    "HF Trainer": hf_trainer,
    "litgpt": litgpt,
}


def work(name: str, job: dict[str, Any]) -> None:
    """Run one contestant and print its figures as the last line."""
    import resource

    import torch

    torch.set_num_threads(job["threads"])
    result = CONTESTANTS[name](job)
    result["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("RESULT " + json.dumps(result), flush=True)
