"""Types reach users: the findings of a type checker in a script that uses the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import torch
from accelerate import Accelerator
from transformers import Trainer

import accel_scale
from accel_scale import CheckpointingPolicy, ConfigError, ScalePlugin, save_atomically

scale = ScalePlugin(optimizer="adamw_bnb_8bit", global_batch_size=64)
accelerator = scale.accelerator(log_with="tensorboard")
model, loader = accelerator.prepare(torch.nn.Linear(1, 1), [1])
alone = scale.prepare(accelerator, torch.nn.Linear(1, 1))
MyTrainer = scale.trainer(Trainer)
reveal_type(ScalePlugin)
reveal_type(accelerator)
reveal_type(loader)
reveal_type(MyTrainer)
reveal_type(CheckpointingPolicy.parse("full"))
reveal_type(ConfigError("x").one_line())
reveal_type(save_atomically)
ScalePlugin(optimiser="sgd")  # error
ScalePlugin(global_batch_size="64")  # error
accel_scale.ScalPlugin  # error
from accel_scale import load_traning_data  # error
"""


@pytest.mark.slow
def test_a_script_is_checked_and_its_mistakes_are_found(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "script.py").write_text(SCRIPT)
    # Other libraries are not under test, and following their imports takes minutes.
    skipped = "[mypy]\nstrict = True\npython_version = 3.11\ndisallow_subclassing_any = False\n" + "".join(
        f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
        for name in (
            "torch",
            "transformers",
            "accelerate",
            "trl",
            "peft",
            "datasets",
            "numpy",
            "pyarrow",
            "safetensors",
        )
    )
    (tmp_path / "mypy.ini").write_text(skipped)
    words = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    said, _, _ = api.run([*words, str(tmp_path / "script.py")])
    lines = [line for line in said.splitlines() if "script.py" in line]
    revealed = [match[1] for line in lines if (match := re.search(r'Revealed type is "(.*)"', line))]
    assert "accel_scale.plugin.plugin.ScalePlugin" in revealed[0]
    assert revealed[1] == "accel_scale.plugin.scaled_accelerator.ScaledAccelerator"
    assert revealed[2] == "list[int]"
    assert revealed[4] == "accel_scale.modeling.recomputing.policies.CheckpointingPolicy"
    assert revealed[5] == "str"
    assert "AbstractContextManager" in revealed[6] or "_GeneratorContextManager" in revealed[6]
    errors = {int(line.split(":")[1]) for line in lines if ": error:" in line}
    expected = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# error")}
    assert errors == expected, said


def test_types_are_shipped():
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert (REPOSITORY / "accel_scale" / "py.typed").is_file()
    assert re.search(r'accel_scale = \[[^]]*"py.typed"', text)
