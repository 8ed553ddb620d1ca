"""Which layers FSDP2 must not put in groups of their own: those that share weights with others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from accel_scale.modeling.fsdp2_preparation import mend_fsdp2_preparation, modules_that_share


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
    """Names of the modules to which Accelerate gives a group."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin = SimpleNamespace(auto_wrap_policy=transformer_auto_wrap_policy, transformer_cls_names_to_wrap=None)
    policy = fsdp_utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    return [name for name, module in model.named_modules() if name and policy(module)]


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import fsdp_utils

    for name in ("fsdp2_prepare_auto_wrap_policy", "fsdp2_load_full_state_dict"):
        monkeypatch.setattr(fsdp_utils, name, getattr(fsdp_utils, name))
    mend_fsdp2_preparation()


@pytest.mark.usefixtures("mended")
def test_layers_of_their_own_keep_their_groups() -> None:
    layers = [f"layers.{i}{part}" for i in range(2) for part in ("", ".attention", ".own")]
    assert groups(Model(Layer(), Layer())) == layers


@pytest.mark.usefixtures("mended")
def test_layers_that_share_a_weight_get_no_group() -> None:
    first, second = Layer(), Layer()
    second.attention.weight = first.attention.weight
    # What the two do not share is still sharded by itself.
    assert groups(Model(first, second, Layer())) == [
        "layers.0.own", "layers.1.own", "layers.2", "layers.2.attention", "layers.2.own",
    ]  # fmt: skip


@pytest.mark.usefixtures("mended")
def test_a_module_in_two_layers_has_one_group() -> None:
    attention = nn.Linear(2, 2)
    model = Model(Layer(attention), Layer(attention))
    assert groups(model) == ["layers.0.attention", "layers.0.own", "layers.1.own"]
    assert modules_that_share(Model(Layer(), Layer())) == set()
