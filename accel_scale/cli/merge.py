"""`accel-scale merge`: merge a LoRA or QLoRA adapter and its base into one ordinary model."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

DESCRIPTION = (
    "Merge a LoRA, rsLoRA, DoRA or QLoRA adapter into its base, shard by shard: models larger than memory merge too. "
    "An adapter trained on a 4-bit base is merged into the dequantised base, which is what it was trained on."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; light, so that `--help` stays fast."""
    parser.description = DESCRIPTION
    parser.add_argument("adapter", metavar="ADAPTER", help="Folder (or Hub id) of the adapter.")
    parser.add_argument("--output_dir", required=True, help="Where the merged model goes.")
    parser.add_argument("--base_model", help="Folder or Hub id of the base. Default: the one the adapter names.")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="Dtype of the result. Default: the base's."
    )
    parser.add_argument("--max_shard_size", default="2GB", help="Largest file written; memory used is about twice it.")
    parser.add_argument(
        "--base_weights",
        default="auto",
        choices=("auto", "original", "dequantized"),
        help="Merge into the base as published, or into its 4-bit weights dequantised. Default: what "
        "quantization_config.json beside the adapter says, else original.",
    )
    parser.add_argument("--no_check", action="store_true", help="Do not compare logits with base + adapter.")


def run(args: argparse.Namespace) -> int:
    """Merge, then print what was merged into what and how the logits compare."""
    from accel_scale.launching.run_folder import OutputFolder
    from accel_scale.quiet import quiet_imports
    from accel_scale.starting.early_checks import check_model
    from accel_scale.units import format_bytes, parse_bytes

    parse_bytes(args.max_shard_size, place="--max_shard_size")
    check_model(args.adapter, place="ADAPTER")
    if args.base_model:
        check_model(args.base_model, place="--base_model")
    adapter = Path(args.adapter)
    if adapter.is_dir():
        inputs = {"ADAPTER": [str(adapter)]}
        made_of = str(adapter.resolve())
        OutputFolder(Path(args.output_dir), "accel-scale merge", inputs, made_of=made_of).check_writable()
    quiet_imports()  # before libraries that would print at import
    warnings.simplefilter("ignore", FutureWarning)  # from libraries to one another
    from transformers.utils import logging

    from accel_scale.merging.adapter import merge_adapter

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    result = merge_adapter(
        args.adapter,
        args.output_dir,
        base_model=args.base_model,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        base_weights=args.base_weights,
        check=not args.no_check,
    )
    replaced = f", {result.num_replaced_tensors} tensors replaced" if result.num_replaced_tensors else ""
    files = "1 file" if result.num_shards == 1 else f"{result.num_shards} files"
    print(f"base     {result.base_model} ({result.base_weights_reason})")
    print(f"merged   {result.num_merged_modules} modules{replaced}")
    print(f"written  {args.output_dir}: {format_bytes(result.total_bytes)} of {result.dtype} in {files}")
    print(f"check    {result.check}")
    return 0
