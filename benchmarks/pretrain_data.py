"""Measure pretraining data of ten million rows: time to the first batch, memory, time to resume, tokens/s.

    python benchmarks/pretrain_data.py --folder /tmp/corpus       # writes benchmarks/results/pretrain_data.md
    python benchmarks/pretrain_data.py --folder /tmp/corpus --num_rows 100000 --steps 300 --results /tmp/results

The corpus is created once in `--folder` (about 3.5 GB for the three formats, and 1.2 GB for the converted Parquet
file). Each case runs in its own process. Times start at opening the data, after imports, with the page cache as left
by writing the corpus. Memory is private memory (RssAnon) of the process and its workers, sampled every 50 batches;
pages of memory-mapped files, which the system can reclaim, are counted separately (RssFile).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from apart import REPOSITORY, run_apart

ROW_LENGTH, GLOBAL_BATCH, MICRO_BATCH, VOCAB_SIZE = 256, 16, 4, 8192
SAMPLE_EVERY, WARM_UP = 50, 200
CASES = (
    ("jsonl", "corpus.jsonl"),
    ("arrow", "corpus.arrow"),
    ("parquet, first time", "corpus.parquet"),
    ("parquet, cached", "corpus.parquet"),
)
_CHUNK_ROWS = 100_000


# ── The corpus ───────────────────────────────────────────────────────────────────────────────────────────────────────


def make_corpus(folder: Path, num_rows: int) -> None:
    """Create one corpus in three formats and a tokenizer trained on it; an existing corpus is kept."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from accel_scale.data.pretraining import sample_texts, train_tokenizer

    marker = folder / "corpus.json"
    if marker.exists() and json.loads(marker.read_text())["num_rows"] == num_rows:
        return
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("text", pa.string())])
    with (
        open(folder / "corpus.jsonl", "w") as lines,
        pa.OSFile(str(folder / "corpus.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as arrow,
        pq.ParquetWriter(folder / "corpus.parquet", schema) as parquet,
    ):
        for texts in _chunks(num_rows):
            lines.writelines(f'{{"text": "{text}"}}\n' for text in texts)
            table = pa.table({"text": texts}, schema=schema)
            arrow.write_table(table, max_chunksize=1000)  # chunk size used by `datasets`
            parquet.write_table(table)
    train_tokenizer(sample_texts(str(folder / "corpus.jsonl"), max_bytes=8 << 20), VOCAB_SIZE).save_pretrained(
        folder / "tokenizer"
    )
    marker.write_text(json.dumps({"num_rows": num_rows}))


def _chunks(num_rows: int) -> Iterator[list[str]]:
    """Yield short rows of words with frequencies like those of a language."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfwyp", k=draw.randrange(2, 10))) for _ in range(20_000)]
    weights = list(accumulate(1 / (rank + 3) for rank in range(len(words))))
    sentences = [" ".join(draw.choices(words, cum_weights=weights, k=draw.randrange(5, 26))) for _ in range(50_021)]
    for start in range(0, num_rows, _CHUNK_ROWS):
        rows = range(start, min(start + _CHUNK_ROWS, num_rows))
        yield [f"{row} {sentences[row * 7919 % len(sentences)]}" for row in rows]


# ── One case, in a process of its own ────────────────────────────────────────────────────────────────────────────────


def measure(folder: str, name: str, steps: int, num_workers: int, state_file: str) -> dict[str, Any]:
    """Open the data, read `steps` global batches and save the state."""
    data, tokenizer = _opened_after_imports(folder)
    started = time.perf_counter()
    opened = data(os.path.join(folder, name), tokenizer)
    loader = opened.train_loader(global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, num_workers=num_workers)
    next(loader)
    first_seconds = time.perf_counter() - started
    samples, running = [], time.perf_counter()
    for step in range(1, steps):
        next(loader)
        if step % SAMPLE_EVERY == 0:
            samples.append((step, *_memory()))
    seconds = time.perf_counter() - running
    Path(state_file).write_text(json.dumps({"state": loader.state_dict(), "next": next(loader).row_ids}))
    loader.close()
    return {
        "first_seconds": first_seconds,
        "tokens_per_second": (steps - 1) * GLOBAL_BATCH * ROW_LENGTH / seconds,
        "samples": samples,
        "num_blocks": opened.sources[0].num_blocks,
        "size_bytes": opened.sources[0].size_bytes,
    }


def resume(folder: str, name: str, num_workers: int, state_file: str) -> dict[str, Any]:
    """Resume from the state of `measure`; the next batch must be the one that followed there."""
    data, tokenizer = _opened_after_imports(folder)
    left = json.loads(Path(state_file).read_text())
    started = time.perf_counter()
    loader = data(os.path.join(folder, name), tokenizer).train_loader(
        global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, num_workers=num_workers, state=left["state"]
    )
    row_ids = next(loader).row_ids
    seconds = time.perf_counter() - started
    loader.close()
    if row_ids != left["next"]:
        raise RuntimeError("the batch after resuming is not the one that followed")
    return {"resume_seconds": seconds}


def _opened_after_imports(folder: str) -> Any:
    """Function that opens data, and tokenizer, after importing everything that a training run imports anyway."""
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    from accel_scale.data.pretraining import TrainLoader, load_pretraining_tokenizer, open_pretraining_data

    assert TrainLoader
    tokenizer = load_pretraining_tokenizer(os.path.join(folder, "tokenizer"))
    return lambda path, chosen: open_pretraining_data(path, tokenizer=chosen, row_length=ROW_LENGTH), tokenizer


def _memory() -> tuple[int, int]:
    """Private bytes and bytes of mapped files of this process and its children."""
    import psutil

    private = mapped = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        told = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        private += int(told["RssAnon"]) * 1024
        mapped += int(told["RssFile"]) * 1024
    return private, mapped


# ── The table ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_case(label: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run both processes of a case; raises RuntimeError if one fails."""
    found: dict[str, Any] = {"label": label}
    state_file = str(Path(args.folder, "state.json"))
    base = [sys.executable, __file__, "--folder", args.folder, "--num_workers", str(args.num_workers)]
    for mode in ("measure", "resume"):
        command = [*base, "--case", mode, name, state_file, "--steps", str(args.steps)]
        printed, problem = run_apart(command, limit_seconds=3600)
        if problem:
            raise RuntimeError(f"{label}, {mode}: {problem}")
        found |= json.loads(printed.splitlines()[-1])
    return found


def table_row(found: dict[str, Any]) -> str:
    """One row of the table; memory is flat if its largest sample after the warm-up is within 10 % of the first."""
    samples = [sample for sample in found["samples"] if sample[0] >= WARM_UP] or found["samples"]
    first, largest = samples[0][1], max(sample[1] for sample in samples)
    cells = [
        found["label"],
        f"{found['size_bytes'] / 1e9:.2f}",
        f"{found['first_seconds']:.1f}",
        f"{found['resume_seconds']:.1f}",
        f"{first / 2**20:,.0f}",
        f"{largest / 2**20:,.0f}",
        f"{100 * (largest / first - 1):+.1f} %",
        f"{samples[-1][2] / 2**20:,.0f}",
        f"{found['tokens_per_second']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def report(cases: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The results as Markdown."""
    packages = ("torch", "datasets", "pyarrow", "tokenizers", "transformers", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()
    heads = (
        "format",
        "text, GB",
        "first batch, s",
        "resume, s",
        f"private memory at batch {WARM_UP}, MiB",
        "largest after, MiB",
        "growth",
        "mapped files at the end, MiB",
        "tokens/s",
    )
    lines = [
        f"# Pretraining data of {args.num_rows:,} rows",
        "",
        f"{os.cpu_count()} cores, {platform.machine()}, {versions}, Python {platform.python_version()}, "
        f"{datetime.date.today()}, commit {commit}, load average {args.load:.1f} at the start. "
        f"{args.steps:,} global batches of {GLOBAL_BATCH} rows of {ROW_LENGTH} tokens, byte-level BPE of {VOCAB_SIZE} "
        f"tokens trained on the corpus, {args.num_workers} worker processes, tokenised while running. Made by "
        "`python benchmarks/pretrain_data.py`, whose first lines say how it is measured.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *map(table_row, cases),
        "",
        "The first time, the Parquet file's row groups are converted to an Arrow file in the cache; from then on it "
        "is read as one. After resuming, the next batch was compared with the one that followed in the first process: "
        "the same rows.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Create the corpus, run the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="where the corpus goes")
    parser.add_argument("--num_rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=2_050)
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--results", default=str(REPOSITORY / "benchmarks" / "results"))
    parser.add_argument("--case", nargs=3, metavar=("MODE", "FILE", "STATE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["HF_DATASETS_CACHE"] = str(Path(args.folder, "cache"))
    if args.case:
        mode, name, state_file = args.case
        found = (
            measure(args.folder, name, args.steps, args.num_workers, state_file)
            if mode == "measure"
            else resume(args.folder, name, args.num_workers, state_file)
        )
        print(json.dumps(found))
        return
    args.load = os.getloadavg()[0]
    make_corpus(Path(args.folder), args.num_rows)
    cases = [run_case(label, name, args) for label, name in CASES]
    text = report(cases, args)
    Path(args.results).mkdir(parents=True, exist_ok=True)
    Path(args.results, "pretrain_data.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
