"""Memory and speed of `recipes/sft.py` on this machine's device, by method, checkpointing, attention, packing and cap.

    python benchmarks/gpu_sft.py                                  # sizes that suit the device; 0.5B–8B on a GPU
    python benchmarks/gpu_sft.py --sizes 0.5B 8B --seconds 540    # stop starting cases when the time is up

Every case is the real recipe in a process of its own, on a random-weight model of a real shape written to a temporary
folder and on generated documents of varied length. Needs no network. Results, with hardware, versions, date and
commit, go to `benchmarks/results/gpu_sft_<device>.json` and a table beside it. Without a GPU a tiny model runs the
same cases on the CPU, so that the script is known to work before a GPU is paid for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apart import run_apart

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

# hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied: Qwen2.5-0.5B and 1.5B, Llama-3.1-8B.
SHAPES = {
    "tiny": (64, 2, 4, 2, 128, 2048, True),
    "0.5B": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "8B": (4096, 32, 32, 8, 14_336, 128_256, False),
}  # A case that takes longer has gone wrong, and the others want their time.
_CASE_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """One run of the recipe: what differs from full fine-tuning with full checkpointing and packing."""

    size: str
    method: str = "full"
    checkpointing: str = "full"
    attention: str | None = None
    packing: bool = True
    optimizer: str = "adamw_torch_fused"
    micro_batch: int = 4
    length: int = 1024
    memory: str | None = None
    compile: bool = False
    precision: str | None = None  # as the device has it

    def flags(self) -> list[str]:
        """The recipe's flags for this case."""
        flags = {
            "method": self.method,
            "checkpointing_policy": self.checkpointing,
            "optim": self.optimizer,
            "per_device_train_batch_size": self.micro_batch,
            "max_length": self.length,
            "packing": self.packing,
            "torch_compile": self.compile,
        }
        if self.attention:
            flags["attn_implementation"] = self.attention
        if self.precision:
            flags["precision"] = self.precision
        if self.memory:
            flags["device_memory"] = self.memory
        return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def cases(sizes: list[str], *, on_gpu: bool) -> list[Case]:
    """What is measured, most telling first, the largest model before all: the time may not suffice for all."""
    first: list[Case] = []
    others: list[Case] = []
    for size in reversed(sizes):
        small = size != "8B"
        first += [Case(size, method, micro_batch=4 if small else 2) for method in ("qlora", "lora", "full")]
        if on_gpu and not small:
            others += [
                Case(size, "qlora", micro_batch=1, memory=m, optimizer="paged_adamw_8bit") for m in ("24GiB", "12GiB")
            ]
        others += [Case(size, "lora", checkpointing=p) for p in ("none", "every_2", "selective", "offload")]
        others += [Case(size, "lora", packing=False), Case(size, "lora", attention="sdpa")]
        if small:
            others += [Case(size, optimizer=o) for o in ("adamw_bnb_8bit", "adamw_torch_8bit")]
            others += [Case(size, precision="bf16_true"), Case(size, compile=True)]
    return first + others


def write_model(folder: Path, size: str) -> int:
    """A random-weight Llama of the shape `size` in bf16, with the embedded tokenizer; returns its parameters."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from accel_scale.data.default import default_model_path

    hidden, layers, heads, kv_heads, feed_forward, vocabulary, tied = SHAPES[size]
    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    num_parameters = model.num_parameters()
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # the cases run in processes of their own and want the whole card
    return num_parameters


def write_data(path: Path, *, num_rows: int, seed: int = 0) -> None:
    """Documents of 20 to 400 words, the spread of instruction data."""
    rng = random.Random(seed)
    words = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "with", "by", "not", "this")
    with path.open("w", encoding="utf-8") as lines:
        for _ in range(num_rows):
            length = min(400, int(rng.lognormvariate(4.4, 0.7)) + 20)
            text = " ".join(rng.choice(words) for _ in range(length))
            lines.write(json.dumps({"text": text}) + "\n")


def run_case(case: Case, model: Path, data: Path, work: Path, *, steps: int, limit: float) -> dict[str, Any]:
    """The recipe's own summary of one run, or the last line of its failure."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, str(REPOSITORY / "recipes" / "sft.py"), *case.flags()]
    command += ["--model_name_or_path", str(model), "--dataset_name", str(data), "--max_steps", str(steps)]
    command += ["--output_dir", str(out), "--save_strategy", "no", "--logging_steps", "1"]
    command += ["--verify_first_checkpoint", "false"]
    started = time.perf_counter()
    _, failure = run_apart(command, limit_seconds=limit)
    if failure:
        return {"error": failure}
    summary = json.loads((out / "run_summary.json").read_text())
    kept = ("tokens_per_second", "peak_device_bytes", "peak_host_bytes", "losses", "attention", "parameters")
    return {**{name: summary[name] for name in kept}, "process_seconds": time.perf_counter() - started}


def utilisation(num_parameters: int, tokens_per_second: float | None, device: str) -> float | None:
    """MFU: 6·N FLOPs per token (PaLM, appendix B, attention left out) over the card's dense bf16 peak."""
    from accel_scale.errors import ConfigError
    from accel_scale.facts.hardware import find_gpu

    try:
        peak = find_gpu(device).flops("bf16")
    except ConfigError:  # not in the catalogue, or without bf16
        return None
    return 6 * num_parameters * tokens_per_second / peak if tokens_per_second else None


def use_one_gpu() -> None:
    """The first visible GPU, for this process and the cases: each is one process, which would refuse several."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line per case."""
    lines = ["| case | tokens/s | MFU | peak allocated | peak host | note |", "|---|---|---|---|---|---|"]
    for row in rows:
        case = {k: v for k, v in row["case"].items() if v != getattr(Case("x"), k)}
        name = ", ".join(f"{k}={v}" if k not in ("size", "method") else str(v) for k, v in case.items())
        device = (row.get("peak_device_bytes") or {}).get("allocated_bytes")
        speed, mfu = row.get("tokens_per_second"), row.get("mfu")
        lines.append(
            f"| {name} | {f'{speed:,.0f}' if speed else ''} | {f'{mfu:.1%}' if mfu else ''} | "
            f"{f'{device / 2**30:.2f} GiB' if device else ''} | "
            f"{row['peak_host_bytes'] / 2**30:.2f} GiB | |"
            if "error" not in row
            else f"| {name} | | | | | {row['error']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases that fit in the time and write the results after each."""
    use_one_gpu()
    import torch

    from accel_scale.reporting.summary import write_summary

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--sizes", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B", "8B"] if on_gpu else ["tiny"]
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0, help="No new case is started after this time.")
    parser.add_argument("--max_cases", type=int, default=None)
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    name = "gpu_sft_" + re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    started, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        data = work / "documents.jsonl"
        write_data(data, num_rows=4000 if on_gpu else 200)
        sizes: dict[str, int] = {}
        for case in cases(options.sizes, on_gpu=on_gpu)[: options.max_cases]:
            left = options.seconds - (time.perf_counter() - started)
            if left <= 0:
                print(f"time is up; not run: {case}")
                continue
            model = work / case.size
            if case.size not in sizes:
                sizes[case.size] = write_model(model, case.size)
            result = run_case(case, model, data, work, steps=options.steps, limit=min(_CASE_SECONDS, max(60.0, left)))
            row = {"case": asdict(case), **result}
            if "error" not in result:
                row["mfu"] = utilisation(sizes[case.size], result["tokens_per_second"], device)
            rows.append(row)
            print(table([row]).splitlines()[-1], flush=True)
            folder = work / "summary"
            document = json.loads(write_summary(folder, {"device": device, "rows": rows}).read_text())
            options.results.mkdir(parents=True, exist_ok=True)
            (options.results / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
            versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items())
            heading = (
                f"# `benchmarks/gpu_sft.py` on {device}\n\n{document['date']}, {document['commit']}; {versions}\n\n"
            )
            (options.results / f"{name}.md").write_text(heading + table(rows))


if __name__ == "__main__":
    main()
