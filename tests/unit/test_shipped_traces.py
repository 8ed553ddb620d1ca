"""The catalogue's traced models ship with the traces of the usual plans, which then need no torch.

python tests/unit/test_shipped_traces.py           # traces all of them again: half an hour of one core
python tests/unit/test_shipped_traces.py NAME …    # some of them
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_scale.errors import ConfigError
from accel_scale.planning.models.catalogue import catalogue_names, load_model_facts
from accel_scale.planning.models.traced import FORMAT, read_trace, shipped_fits, shipped_path
from accel_scale.planning.models.training_setup import LoraSetup, TrainingSetup
from accel_scale.planning.search.api import plan
from accel_scale.planning.traced.fits import _key, _known
from accel_scale.planning.traced.steps import marks_of
from accel_scale.tracing.service import traced_fit

TRACED = [name for name in catalogue_names() if load_model_facts(name).traced_config]
USUAL = {"gpu": "H100", "max_length": 2048}


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("name", TRACED)
def test_a_usual_plan_of_the_catalogue_needs_no_trace(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a trace is taken")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("accel_scale.planning.traced.fits.tracer", refuse)
    for num_gpus in (1, 8):
        found = plan(name, method=method, num_gpus=num_gpus, **USUAL)
        assert found.candidates or found.rejections


def test_a_usual_plan_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from accel_scale.planning.search.api import plan\n"
        "plan('Qwen/Qwen3.5-35B-A3B', gpu='H100', num_gpus=8, method='full')\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "google/gemma-4-26B-A4B"])
def test_shipped_traces_are_those_of_the_class(name: str) -> None:
    facts = load_model_facts(name)
    setup = TrainingSetup(method="lora", lora=LoraSetup(dropout=0.05), micro_batch_size=2, sequence_length=2048)
    shipped = shipped_fits(facts.traced_config)[_key(facts, setup, True, False)]
    found = traced_fit(facts, setup, is_cuda=True, is_tracked=False)
    assert {key: found[key] for key in ("stands_for", "kinds", "exact")} == {
        key: shipped[key] for key in ("stands_for", "kinds", "exact")
    }
    for size in ((1, 2048), (4, 4096), (16, 32768)):
        (peaks, nets), (kept_peaks, kept_nets) = (marks_of(fit, *size) for fit in (found, shipped))
        assert nets == pytest.approx(kept_nets, rel=0.01, abs=1e6)
        # Masks are made and freed in no fixed order while tokens are embedded.
        assert {**peaks, "embed": 0} == pytest.approx({**kept_peaks, "embed": 0}, rel=0.01, abs=1e6)


def write(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        text = load_model_facts(name).traced_config
        with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", cache)
            patch.setattr("accel_scale.planning.traced.fits.shipped_fits", lambda text: {})
            # On more or larger cards, every policy may be considered.
            patch.setattr("accel_scale.planning.search.search.states_exceed", lambda setup, request: False)
            _known.cache_clear()
            for method in ("full", "lora", "qlora"):
                for num_gpus in (1, 8):
                    try:
                        plan(name, method=method, num_gpus=num_gpus, **USUAL)
                    except ConfigError as error:
                        print(f"{name}, {method}: {error}")
            fits = read_trace(text).get("fits", {})
        path = shipped_path(text)
        path.parent.mkdir(exist_ok=True)
        packed = json.dumps({"format": FORMAT, "fits": fits}, separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(packed, mtime=0))
        print(f"{name}: {len(fits)} traces, {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    write(sys.argv[1:] or TRACED)
