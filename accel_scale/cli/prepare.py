"""Tokenise pretraining data once, into memory-mapped shards; training from them sees the same rows as from the data.

  accel-scale prepare --data corpus.jsonl --tokenizer gpt2 --output prepared
  accel-scale prepare --data 'web/*.parquet=0.8' books=0.2 --tokenizer my_tokenizer --output prepared

Run the same command again after a kill or a full disk: finished shards are kept. On a finished folder it compares
checksums. Name the folder as the run's data.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; light, so that `--help` stays fast."""
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="SOURCE",
        help="files, folders, globs or hub data sets, each with its share of the tokens (name=0.7) or none of them",
    )
    parser.add_argument("--tokenizer", required=True, help="a folder or hub id, `byte`, or `char` (of the data)")
    parser.add_argument("--output", required=True, help="where the shards go: a new folder, or an unfinished one")
    parser.add_argument("--num_workers", type=int, help="processes that tokenise (default: one per core)")
    parser.add_argument("--text_column", default="text", help="column of the text (default: text)")
    parser.add_argument(
        "--text_documents",
        default="file",
        choices=("file", "line", "paragraph"),
        help="unit of a document in a .txt file (default: file)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, then print a summary."""
    from accel_scale.facts.exit_statuses import INTERRUPTED_STATUS
    from accel_scale.flags.paths import without_weight
    from accel_scale.quiet import quiet_imports
    from accel_scale.starting.early_checks import BUILT_IN_TOKENIZERS, check_data, check_model

    for source in args.data:
        check_data(without_weight(source), place="--data")
    if args.tokenizer not in BUILT_IN_TOKENIZERS:
        check_model(args.tokenizer, place="--tokenizer")
    quiet_imports()  # before libraries that would print at import
    from accel_scale.data.pretraining.prepare import prepare_data
    from accel_scale.data.pretraining.sampling import sample_texts
    from accel_scale.data.pretraining.tokenizers import load_pretraining_tokenizer
    from accel_scale.reporting.tables import format_count, format_seconds
    from accel_scale.units import format_bytes

    options = {"text_column": args.text_column, "text_documents": args.text_documents}
    texts = sample_texts(args.data, **options) if args.tokenizer == "char" else None
    try:
        done = prepare_data(
            args.data,
            tokenizer=load_pretraining_tokenizer(args.tokenizer, texts=texts),
            output_dir=args.output,
            num_workers=args.num_workers,
            **options,
        )
    except KeyboardInterrupt:
        print("interrupted: finished shards are kept, and the same command continues from there.", file=sys.stderr)
        return INTERRUPTED_STATUS
    kept = f", {done.num_kept_shards} of them from before, checksums compared" if done.num_kept_shards else ""
    print(f"tokens     {format_count(done.num_tokens)} in {format_count(done.num_documents)} documents")
    print(f"written    {done.folder}: {format_bytes(done.token_bytes)} of tokens in {done.num_shards} shards{kept}")
    print(f"tokenizer  {done.folder}/tokenizer")
    print(f"time       {format_seconds(done.seconds)}")
    return 0
