"""The README's pictures, each from a real command or run: `python docs/pictures.py [plan] [rehearsal] [report]`.

pictures/plan.svg, pictures/rehearsal.svg   what the commands below print on a terminal
examples/guarded.png                        the report of a run with three bad batches, killed once and stopped once

The first two take a second and half a minute, the third minutes on two idle cores and needs Chromium.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PICTURES = HERE / "pictures"
COMMANDS = {
    "plan": 'accel-scale plan meta-llama/Llama-3.1-8B --gpu "RTX 4090" --method auto --max_length 2048 --top 3',
    "rehearsal": "accel-scale rehearse --config_file accelerate_configs/fsdp2.yaml recipes/sft.py --method qlora",
}
COLUMNS = 120
# As rich's own template without its fonts, which a page would load from another server.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Make the pictures that are named, or all."""
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [*COMMANDS, "report"]:
        if name == "report":
            path = HERE / "examples" / "guarded.png"
            for words in (["example_reports.py", "guarded"], ["screenshots.py", "--page", "guarded"]):
                subprocess.run([sys.executable, str(HERE / words[0]), *words[1:]], check=True)
        else:
            path = PICTURES / f"{name}.svg"
            path.write_text(picture(COMMANDS[name]), encoding="utf-8")
        print(f"written  {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB")


def picture(command: str) -> str:
    """What a command prints on a terminal, below the command itself, as SVG."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(f"[bold green]$[/] {command}", highlight=False)
    for line in printed(command):
        console.print(Text.from_ansi(line), highlight=False, overflow="crop", no_wrap=True)
    return console.export_svg(title="accel-scale", theme=MONOKAI, code_format=_SVG, unique_id="picture")


def printed(command: str) -> list[str]:
    """The lines of a command's output with their colours, without those of a spinner."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}
    environment |= {"TERM": "xterm-256color", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        shlex.split(command), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if not re.search("[\u2800-\u28ff]", line)]


if __name__ == "__main__":
    main()
