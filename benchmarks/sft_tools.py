"""Other contestants of sft_side_by_side.py besides TRL and us: tools in separate environments, and their settings.

The files that a tool needs to train on the same rows are written here: LLaMA-Factory's list of data sets, torchtune's
configuration. The first contestant of each tool uses its defaults, the others are tunings from its documentation. Both
read chat messages, so they take part in workloads that have them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_workloads import Workload, document_lengths

BENCHMARKS = Path(__file__).resolve().parent
WARM_UP = 0.05  # share of all steps, as in the workloads' shared flags

NOT_MEASURED = (
    "axolotl was not measured: `pip install axolotl` (0.19.0, beside a CPU build of torch 2.13.0) had not ended after "
    "15 minutes on a loaded machine. Whether it runs on a CPU is not known."
)


@dataclass(frozen=True)
class Contestant:
    """A script with its flags, Python, measuring runner, and the place of the trained model in its output."""

    name: str
    script: Path
    flags: tuple[str, ...]
    python: str = sys.executable
    runner: str = "measured_run.py"
    output_flag: str = "--output_dir"
    saved_in: str = "."

    def command(self, report: Path, output: Path) -> list[str]:
        """Command that trains into `output` and writes `report`."""
        words = [self.python, str(BENCHMARKS / self.runner), str(report), str(self.script), *self.flags]
        return [*words, f"{self.output_flag}={output}"]


def documents_per_step(workload: Workload) -> float:
    """Number of documents that make up the tokens of one optimizer step."""
    lengths = document_lengths(workload)
    return workload.tokens_per_step * len(lengths) / sum(lengths)


def llama_factory(workload: Workload, python: str) -> list[Contestant]:
    """LLaMA-Factory's command lines; bf16 by default, as in its examples of full fine-tuning.

    With a CPU build of torch, uninstall torchvision and delete torchaudio/lib if pip has installed CUDA builds.
    """
    folder = workload.data.parent / "llama_factory"
    folder.mkdir(exist_ok=True)
    roles = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    rows = {"file_name": str(workload.data / "train.jsonl"), "formatting": "sharegpt", "tags": roles}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows | {"columns": {"messages": "messages"}}}))
    common = (
        "train", "--stage=sft", "--do_train=true", "--finetuning_type=full", f"--model_name_or_path={workload.model}",
        "--dataset=rows", f"--dataset_dir={folder}", "--num_train_epochs=1", "--seed=42", "--report_to=none",
        "--logging_steps=1", "--use_cpu=true",
        *(flag for flag in workload.shared_flags if not flag.startswith("--assistant_only_loss")),  # its default
    )  # fmt: skip

    def contestant(name: str, micro_batch: int, per_step: float, *flags: str) -> Contestant:
        accumulation = max(1, round(per_step / micro_batch))
        batch = (f"--per_device_train_batch_size={micro_batch}", f"--gradient_accumulation_steps={accumulation}")
        return Contestant(name, Path(python).parent / "llamafactory-cli", (*common, *batch, *flags), python)

    documents, rows_per_step = documents_per_step(workload), workload.tokens_per_step / 512
    plain, half, single = "--disable_gradient_checkpointing=true", "--bf16=true", "--bf16=false"
    packed = (plain, "--neat_packing=true", "--cutoff_len=512")
    by_length = (plain, "--train_sampling_strategy=group_by_length")
    return [
        contestant("defaults", 8, documents, half),
        contestant("micro-batch 16, by length, bf16", 16, documents, *by_length, half),
        contestant("micro-batch 16, by length, fp32", 16, documents, *by_length, single),
        contestant("neat packing of 512, bf16", 4, rows_per_step, *packed, half),
        contestant("neat packing of 512, fp32", 4, rows_per_step, *packed, single),
    ]


def torchtune(workload: Workload, python: str) -> list[Contestant]:
    """torchtune's recipe for one device; its defaults are dtype, loss and batch of its Llama 3.2 1B configuration.

    The optimizer is the shared one, since the configured one, bitsandbytes' paged 8-bit Adam, needs a GPU. torchtune
    0.6.1 imports with torchao 0.14.1, but not with 0.12, 0.16 or 0.18.
    """
    site = Path(python).parent.parent / "lib"
    recipe = next(site.glob("python3*/site-packages/recipes/full_finetune_single_device.py"), site)
    folder = workload.data.parent / "torchtune"
    folder.mkdir(exist_ok=True)
    shape = json.loads((workload.model / "config.json").read_text())
    shared = dict(flag.removeprefix("--").split("=") for flag in workload.shared_flags)
    lengths = document_lengths(workload)

    def contestant(
        name: str, micro_batch: int, per_step: float, num_rows: float, *, packed: bool, dtype: str
    ) -> Contestant:
        accumulation = max(1, round(per_step / micro_batch))
        steps = int(num_rows / micro_batch / accumulation)
        config = folder / f"{'packed' if packed else 'padded'}_{micro_batch}_{dtype}.json"
        settings: dict[str, Any] = {
            "output_dir": "set by the benchmark",
            "model": {
                "_component_": "torchtune.models.llama2.llama2",
                "vocab_size": shape["vocab_size"],
                "num_layers": shape["num_hidden_layers"],
                "num_heads": shape["num_attention_heads"],
                "num_kv_heads": shape["num_key_value_heads"],
                "embed_dim": shape["hidden_size"],
                "intermediate_dim": shape["intermediate_size"],
                "max_seq_len": shape["max_position_embeddings"],
                "norm_eps": shape["rms_norm_eps"],
                "rope_base": shape["rope_parameters"]["rope_theta"],
            },
            "tokenizer": {
                "_component_": "measured_torchtune.ChatTokenizer",
                "path": str(workload.model / "tokenizer.json"),
                "pad_token": "<|pad|>",
                "max_seq_len": 512,
            },
            "dataset": {
                "_component_": "torchtune.datasets.chat_dataset",
                "source": "json",
                "data_files": str(workload.data / "train.jsonl"),
                "split": "train",
                "conversation_column": "messages",
                "conversation_style": "openai",
                "packed": packed,
            },
            "checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "checkpoint_dir": str(workload.model),
                "checkpoint_files": ["model.safetensors"],
                "recipe_checkpoint": None,
                "output_dir": "${output_dir}",
                "model_type": "LLAMA2",
            },
            "optimizer": {
                "_component_": "torch.optim.AdamW",
                "lr": float(shared["learning_rate"]),
                "betas": [0.9, float(shared["adam_beta2"])],
                "weight_decay": 0.0,
                "fused": True,
            },
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": round(WARM_UP * steps),
            },
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": "${output_dir}/logs",
            },
            "seed": 42, "shuffle": True, "resume_from_checkpoint": False, "batch_size": micro_batch, "epochs": 1,
            "max_steps_per_epoch": None, "gradient_accumulation_steps": accumulation, "optimizer_in_bwd": False,
            "clip_grad_norm": 1.0, "compile": False, "device": "cpu", "enable_activation_checkpointing": False,
            "enable_activation_offloading": False, "dtype": dtype, "log_every_n_steps": 1,
            "log_peak_memory_stats": False,
        }  # fmt: skip
        config.write_text(json.dumps(settings, indent=1))
        flags = ("--config", str(config))
        return Contestant(name, recipe, flags, python, "measured_torchtune.py", "output_dir", "epoch_0")

    documents, rows_per_step = documents_per_step(workload), workload.tokens_per_step / 512
    num_rows = sum(lengths) / 512
    return [
        contestant("defaults", 4, documents, len(lengths), packed=False, dtype="bf16"),
        contestant("micro-batch 16, bf16", 16, documents, len(lengths), packed=False, dtype="bf16"),
        contestant("micro-batch 16, fp32", 16, documents, len(lengths), packed=False, dtype="fp32"),
        contestant("packed rows of 512, bf16", 4, rows_per_step, num_rows, packed=True, dtype="bf16"),
        contestant("packed rows of 512, fp32", 4, rows_per_step, num_rows, packed=True, dtype="fp32"),
    ]


@dataclass(frozen=True)
class Tool:
    """A tool, the packages whose versions are recorded, and its contestants: defaults first, then tunings."""

    title: str
    packages: tuple[str, ...]
    contestants: Callable[[Workload, str], list[Contestant]]


TOOLS = {
    "llama_factory": Tool("LLaMA-Factory", ("llamafactory", "transformers", "torch"), llama_factory),
    "torchtune": Tool("torchtune", ("torchtune", "torchao", "torch"), torchtune),
}


def versions(python: str, tool: Tool) -> dict[str, str]:
    """Versions of a tool's packages in its environment; exits before the benchmark starts if they are missing."""
    script = "import importlib.metadata, sys; print(*map(importlib.metadata.version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", script, *tool.packages], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"{python} has no {tool.title} ({last}). Mend that environment first.")
    return dict(zip(tool.packages, done.stdout.split(), strict=True))
