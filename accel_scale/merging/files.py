"""Output of a merge: writes merged weights shard by shard, and dequantises 4-bit base weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ShardWriter:
    """Collects tensors and writes each shard when it is full, so that only one shard is in memory at a time."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.total_bytes = self.num_parameters = self._pending_bytes = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue a tensor; it must not be changed afterwards."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.total_bytes += size
        self.num_parameters += tensor.numel()

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._shards.append(list(self._pending))
        save_file(self._pending, self._path(len(self._shards)), metadata={"format": "pt"})
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> int:
        """Write the rest and the index under the names `from_pretrained` expects; returns the number of shards."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        if count == 1:
            os.rename(self._path(1), self.folder / "model.safetensors")
            return 1
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            os.rename(self._path(number), self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        metadata = {"total_parameters": self.num_parameters, "total_size": self.total_bytes}
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        return count


class NF4RoundTrip:
    """Quantises and dequantises weights with bitsandbytes, for the values that a loaded 4-bit base computes with.

    Args:
        model: The base on the meta device, to find which layers would be quantised.
        settings: Dictionary of a `BitsAndBytesConfig` with ``base_dtype``, the dtype the base was loaded in.
    """

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        import torch
        from transformers import BitsAndBytesConfig
        from transformers.integrations import replace_with_bnb_linear
        from transformers.quantizers.base import HfQuantizer

        settings = dict(settings)
        self.dtype = getattr(torch, settings.pop("base_dtype"))
        self.config = BitsAndBytesConfig.from_dict(settings)
        skipped = HfQuantizer.get_modules_to_not_convert(
            model, self.config.llm_int8_skip_modules, getattr(model, "_keep_in_fp32_modules", None)
        )
        before = {name: type(module).__name__ for name, module in model.named_modules()}
        replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=self.config)
        # `Conv1D` stores its matrix transposed, but is quantised in a linear layer's layout.
        self.transposed = {
            f"{name}.weight": before[name] == "Conv1D"
            for name, module in model.named_modules()
            if type(module).__name__ == "Linear4bit"
        }

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` as the loaded base computes with it: rounded to its dtype and, for a linear layer, quantised."""
        import bitsandbytes as bnb
        import torch

        weight = weight.to(self.dtype) if weight.is_floating_point() else weight
        if name not in self.transposed:
            return weight
        matrix = (weight.T if self.transposed[name] else weight).contiguous()
        packed: Any = bnb.nn.Params4bit(
            matrix,
            requires_grad=False,
            compress_statistics=self.config.bnb_4bit_use_double_quant,
            quant_type=self.config.bnb_4bit_quant_type,
        )
        packed = packed.to("cuda" if torch.cuda.is_available() else "cpu")
        restored = bnb.functional.dequantize_4bit(packed.data, packed.quant_state).cpu()
        return restored.T.contiguous() if self.transposed[name] else restored
