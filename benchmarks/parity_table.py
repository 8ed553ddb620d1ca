"""Run the SFT recipe under every launch file and method on CPU processes and write how much the results differ.

    python benchmarks/parity_table.py                    # every row of docs/parity.md, about 8 minutes on 2 cores
    python benchmarks/parity_table.py --only zero3 zero1 # some rows; the others stay if the versions are still theirs

The runs and the comparison are those of `tests/distributed/test_parity.py`. The file is written after every row.
"""

from __future__ import annotations

import argparse
import datetime
import resource
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "distributed"))

import parity  # noqa: E402

from accel_scale.launching.launch_file import read_launch_file  # noqa: E402
from accel_scale.reporting.summary import installed_versions  # noqa: E402

TABLE = REPOSITORY / "docs" / "parity.md"
WRONG = "half_batch"
RESULTS = REPOSITORY / "benchmarks" / "results" / "model_parallel_parity.md"
LINK = f"../{RESULTS.relative_to(REPOSITORY)}"
HEADER = f"""# Parity: every launch file trains the same model

The same recipe, seed and data under every launch file in `accelerate_configs/`, on CPU processes over gloo, against
DDP; DDP itself against one process at the same global batch. fp32, {parity.NUM_STEPS} AdamW steps at a learning rate
of 1e-3, a global batch of {parity.GLOBAL_BATCH_SIZE} sequences of up to 256 tokens, a real pretrained 260K Llama on
GSM8K. Files for several nodes run as that many `accelerate launch` commands on one machine.

Each cell: largest relative difference of a step's loss / of a saved tensor, ‖A − B‖ ÷ ‖B‖. The tests allow
{parity.TOLERANCE:g} for both. The row `{WRONG}` is what a mistake looks like: DDP at half the global batch.

| launch file | strategy | against | full | LoRA | QLoRA | CPU seconds | measured |
|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    """Measure row by row, print each row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [parity.REFERENCE, WRONG, *(name for name in parity.launch_names() if name != parity.REFERENCE)]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names)
    rows = kept_rows()
    for name in parser.parse_args().only:
        rows[name] = measured_row(name)
        print(rows[name], flush=True)
        ordered = [rows[name] for name in names if name in rows]
        TABLE.write_text(HEADER + "\n".join(ordered) + "\n" + elsewhere() + footer(), encoding="utf-8")
    return 0


def elsewhere() -> str:
    """List the launch files without a row, and where their parity is shown."""
    shown = {name: f"{why}." for name, why in parity.SINGLE_PROCESS_FILES.items()}
    for name, layout in parity.MODEL_PARALLEL_FILES.items():
        row = layout.replace(" x ", " × ")
        shown[name] = (
            f"`recipes/pretrain.py` beside one process, four architectures: rows {row} of [{RESULTS.name}]({LINK})."
        )
    lines = [f"- `{name}`: {text}" for name, text in shown.items()]
    return (
        "\nShown elsewhere, because `recipes/sft.py` does not run them on several processes:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def kept_rows() -> dict[str, str]:
    """Rows of the existing table by launch file; none if the versions have changed since."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else ""
    if not text.endswith(footer()):
        return {}
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| launch file")]
    return {row.split("|")[1].strip(): row for row in rows}


def measured_row(name: str) -> str:
    """Measure one line of the table; its time is the CPU time of one launch with its three runs."""
    before = children_cpu_seconds()
    if name == WRONG:
        cells, against, file = ["", cell(parity.wrong_batch_difference()), ""], parity.REFERENCE, parity.REFERENCE
        seconds = ""
    else:
        against, file = parity.SINGLE if name == parity.REFERENCE else parity.REFERENCE, name
        results = parity.results(name)
        seconds = f"{children_cpu_seconds() - before:.0f}"
        reference = parity.results(against)
        cells = [cell(parity.compare(results[method], reference[method])) for method in parity.METHODS]
    label = read_launch_file(parity.CONFIGS / f"{file}.yaml").parallel.label
    today = datetime.datetime.now(datetime.UTC).date()
    return f"| {name} | {label} | {against} | {' | '.join(cells)} | {seconds} | {today} |"


def children_cpu_seconds() -> float:
    """CPU time of all child processes waited for, which unlike wall time is not affected by other load."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cell(difference: parity.Difference) -> str:
    """Differences of loss and weights, like ``1e-07 / 3e-06``."""
    return f"{difference.loss:.0e} / {difference.weight:.0e}"


def footer() -> str:
    """Versions with which all rows were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    return f"\nVersions: {versions}. Written by `python benchmarks/parity_table.py`.\n"


if __name__ == "__main__":
    sys.exit(main())
