"""The recipe's settings that determine whether a launch can work, as plain values without torch or transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accel_scale.errors import ConfigError
from accel_scale.facts.methods import METHOD_FACTS
from accel_scale.units import parse_duration

# Flags whose name in recipes differs from the field here, and older spellings that transformers and TRL accept.
_ALIASES = {
    "attn_implementation": ("attn_implementation",),
    "activation_checkpointing": ("activation_checkpointing", "gradient_checkpointing"),
    "dtype": ("dtype", "torch_dtype"),
}
_REENTRANT_FLAGS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")


@dataclass(frozen=True)
class RunSettings:
    """What a recipe was asked to do. None (or the default) means "not set".

    Fields are named like the flags. `places` maps a flag to where it was set, e.g. ``--optim`` or ``qlora.yaml:12``.
    """

    method: str | None = None
    precision: str | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    dtype: str | None = None
    use_cpu: bool | None = None
    optim: str = "adamw_torch_fused"
    attn_implementation: str | None = None
    packing: bool = True
    packing_strategy: str = "bfd"
    padding_free: bool = False
    max_length: int | None = 1024
    torch_compile: bool = False
    long_rows: bool = False
    fused_kernels: str = "auto"
    use_liger_kernel: bool | None = None
    checkpointing_policy: str | None = None
    activation_checkpointing: bool | None = None
    use_reentrant: bool | None = None
    global_batch_size: int | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int | None = None
    sync_each_batch: bool = False
    max_grad_norm: float | None = None
    auto_find_batch_size: bool = False
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    use_peft: bool | None = None
    bnb_4bit_quant_storage: str | None = None
    dataset_streaming: bool = False
    max_steps: int = -1
    dataset_num_proc: int | None = None
    dataset_bytes: int | None = None
    ddp_timeout: int = 1800
    ddp_bucket_cap_mb: int | None = None
    ddp_comm_hook: str = "none"
    reduce_dtype: str | None = None
    powersgd_rank: int | None = None
    powersgd_start_step: int | None = None
    output_dir: str = "outputs/sft"
    save_strategy: str = "steps"
    resume_from_checkpoint: str | None = None
    resume_num_ranks: int | None = None
    fp8_emulate: bool = False
    model_dropout: float | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_tensor_parallel_size: int = 1
    tp_size: int | None = None
    sp_size: int | None = None
    pp_size: int | None = None  # None: the recipe has no such flag, and does not share its model between ranks
    deepspeed: Any = None
    fsdp: Any = None
    places: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_flags(cls, values: Mapping[str, Any], places: Mapping[str, str] | None = None) -> RunSettings:
        """Build from flag names and values as the recipe's parser returns them; flags without a field are ignored."""
        known: dict[str, Any] = {}
        for f in fields(cls):
            names = _ALIASES.get(f.name, (f.name,))
            value = next((values[name] for name in names if values.get(name) is not None), None)
            if value is not None and f.name != "places":
                known[f.name] = getattr(value, "value", value)
        known.setdefault("use_reentrant", _use_reentrant(values))
        known.setdefault("dataset_bytes", _dataset_bytes(values))
        if values.get("collective_timeout") is not None:
            known["ddp_timeout"] = int(parse_duration(values["collective_timeout"], place="--collective_timeout"))
        if known.get("resume_from_checkpoint"):
            known["resume_num_ranks"] = deepspeed_ranks_in_checkpoint(Path(str(known["resume_from_checkpoint"])))
        return cls(**known, places=dict(places or {}))

    def place(self, flag: str) -> str:
        """Where `flag` was set, or the flag itself."""
        return self.places.get(flag, f"--{flag}")

    @property
    def shares_model(self) -> bool:
        """True if the recipe supports tensor, pipeline and sequence parallelism."""
        return self.pp_size is not None

    @property
    def is_4bit(self) -> bool:
        """True if the base weights are NF4."""
        facts = METHOD_FACTS.get(self.method or "")
        return self.load_in_4bit or (facts is not None and facts.quantises_base)

    @property
    def trains_adapters(self) -> bool:
        """True if LoRA adapters are trained instead of every weight."""
        facts = METHOD_FACTS.get(self.method or "")
        return facts.trains_adapters if facts is not None else self.method is None and bool(self.use_peft)


def _use_reentrant(values: Mapping[str, Any]) -> bool | None:
    for name in _REENTRANT_FLAGS:
        options = values.get(name)
        if isinstance(options, str):
            with contextlib.suppress(ValueError, RecursionError):
                options = json.loads(options)
        if options and not isinstance(options, Mapping):
            raise ConfigError(
                f"{values[name]!r} is no mapping.",
                place=f"--{name}",
                fix="""write it like '{"use_reentrant": false}'.""",
            )
        if options and "use_reentrant" in options:
            return bool(options["use_reentrant"])
    return None


def _dataset_bytes(values: Mapping[str, Any]) -> int | None:
    """Size of a local data set's files in bytes; None for one on the Hub."""
    name = values.get("dataset_name")
    path = Path(str(name)) if name else None
    if path is None or not path.exists():
        return None
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


def deepspeed_ranks_in_checkpoint(folder: Path) -> int | None:
    """Data-parallel ranks that wrote the DeepSpeed state in another program's folder; None if there is none.

    DeepSpeed writes ``global_step*/*zero_pp_rank_<rank>_mp_rank_*_optim_states.pt``, one per rank. A checkpoint with a
    manifest records who wrote it, and is converted.
    """
    if (folder / "manifest.json").exists():
        return None
    files = list(folder.glob("global_step*/*zero_pp_rank_*_mp_rank_*_optim_states.pt"))
    return len(files) or None
