"""Count how often the host waits for the GPU in each micro-batch and step of the recipes, on a pretend GPU.

    python benchmarks/device_waits.py --results benchmarks/results

Runs that differ in the number of micro-batches per step, and in the number of steps, are compared, so that one-off
waits cancel out. The kernels run on the CPU, so nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bad_inputs import load_recipe
from benchmarks.pretend_gpu import PretendGpu

Waits = Counter[tuple[str, str]]  # kind and place
_FLAGS = {
    "sft": ["--packing", "true", "--exact_match_samples", "0", "--save_strategy", "no", "--dataset_name"],
    "pretrain": ["--save_steps", "0", "--sample_tokens", "0", "--eval_steps", "0", "--data"],
}


def write_inputs(folder: Path) -> None:
    """Write a model of two layers and some text."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from accel_scale.data.default import default_model_path

    tokenizer = AutoTokenizer.from_pretrained(default_model_path())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    texts = (f"Document {number} says that {7 * number} follows. " * (1 + number % 3) for number in range(300))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")


def waits_of(recipe: str, folder: Path, *, steps: int, accumulated: int, flags: tuple[str, ...] = ()) -> Waits:
    """Run the recipe and return all its waits."""
    command = [
        *_FLAGS[recipe],
        str(folder / "text.jsonl"),
        "--model_name_or_path",
        str(folder / "model"),
        "--output_dir",
        str(folder / f"{recipe}-{steps}-{accumulated}"),
        *("--max_steps", str(steps), "--max_length", "128", "--per_device_train_batch_size", "2"),
        *("--global_batch_size", str(2 * accumulated), "--logging_steps", "100", "--dataloader_num_workers", "0"),
        *flags,
    ]
    import trl.trainer.sft_trainer  # noqa: F401  # its imports query torch for devices

    module = load_recipe(recipe)
    with PretendGpu() as gpu, contextlib.redirect_stdout(io.StringIO()):
        module.main(command)
    return Counter((wait.kind, wait.place) for wait in gpu.waits)


def per_micro_batch_and_step(recipe: str, folder: Path, flags: tuple[str, ...] = ()) -> tuple[Waits, Waits]:
    """Waits of each micro-batch, and of each step in addition to its micro-batches'."""
    one = waits_of(recipe, folder, steps=1, accumulated=1, flags=flags)
    wider = waits_of(recipe, folder, steps=1, accumulated=3, flags=flags)
    longer = waits_of(recipe, folder, steps=3, accumulated=1, flags=flags)
    micro = Counter({wait: (wider[wait] - one[wait]) // 2 for wait in wider})
    step = Counter({wait: (longer[wait] - one[wait]) // 2 - micro[wait] for wait in longer})
    return +micro, +step


def main() -> int:
    """Print the table, and write it if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--column", default="now", help="What these figures are called in the table.")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        for recipe in _FLAGS:
            for part, waits in zip(("micro-batch", "step"), per_micro_batch_and_step(recipe, Path(name)), strict=True):
                for kind in ("readback", "blocking upload"):
                    places = {place: count for (its, place), count in waits.items() if its == kind}
                    found[f"{recipe}.py, each {part}, {kind}s"] = {"count": sum(places.values()), "places": places}
    for line, entry in found.items():
        print(f"{line}: {entry['count']} {entry['places'] or ''}")
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / "device_waits.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known[options.column] = found
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        (options.results / "device_waits.md").write_text(_table(known), encoding="utf-8")
    return 0


def _table(known: dict[str, dict[str, dict[str, int]]]) -> str:
    columns = list(known)
    lines = [
        "# Waits for the device",
        "",
        "How often the host stops and waits for a GPU: it reads a value, or copies from memory that is not pinned.",
        "Counted by `benchmarks/device_waits.py` on a GPU that is pretended (an H100; packed rows, one process, guard",
        "on). Logging, validation, saving, the beginning and the end of a run are not counted.",
        "",
        "| where | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for line in known[columns[-1]]:
        counts = [str(known[column].get(line, {}).get("count", "")) for column in columns]
        lines.append(f"| {line} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
