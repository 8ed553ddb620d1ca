"""Write a script that starts a launch on several nodes: a Slurm batch script, a Kubernetes TrainJob, or an SSH script.

  accel-scale launch-script slurm --config_file accelerate_configs/fsdp2_multinode.yaml --partition gpu --time 24h \\
      --output run.sbatch recipes/pretrain.py --config_file my_run.yaml
  accel-scale launch-script kubernetes --config_file plans/70b --image registry/accel-scale:1 --volume_claim runs
  accel-scale launch-script ssh --config_file accelerate_configs/ddp_multinode.yaml --hosts node1,node2 \\
      --output run.sh recipes/sft.py --model_name_or_path … --dataset_name …

--config_file is a launch file, or a folder of `accel-scale plan --write`, which also has the recipe's flags. Every
script starts one agent per node with the elastic rendezvous c10d; failed workers restart from the last checkpoint, and
only the steps since then are lost. The environment is not written into any script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_scale.errors import ConfigError

if TYPE_CHECKING:
    from accel_scale.cluster.job import ClusterJob

KINDS = ("slurm", "kubernetes", "ssh")
# Flag → the kinds that read it, its default, its help. A flag that the kind does not read is refused.
_FLAGS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "job_name": (("slurm", "kubernetes"), None, "name of the job (default: the recipe's)"),
    "time": (("slurm", "kubernetes"), None, "time limit, e.g. 24h; slurm's default: 24h"),
    "save_seconds": (KINDS, None, "how long a step and a save may take when the run is asked to stop "
                     "(default: slurm 300, others 120)"),
    "partition": (("slurm",), None, "partition to queue in"),
    "account": (("slurm",), None, "account to charge"),
    "cpus_per_task": (("slurm",), None, "cores of each node's agent and its workers"),
    "log": (("slurm",), "%x-%j.out", "file for the output (default: %(default)s)"),
    "step_restarts": (("slurm",), 2, "how often a failed step is tried again on the same nodes (default: 2)"),
    "max_requeues": (("slurm",), 100, "how often the job goes back into the queue (default: 100)"),
    "sbatch": (("slurm",), None, "further directives, separated by commas: qos=high,reservation=x"),
    "image": (("kubernetes",), None, "container image with accel-scale and the recipes"),
    "namespace": (("kubernetes",), None, "namespace of the job"),
    "runtime": (("kubernetes",), "torch-distributed", "ClusterTrainingRuntime (default: %(default)s)"),
    "cpus": (("kubernetes",), None, "cores of each node"),
    "memory": (("kubernetes",), None, "memory of each node, e.g. 512Gi"),
    "gpu_resource": (("kubernetes",), "nvidia.com/gpu", "name under which GPUs are counted (default: %(default)s)"),
    "volume_claim": (("kubernetes",), None, "claim of a volume that all nodes can write, for checkpoints"),
    "mount_path": (("kubernetes",), "/workspace", "where it is mounted (default: %(default)s)"),
    "hosts": (("ssh",), None, "hosts separated by commas; the first is where agents meet"),
    "port": (("ssh",), 29500, "port of the rendezvous on the first host (default: 29500)"),
    "node_restarts": (("ssh",), 1, "how often a failed agent is started again (default: 1)"),
}  # fmt: skip
_NUMBERS = {"save_seconds", "cpus_per_task", "step_restarts", "max_requeues", "port", "node_restarts"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `accel-scale launch-script`."""
    parser.add_argument("kind", choices=KINDS, help="kind of script")
    parser.add_argument("--config_file", required=True, help="the launch file, or a folder of plan --write")
    parser.add_argument("--nodes", type=int, help="number of nodes (default: the launch file's)")
    parser.add_argument("--gpus_per_node", type=int, help="default: the launch file's processes ÷ nodes")
    parser.add_argument("--max_restarts", type=int, default=3, help="restarts of failed workers (default: 3)")
    parser.add_argument("--join_timeout", default="15m", help="how long nodes wait for one another (default: 15m)")
    parser.add_argument("--workdir", help="folder to run in on every node (default: this one; in the image, its own)")
    parser.add_argument("--setup", help="command before it, e.g. 'source .venv/bin/activate'")
    parser.add_argument("--output", metavar="FILE", help="where to write it (default: standard output)")
    for name, (kinds, default, text) in _FLAGS.items():
        only = "" if kinds == KINDS else f"{' and '.join(kinds)}: "
        number = int if name in _NUMBERS else str
        parser.add_argument(f"--{name}", type=number, default=default, help=only + text)
    parser.add_argument("recipe", nargs="*", help="the recipe and its flags, as after accelerate launch")


def arrange(words: Sequence[str]) -> list[str]:
    """Insert ``--`` before kind and recipe, so that argparse leaves everything after the recipe to it."""
    if not words or words[0].startswith("-"):
        return list(words)
    index = 1
    while index < len(words) and words[index].startswith("--"):
        index += 1 if "=" in words[index] or words[index] == "--help" else 2
    return [*words[1:index], "--", words[0], *words[index:]]


def run(args: argparse.Namespace) -> int:
    """Check, then write or print."""
    from accel_scale.cluster.job import cluster_job
    from accel_scale.units import parse_duration

    _refuse_foreign(args)
    workdir = args.workdir
    if workdir is None and args.kind != "kubernetes":
        workdir = str(Path.cwd())
    job = cluster_job(
        args.config_file,
        args.recipe,
        num_nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        max_restarts=args.max_restarts,
        join_timeout_seconds=int(parse_duration(args.join_timeout, place="--join_timeout")),
        workdir=workdir,
        setup=args.setup,
    )
    text = {"slurm": _slurm, "kubernetes": _kubernetes, "ssh": _ssh}[args.kind](job, args)
    if args.output is None:
        print(text, end="")
        return 0
    _write(Path(args.output), text, executable=args.kind != "kubernetes")
    how = {"slurm": "sbatch {}", "kubernetes": "kubectl create -f {}", "ssh": "bash {}"}[args.kind]
    print(f"written  {args.output}: {job.about}")
    print(f"start    {how.format(args.output)}")
    return 0


def _refuse_foreign(args: argparse.Namespace) -> None:
    for name, (kinds, default, _) in _FLAGS.items():
        if args.kind not in kinds and getattr(args, name) != default:
            raise ConfigError(f"says nothing to {args.kind}.", place=f"--{name}", fix="remove it.")
    for name in ("image",) if args.kind == "kubernetes" else ("hosts",) if args.kind == "ssh" else ():
        if getattr(args, name) is None:
            raise ConfigError(f"{args.kind} needs --{name}.", place="command line", fix=f"add --{name}.")
    for name in _NUMBERS:
        if (getattr(args, name) or 0) < 0:
            raise ConfigError(f"{getattr(args, name)} is negative.", place=f"--{name}", fix="use 0 or more.")


def _name(job: ClusterJob, args: argparse.Namespace) -> str:
    return args.job_name or job.recipe.script.stem.replace("_", "-").lower()


def _slurm(job: ClusterJob, args: argparse.Namespace) -> str:
    from accel_scale.cluster.slurm import SlurmOptions, slurm_script
    from accel_scale.units import parse_duration

    options = SlurmOptions(
        job_name=_name(job, args),
        time_seconds=parse_duration(args.time or "24h", place="--time"),
        save_seconds=args.save_seconds or 300,
        step_restarts=args.step_restarts,
        max_requeues=args.max_requeues,
        partition=args.partition,
        account=args.account,
        cpus_per_task=args.cpus_per_task,
        log=args.log,
        extra=args.sbatch.split(",") if args.sbatch else (),
    )
    return slurm_script(job, options)


def _kubernetes(job: ClusterJob, args: argparse.Namespace) -> str:
    from accel_scale.cluster.kubernetes import KubernetesOptions, kubernetes_manifest
    from accel_scale.units import parse_duration

    names = ("image", "namespace", "runtime", "cpus", "memory", "gpu_resource", "volume_claim", "mount_path")
    options = KubernetesOptions(
        name=_name(job, args),
        deadline_seconds=int(parse_duration(args.time, place="--time")) if args.time else None,
        save_seconds=args.save_seconds or 120,
        **{name: getattr(args, name) for name in names},
    )
    return kubernetes_manifest(job, options)


def _ssh(job: ClusterJob, args: argparse.Namespace) -> str:
    from accel_scale.cluster.ssh import SshOptions, ssh_script

    hosts = [host.strip() for host in args.hosts.split(",") if host.strip()]
    return ssh_script(job, SshOptions(hosts, args.port, args.node_restarts, args.save_seconds or 120))


def _write(path: Path, text: str, *, executable: bool) -> None:
    if path.exists() and "Written by accel-scale launch-script" not in path.read_text(errors="replace"):
        raise ConfigError("exists and was not written by this command.", place=str(path), fix="name another file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if executable else 0o644)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}.", place=str(path), fix="name another.") from None
