"""A Kubeflow Trainer TrainJob for a `ClusterJob`: one pod per node, with the runtime's own rendezvous address.

Field names: `pkg/apis/trainer/v1alpha1/trainjob_types.go` of Kubeflow Trainer 2.2 and 2.3. Before 2.2,
``runtimePatches`` was called ``podTemplateOverrides``; it is only written for a volume.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from accel_scale.cluster.job import ClusterJob
from accel_scale.errors import ConfigError

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_MANAGER = "accel-scale.launch-script"


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of a Kubernetes job.

    Attributes:
        image: Image that has accel-scale, the recipes and the launch files, unless they are on the volume.
        runtime: A ClusterTrainingRuntime whose ML policy is torch.
        cpus, memory: Per node, as Kubernetes quantities; None for the runtime's.
        gpu_resource: Resource name of GPUs.
        volume_claim: A PersistentVolumeClaim that all nodes can write to, since checkpoints must outlive the pods.
        mount_path: Mount path of the volume.
        deadline_seconds: Run time after which the job fails; None for no limit.
        save_seconds: Time that workers may take to save when a pod is asked to stop.
    """

    name: str
    image: str
    namespace: str | None = None
    runtime: str = "torch-distributed"
    cpus: str | None = None
    memory: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    volume_claim: str | None = None
    mount_path: str = "/workspace"
    deadline_seconds: int | None = None
    save_seconds: int = 120


def kubernetes_manifest(job: ClusterJob, options: KubernetesOptions) -> str:
    """The TrainJob as YAML.

    Raises:
        ConfigError: for an invalid Kubernetes name or quantity, or a relative mount path.
    """
    import yaml

    _check(options)
    about = [
        f"# Written by accel-scale launch-script: {job.about}.",
        "# For Kubeflow Trainer 2.2 or later. Restarts are the runtime's: a JobSet's pods have restartPolicy",
        "# OnFailure if it says nothing: a container that dies comes back to the same rendezvous, up to backoffLimit.",
        f"# Its terminationGracePeriodSeconds (30 by default) must be above {options.save_seconds}, or a pod that is",
        "# evicted has no time to save.",
    ]
    return "\n".join([*about, yaml.safe_dump(train_job(job, options), sort_keys=False, width=1000)])


def train_job(job: ClusterJob, options: KubernetesOptions) -> dict[str, Any]:
    """The TrainJob as plain values."""
    # The runtime's torch plugin sets these variables, from the pod's index and the first pod's name.
    agent = job.agent_command(rank="PET_NODE_RANK", address="PET_MASTER_ADDR", port="PET_MASTER_PORT")
    resources = {"cpu": options.cpus, "memory": options.memory, options.gpu_resource: job.gpus_per_node}
    written = {name: value for name, value in resources.items() if value is not None}
    spec: dict[str, Any] = {
        "runtimeRef": {"name": options.runtime},
        "trainer": {
            "image": options.image,
            "numNodes": job.num_nodes,
            "numProcPerNode": job.gpus_per_node,
            "resourcesPerNode": {"requests": dict(written), "limits": dict(written)},
            "command": ["bash", "-c"],
            "args": ["\n".join([*job.setup_lines(), f"exec {agent}"])],
            "env": [
                *({"name": name, "value": value} for name, value in job.environment.items()),
                {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(options.save_seconds)},
            ],
        },
    }
    if options.deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = options.deadline_seconds
    if options.volume_claim:
        spec["runtimePatches"] = [_volume_patch(options)]
    metadata = {"name": options.name, **({"namespace": options.namespace} if options.namespace else {})}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _volume_patch(options: KubernetesOptions) -> dict[str, Any]:
    pod = {
        "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": options.volume_claim}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "run", "mountPath": options.mount_path}]}],
    }
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def _check(options: KubernetesOptions) -> None:
    names = (
        ("--job_name", options.name),
        ("--namespace", options.namespace),
        ("--volume_claim", options.volume_claim),
    )
    for flag, name in names:
        if name is not None and (not _NAME.fullmatch(name) or len(name) > 63):
            raise ConfigError(
                f"{name!r} is not a Kubernetes name.",
                place=flag,
                fix="use lower-case letters, digits and -, at most 63.",
            )
    for flag, quantity in (("--cpus", options.cpus), ("--memory", options.memory)):
        if quantity is not None and not _QUANTITY.fullmatch(quantity):
            raise ConfigError(f"{quantity!r} is not a quantity.", place=flag, fix="write it like 32 or 512Gi.")
    if not options.mount_path.startswith("/"):
        raise ConfigError(f"{options.mount_path!r} is relative.", place="--mount_path", fix="begin it with /.")
