"""Writes what the documents quote from the program: outputs of commands, flags, names, and lines that tests run.

python docs/refresh.py                          # outputs of commands in README.md; docs/flags.md and docs/api.md
python docs/refresh.py --coverage coverage.json # the figure in docs/contributing.md, from `make coverage`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A shell block whose last line is the command, a comment that names this script, and what the command printed.
_QUOTED = re.compile(
    r"```bash\n(?:[^`]*\n)?(?P<command>accel-scale [^\n`]+)\n```\n(?P<between>(?:(?!```).)*?"
    r"<!-- output of the command above: python docs/refresh\.py -->\n)```text\n(?P<output>.*?)```\n",
    re.DOTALL,
)
_COVERAGE = re.compile(r"<!-- coverage: begin -->.*?<!-- coverage: end -->", re.DOTALL)


def quoted_outputs(text: str) -> list[tuple[str, str]]:
    """Every command whose output `text` quotes, with that output."""
    return [(found["command"], found["output"]) for found in _QUOTED.finditer(text)]


def output_of(command: str) -> str:
    """What a command prints on a wide terminal, without spaces at the ends of its lines."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def refresh_outputs(page: Path) -> None:
    """Run every quoted command of a page again and write what it prints now."""
    text = page.read_text(encoding="utf-8")
    for command, old in quoted_outputs(text):
        text = text.replace(f"```text\n{old}```", f"```text\n{output_of(command)}```", 1)
    page.write_text(text, encoding="utf-8")


def write_coverage(report: Path) -> None:
    """Put the total of coverage.py's JSON report, and the folders below the total, into docs/contributing.md."""
    measured = json.loads(report.read_text(encoding="utf-8"))
    folders: dict[str, list[int]] = {}
    for name, entry in measured["files"].items():
        parts = Path(name).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        covered, statements = folders.setdefault(folder, [0, 0])
        summary = entry["summary"]
        folders[folder] = [covered + summary["covered_lines"], statements + summary["num_statements"]]
    rows = [
        f"| `{name}/` | {statements:,} | {covered / statements:.0%} |"
        for name, (covered, statements) in sorted(folders.items())
        if statements
    ]
    total = measured["totals"]["percent_covered"]
    date = measured["meta"]["timestamp"][:10]
    table = "\n".join(["| folder | statements | run by fast tests |", "|---|---:|---:|", *rows])
    block = f"<!-- coverage: begin -->\n**{total:.1f} %** of the lines, {date}.\n\n{table}\n<!-- coverage: end -->"
    page = ROOT / "docs" / "contributing.md"
    page.write_text(_COVERAGE.sub(lambda _: block, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coverage", type=Path, metavar="JSON", help="coverage.py's report to quote")
    report = parser.parse_args().coverage
    if report is None:
        from reference_pages import api_page, flags_page

        refresh_outputs(ROOT / "README.md")
        (ROOT / "docs" / "flags.md").write_text(flags_page(), encoding="utf-8")
        (ROOT / "docs" / "api.md").write_text(api_page(), encoding="utf-8")
    else:
        write_coverage(report)
