"""How long the first plan of a model takes that is not modelled by hand, and how long the next one.

    python benchmarks/plan_times.py               # all of CONFIGS, about five minutes; writes results/plan_times.md
    python benchmarks/plan_times.py --only rwkv   # prints the rows

Every plan is a process of its own: `accel-scale plan` of a config.json with everything open, on one H100. The first
has an empty cache, so it imports torch, builds the class and traces it; the second reads the cache. Configurations are
those of transformers' classes with the sizes below, so that most have 6 to 10 billion parameters.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

RESULTS = Path(__file__).parent / "results" / "plan_times.md"
_DENSE = {"hidden_size": 4096, "num_hidden_layers": 32}
_STATES = {"hidden_size": 4096, "num_hidden_layers": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {}, "apertus": {}, "bailing_hybrid": {"num_experts": 24}, "bamba": {},
    "deepseek_v4": {"n_routed_experts": 6, "num_hidden_layers": 26}, "exaone4": _DENSE, "falcon_h1": {},
    "falcon_mamba": _STATES, "gemma3n_text": {}, "gemma4_text": {**_DENSE, "intermediate_size": 14336},
    "glm5_next": {"text_config": {"n_routed_experts": 8, "num_hidden_layers": 16}}, "granitemoehybrid": {},
    "hrm_text": {}, "hy_v4": {"n_routed_experts": 24}, "jamba": {"num_hidden_layers": 8},
    "kimi_linear": {"num_experts": 32}, "lfm2": _DENSE, "llama4_text": {"num_hidden_layers": 8}, "mamba": _STATES,
    "mamba2": _STATES, "minimax": {"num_hidden_layers": 8},
    "nemotron_h": {"hidden_size": 4096, "intermediate_size": 21504}, "olmo_hybrid": {}, "persimmon": {},
    "qwen3_5_text": _DENSE, "qwen3_next": {"num_hidden_layers": 8},
    "recurrent_gemma": {**_DENSE, "num_attention_heads": 16, "intermediate_size": 24576}, "rwkv": _DENSE,
    "seed_oss": {"num_hidden_layers": 16}, "xlstm": {}, "zamba": {}, "zamba2": {},
}  # fmt: skip
_CLI = "import sys; from accel_scale.cli.main import main; sys.argv[0] = 'accel-scale'; sys.exit(main())"


def seconds(folder: Path) -> tuple[float, str]:
    """Wall-clock seconds of one plan, and the number of parameters that it states.

    Raises:
        SystemExit: if it fails.
    """
    words = [sys.executable, "-c", _CLI, "plan", str(folder), "--gpu", "H100"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    took = time.perf_counter() - began
    found = re.search(r"([\d.]+[BMT]) parameters", done.stdout)
    if found is None:
        raise SystemExit(f"{folder.name}: {done.stderr or done.stdout}")
    return took, found.group(1)


def row(name: str) -> tuple[float, str]:
    """Seconds of a model's first plan, and its line in the table."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / name
        AutoConfig.for_model(name, **CONFIGS[name]).save_pretrained(folder)
        (first, parameters), (second, _) = seconds(folder), seconds(folder)
    return first, f"| {name} | {parameters} | {first:.1f} | {second:.2f} |"


def main() -> None:
    """Measure, print and, without ``--only``, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", choices=CONFIGS, default=[])
    options = parser.parse_args()
    rows = []
    for name in options.only or CONFIGS:
        rows.append(row(name))
        print(rows[-1][1], flush=True)
    if options.only:
        return
    here = machine()
    num_fast = sum(first < 20 for first, _ in rows)
    lines = [
        "# First plans of traced models",
        "",
        f"`python benchmarks/plan_times.py`, {here['date']}, {here['cores']} cores of {here['cpu']}, torch "
        f"{here['torch']}, transformers {here['transformers']}: seconds of `accel-scale plan` with an empty cache, "
        f"and again. {num_fast} of {len(rows)} first plans take less than 20 s.",
        "",
        "| model type | parameters | first | again |",
        "|---|---:|---:|---:|",
        *(line for _, line in rows),
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
