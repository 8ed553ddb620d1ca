"""Records the cases of a gpu_check.py stage: one line per finished case, kept for the next start."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

OK, WRONG, NEEDS = "ok", "FAILED", "needs"


class Needs(Exception):
    """A case's missing requirement, such as ``needs a GPU``: shown in the table, neither passed nor failed."""


class Wrong(Exception):
    """A case finished with a wrong result."""


@dataclass(frozen=True)
class Row:
    """One case: its result and verdict."""

    case: str
    found: str
    verdict: str
    seconds: float


class Cases:
    """The cases of one stage, used in the stage's process.

    Attributes:
        folder: Folder for the stage's files; kept between starts.
        on_gpu: Whether the cases run on a GPU, or at a small size on the CPU.
        num_gpus: Number of visible GPUs; on the CPU, the number of processes that replace them.
    """

    def __init__(self, folder: Path, *, on_gpu: bool, num_gpus: int, seconds: float) -> None:
        self.folder, self.on_gpu, self.num_gpus = folder, on_gpu, num_gpus
        self._deadline = time.monotonic() + seconds
        self._rows, self._writing = rows_file(folder), threading.Lock()
        kept = [row for row in read_rows(folder) if row.verdict != WRONG]
        self._done = {row.case for row in kept}
        self._rows.write_text("".join(_line(row) for row in kept))

    @property
    def device(self) -> str:
        """torch's name of the device on which the cases run."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def seconds_left(self) -> float:
        """Seconds until the stage is ended from outside."""
        return self._deadline - time.monotonic()

    def case(self, name: str, run: Callable[[], str]) -> None:
        """Run one case, unless an earlier start did; exceptions only end this case. Thread-safe.

        Args:
            name: What is compared; the row's first cell.
            run: Returns the result; raises `Wrong`, or `Needs` if the machine lacks something for it.
        """
        if name in self._done:
            return
        started = time.monotonic()
        try:
            found, verdict = run(), OK
        except Needs as lacking:
            found, verdict = str(lacking), NEEDS
        except Wrong as why:
            found, verdict = str(why), WRONG
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # goes to the stage's log
            found, verdict = one_line(error), WRONG
        row = Row(name, found, verdict, time.monotonic() - started)
        with self._writing, self._rows.open("a") as rows:
            rows.write(_line(row))
        print(f"{row.verdict}: {row.case}: {row.found} ({row.seconds:.1f} s)", flush=True)


def expect(holds: bool, found: str) -> str:
    """Return `found` if `holds`; else raise `Wrong`."""
    if not holds:
        raise Wrong(found)
    return found


def lacks(what: str) -> str:
    """Case that this machine cannot run: raises `Needs`."""
    raise Needs(what)


def one_line(error: BaseException) -> str:
    """``ValueError: message (file.py:12)``, with the innermost place."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text[:240]}{place}"


def rows_file(folder: Path) -> Path:
    """File of a stage's rows."""
    return folder / "rows.jsonl"


def read_rows(folder: Path) -> list[Row]:
    """Finished cases; a line left incomplete by a kill is skipped."""
    path, rows = rows_file(folder), []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(Row(**json.loads(line)))
        except ValueError:
            continue
    return rows


def _line(row: Row) -> str:
    return json.dumps(asdict(row)) + "\n"
