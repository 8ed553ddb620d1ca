"""Merges the tensors of base + adapter one by one, with PEFT's own arithmetic on one real module at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError
from accel_scale.merging.files import NF4RoundTrip, ShardWriter
from accel_scale.modeling.adapters import is_of_rewards
from accel_scale.modeling.checkpoint_names import StoredWeights
from accel_scale.modeling.gathering import named_tensors
from accel_scale.modeling.load_report import fit_of, refuse_partial_load
from accel_scale.modeling.loading import changed_head
from accel_scale.modeling.model_class import as_reward_model, language_model_class, scores_rows
from accel_scale.modeling.stored_weights import SafetensorsReader, rows_of_embedding

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedConfig

_WRAPPERS = (".base_layer", ".original_module", ".modules_to_save.default", ".token_adapter")
_PEFT_PREFIX = "base_model.model."
_MAX_LISTED = 3


class AdapterMerger:
    """The base on the meta device with the adapter injected; real tensors pass through one by one.

    Args:
        base: Folder with the base's safetensors and configuration.
        adapter: Folder with the adapter.
        peft_config: The adapter's `LoraConfig`.
        quantization: `BitsAndBytesConfig` as a dictionary if the adapter is merged into the dequantised base.
        dtype: Name of the result's dtype; None for the base's.
    """

    def __init__(
        self, base: Path, adapter: Path, peft_config: Any, quantization: dict[str, Any] | None, dtype: str | None
    ) -> None:
        import torch

        self.place = str(adapter)
        self.base, self.adapter = SafetensorsReader(base), SafetensorsReader(adapter, "adapter_model")
        self.rewards = is_of_rewards(peft_config)
        self.config = base_config(base, rewards=self.rewards)
        self._grow_vocabulary()
        self.dtype = getattr(torch, dtype or dtype_of(base), None)
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"{dtype!r} is not a dtype.", place="--dtype", fix="write float32, float16 or bfloat16.")
        self.round_trip = NF4RoundTrip(_on_meta(self.config), quantization) if quantization else None
        model = _on_meta(self.config)
        self.base_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.buffers = {name for name, _ in model.named_buffers()}
        fit, (new, left) = fit_of(model, self.base.file_of), changed_head(model) if self.rewards else (set(), set())
        new = set() if _has_scores(base) else new
        refuse_partial_load(model, fit, name=base.name, place=str(base), may_lack=new, may_leave=left)
        self.stored = StoredWeights(model, self.base.file_of)
        self.input_name = _weight_name(model, model.get_input_embeddings())
        self.output_name = _weight_name(model, model.get_output_embeddings())
        self._inject(model, peft_config)
        changed = {n for n in self.base_shapes if n in self.replaced or self._is_merged(n)}
        self.untied_head = self._untied_head(changed)
        # A score head on a language model's layers.
        self.added = [name for name in self.replaced if self.rewards and not self.stored.names_for(name)]
        through_4_bits = set(self.round_trip.transposed) if self.round_trip else set()
        touched = changed | through_4_bits  # untied and added heads are in no file
        self.touched = {self.stored.group_of[stored] for name in touched for stored in self.stored.names_for(name)}

    def _grow_vocabulary(self) -> None:
        """Resize the vocabulary to the adapter's embeddings, which it holds whole if tokens were added in training."""
        num_rows = rows_of_embedding(self.adapter)
        if num_rows is not None:
            self.config.get_text_config().vocab_size = num_rows

    def _untied_head(self, changed: set[str]) -> str | None:
        """The output embedding, if the base stores it as the input embedding and the adapter changes either."""
        head, ends = self.output_name, {self.input_name, self.output_name}
        return head if head and ends & changed and not self.stored.names_for(head) else None

    def _inject(self, model: nn.Module, peft_config: PeftConfig) -> None:
        from peft import get_peft_model, get_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer

        try:
            peft_model = get_peft_model(model, peft_config, low_cpu_mem_usage=True)  # type: ignore[arg-type]
        except ValueError as error:  # PEFT: target modules not found in the base
            raise self._wrong_base(str(error).split(". ")[0]) from error
        expected = get_peft_model_state_dict(
            peft_model, state_dict=named_tensors(peft_model), save_embedding_layers=False
        )
        embeddings = self._saved_embeddings(set(expected))
        self._refuse_strangers(expected, embeddings)
        stored = {id(tensor): name for name, tensor in expected.items()}
        root = peft_model.get_base_model()
        # An adapter on a second weight of the same module wraps the one on the first.
        self.modules: dict[str, Any] = {
            _plain(name): module
            for name, module in root.named_modules()
            if isinstance(module, BaseTunerLayer) and not name.endswith(".base_layer")
        }
        self.adapter_names = {
            name: {leaf: stored[id(p)] for leaf, p in module.named_parameters() if id(p) in stored}
            for name, module in self.modules.items()
        }
        # Whole tensors stored in the adapter: modules_to_save, trained biases, resized embeddings.
        self.replaced = {
            _plain(name): stored[id(parameter)]
            for name, parameter in root.named_parameters(remove_duplicate=False)
            if id(parameter) in stored and _plain(name) in self.base_shapes
        }
        self.replaced.update(embeddings)

    def _saved_embeddings(self, expected: set[str]) -> dict[str, str]:
        """Embeddings that PEFT saved with the adapter because tokens were added or they were targeted."""
        extra = {name: _plain(name.removeprefix(_PEFT_PREFIX)) for name in set(self.adapter.file_of) - expected}
        return {name: key for key, name in extra.items() if name in (self.input_name, self.output_name)}

    def _refuse_strangers(self, expected: dict[str, torch.Tensor], embeddings: dict[str, str]) -> None:
        held = set(self.adapter.file_of) - set(embeddings.values())
        missing, extra = sorted(set(expected) - held), sorted(held - set(expected))
        if missing:
            raise self._wrong_base(f"the base has a place for {_some(missing)}, which the adapter lacks")
        if extra:
            raise self._wrong_base(f"the adapter has {_some(extra)}, for which the base has no place")
        for name, tensor in expected.items():
            if self.adapter.shape(name) != tuple(tensor.shape):
                shapes = f"{list(self.adapter.shape(name))} in the adapter and {list(tensor.shape)} for this base"
                raise self._wrong_base(f"{name} has shape {shapes}")

    def _wrong_base(self, reason: str) -> ConfigError:
        return ConfigError(
            f"adapter and base do not belong together: {reason}.",
            place=self.place,
            fix="pass the base it was trained on with --base_model.",
        )

    def _base_tensor(self, name: str) -> torch.Tensor:
        """A tensor as training saw it: from the adapter, through 4 bits, or as published."""
        source = str(self.input_name) if name == self.untied_head and name not in self.replaced else name
        if source in self.replaced:
            return self.adapter.read(self.replaced[source])
        if not self.stored.names_for(source):
            raise self._wrong_base(f"{source} is not in the base's files")
        tensor = self.stored.read(source, self.base.read)
        if tuple(tensor.shape) != self.base_shapes[name]:
            shapes = f"{list(tensor.shape)} in its file and {list(self.base_shapes[name])} by its config.json"
            raise self._wrong_base(f"{name} of the base has shape {shapes}")
        return self._as_loaded(name, _finite(name, tensor, self.base.folder))

    def _as_loaded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.round_trip(name, tensor) if self.round_trip else tensor

    def _merged_module(self, name: str) -> dict[str, torch.Tensor]:
        """Run PEFT's own merge on one real layer, then move the layer back to the meta device."""
        import torch
        from peft.tuners.lora import ParamWrapper
        from torch import nn

        layer, brought = self.modules[name], self.adapter_names[name]
        for parameter_name, _ in list(layer.named_parameters()):
            owner, _, leaf = parameter_name.rpartition(".")
            if parameter_name in brought:
                value = _finite(brought[parameter_name], self.adapter.read(brought[parameter_name]), self.place)
            else:
                value = self._base_tensor(f"{name}.{parameter_name.replace('base_layer.', '')}")
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(value.to(torch.float32), requires_grad=False))
        wrappers = [layer]
        while isinstance(wrappers[-1].base_layer, ParamWrapper):
            wrappers.append(wrappers[-1].base_layer)
        for wrapper in wrappers:
            wrapper.merge()
            wrapper.merged_adapters.clear()
        merged = {
            f"{name}.{leaf}": _finite(f"{name}.{leaf}", parameter.detach(), self.place)
            for leaf, parameter in layer.get_base_layer().named_parameters()
        }
        layer.to("meta")
        return merged

    def final(self, name: str) -> dict[str, torch.Tensor]:
        """The final tensor `name`, with the module's other tensors if the module is merged."""
        module = name.rpartition(".")[0]
        tensors = self._merged_module(module) if self._is_merged(name) else {name: self._base_tensor(name)}
        return {key: self._cast(tensor) for key, tensor in tensors.items()}

    def _is_merged(self, name: str) -> bool:
        return name.rpartition(".")[0] in self.modules and name not in self.buffers

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def write(self, writer: ShardWriter) -> None:
        """Write every tensor of the result, in the order of the base's files."""
        done: set[str] = set()
        pending: dict[str, torch.Tensor] = {}  # tensors merged with their module but not yet written with their group
        for stored in self.base.names():
            group = self.stored.group_of.get(stored)
            if group is None and self.rewards:
                continue  # the language model's head
            if group not in self.touched:  # the group is unchanged
                writer.add(stored, self._cast(self._as_loaded(stored, self.base.read(stored))))
            elif group not in done:
                done.add(group)
                for name in self.stored.made_by(group):
                    if name not in pending:
                        pending |= self.final(name)
                tensors = {name: pending.pop(name) for name in self.stored.made_by(group)}
                for key, tensor in self.stored.write(group, tensors).items():
                    writer.add(key, tensor)
        for name in self.added:
            writer.add(name, self.final(name)[name])
        if self.untied_head and self.input_name:
            head = self.final(self.untied_head)[self.untied_head]
            if not head.equal(self.final(self.input_name)[self.input_name]):
                writer.add(self.untied_head, head)
                self.config.get_text_config().tie_word_embeddings = False


def dtype_of(base: Path) -> str:
    """Name of the dtype in which the model in `base` is stored, from its configuration."""
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(base).dtype or "float32").removeprefix("torch.")


def base_config(base: Path, *, rewards: bool) -> Any:
    """The configuration of the unquantised base; with `rewards`, as a reward model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base)
    if rewards:
        as_reward_model(config, name=base.name, place=str(base))
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the base is stored quantised.", place=str(base), fix="pass the unquantised one with --base_model."
        )
    return config


def _has_scores(base: Path) -> bool:
    from transformers import AutoConfig

    return scores_rows(AutoConfig.from_pretrained(base))


def _on_meta(config: PreTrainedConfig) -> Any:
    import torch

    with torch.device("meta"):
        return language_model_class(config).from_config(config)


def _weight_name(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((f"{name}.weight" for name, m in model.named_modules() if m is module), None) if module else None


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _finite(name: str, tensor: torch.Tensor, place: str | Path) -> torch.Tensor:
    """Return `tensor`, or raise if it holds NaN or infinity."""
    if tensor.is_floating_point() and tensor.itemsize > 1 and not bool(tensor.isfinite().all()):
        raise ConfigError(
            f"{name} holds values that are not finite, so the merged model would be of no use.",
            place=str(place),
            fix="merge a base and an adapter whose weights are finite.",
        )
    return tensor
