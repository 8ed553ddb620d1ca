"""Launch scripts with names that are shell programs: bash treats them as names and runs nothing but the agent."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_scale.cli.main import main
from accel_scale.cluster.job import ClusterJob, cluster_job
from accel_scale.cluster.kubernetes import KubernetesOptions, kubernetes_manifest
from accel_scale.cluster.slurm import SlurmOptions, slurm_script
from accel_scale.cluster.ssh import SshOptions, ssh_script
from accel_scale.errors import ConfigError

LAUNCH = {"distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1, "mixed_precision": "bf16"}
HOSTILE = "\ntouch pwned #$(touch pwned)`touch pwned`'\"; touch pwned; \\"
NAMES = st.text(alphabet="ab '\"$`\\\n\r;|&<>()*?!#~{}[]-%=\u2028é", min_size=1, max_size=12)
# A stand-in for the launcher: writes its arguments one after the other, each terminated by a zero byte.
ACCELERATE = '#!/bin/bash\nprintf \'%s\\0\' "$@" > "$WORDS"\n'
STUBS = {
    "accelerate": ACCELERATE,
    "scontrol": "#!/bin/bash\necho node1\n",
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "faked_ssh": '#!/bin/bash\nshift\nexec bash -c "$*"\n',
}


def job_in(folder: Path, name: str) -> ClusterJob:
    """A launch whose file, recipe, words, folder and set-up all contain the name."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = name.replace("/", "_")
    (folder / f"{plain}.yaml").write_text(yaml.safe_dump(LAUNCH))
    (folder / f"{plain}.py").write_text("")
    words = [str(folder / f"{plain}.py"), "--run_name", name, f"--data={name}"]
    return cluster_job(str(folder / f"{plain}.yaml"), words, workdir=str(folder))


def scripts(job: ClusterJob) -> dict[str, str]:
    return {
        "slurm": slurm_script(job, SlurmOptions("job", 3600)),
        "ssh": ssh_script(job, SshOptions(["node1"])),
    }


def run_script(folder: Path, text: str) -> list[str]:
    """The arguments that the launcher received."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (stubs / name).write_text(body)
        (stubs / name).chmod(0o755)
    (folder / "script").write_text(text)
    env = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "WORDS": str(folder / "words")}
    env |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_NODEID": "0", "SSH": "faked_ssh"}
    done = subprocess.run(["bash", str(folder / "script")], env=env, cwd=folder, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return (folder / "words").read_bytes().decode().split("\0")[:-1]


@settings(max_examples=8, deadline=None)
@given(name=NAMES)
@example(name=HOSTILE)
@example(name="-oProxyCommand=touch pwned")
@example(name="*")
def test_names_reach_the_launcher_as_they_are(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("named") / "work"
    job = job_in(folder, name)
    for text in scripts(job).values():
        words = run_script(folder, text)
        assert words[words.index(str(job.recipe.script)) :] == [str(job.recipe.script), *job.recipe.words]
        assert words[words.index("--config_file") + 1] == str(job.launch.path)
        assert not list(folder.rglob("pwned"))
        assert not Path("pwned").exists()
    manifest = yaml.safe_load(kubernetes_manifest(job, KubernetesOptions("job", image=name)))
    assert manifest["spec"]["trainer"]["image"] == name


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch pwned", "-oProxyCommand=x@node1", "node1;x", "user@-x", "a b", "$(x)", "@node1"]
)
def test_hosts_that_ssh_takes_for_options_are_refused(tmp_path, host):
    job = job_in(tmp_path, "plain")
    with pytest.raises(ConfigError, match="is not a host") as refused:
        ssh_script(job, SshOptions([host]))
    assert refused.value.place == "--hosts"


@pytest.mark.parametrize("host", ["node1", "user@node1.example.org", "10.0.0.1", "fe80::1", "user.name@node-1"])
def test_hosts_are_hosts(tmp_path, host):
    assert f"HOSTS=({host})" in ssh_script(job_in(tmp_path, "plain"), SshOptions([host]))


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", "plain-looking"],
        ["--wandb_api_key=123"],
        ["--dataset_name", "https://user:sekret@host/x.jsonl"],
        ["--dataset_name", "s3://b/x?X-Amz-Signature=12ab"],
        ["--run_name", "hf_abcdefghijklmnopqrstuvwx"],
    ],
)
def test_scripts_hold_no_credentials(tmp_path, capsys, words):
    job_in(tmp_path, "plain")
    command = [
        "launch-script",
        "slurm",
        "--config_file",
        str(tmp_path / "plain.yaml"),
        "--output",
        str(tmp_path / "s"),
    ]
    with pytest.raises(SystemExit):
        main([*command, str(tmp_path / "plain.py"), *words])
    said = capsys.readouterr().err
    assert "set HF_TOKEN" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "s").exists()
    for secret in ("plain-looking", "123", "sekret", "12ab", "abcdefghijklmnop"):
        assert secret not in said


def test_training_arguments_hold_no_token(tmp_path, monkeypatch):
    from accel_scale.settings.trl_config import RecipeSFTConfig

    monkeypatch.delenv("HF_TOKEN", raising=False)
    config = RecipeSFTConfig(output_dir=str(tmp_path), hub_token="hf_abcdefghijklmnopqrstuvwx", use_cpu=True)
    torch.save(config, tmp_path / "training_args.bin")
    assert b"abcdefghijkl" not in (tmp_path / "training_args.bin").read_bytes()
    assert "abcdefghijkl" not in repr(config) + str(config.to_dict())
    assert os.environ["HF_TOKEN"] == "hf_abcdefghijklmnopqrstuvwx"  # where the hub's client looks for it
