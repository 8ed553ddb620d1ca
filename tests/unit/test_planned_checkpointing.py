"""``--checkpointing_policy auto``: the fastest policy that fits according to the plan, on GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from accel_scale.checks.case import Case
from accel_scale.errors import ConfigError
from accel_scale.facts.device import CPU, Device
from accel_scale.facts.names import AUTO_POLICIES
from accel_scale.flags.parsing import parse_flags
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.planning.models.catalogue import catalogue_config
from accel_scale.planning.search.requests import build_request
from accel_scale.planning.search.wish import Wish
from accel_scale.settings.planned_checkpointing import settle_checkpointing
from accel_scale.settings.planned_choice import resolve_planned
from accel_scale.settings.resolved import LaunchFacts, Resolved
from accel_scale.start_check import recipes
from accel_scale.start_check.plan import PlannedRun, PolicyRefused, Verdict
from accel_scale.training.checkpoints.manifest import Manifest, write_manifest
from accel_scale.training.checkpoints.settings import differences, meaning_of
from tests.unit.test_planned import FLAG_CLASSES

LAUNCH = LaunchEnvironment(LaunchStrategy("single"), None, 1, 1, 0, 0)
GPU = Device("cuda")
MODELS = {
    "135M": ("HuggingFaceTB/SmolLM2-135M", "--per_device_train_batch_size 8 --max_length 1024"),
    "0.6B": ("Qwen/Qwen3-0.6B", "--per_device_train_batch_size 4 --max_length 2048"),
    "qlora 8B": ("meta-llama/Llama-3.1-8B", "--method qlora --per_device_train_batch_size 1 --max_length 2048"),
    "lora 8B": ("meta-llama/Llama-3.1-8B", "--method lora --per_device_train_batch_size 4 --max_length 2048"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes a model's configuration without weights."""
    root = tmp_path_factory.mktemp("models")

    def write(model: str) -> Path:
        path = root / model.replace("/", "--")
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(catalogue_config(model)))
        return path

    return write


def settled(folder: Path, flags: str, *, device: Device = GPU, settle: bool = True) -> tuple[Resolved, list[str]]:
    argv = ["--model_name_or_path", str(folder), "--dataset_name", "x", *flags.split()]
    facts = LaunchFacts(device=device)
    settings = resolve_planned(parse_flags(FLAG_CLASSES, argv, program="sft.py"), facts, LAUNCH)
    lines: list[str] = []
    if settle:
        settle_checkpointing(settings, LAUNCH, AutoConfig.from_pretrained(folder), "sdpa_packed", lines.append)
    return settings, lines


@pytest.mark.parametrize(
    ("model", "card", "policy"),
    [
        ("135M", "16GiB", "selective"),
        ("135M", "24GiB", "none"),
        ("0.6B", "24GiB", "full"),
        ("0.6B", "RTX4090", "full"),
        ("0.6B", "RTX5090", "every_2"),  # with `selective` the host would be the bottleneck
        ("0.6B", "A100-80GB", "none"),
        ("qlora 8B", "12GiB", "full"),
        ("qlora 8B", "24GiB", "selective"),
        ("qlora 8B", "RTX4090", "every_2"),
        ("qlora 8B", "A100-80GB", "none"),
        ("lora 8B", "A100-80GB", "every_2"),
    ],
)
def test_the_fastest_that_fits_is_chosen_and_said(folder: Any, model: str, card: str, policy: str) -> None:
    """If only the memory of the GPU is known, the choice is the policy that recomputes least."""
    why = "the least that fits" if card.endswith("GiB") else "the fastest that fits"
    name, flags = MODELS[model]
    settings, lines = settled(folder(name), f"{flags} --plan_gpu {card}")
    assert str(settings.checkpointing) == settings.values["checkpointing_policy"] == policy
    assert settings.scale.checkpointing_policy == policy
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpointing: {policy}, {why}: predicted ")
    assert settings.sources["checkpointing_policy"].startswith(f"planned: {why}, predicted ")
    # On a laptop that plans for this GPU, the planned run gets the same policy.
    here, lines = settled(folder(name), f"{flags} --plan_gpu {card}", device=CPU)
    assert (str(here.checkpointing), str(here.on_card and here.on_card.checkpointing)) == ("none", policy)
    assert len(lines) == 1


def test_what_fits_no_card_keeps_the_default_for_the_plan_to_refuse(folder: Any) -> None:
    name, flags = MODELS["lora 8B"]
    settings, lines = settled(folder(name), f"{flags} --plan_gpu 12GiB")
    assert (str(settings.checkpointing), settings.next_policies, lines) == ("full", (), [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("card", "sources"), [("24GiB", "planned: the least"), ("1GiB", "derived: default")])
def test_of_a_class_without_checkpointing_nothing_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, sources: str
) -> None:
    """JetMoE's class refuses every other policy, so `full` would end the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 512, "num_key_value_heads": 4,
             "kv_channels": 32, "vocab_size": 32000, "num_attention_heads": 8}  # fmt: skip
    AutoConfig.for_model("jetmoe", **shape).save_pretrained(tmp_path)
    flags = f"--max_length 512 --per_device_train_batch_size 4 --attn_implementation sdpa --plan_gpu {card}"
    settings, lines = settled(tmp_path, flags)
    assert (str(settings.checkpointing), settings.next_policies) == ("none", ())
    assert settings.sources["checkpointing_policy"].startswith(sources)
    assert len(lines) == (card == "24GiB")


def test_what_the_user_set_wins(folder: Any) -> None:
    name, flags = MODELS["135M"]
    for given, policy in {
        "--checkpointing_policy full": "full",
        "--gradient_checkpointing true": "full",
        "--checkpointing_policy every_3": "every_3",
        "--long_rows": "offload",
    }.items():
        settings, lines = settled(folder(name), f"{flags} --plan_gpu 24GiB {given}")
        assert (str(settings.checkpointing), lines) == (policy, [])
    settings, _ = settled(folder(name), f"{flags} --checkpointing_policy auto --plan_gpu 16GiB")
    assert str(settings.checkpointing) == "selective"


def test_auto_is_printed_and_read_back_before_it_is_decided(folder: Any) -> None:
    settings, _ = settled(folder("HuggingFaceTB/SmolLM2-135M"), "--plan_gpu 24GiB", settle=False)
    assert 'checkpointing_policy: "auto"  # derived: left to the plan' in settings.as_yaml(FLAG_CLASSES)
    on_cpu, lines = settled(folder("HuggingFaceTB/SmolLM2-135M"), "--checkpointing_policy auto", device=CPU)
    assert (str(on_cpu.checkpointing), lines) == ("none", [])


def test_without_a_plan_it_is_full(folder: Any) -> None:
    name, flags = MODELS["135M"]
    settings, lines = settled(folder(name), f"{flags} --plan off")
    assert (str(settings.checkpointing), lines) == ("full", ["checkpointing: full, because nothing is planned"])
    with pytest.raises(ConfigError, match="--plan off makes none"):
        settled(folder(name), f"{flags} --plan off --checkpointing_policy auto")
    with pytest.raises(ConfigError, match="contradict"):
        settled(folder(name), f"{flags} --checkpointing_policy auto --gradient_checkpointing true")
    settings, (line,) = settled(folder(name), f"{flags} --plan_gpu 24GiB --method lora --load_in_8bit true")
    assert str(settings.checkpointing) == "full"
    assert "cannot be planned: memory of an 8-bit base is not modelled" in line


def test_plan_auto_chooses_it_with_the_rest(folder: Any) -> None:
    name, _ = MODELS["135M"]
    flags = "--plan auto --plan_gpu 12GiB --checkpointing_policy auto --global_batch_size 8 --max_length 1024"
    settings, lines = settled(folder(name), flags)
    assert str(settings.checkpointing) in AUTO_POLICIES
    assert settings.sources["checkpointing_policy"].startswith("planned: fits ")
    assert lines == []


def test_a_run_that_goes_on_keeps_its_policy(folder: Any, tmp_path: Path) -> None:
    name, flags = MODELS["135M"]
    before, _ = settled(folder(name), f"{flags} --plan_gpu 16GiB")
    record = meaning_of(before.values)
    assert record["checkpointing_policy"] == "selective"
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    manifest = Manifest.of_run(
        3, world_size=1, strategy="single", layout="whole", stopped_by=None, settings={**record, "seed": 42}
    )
    write_manifest(checkpoint, manifest)
    flags += " --plan_gpu 24GiB"  # a fresh run would recompute nothing here
    for how in ("", f"--resume_from_checkpoint {checkpoint}"):
        after, (line,) = settled(folder(name), f"{flags} --output_dir {tmp_path} {how}")
        assert str(after.checkpointing) == "selective"
        assert line == "checkpointing: selective, as the run that goes on has it"
    fresh, _ = settled(folder(name), f"{flags} --output_dir {tmp_path} --resume_from_checkpoint no")
    assert str(fresh.checkpointing) == "none"
    # A policy or seed that the user changes does not make it a different run.
    assert differences(record, meaning_of({**before.values, "checkpointing_policy": "full"})) == []
    assert differences(record, meaning_of({**before.values, "seed": 7})) == []


def test_a_policy_that_changes_gradients_gives_way_to_the_next(folder: Any, monkeypatch: Any) -> None:
    name, flags = MODELS["135M"]
    settings, _ = settled(folder(name), f"{flags} --plan_gpu 16GiB")
    assert settings.next_policies == ("every_2", "full")
    config = AutoConfig.from_pretrained(folder(name))

    def check(run: PlannedRun) -> Verdict:
        if run.policy.kind in ("selective", "every_n"):
            raise PolicyRefused("it changes gradients.", place="--checkpointing_policy")
        return Verdict(run.attention)

    monkeypatch.setattr(recipes, "check_start", check)
    lines: list[str] = []
    run = PlannedRun(config, "sdpa", "packed", settings.checkpointing)
    recipes._said(run, settings, lines.append)
    assert str(settings.checkpointing) == "full"
    assert lines[0].startswith("checkpointing: every_2, because selective does not leave")
    settings.set_checkpointing("selective", "--checkpointing_policy")
    settings.next_policies = ()
    with pytest.raises(PolicyRefused):
        recipes._said(run, settings, lines.append)


def test_the_other_commands_take_it_as_left_open() -> None:
    assert (
        "checkpointing" not in build_request(Wish("Qwen/Qwen3-0.6B", gpu="24GiB", checkpointing_policy="auto")).fixed
    )
    run = SimpleNamespace(checkpointing_policy="auto", activation_checkpointing=None)
    for device, checkpoints in ((GPU, True), (CPU, False)):
        assert Case.checkpoints.fget(SimpleNamespace(run=run, device=device)) is checkpoints  # type: ignore[attr-defined]


def test_every_automatic_policy_is_one() -> None:
    assert [str(CheckpointingPolicy.parse(policy)) for policy in AUTO_POLICIES] == list(AUTO_POLICIES)
