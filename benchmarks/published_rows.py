"""Published memory measurements as model facts and training setups.

The rows are in benchmarks/data/memory_measurements.json: values from repositories' documentation, with their sources.
Anything a row does not state is taken from the stack it was measured on, in one place here, never row by row.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts.stacks import STACKS
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.model_facts import LinearFacts, ModelFacts
from accel_scale.planning.models.training_setup import LoraSetup, ParallelSetup, TrainingSetup

MEASUREMENTS = Path(__file__).parent / "data" / "memory_measurements.json"
# Stacks that train transformers models with Accelerate, DeepSpeed or the HF Trainer.
HF_STACKS = ("HF Trainer", "HF Trainer (Qwen finetune.py)", "DeepSpeed", "Accelerate", "llama-recipes (HF model)")
_QWEN_TARGETS = ("c_attn", "c_proj", "w1", "w2")
# Value set by the scripts of Qwen, litgpt and torchtune, or their default.
_LORA_DROPOUT = 0.05
# Names in the rows for an optimizer that steps as soon as gradients are ready.
_IN_BACKWARD = ("optimizer_in_bwd", "opt-in-bwd", "fused into backward")
# torchtitan's documents of after April 2025, when its loss began to be compiled with the layers (bbb1b616e).
_WITH_COMPILED_LOSS = ("llama3-8b_h200_202506", "mxfp8.md")
_DEGREE = re.compile(r"\b(dp|tp|pp|cp)=(\d+)", re.IGNORECASE)
# Rows of an optimizer step where litgpt's documents state them: all runs of resource-tables.md, and the full.yaml of
# each model in config_hub/finetune, whose row does not repeat it.
_LITGPT_TABLES_STEP = 128
_LITGPT_FULL_STEPS = {
    "google/gemma-2b": 16,
    "meta-llama/Llama-2-7b-hf": 64,
    "meta-llama/Meta-Llama-3-8B": 64,
    "microsoft/phi-2": 8,
    "stabilityai/stablelm-base-alpha-3b": 8,
}


@dataclass(frozen=True)
class PublishedRow:
    """One row for which the planner can make a prediction."""

    id: int
    source: str
    stack: str
    metric: str
    measured_gib: float
    model: ModelFacts
    setup: TrainingSetup
    row: dict[str, Any]

    @property
    def has_old_adamw(self) -> bool:
        """True for PyTorch 2.0's AdamW, which makes the denominator out of place: a second copy during the step."""
        is_torchs = self.setup.optimizer == "adamw_torch" and not self.setup.parallel.is_deepspeed
        return is_torchs and self.stack == "HF Trainer (Qwen finetune.py)"


def load_rows(path: Path = MEASUREMENTS) -> list[dict[str, Any]]:
    """All rows, graded or not."""
    return json.loads(path.read_text())


def published_row(row: dict[str, Any]) -> PublishedRow:
    """Convert `row` to a request to the planner.

    Raises:
        ConfigError: if the row lacks what a prediction needs, or uses something that is not modelled.
    """
    if not row["seq_len"] or not row["batch"] or not row["peak_mem_gib"]:
        raise ConfigError(f"row {row['id']} states no length, batch or memory.")
    measured = row["peak_mem_gib"] / (row["n_gpus"] if row["sum_over_gpus"] else 1)
    setup = setup_of(row)
    return PublishedRow(row["id"], source_of(row), row["stack"], metric_of(row), measured, model_of(row), setup, row)


def model_of(row: dict[str, Any]) -> ModelFacts:
    """The row's model as its stack builds it."""
    model = load_model_facts(row["model"]["name"], allow_download=False)
    return _litgpts(model) if _is_litgpt(row) else model


def source_of(row: dict[str, Any]) -> str:
    """The document a row comes from; each gets its own score."""
    return re.split(r" \(| @|;", row["source"])[0].strip()


def metric_of(row: dict[str, Any]) -> str:
    """The metric that was read: ``allocated``, ``reserved`` or ``device``."""
    text = f"{row['peak_mem_metric']}".lower()
    if "nvidia-smi" in text or row["stack"].startswith("HF Trainer"):
        return "device"
    if "max_memory_allocated" in text or "active" in text or "offers active" in text:
        return "allocated"
    return "reserved" if "reserved" in text or "torchtitan" in row["stack"] else "allocated"


def setup_of(row: dict[str, Any]) -> TrainingSetup:
    """The row's settings in the planner's terms."""
    peft = row["peft"]
    precision, weight_dtype = _precision(row)
    parallel = _parallel(row)
    # torchtitan's local batch is split into as many micro-batches as a pipeline has ranks (pipelining_utils.py, 2024).
    pieces = parallel.pipeline_parallel
    return TrainingSetup(
        method="full" if peft is None else ("qlora" if peft["quant"] else "lora"),
        precision=precision,
        weight_dtype=weight_dtype,
        frozen_dtype="float32" if peft and "fp32 weights" in row["dtype"] else None,
        optimizer=_optimizer(row),
        checkpointing=_checkpointing(row),
        attention="eager" if row["attention"] == "eager" else "flash_attention_2",
        loss=_loss(row),
        micro_batch_size=row["batch"] // pieces,
        sequence_length=row["seq_len"],
        accumulation=pieces * _accumulation(row),
        reduce_dtype="fp32" if "grads-reduce fp32" in row["dtype"] else None,
        lora=_lora(row),
        double_quantisation=bool(peft and "dq" in str(peft["quant"])),
        quantises_whole=STACKS["torchtune"].quantises_whole if _is_torchtune(row) else True,
        keeps_quantised_inputs=_is_litgpt(row),
        keeps_every=2 if row["stack"] == "torchtitan" else 1,  # models/llama/parallelize_llama.py, 2024
        flat_blocks=_is_litgpt(row) and peft is not None and parallel.kind.is_fsdp,
        steps_in_backward=any(word in row["optimizer"].lower() for word in _IN_BACKWARD),
        compile=bool(row["torch_compile"]),
        parallel=parallel,
    )


def _litgpts(model: ModelFacts) -> ModelFacts:
    """A model as litgpt has it (litgpt/model.py): no tied head, GELU in one kernel, every product an `nn.Linear`."""
    activation = "gelu_pytorch_tanh" if model.activation.startswith("gelu_") else model.activation

    def plain(linears: tuple[LinearFacts, ...]) -> tuple[LinearFacts, ...]:
        return tuple(replace(linear, quantisable=True, written_out=False) for linear in linears)

    layers = tuple(replace(layer, attention=plain(layer.attention), mlp=plain(layer.mlp)) for layer in model.layers)
    return replace(model, tied_embeddings=False, activation=activation, layers=layers)


def _accumulation(row: dict[str, Any]) -> int:
    """Micro-batches per step; litgpt states the rows of a step instead."""
    if row["grad_accum"] or not _is_litgpt(row):
        return row["grad_accum"] or 1
    rows = row["batch"] * row["n_gpus"]
    if "resource-tables" in row["source"]:
        rows = _LITGPT_TABLES_STEP
    elif "config_hub" in row["source"] and row["peft"] is None:
        rows = _LITGPT_FULL_STEPS.get(row["model"]["name"], rows)
    return max(1, rows // (row["batch"] * row["n_gpus"]))


def _is_litgpt(row: dict[str, Any]) -> bool:
    return row["stack"].startswith("litgpt")


def _is_torchtune(row: dict[str, Any]) -> bool:
    return row["stack"].startswith("torchtune")


def _loss(row: dict[str, Any]) -> str:
    """``full`` if the row says so; torchtune's chunks are taken from logits that exist as a whole."""
    if "full logits" in row["loss"] and "chunked" not in row["loss"]:
        is_compiled = row["torch_compile"] and any(name in row["source"] for name in _WITH_COMPILED_LOSS)
        return "full_compiled" if is_compiled else "full"
    return STACKS["torchtune"].loss if _is_torchtune(row) else "chunked"


def _precision(row: dict[str, Any]) -> tuple[str, str | None]:
    text = row["dtype"]
    if text.startswith("bf16 weights + autocast"):
        # PEFT keeps adapters in fp32 next to bf16 weights; fully trained modules are copies in the base's dtype.
        peft = row["peft"]
        return "bf16", None if peft and not peft.get("modules_to_save") else "bfloat16"
    if text.startswith(("bf16 (pure)", "bf16-true")):
        return "bf16_true", None
    if text == "fp16":
        return "fp16", "float16"
    return ("fp32", None) if text == "fp32" else ("bf16", None)


def _optimizer(row: dict[str, Any]) -> str:
    text = row["optimizer"].lower()
    if "adamw8bit" in text and "paged" not in text:
        return "adamw_bnb_8bit"
    if "paged" in text and "when quantised" not in text:
        return "paged_adamw_8bit" if "8bit" in text else "paged_adamw_32bit"
    if "when quantised" in text and row["peft"] and row["peft"]["quant"]:
        return "paged_adamw_32bit"
    if "fused" in text or row["stack"] == "torchtitan":
        return "adamw_torch_fused"
    return "adamw_torch"


def _checkpointing(row: dict[str, Any]) -> str:
    text = row["checkpointing"].lower()
    if "offload" in text:
        return "offload"
    if "selective" in text or "sac" in text:
        return "selective"
    if text == "unstated":
        raise ConfigError(f"row {row['id']} does not say whether activations are checkpointed.")
    return "none" if text.startswith("none") else "full"


def _lora(row: dict[str, Any]) -> LoraSetup:
    peft = row["peft"]
    if peft is None:
        return LoraSetup()
    names = " ".join(peft["targets"])
    if row["model"]["name"].startswith("Qwen/Qwen-"):
        full = tuple(peft.get("modules_to_save", ()))
        return LoraSetup(peft["r"], _QWEN_TARGETS, full_modules=full, dropout=_LORA_DROPOUT)
    if "mlp" in names or "w1" in names:
        return LoraSetup(peft["r"], dropout=_LORA_DROPOUT)
    if "falcon" in row["model"]["name"] or "stablelm-base-alpha" in row["model"]["name"]:
        return LoraSetup(peft["r"], ("query_key_value",), dropout=_LORA_DROPOUT)  # queries, keys and values in one
    return LoraSetup(peft["r"], tuple(f"{name[0]}_proj" for name in peft["targets"]), dropout=_LORA_DROPOUT)


def _parallel(row: dict[str, Any]) -> ParallelSetup:
    text = row["strategy"]
    sizes = {key.lower(): int(value) for key, value in _DEGREE.findall(text)}
    degrees = {
        "num_gpus": row["n_gpus"],
        "tensor_parallel": sizes.get("tp", 1),
        "pipeline_parallel": sizes.get("pp", 1),
        "sequence_parallel": sizes.get("cp", 1),
        # models/llama/parallelize_llama.py: norms and residual stream are divided by tokens.
        "stream_ranks": sizes.get("tp", 1) if row["stack"] == "torchtitan" else 1,
        # There, weights stay gathered between a pipeline's micro-batches.
        "reshard_after_forward": not (row["stack"] == "torchtitan" and "pp" in sizes),
    }
    lower = text.lower()
    if lower.startswith("single"):
        return ParallelSetup()
    if lower.startswith("ddp"):
        return ParallelSetup("ddp", **degrees)
    if "deepspeed" in lower:
        return ParallelSetup(f"zero{re.search(r'zero-(.)', lower)[1]}", **degrees)  # type: ignore[index]
    offload = "cpu" if "cpu offload" in lower else "none"
    name = "fsdp2" if "fsdp2" in lower else "fsdp1"
    return ParallelSetup(name, offload_params=offload, offload_optimizer=offload, **degrees)
