"""The final folder of a pipeline: each stage writes its own weights, and plain `from_pretrained` loads all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.parallel.pipeline_split import owned_parameters, stage_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_INDEX = "model.safetensors.index.json"


def save_stages(
    parts: Sequence[Any],
    output_dir: str | Path,
    group: dist.ProcessGroup,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Write a folder that plain `from_pretrained` loads; call it on every process of the run.

    Every stage writes ``model-<stage>-of-<stages>.safetensors``, by the rank of its that is in one pipeline with rank
    0, and reads it back; rank 0 writes configuration, tokenizer and index. The folder appears complete or not at all.

    Args:
        parts: This rank's, sharded by FSDP2, replicated, tensor-parallel or plain.
        output_dir: On a filesystem that all nodes share. Existing checkpoints and logs in it are kept.
        group: Ranks of this rank's pipeline.
        tokenizer: Saved too, unless None.
        dtype: Cast floating-point weights; None writes the dtype they are trained in.

    Returns:
        How many tensors were written and read back, on all stages together.

    Raises:
        CheckpointMismatch: if what was written is not what is in memory; `output_dir` is then left as it was.
        ConfigError: if a stage's file does not arrive where rank 0 looks.
    """
    import torch.distributed as dist

    from accel_scale.training.final_model import correct_config, make_generation_config_savable
    from accel_scale.training.gathering import process_index
    from accel_scale.training.staging import save_atomically
    from accel_scale.training.verification import CheckpointMismatch

    is_writer = dist.get_process_group_ranks(group)[0] == 0
    with save_atomically(output_dir) as staging:
        written: dict[str, dict[str, Any]] = {}
        problems: list[str] = []
        for part in parts:
            weights = _whole_weights(part, dtype, keep=is_writer)
            if is_writer:
                file_name = _file_name(part)
                problems += _write(part, weights, staging / file_name)
                written[file_name] = {name: tensor.nbytes for name, tensor in weights.items()}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (written, problems))
        files = {name: sizes for found, _ in everywhere for name, sizes in found.items()}
        problems = [problem for _, found in everywhere for problem in found]
        if process_index() == 0:
            problems += [f"{name} is not on this filesystem" for name in files if not (staging / name).is_file()]
            make_generation_config_savable(parts[0])
            _write_index(parts[0], files, staging)
            correct_config(staging, dtype)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
        problems = _broadcast(problems)
        if problems:
            raise CheckpointMismatch(
                f"what was saved is not what is in memory: {'; '.join(problems[:4])}.",
                place=str(output_dir),
                fix="check the disk, and that all nodes share it.",
            )
    return sum(len(sizes) for sizes in files.values())


def _broadcast(value: Any) -> Any:
    from accel_scale.training.gathering import broadcast_from_main

    return broadcast_from_main(value)


def _file_name(part: Any) -> str:
    stage = stage_of(part)
    return f"model-{stage.index + 1:05d}-of-{stage.num_stages:05d}.safetensors"


def _whole_weights(part: Any, dtype: torch.dtype | None, *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors on the host under the names of published checkpoints, if `keep`; a collective of the stage."""
    from transformers.core_model_loading import revert_weight_conversion

    from accel_scale.training.gathering import gather_whole, named_tensors

    copy = stage_of(part).tied_weight if stage_of(part).holds_copy else None
    held = {name: tensor for name, tensor in named_tensors(part).items() if name != copy}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in gather_whole(held):
        if keep:
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            weights[name] = tensor.to(device="cpu", dtype=target, copy=True).contiguous()
    # Experts that transformers keeps as one tensor are files' single ones again (transformers 5.23).
    return (
        {name: tensor.contiguous() for name, tensor in revert_weight_conversion(part, weights).items()} if keep else {}
    )


def _write(part: Any, weights: dict[str, torch.Tensor], path: Path) -> list[str]:
    """Write one stage's file and compare it with memory; what is wrong with it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from accel_scale.training.tensor_difference import difference

    save_file(weights, path, metadata={"format": "pt"})
    with safe_open(path, framework="pt") as stored:
        missing = set(weights) ^ set(stored.keys())
        found = [
            difference(name, weights[name], stored.get_tensor(name))[0] for name in weights if name not in missing
        ]
    return [f"{name} is missing" for name in sorted(missing)] + [problem for problem in found if problem]


def _write_index(part: Any, files: dict[str, dict[str, int]], folder: Path) -> None:
    weight_map = {name: file for file, sizes in sorted(files.items()) for name in sizes}
    total = sum(size for sizes in files.values() for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.config.architectures = [type(part).__name__.removeprefix("FSDP").removeprefix("Replicate")]
    part.config.dtype = next(iter(owned_parameters(part).values())).dtype
    part.config.save_pretrained(folder)
    if part.can_generate():
        part.generation_config.save_pretrained(folder)
