"""Rehearse a variety of plans on CPU processes, as written by `accel-scale plan --write`.

    python benchmarks/rehearse_plans.py                 # all of them, and writes benchmarks/results/rehearse_plans.md
    python benchmarks/rehearse_plans.py zero3 hybrid    # those whose name contains a word; the other rows stay

Models are given as folders with their configuration from the catalogue, so nothing is downloaded. A rehearsal shrinks
the model, launches, saves, resumes, reloads and compares. Plans run one after another, about a minute each on two
cores; one that fails or hangs does not stop the others. Exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "rehearse_plans.md"
TIMEOUT_SECONDS = 900
_CLI = "import sys; from accel_scale.cli.main import main; sys.exit(main())"

# Model and flags of `accel-scale plan`, by name.
REQUESTS: dict[str, str] = {
    "one-gpu-full": "meta-llama/Llama-3.2-1B --gpu 4090",
    "one-gpu-qlora": "meta-llama/Llama-3.1-8B --gpu 4090 --method qlora --strategy single_gpu",
    "unnamed-card-lora": "Qwen/Qwen2.5-3B --gpu 24GiB --method lora --lora_r 32 --lora_target_modules q_proj v_proj",
    "bf16-true": "Qwen/Qwen3-0.6B --gpu 3060 --precision bf16_true --max_length 1024",
    "fp16": "HuggingFaceTB/SmolLM2-135M --gpu T4 --num_gpus 2 --max_length 1024 --strategy ddp",
    "fp32": "openai-community/gpt2 --gpu A10G --precision fp32 --max_length 1024 --global_batch_size 32",
    "fp8-ddp": "meta-llama/Llama-3.2-1B --gpu H100-SXM --num_gpus 2 --precision fp8 --strategy ddp",
    "ddp-lora": "Qwen/Qwen2.5-7B --gpu A100-80GB-SXM --num_gpus 8 --method lora --strategy ddp",
    "ddp-paged": "HuggingFaceTB/SmolLM2-1.7B --gpu L40S --num_gpus 4 --optim paged_adamw_8bit --no_packing",
    "fsdp2-full": "meta-llama/Llama-3.1-8B --gpu H100-SXM --num_gpus 8 --strategy fsdp2",
    "fsdp2-accumulated": "Qwen/Qwen3-32B --gpu H100-SXM --num_gpus 8 --strategy fsdp2 --max_length 4096 "
    "--global_batch_size 256",
    "fsdp2-qlora": "meta-llama/Llama-3.1-70B --gpu H100 --num_gpus 4 --method qlora --strategy fsdp2 --max_length 512",
    "fsdp2-eager": "google/gemma-2-2b --gpu 4090 --num_gpus 4 --strategy fsdp2 --max_length 1024",
    "fsdp2-grad-op": "EleutherAI/pythia-1b --gpu A10G --num_gpus 4 --strategy fsdp2_grad_op",
    "fsdp2-offload": "mistralai/Mistral-7B-v0.1 --gpu 4090 --num_gpus 2 --strategy fsdp2_offload",
    "fsdp2-hybrid": "Qwen/Qwen2.5-14B --gpu H100-SXM --num_gpus 16 --network infiniband-8xndr "
    "--strategy 'FSDP2 hybrid'",
    "zero1": "microsoft/phi-2 --gpu A100-80GB-SXM --num_gpus 8 --strategy zero1 --checkpointing_policy every_2",
    "zero2-offload": "mistralai/Mistral-7B-v0.3 --gpu L40S --strategy zero2_offload --host_memory 512GiB",
    "zero3-lora-two-nodes": "meta-llama/Llama-3.1-70B --gpu A100-80GB-SXM --num_gpus 16 --network infiniband-hdr "
    "--method lora --strategy zero3",
    "zero3-offload-moe": "Qwen/Qwen3-30B-A3B --gpu H100-SXM --num_gpus 8 --strategy zero3_offload --tokens 100M",
    "long-rows-lora": "meta-llama/Llama-3.1-8B --gpu H100-SXM --num_gpus 8 --method lora --max_length 131072 "
    "--global_batch_size 4",
    "pretrain-4-4-4": "meta-llama/Llama-3.1-70B --gpu H100-SXM --num_gpus 64 --network infiniband-8xndr "
    "--recipe pretrain --tp_size 4 --pp_size 4 --global_batch_size 256 --max_length 4096",
    "pretrain-long-rows": "meta-llama/Llama-3.1-8B --gpu H100-SXM --num_gpus 8 --recipe pretrain --max_length 131072 "
    "--global_batch_size 8",
    "pretrain-lora": "Qwen/Qwen2.5-7B --gpu A100-80GB-SXM --num_gpus 4 --recipe pretrain --method lora "
    "--strategy fsdp2",
    "zero-infinity": "Qwen/Qwen2.5-7B --gpu 4090 --num_gpus 2 --strategy zero_infinity --nvme 6GB",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one plan.

    Attributes:
        name: Its name in `REQUESTS`.
        setting: The best setting, as in the plan's table.
        status: ``passed`` or ``failed``.
        details: Result of resuming, or the failed check and its details.
        seconds: Time of planning and rehearsal.
    """

    name: str
    setting: str
    status: str
    details: str
    seconds: float


def write_plan(name: str, folder: Path) -> dict:
    """Plan and write the request `name` into `folder`; returns the output of ``--json``.

    Raises:
        RuntimeError: if nothing fits or the command fails.
    """
    from accel_scale.planning.models.catalogue import catalogue_config

    model, *flags = shlex.split(REQUESTS[name])
    config = catalogue_config(model)
    if config is None:
        raise RuntimeError(f"{model} is not in the catalogue")
    source = folder / model.rpartition("/")[2]
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(config))
    words = ["plan", str(source), *flags, "--write", str(folder), "--json"]
    done = _run(words, timeout_seconds=120)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-500:])
    return json.loads(done.stdout)


def rehearse(name: str, folder: Path) -> Outcome:
    """Plan, write and rehearse one request."""
    started = time.perf_counter()
    setting = ""
    try:
        plan = write_plan(name, folder)
        setting = _setting(plan)
        words = shlex.split(plan["written"]["rehearse"])[1:]
        words[1:1] = ["--timeout_seconds", str(TIMEOUT_SECONDS / 2), "--keep", str(folder / "kept")]
        done = _run(words, timeout_seconds=TIMEOUT_SECONDS)
        status, details = _judge(done.stdout, done.stderr, done.returncode)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        status, details = "failed", str(error)
    except subprocess.TimeoutExpired as error:
        status, details = "failed", f"no end after {error.timeout:.0f} s"
    return Outcome(name, setting, status, " ".join(details.split()), time.perf_counter() - started)


def _run(words: list[str], *, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    # DeepSpeed searches for ninja on the PATH.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    return subprocess.run(
        [sys.executable, "-c", _CLI, *words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )


def _setting(plan: dict) -> str:
    best = plan["candidates"][0]
    setup = best["setup"]
    batch = f"{setup['micro_batch_size']} × {setup['accumulation']}"
    return f"{best['strategy']}, {setup['method']}, {batch}, {setup['checkpointing']}, {setup['optimizer']}"


def _judge(out: str, err: str, status: int) -> tuple[str, str]:
    """Status and details from the printed table of a rehearsal."""
    checks = re.findall(r"^[│┃|] ?(\w+) +[│┃|] (passed|FAILED|not offered|–) +[│┃|] (.*?) *[│┃|]", out, re.MULTILINE)
    if status == 0:
        seen = {check: text for check, _, text in checks}
        return "passed", seen.get("resume", "")
    failed = next(((check, text) for check, result, text in checks if result == "FAILED" and check != "total"), None)
    if failed is None:
        return "failed", (err or out).strip()[-400:]
    start = out.find(failed[1][:40])
    return "failed", f"{failed[0]}: {re.sub('[│┃]', ' ', out[start : start + 600])}"


def table_row(o: Outcome) -> str:
    """One row of the table."""
    flags, details = REQUESTS[o.name].replace("|", "\\|"), o.details.replace("|", "\\|")
    return f"| {o.name} | `{flags}` | {o.setting} | {o.status}: {details} | {o.seconds:.0f} |"


def rows_so_far(text: str) -> dict[str, str]:
    """Rows of an earlier table by name, for requests that have not changed."""
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    return {name: row for name, row in rows.items() if name in REQUESTS and f"`{REQUESTS[name]}`" in row}


def report(rows: dict[str, str]) -> str:
    """The table as Markdown."""
    good = sum("| passed" in row for row in rows.values())
    lines = [
        "# Plans rehearsed as they were written",
        "",
        f"`python benchmarks/rehearse_plans.py`: {good} of {len(rows)} plans ran as written, on CPU processes of one "
        f"{platform.machine()} machine with {os.cpu_count()} cores; seconds include planning, two launches and the "
        "comparison.",
        "",
        "| plan | flags | best setting | result | seconds |",
        "|---|---|---|---|--:|",
    ]
    return "\n".join([*lines, *(rows[name] for name in REQUESTS if name in rows), ""])


def main() -> int:
    """Rehearse the plans, print a line for each and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only plans whose name contains one of these")
    parser.add_argument("--keep", metavar="DIR", help="keep files, logs and checkpoints here")
    args = parser.parse_args()
    names = [name for name in REQUESTS if not args.words or any(word in name for word in args.words)]
    outcomes = []
    rows = rows_so_far(RESULTS.read_text(encoding="utf-8")) if args.words and RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="plans-") as temporary:
        work = Path(args.keep or temporary)
        for name in names:
            outcomes.append(rehearse(name, work / name))
            last = outcomes[-1]
            print(f"{last.status:<6}  {last.seconds:4.0f} s  {name}: {last.setting}; {last.details}", flush=True)
            rows[name] = table_row(last)
            RESULTS.write_text(report(rows), encoding="utf-8")
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
