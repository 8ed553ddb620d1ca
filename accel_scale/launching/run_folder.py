"""Who owns an output folder: refuse, before anything is loaded, to overwrite, delete or mix with other files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from accel_scale.disk_space import writes_into
from accel_scale.errors import ConfigError
from accel_scale.launching.folder_lock import LOCK_FILE, held, is_held
from accel_scale.version import __version__

# Pushes to the hub leave out names that begin with an underscore.
RUN_FILE = "_run.json"
ADAPTER_CONFIG = "adapter_config.json"
_CHECKPOINT = re.compile(r"checkpoint[-_]\d+")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)\b.*\.(safetensors|bin|index\.json)")
# What runs write, with its name in messages; the first match is reported.
_HOLDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("an adapter", re.compile(r"adapter_config\.json|adapter_model\..*")),
    ("a model", re.compile(rf"config\.json|generation_config\.json|{_WEIGHTS.pattern}")),
    ("checkpoints", _CHECKPOINT),
    ("a tokenizer", re.compile(r"tokenizer(_config)?\.json|tokenizer(\.model)?|vocab\.(json|txt)|merges\.txt|"
                               r"special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)")),
    ("a search", re.compile(r"study\.db|study_summary\.json|trials|best\.yaml|trials\.csv")),
    ("another run's records", re.compile(r"run_summary\.json|metrics\.jsonl|guard_events\.jsonl|training_args\.bin|"
                                         r"trainer_state\.json|quantization_config\.json|run_starts\.jsonl|"
                                         r"report\.html")),
    ("a file that the run would overwrite", re.compile(r"README\.md|_run\.json")),
)  # fmt: skip


class RunRecord(TypedDict, total=False):
    """Contents of `RUN_FILE`: the program that owns the folder, and the files that were published into it."""

    program: str
    made_of: str
    version: str
    files: dict[str, list[int]]


def read_record(folder: Path) -> RunRecord | None:
    """The record of a folder; None if there is none."""
    try:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("program"), str):
        return None
    known: RunRecord = {"program": record["program"], "made_of": str(record.get("made_of", ""))}
    files = record.get("files")
    known["files"] = dict(files) if isinstance(files, dict) else {}
    return known


def _write_record(folder: Path, record: RunRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**record, "version": __version__}, indent=1) + "\n"
    partial = folder / f"{RUN_FILE}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / RUN_FILE)


@dataclass(frozen=True)
class OutputFolder:
    """The folder that a run is about to write.

    Attributes:
        folder: The folder as the user wrote it.
        program: The program whose run it is: ``sft.py``, the name of a script …
        inputs: Where a path was set → the path of a model, an adapter, a tokenizer or data that the run reads.
        resumes_from: The checkpoint that the user names to resume from; ``true`` for the newest one there.
        made_of: What the result is made of, if a result of something else must not be replaced.
        is_strict: Whether any existing content at all is refused.
        place: The setting that names the folder.
    """

    folder: Path
    program: str
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    resumes_from: str | None = None
    made_of: str = ""
    is_strict: bool = False
    place: str = "--output_dir"

    def check(self) -> None:
        """Refuse a folder that contains anything not belonging to this run.

        Raises:
            ConfigError: naming what is there.
        """
        self._refuse_inputs()
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file.", place=self.place, fix="name a folder.")
        record = read_record(self.folder)
        if record is not None:
            if (record["program"], record["made_of"]) != (self.program, self.made_of):
                self._refuse(f"a run of {record['program']}" + f" on {record['made_of']}" * bool(record["made_of"]))
            return
        if self._holds_own_run() or self._is_resumed():
            return
        found = self._foreign()
        if found:
            self._refuse("{} ({})".format(*found))

    def check_writable(self) -> None:
        """`check`, and check that the folder, or its nearest existing parent, can be written to.

        Raises:
            ConfigError: as `check`, or if it cannot be written.
        """
        self.check()
        nearest = next(path for path in (self.folder.absolute(), *self.folder.absolute().parents) if path.is_dir())
        with self._write_errors():
            os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=nearest))
            if len(os.fsencode(self.folder.name)) > os.pathconf(nearest, "PC_NAME_MAX"):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))

    @contextlib.contextmanager
    def taken(self, *, is_main: bool = True) -> Iterator[None]:
        """`check` and lock the folder: no other run can take it until this one leaves. It may be taken again within.

        Raises:
            ConfigError: as `check`, or if another run holds the folder or it cannot be written.
        """
        if not is_main or is_held(self.folder):
            yield
            return
        self._make()
        writes_into(self.folder, self.place)
        with contextlib.ExitStack() as stack:
            with self._write_errors():
                stack.enter_context(held(self.folder, place=self.place))
            self.mark()  # its previous holder may have begun another run there
            yield

    def mark(self) -> None:
        """`check`, then record the owner of the folder: for work that several processes may do together.

        Raises:
            ConfigError: as `check`, or if the folder cannot be written.
        """
        self._make()
        with self._write_errors():
            if read_record(self.folder) is None:
                _write_record(self.folder, {"program": self.program, "made_of": self.made_of, "files": {}})

    def _make(self) -> None:
        self.check()
        with self._write_errors():
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be written ({error.strerror}).", place=self.place, fix="name another folder."
            ) from None

    def _refuse(self, what: str) -> None:
        raise ConfigError(
            f"{self.folder} holds {what}, which this run did not write and would overwrite or mix with its own.",
            place=self.place,
            fix="name another folder.",
        )

    def _refuse_inputs(self) -> None:
        for place, paths in self.inputs.items():
            for path in paths:
                if _is_same(Path(path), self.folder) or _is_kept_in(Path(path), self.folder):
                    raise ConfigError(
                        f"{self.folder} is where {place} is read from: {path} would be overwritten.",
                        place=self.place,
                        fix="name another folder.",
                    )
                base = _base_of_adapter(Path(path))
                if base is not None and _is_same(base, self.folder):
                    raise ConfigError(
                        f"{self.folder} is the base of the adapter in {path} and would be overwritten.",
                        place=self.place,
                        fix="name another folder.",
                    )

    def _holds_own_run(self) -> bool:
        """True if the run is recognised by its files: earlier versions kept no `RUN_FILE`."""
        if self.program == "tune.py":
            return (self.folder / "study.db").is_file()
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((self.folder / "run_summary.json").read_text(encoding="utf-8"))
            return isinstance(summary, dict) and summary.get("recipe") == self.program
        # Checkpoints that were copied here to resume from them in a new folder.
        state = "state.json" if self.program == "pretrain.py" else "trainer_state.json"
        return any((path.parent / state).is_file() for path in self.folder.glob("checkpoint[-_]*/manifest.json"))

    def _is_resumed(self) -> bool:
        resumes = str(self.resumes_from or "")
        return resumes.lower() == "true" or (bool(resumes) and _is_same(Path(resumes).parent, self.folder))

    def _foreign(self) -> tuple[str, str] | None:
        names = sorted(os.listdir(self.folder))
        if self.is_strict:
            return next((("other things", name) for name in names if not name.startswith((".", LOCK_FILE))), None)
        return next(((what, name) for what, pattern in _HOLDS for name in names if pattern.fullmatch(name)), None)


def _is_same(path: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        if path.exists() and folder.exists():
            return path.samefile(folder)
    return os.path.realpath(path) == os.path.realpath(folder)


def _is_kept_in(path: Path, folder: Path) -> bool:
    """True if `path` is one of the checkpoints of `folder`, which come and go."""
    own, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    return path.exists() and root in own.parents and bool(_CHECKPOINT.fullmatch(own.relative_to(root).parts[0]))


def _base_of_adapter(path: Path) -> Path | None:
    try:
        base = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(base) if isinstance(base, str) and base else None


# ── Files that are published into a folder ───────────────────────────────────────────────────────────────────────────


def refuse_foreign_model(folder: Path) -> None:
    """Refuse to replace a model that this program did not write.

    Raises:
        ConfigError: naming the file.
    """
    files = _files_of(folder)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    gates = [name for name in names if name in ("config.json", ADAPTER_CONFIG)]
    for name in [*gates, *(name for name in names if gates and _WEIGHTS.fullmatch(name))]:
        if not is_own(folder / name, files):
            raise ConfigError(
                f"{folder} holds a model ({name}) that this program did not write.",
                place="output folder",
                fix="save into another folder.",
            )


def is_own(path: Path, files: Mapping[str, Sequence[int]] | None = None) -> bool:
    """True if `path` does not exist or is unchanged since it was published."""
    known = _files_of(path.parent) if files is None else files
    return not path.exists() or list(known.get(path.name, ())) == _stamp(path)


def record_published(staged: Path, folder: Path, program: str = "") -> None:
    """Record in `staged` what is about to be moved into `folder`; the user's own README.md stays, ours is dropped."""
    record = read_record(folder) or {"program": program, "made_of": "", "files": {}}
    if not is_own(folder / "README.md", record["files"]):
        (staged / "README.md").unlink(missing_ok=True)
    new = {path.name: _stamp(path) for path in staged.iterdir() if path.is_file() and path.name != RUN_FILE}
    record["files"] = {**record["files"], **new}
    _write_record(staged, record)


def record_written(path: Path) -> None:
    """Record that this run has written `path` in its own folder."""
    record = read_record(path.parent)
    if record is not None and path.is_file():
        record["files"] = {**record["files"], path.name: _stamp(path)}
        _write_record(path.parent, record)


def _files_of(folder: Path) -> Mapping[str, Sequence[int]]:
    record = read_record(folder)
    return record["files"] if record is not None else {}


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
