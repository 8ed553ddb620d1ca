"""Ranks of one server map the model that the first rank has built; rank 0 prints what each of them holds as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, set_seed

from accel_scale.ending.leaving import leave_process_group
from accel_scale.errors import ConfigError
from accel_scale.modeling.loading import skeleton_of
from accel_scale.modeling.scratch import model_from_nothing
from accel_scale.parallel.mapped_weights import build_once_per_server

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LARGE = {**SMALL, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 4096}


def config_of(kind: str, fields: dict[str, Any]) -> Any:
    if kind == "gpt2":
        return CONFIG_MAPPING["gpt2"](vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    return CONFIG_MAPPING[kind](**fields, tie_word_embeddings=kind != "qwen3")


def once(config: Any, **changes: Any) -> Any:
    """Build as the recipe does, with all ranks on one server."""
    build = changes.pop("build", lambda: model_from_nothing(config, dtype=torch.float32, attention="sdpa", seed=3))
    settings = {"local_rank": dist.get_rank(), "num_bytes": 4 << 20, "fits_on_each": False, **changes}
    return build_once_per_server(build, lambda: skeleton_of(config, "sdpa"), **settings)


def same_as_built_here(kind: str) -> dict[str, Any]:
    """Compares every tensor, tie and random number of the mapped model with those of a model that this rank builds."""
    config = config_of(kind, SMALL)
    set_seed(100 + dist.get_rank())
    model = once(config).eval()
    drawn = torch.rand(4)
    expected: Any = model_from_nothing(config_of(kind, SMALL), dtype=torch.float32, attention="sdpa", seed=3).eval()
    drawn_here = torch.rand(4)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    ids = torch.arange(12).reshape(2, 6)
    logits = model(input_ids=ids).logits
    logits.sum().backward()  # mapped weights can be trained
    torch.optim.SGD(model.parameters(), 0.1).step()
    return {
        "names": tensors.keys() == wanted.keys(),
        "buffers": all(torch.equal(buffer, tensors[name]) for name, buffer in expected.named_buffers()),
        "logits": torch.equal(logits, expected(input_ids=ids).logits),
        "random": torch.equal(drawn, drawn_here),
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "trained": not torch.equal(next(iter(model.parameters())), next(iter(expected.parameters()))),
        "generation": model.generation_config.to_dict() == expected.generation_config.to_dict(),
    }


def anonymous_bytes() -> int:
    """Anonymous memory of this process, which belongs to no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def memory() -> dict[str, float]:
    """Private memory that the model costs this rank, divided by its size; the weights are read once."""
    config = config_of("llama", LARGE)
    num_bytes = 4 * skeleton_of(config).num_parameters()
    once(config_of("llama", SMALL))  # to get imports out of the way
    before = anonymous_bytes()
    model = once(config, num_bytes=num_bytes)
    total = sum(float(p.detach().sum()) for p in model.parameters())
    private = (anonymous_bytes() - before) / num_bytes
    return {"private": private, "total": total, "files": len(list(Path(tempfile.gettempdir()).glob("accel-scale-w*")))}


def refusals() -> dict[str, str]:
    """The error on each rank if the disk is full or building fails, and the outcome where it has room itself."""
    config, said = config_of("llama", SMALL), {}

    def fail() -> Any:
        raise ConfigError("no such weights.", place="--model_name_or_path", fix="check the folder.")

    real, shutil.disk_usage = shutil.disk_usage, lambda path: types.SimpleNamespace(free=1 << 20)
    for name, changes in {"full": {}, "own": {"fits_on_each": True}, "failed": {"build": fail}}.items():
        if name == "failed":
            shutil.disk_usage = real
        try:
            said[name] = type(once(config, **changes)).__name__
        except ConfigError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {kind: same_as_built_here(kind) for kind in ("llama", "qwen3", "gemma3_text", "gpt2")}
    results |= {"memory": memory(), "refusals": refusals()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    leave_process_group()
