"""Runs the notebooks of this folder and keeps their outputs: `python notebooks/run.py [--plans] [NAME…]`.

With ``--plans`` only cells that ask the planner are run, which takes seconds: after a change of its figures.

Needs the extra `dev`. What differs from machine to machine (paths, times of execution, versions of the kernel) is not
kept, nor is what goes to standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TIMEOUT_SECONDS = 600  # of one cell
# How cells begin that ask the planner and nothing else: they print the same on every machine.
_BASH = "%%bash\n"
PLAN_CELLS = (f"{_BASH}accel-scale plan", "from accel_scale import longest_row\n")


def executed(path: Path) -> NotebookNode:
    """The notebook run from top to bottom by this Python, with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env=environment())
    return notebook


def environment() -> dict[str, str]:
    """For the cells: commands are those of this Python, and the package is the one beside the notebooks."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",  # else DeepSpeed says the time and that it found no other
    }


def planned(notebook: NotebookNode) -> NotebookNode:
    """The notebook, changed in place, with what its cells for the planner print now."""
    for cell in notebook.cells:
        if cell.source.startswith(PLAN_CELLS):
            own = {**environment(), "COLUMNS": "118"}  # as the first cell sets it
            shell = "bash" if cell.source.startswith(_BASH) else sys.executable
            words = [shell, "-c", cell.source.removeprefix(_BASH)]
            done = subprocess.run(words, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True, check=True)
            cell.outputs[0].text = done.stdout
    return notebook


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """The notebook, changed in place, with what is the same wherever it runs."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text" in output:
                    output.text = "".join(map(without_root, output.text.splitlines(keepends=True)))
    return notebook


def without_root(line: str) -> str:
    """A line with paths from the checkout on; a table keeps its right border."""
    text = line.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    return f"{text[:-2].ljust(len(line) - 2)}│\n" if text.endswith("│\n") else text


def main() -> None:
    """Run the notebooks that are named, or all."""
    import nbformat

    names = [word for word in sys.argv[1:] if word != "--plans"]
    for path in sorted(HERE.glob("*.ipynb")):
        if not names or path.stem in names:
            again = planned(nbformat.read(path, as_version=4)) if "--plans" in sys.argv else cleaned(executed(path))
            nbformat.write(again, path)
            print(f"written  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
