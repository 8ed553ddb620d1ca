"""Layers that FSDP2 must not put in groups of their own because they share weights with others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils
from torch import nn
from transformers import CONFIG_MAPPING

from accel_scale.modeling.fsdp2_preparation import mend_fsdp2_preparation, modules_that_share
from accel_scale.modeling.model_class import language_model_class


class Layer(nn.Module):
    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.own = attention or nn.Linear(2, 2), nn.Linear(2, 2)


class Model(nn.Module):
    _no_split_modules = ("Layer", "Linear")

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def groups(model: nn.Module) -> list[str]:
    """Names of the modules that Accelerate puts in a group of their own."""
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin = SimpleNamespace(auto_wrap_policy=transformer_auto_wrap_policy, transformer_cls_names_to_wrap=None)
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    return [name for name, module in model.named_modules() if name and policy(module)]


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsdp2_prepare_auto_wrap_policy", "fsdp2_load_full_state_dict"):
        monkeypatch.setattr(fsdp_utils, name, getattr(fsdp_utils, name))
    choose = FullyShardedDataParallelPlugin.set_auto_wrap_policy
    monkeypatch.setattr(FullyShardedDataParallelPlugin, "set_auto_wrap_policy", choose)
    mend_fsdp2_preparation()


@pytest.mark.usefixtures("mended")
def test_layers_of_their_own_keep_their_groups() -> None:
    layers = [f"layers.{i}{part}" for i in range(2) for part in ("", ".attention", ".own")]
    assert groups(Model(Layer(), Layer())) == layers


@pytest.mark.usefixtures("mended")
def test_layers_that_share_a_weight_get_no_group() -> None:
    first, second = Layer(), Layer()
    second.attention.weight = first.attention.weight
    # Parts that the two do not share are still sharded by themselves.
    assert groups(Model(first, second, Layer())) == [
        "layers.0.own", "layers.1.own", "layers.2", "layers.2.attention", "layers.2.own",
    ]  # fmt: skip


@pytest.mark.usefixtures("mended")
def test_a_module_in_two_layers_has_one_group() -> None:
    attention = nn.Linear(2, 2)
    model = Model(Layer(attention), Layer(attention))
    assert groups(model) == ["layers.0.attention", "layers.0.own", "layers.1.own"]
    assert modules_that_share(Model(Layer(), Layer())) == set()


HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 64, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 16, **HEADS}
VISION = {**HEADS, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
OWN = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION},
    "gemma4_text": {**TEXT, "vocab_size_per_layer_input": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("kind", OWN)
def test_layers_that_a_model_names_and_lacks_are_left_out(kind: str) -> None:
    """A text model names layers of its family's towers, and a model with a tower those of a text tower it lacks."""
    config = CONFIG_MAPPING[kind](**OWN[kind])
    with torch.device("meta"):
        model = language_model_class(config).from_config(config)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert all(policy(layer) for layer in model.get_decoder().layers)
