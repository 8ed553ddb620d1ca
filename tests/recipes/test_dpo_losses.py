"""Every loss of TRL's DPO trainer runs in recipes/dpo.py, and mistakes that TRL refuses late are refused early."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest
from launched_recipe import STEPS, launched, logged
from pairs import write_pairs
from trl import DPOTrainer

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.trl import DPO
from accel_scale.settings.preference_losses import DPO_LOSSES

BETA, SMOOTHING = 0.5, 0.1
_LOG2 = math.log(2)
# Losses of a model that is its own reference, as in the first step.
AT_FIRST = {
    "sigmoid": _LOG2,
    "hinge": 1.0,
    "ipo": (1 / (2 * BETA)) ** 2,
    "exo_pair": -_LOG2 - 0.5 * math.log((1 - SMOOTHING) * SMOOTHING),
    "nca_pair": 2 * _LOG2,
    "robust": _LOG2,
    "bco_pair": 2 * _LOG2,
    "sppo_hard": 2 * (0.5 / BETA) ** 2,
    "aot": _LOG2,
    "aot_unpaired": _LOG2,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": 0.5 * _LOG2 + 0.5,
    "sigmoid_norm": _LOG2,
}


def refused(*flags: str) -> str:
    given = ["--model_name_or_path", "m", "--dataset_name", "d", *flags]
    with pytest.raises(ConfigError) as error:
        DPO.refuse(parse_flags(DPO.flags, given, program="dpo.py"))
    return error.value.one_line()


def test_the_losses_are_trls() -> None:
    source = inspect.getsource(DPOTrainer)
    assert set(re.findall(r'if loss_type == "(\w+)"', source)) == set(DPO_LOSSES) == {*AT_FIRST, "sft"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_loss_runs(tmp_path: Path) -> None:
    """All losses at once, with distinct weights; the remaining one, sft, is in the default of the embedded pairs."""
    weights = [1 + 0.1 * place for place, _ in enumerate(AT_FIRST)]
    data = ["--model_name_or_path", default_model_path(), "--dataset_name", str(write_pairs(tmp_path / "pairs"))]
    losses = ["--loss_type", *AT_FIRST, "--loss_weights", *map(str, weights)]
    flags = ["--beta", str(BETA), "--label_smoothing", str(SMOOTHING), "--guard", "off"]
    folder = launched("cpu", "fp32", "dpo", tmp_path / "out", *data, *losses, *flags, processes=1)
    found = [entry["loss"] for entry in logged(folder)]
    expected = sum(weight * loss for weight, loss in zip(weights, AT_FIRST.values(), strict=True))
    assert found[0] == pytest.approx(expected, abs=1e-3)
    assert len(set(found)) == STEPS, "the weights move"


def test_other_losses_are_refused_before_anything_is_loaded() -> None:
    assert "did you mean hinge?" in refused("--loss_type", "hing")
    assert "one weight for each" in refused("--loss_type", "sigmoid", "sft", "--loss_weights", "1")
    assert "label_smoothing" in refused("--loss_type", "exo_pair")
    assert "less than 0.5" in refused("--loss_type", "robust", "--label_smoothing", "0.5")
    assert "f_divergence_type" in refused("--loss_type", "apo_zero", "--f_divergence_type", "js_divergence")
    assert "use_weighting" in refused("--loss_type", "aot", "--use_weighting", "true")
    DPO.refuse(parse_flags(DPO.flags, ["--loss_type", *DPO_LOSSES, "--label_smoothing", "0.1"], program="dpo.py"))
