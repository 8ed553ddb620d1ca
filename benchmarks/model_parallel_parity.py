"""Compare a run on one process with the same run on ranks that share the model: losses, weights and saved logits.

    python benchmarks/model_parallel_parity.py --model path/to/a/small/llama        # writes benchmarks/results/
    python benchmarks/model_parallel_parity.py --layouts tp2 pp2 --families llama --results /tmp/results

recipes/pretrain.py trains a few AdamW steps (fp32, clipping, validation, a checkpoint, the saved model read back) in
every layout, on CPU processes over gloo. Other families use the tokenizer of --model and random weights; without
--model the Llama is random too and the tokenizer is the embedded one. Processes are forked after the imports, with
the variables that `accelerate launch` sets.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
# Processes, flags, and whether the launch file is FSDP2's, by name.
LAYOUTS: dict[str, tuple[int, list[str], bool]] = {
    "tp2": (2, ["--tp_size", "2"], False),
    "sp2": (2, ["--sp_size", "2"], False),
    "pp2": (2, ["--pp_size", "2"], False),
    "pp4": (4, ["--pp_size", "4"], False),
    "fsdp2 x tp2": (4, ["--tp_size", "2"], True),
    "fsdp2 x sp2": (4, ["--sp_size", "2"], True),
    "fsdp2 over sp2": (2, ["--sp_size", "2"], True),
    "pp2 x dp2": (4, ["--pp_size", "2"], False),
    "pp2 x fsdp2": (4, ["--pp_size", "2"], True),
    "pp2 x tp2 x dp2": (8, ["--pp_size", "2", "--tp_size", "2"], False),
    "pp2 x tp2 x fsdp2": (8, ["--pp_size", "2", "--tp_size", "2"], True),
}
# Trained half-way in the first layout, then from its checkpoint to the end in the second. GPT-2's fused projections
# are stored in another shape under tensor parallelism, so it only resumes between layouts with the same shape.
RESUMED = {
    "pp2, then pp2": ("pp2", "pp2"),
    "pp2, then tp2": ("pp2", "tp2"),
    "fsdp2 x tp2, then pp2": ("fsdp2 x tp2", "pp2"),
    "tp2, then ddp2": ("tp2", "ddp2"),
}
# A layout without sharing, to resume in.
PLAIN: dict[str, tuple[int, list[str], bool]] = {"ddp2": (2, [], False)}
FOLDER_PREFIX = "model-parallel-"
FAMILIES = ("llama", "qwen3", "gemma", "gpt2")
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def main() -> int:
    """Entry point; status 1 if a layout differs by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="Folder of a small Llama with its tokenizer.")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--resumed", nargs="*", choices=list(RESUMED), default=list(RESUMED))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=6, help="Even.")
    parser.add_argument("--bound", type=float, default=1e-4, help="Largest relative difference.")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    preload()
    started, load = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        rows = [row for family in options.families for row in compare_family(family, options, Path(name))]
    report = {"rows": rows, "about": about(options, load), "seconds": time.perf_counter() - started}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "model_parallel_parity.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(report, options)
    (options.results / "model_parallel_parity.md").write_text(text)
    print(text)
    return int(any(row["error"] or max(row["loss"], row["weights"]) > options.bound for row in rows))


def preload() -> None:
    """Import what every run needs, but nothing that reads the launch environment or starts a thread pool."""
    from accel_scale.quiet import quiet_imports

    quiet_imports()
    import peft  # noqa: F401
    import torch.distributed.pipelining
    import torch.distributed.tensor  # noqa: F401
    from transformers import GemmaForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

    sys.path.insert(0, str(REPOSITORY / "recipes"))


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compare_family(family: str, options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Train on one process, then compare every layout with it."""
    model = prepare_model(family, options.model, work / family)
    alone = train(model, work / family / "one process", 1, [], False, options.steps)
    assert not alone["error"], alone["error"]
    rows = []
    for name in [*options.layouts, *(options.resumed if family != "gpt2" else [])]:
        began, out = time.perf_counter(), work / family / name
        if name in LAYOUTS:
            run = train(model, out, *LAYOUTS[name], options.steps)
        else:
            run = train_in_two(model, out, RESUMED[name], options.steps)
        row = {"family": family, "layout": name, "error": run["error"], "seconds": time.perf_counter() - began}
        row |= {"loss": 0.0, "validation": 0.0, "weights": 0.0, "logits": 0.0}
        rows.append(row if run["error"] else row | differences(alone, run))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        shutil.rmtree(out, ignore_errors=True)
    return rows


def text_file(out: Path) -> Path:
    """The project's own documentation as training text; the same file for all runs below one folder."""
    root = next(folder for folder in out.parents if folder.name.startswith(FOLDER_PREFIX))
    text = root / "text.txt"
    if not text.exists():
        text.write_text("\n\n".join(p.read_text() for p in sorted((REPOSITORY / "docs").glob("*.md"))))
    return text


def prepare_model(family: str, folder: Path | None, target: Path) -> Path:
    """Prepare a folder with a model of `family`'s architecture and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, set_seed

    from accel_scale.data.default import default_model_path

    if family == "llama" and folder is not None:
        return folder.resolve()
    source = str(folder or default_model_path())
    tokenizer = AutoTokenizer.from_pretrained(source)
    sizes = {
        "vocab_size": len(tokenizer) + len(tokenizer) % 2, "hidden_size": 64, "intermediate_size": 172, "head_dim": 8,
        "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "gpt2":
        config: Any = GPT2Config(
            vocab_size=sizes["vocab_size"], n_embd=64, n_layer=5, n_head=8, n_positions=512, bos_token_id=1,
            eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(family, **sizes)
    set_seed(1)
    target = target / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def train(model: Path, out: Path, processes: int, flags: list[str], is_fsdp: bool, steps: int) -> dict[str, Any]:
    """Run recipes/pretrain.py on forked processes; returns its logs and the folder of the saved model."""
    out.mkdir(parents=True, exist_ok=True)
    given = {
        "model_name_or_path": model, "data": text_file(out), "text_documents": "paragraph", "max_length": 64,
        "per_device_train_batch_size": 2, "global_batch_size": 16, "max_steps": steps, "precision": "fp32",
        "learning_rate": 1e-3, "logging_steps": 1, "eval_steps": steps, "eval_rows": 16, "save_steps": steps // 2,
        "sample_tokens": 0, "checkpointing_policy": "none", "dataloader_num_workers": 0, "output_dir": out / "run",
    }  # fmt: skip
    argv = [word for name, value in given.items() for word in (f"--{name}", str(value))] + flags
    port = free_port()
    children = [fork_rank(rank, processes, port, is_fsdp, argv, out / f"log.{rank}") for rank in range(processes)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    failed = next((rank for rank, status in enumerate(statuses) if status), None)
    if failed is not None:
        lines = (out / f"log.{failed}").read_text().strip().splitlines()
        return {"error": lines[-1] if lines else f"status {statuses[failed]}"}
    logged = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "error": None,
        "losses": [entry["loss"] for entry in logged if "loss" in entry],
        "validation": [entry["eval_loss"] for entry in logged if "eval_loss" in entry],
        "folder": out / "run",
    }


def train_in_two(model: Path, out: Path, layouts: tuple[str, str], steps: int) -> dict[str, Any]:
    """Run the first layout to its end, then resume its half-way checkpoint in the second."""
    first = train(model, out / "first", *LAYOUTS[layouts[0]], steps)
    if first["error"]:
        return first
    half = f"checkpoint-{steps // 2}"
    shutil.copytree(first["folder"] / half, out / "second" / "run" / half)
    second = train(model, out / "second", *(LAYOUTS | PLAIN)[layouts[1]], steps)
    if not second["error"]:
        second["losses"] = first["losses"][: steps // 2] + second["losses"]
    return second


def fork_rank(rank: int, processes: int, port: int, is_fsdp: bool, argv: list[str], log: Path) -> int:
    """Fork a process with the environment of one rank of a launch; returns its PID."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_MIXED_PRECISION="no")
        if processes > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **(FSDP if is_fsdp else {}),
            )  # fmt: skip
        import pretrain
        import torch

        torch.set_num_threads(1)
        pretrain.main(argv)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── Comparison ───────────────────────────────────────────────────────────────────────────────────────────────────────


def differences(alone: dict[str, Any], run: dict[str, Any]) -> dict[str, float]:
    """Largest relative differences; for weights, ‖a − b‖ ÷ ‖a‖ per tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    def relative(a: list[float], b: list[float]) -> float:
        assert len(a) == len(b) > 0
        return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))

    one, other = (AutoModelForCausalLM.from_pretrained(r["folder"]).eval() for r in (alone, run))
    states = one.state_dict(), other.state_dict()
    weights = max(
        float((states[0][name] - states[1][name]).norm() / states[0][name].norm().clamp(min=1e-12))
        for name in states[0]
        if states[0][name].norm() > 1e-3  # skips biases that are still close to zero
    )
    ids = torch.arange(64).reshape(2, 32) % one.config.vocab_size
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (one, other)]
    return {
        "loss": relative(alone["losses"], run["losses"]),
        "validation": relative(alone["validation"], run["validation"]),
        "weights": weights,
        "logits": float((logits[0] - logits[1]).abs().max() / logits[0].abs().max()),
    }


def about(options: argparse.Namespace, load: float) -> str:
    """Hardware, versions, date and commit as text."""
    from machine import machine

    info = machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=REPOSITORY)
    return (
        f"{os.cpu_count()} cores of {info['cpu']}, torch {info['torch']}, transformers {info['transformers']}, "
        f"{datetime.date.today()}, commit {commit.stdout.strip()}, load average {load:.1f} at the start; "
        f"{options.steps} steps of 16 rows of 64 tokens, fp32"
    )


def table(report: dict[str, Any], options: argparse.Namespace) -> str:
    """The report in Markdown."""
    explained = (
        f"{report['about']}. Made by `python benchmarks/model_parallel_parity.py`. Largest relative differences of "
        "losses, of the validation loss, of final weights (‖a − b‖ ÷ ‖a‖ per tensor) and of the logits of the saved "
        f"models; the bound is {options.bound:g}."
    )
    lines = ["# Model parallelism beside one process", "", explained, ""]
    lines += ["| model | layout | losses | validation | weights | logits |", "|---|---|---:|---:|---:|---:|"]
    for row in report["rows"]:
        figures = [f"{row[name]:.1e}" for name in ("loss", "validation", "weights", "logits")]
        cells = [f"FAILED: {row['error']}", "", "", ""] if row["error"] else figures
        lines.append(f"| {row['family']} | {row['layout'].replace(' x ', ' × ')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
