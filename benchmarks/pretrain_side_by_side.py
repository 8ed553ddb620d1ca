"""Pretraining side by side: recipes/pretrain.py, litgpt's loop, HF Trainer, and a bare PyTorch loop as the limit.

    python benchmarks/pretrain_side_by_side.py --litgpt_python /tmp/litgpt/bin/python  # writes benchmarks/results/
    python benchmarks/pretrain_side_by_side.py --bf16
    python benchmarks/pretrain_side_by_side.py --turns 3 --results /tmp/results

litgpt pins libraries of its own, so it needs an environment of its own (python -m venv, pip install torch litgpt
requests); without --litgpt_python it is left out and the table says so. What is the same for all: a Llama of one shape
from random weights, the same tokens in rows of one length, micro-batch, precision (bf16 autocast on fp32 weights, or
fp32), fused AdamW with the same settings, gradient clipping, number of threads; attention over whole rows. What
differs is all around it:

* bare loop: the same transformers model with this project's attention and loss, rows already tensors in memory,
  no logging, no checks, no data loading: what a loop could reach at most;
* bare loop, HF loss: the same with the model's own attention (sdpa) and loss;
* ours: the recipe, from text to validation, guard on, logging every step; with and without --torch_compile;
* HF Trainer: a data set of the same rows, logging every step;
* litgpt: its own pretraining function and model code (it always compiles), fused AdamW passed to it.

The contestants take turns of a few steps, the others standing still meanwhile (benchmarks/turns.py), after ten steps
that are not counted. A ratio is of the turns of one round, which are seconds apart, since machines drift; the table
has the median of those ratios and their middle half. MFU is against square matrix products measured in the same run.
The precision, unless given, is the one whose matrix products are faster here: not every CPU gains from bf16.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
# The shape in transformers' names; vocabulary and length follow from the flags.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WARM_UP_STEPS = 10

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from turns import Contestant, StepClock, race  # noqa: E402

# ── One contestant, in a process of its own ──────────────────────────────────────────────────────────────────────────


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
    """A loop with nothing around it."""
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
    """transformers' Trainer as its documentation has it, with the fused optimizer."""
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
    """The recipe, from text, as its command line runs it."""
    sys.path.insert(0, str(REPOSITORY / "recipes"))
    import pretrain

    from accel_scale.pretraining import report as pretrain_report

    clock, stepped = step_clock(job), pretrain_report.Report.stepped

    def timed(self: Any, outcome: Any, *args: Any, **kwargs: Any) -> None:
        stepped(self, outcome, *args, **kwargs)
        clock.tick(outcome.loss)

    pretrain_report.Report.stepped = timed
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
    """litgpt's own `pretrain.setup`; only the data module is ours: the rows, in memory."""
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


# ── Comparison ───────────────────────────────────────────────────────────────────────────────────────────────────────


def make_job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Text, the same text as rows of tokens, tokenizer and config."""
    import numpy

    from accel_scale.data.default import default_model_path, default_pretraining_text
    from accel_scale.modeling.loading import load_tokenizer

    tokenizer = load_tokenizer(default_model_path())
    text = default_pretraining_text(str(folder))
    wanted = options.steps * options.micro_batch * (options.length + 1)
    ids: list[int] = []
    for document in _documents(text):
        ids += [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
        if len(ids) >= wanted:
            break
    rows = numpy.array(ids[:wanted], dtype=numpy.int32).reshape(-1, options.length + 1)
    numpy.save(folder / "rows.npy", rows)
    config = {**SHAPE, "model_type": "llama", "vocab_size": len(tokenizer), "tie_word_embeddings": False}
    config |= {"max_position_embeddings": options.length}
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "rows": str(folder / "rows.npy"), "text": text, "tokenizer": default_model_path(),
        "config": str(folder / "config.json"), "vocab_size": len(tokenizer), "length": options.length,
        "micro_batch": options.micro_batch, "steps": options.steps, "threads": options.num_threads,
        "bf16": options.bf16,
    }  # fmt: skip


def _documents(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def start(name: str, job: dict[str, Any], folder: Path, python: str) -> Contestant:
    """One contestant, warmed up."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    words = [python, __file__, "--worker", name, "--job", json.dumps({**job, "folder": str(folder)})]
    return Contestant(name, words, environment, folder / "log")


def check_litgpt(python: str) -> None:
    """Its turn comes last: minutes would be lost."""
    done = subprocess.run([python, "-c", "import litgpt.pretrain"], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"{python} cannot import litgpt.pretrain ({last}). Mend that environment first.")


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every contestant in turns."""
    import torch
    from sft_side_by_side import machine
    from transformers import LlamaConfig

    from accel_scale.measuring.peak_flops import measured_peak_flops, model_flops

    if options.litgpt_python:
        check_litgpt(options.litgpt_python)
    torch.set_num_threads(options.num_threads)
    peaks = {bf16: measured_peak_flops("cpu", torch.bfloat16 if bf16 else torch.float32) for bf16 in (True, False)}
    if options.bf16 is None:
        options.bf16 = peaks[True] > peaks[False]
    job = make_job(folder, options)
    pythons = dict.fromkeys(CONTESTANTS, sys.executable) | {"litgpt": options.litgpt_python}
    names = [name for name in CONTESTANTS if pythons[name]]
    starts = [functools.partial(start, name, job, folder / str(i), pythons[name]) for i, name in enumerate(names)]
    print(f"{'bf16' if options.bf16 else 'fp32'}; starting {', '.join(names)}", flush=True)
    found = race(starts, turns=options.turns, steps=options.turn_steps)
    config = LlamaConfig(**SHAPE, vocab_size=job["vocab_size"], tie_word_embeddings=False)
    per_token, _ = model_flops(config, sequence_length=options.length, num_params=0)
    sizes = {name: value for name, value in job.items() if not isinstance(value, str)}
    sizes |= {"turns": options.turns, "turn_steps": options.turn_steps}
    results = {"machine": machine(), "job": sizes, "peak_flops": peaks[options.bf16], "flops_per_token": per_token}
    return results | {"runs": dict(zip(names, found, strict=True))}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    info, job, runs = results["machine"], results["job"], results["runs"]
    lines = [
        "# Pretraining side by side", "",
        f"{job['threads']} cores of {info['cpu']}, torch {info['torch']}, transformers {info['transformers']}, "
        f"accelerate {info['accelerate']}, {info['date']}, commit {info['commit']}, load average "
        f"{info['load_average']:.1f} at the end; {job['turns']} turns of {job['turn_steps']} steps each. A Llama of 6 "
        f"layers of 256, {job['micro_batch']} × {job['length']} tokens a step, "
        f"{'bf16 autocast' if job['bf16'] else 'fp32'}. "
        "Made by `python benchmarks/pretrain_side_by_side.py`, whose first lines say what is equal.", "",
        "| | tokens/s | × bare loop | middle half of the rounds | MFU | peak memory, MiB | loss, last 10 steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, run in runs.items():
        speed = job["turn_steps"] * job["micro_batch"] * job["length"] / statistics.median(run["seconds"])
        ratios = [bare / own for own, bare in zip(run["seconds"], runs["bare loop"]["seconds"], strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        mfu = speed * results["flops_per_token"] / results["peak_flops"]
        lines.append(
            f"| {name} | {speed:,.0f} | {middle:.3f} | {lower:.3f} to {upper:.3f} "
            f"| {mfu:.0%} | {run['peak_resident_bytes'] / 2**20:,.0f} | {run['loss']:.3f} |"
        )
    lines += ["", f"The matrix-product peak measured in the same run is {results['peak_flops'] / 1e9:,.0f} GFLOP/s."]
    if "litgpt" not in runs:
        lines.append("litgpt was not measured: no --litgpt_python.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--turn_steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--num_threads", type=int, default=2)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--litgpt_python", default=None, help="Python of an environment with litgpt.")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--worker", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = WARM_UP_STEPS + options.turns * options.turn_steps
    if options.worker:
        work(options.worker, {**options.job, "pipes": options.pipes})
        return
    with tempfile.TemporaryDirectory() as folder:
        results = compare(options, Path(folder))
    options.results.mkdir(parents=True, exist_ok=True)
    name = f"pretrain_side_by_side_{'bf16' if options.bf16 else 'fp32'}"
    (options.results / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.results / f"{name}.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
