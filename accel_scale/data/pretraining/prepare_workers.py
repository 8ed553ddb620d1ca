"""Processes that write shards: each asks for the next one, and all end with the command."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from accel_scale.data.pretraining.blocks import BlockSource
from accel_scale.data.pretraining.encoding import Encoder, one_thread_tokenizers
from accel_scale.data.pretraining.shards import ShardJob, write_shard
from accel_scale.errors import ConfigError

_POLL_SECONDS = 1.0


class _Orphaned(Exception):
    """The command that started this process is gone."""


def run_jobs(
    folder: str,
    jobs: Sequence[ShardJob],
    sources: Sequence[BlockSource],
    encoder: Encoder,
    dtype: str,
    *,
    num_workers: int,
) -> dict[ShardJob, dict[str, Any]]:
    """Write shards in `num_workers` processes, with one progress bar on stderr.

    Returns:
        Job → facts of its shard.

    Raises:
        ConfigError, OSError: the error of a worker; the other workers are ended.
    """
    from tqdm import tqdm

    finished: dict[ShardJob, dict[str, Any]] = {}
    if not jobs:
        return finished
    block_bytes = [source.size_bytes / source.num_blocks for source in sources]
    total = sum((job.end_block - job.first_block) * block_bytes[job.source] for job in jobs)
    waiting = list(reversed(jobs))
    workers: dict[Connection, Any] = {}
    context = multiprocessing.get_context()
    bar = tqdm(
        total=round(total),
        unit="B",
        unit_scale=True,
        desc="preparing",
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 30,  # a log gets a line now and then
    )
    try:
        with one_thread_tokenizers():
            for _ in range(min(num_workers, len(jobs))):
                ours, theirs = context.Pipe()
                arguments = (theirs, os.getpid(), folder, list(sources), encoder, dtype)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                workers[ours] = process
                ours.send(waiting.pop())
        while workers:
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = workers.pop(connection)
                    process.join()
                    raise _lost(process.exitcode) from None
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, int):
                    bar.update(round(block_bytes[message]))
                    continue
                job, facts = message
                finished[job] = facts
                if waiting:
                    connection.send(waiting.pop())
                else:
                    connection.send(None)
                    workers.pop(connection).join()
    finally:
        bar.close()
        for process in workers.values():
            process.terminate()
            process.join()
    return finished


def _lost(exit_code: int | None) -> ConfigError:
    killed = f"was killed by signal {-exit_code}" if exit_code and exit_code < 0 else f"ended with status {exit_code}"
    return ConfigError(
        f"a tokenising process {killed}; if the system killed it, memory ran out.",
        place="--num_workers",
        fix="run the same command again with fewer processes; finished shards are kept.",
    )


def _work(
    connection: Connection, parent: int, folder: str, sources: list[BlockSource], encoder: Encoder, dtype: str
) -> None:
    """The main function of a worker: write the shards asked for, until None comes or the parent is gone."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which then ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def is_orphan() -> bool:
        return os.getppid() != parent

    try:
        while True:
            while not connection.poll(_POLL_SECONDS):
                if is_orphan():
                    return
            job = connection.recv()
            if job is None:
                return

            def on_block(source: int = job.source) -> None:
                if is_orphan():
                    raise _Orphaned
                connection.send(source)

            connection.send((job, write_shard(folder, job, sources[job.source], encoder, dtype, on_block)))
    except (_Orphaned, EOFError, BrokenPipeError):
        return
    except Exception as error:
        connection.send(error)
