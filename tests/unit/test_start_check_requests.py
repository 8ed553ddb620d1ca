"""Each recipe's request to the start check, and its use of the answer: flags to request, verdict to notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from test_pretrain_resolve import resolved as pretraining
from test_resolve import settle
from torch import nn
from transformers import BertConfig, LlamaConfig, MixtralConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from accel_scale.errors import ConfigError
from accel_scale.facts.device import Device, device_named
from accel_scale.flags.pretraining import PretrainModelArguments
from accel_scale.launching.environment import LaunchEnvironment
from accel_scale.launching.strategy import LaunchStrategy
from accel_scale.modeling.activation_checkpointing import CheckpointingPolicy
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.settings.planned_setup import SharedModel
from accel_scale.settings.resolved import LaunchFacts
from accel_scale.settings.trl_config import RecipeModelConfig
from accel_scale.start_check import recipes, twin_check
from accel_scale.start_check.plan import AttentionRefused, Crashed, PlannedRun, PolicyRefused, Verdict

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64)
MIXTRAL = MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=64, router_aux_loss_coef=0.03)
PLAIN = ParallelLayout()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[PlannedRun]]:
    """Replace the check by a fixed verdict and record the requests."""

    def use(**verdict: Any) -> list[PlannedRun]:
        seen: list[PlannedRun] = []

        def check(run: PlannedRun) -> Verdict:
            seen.append(run)
            return Verdict(run.attention, **verdict)

        monkeypatch.setattr(recipes, "check_start", check)
        return seen

    return use


def sft(flags: str = "", strategy: str = "single", config: Any = LLAMA, device: Device | None = None, **recipe: Any):
    settings = settle(flags, launch=LaunchFacts(strategy=strategy, device=device or Device("cuda")))
    settings.recipe = replace(settings.recipe, **recipe)
    lines: list[str] = []
    model_args = settings.build(RecipeModelConfig)
    return recipes.check_sft_start(settings, model_args, config, "sdpa", say=lines.append), lines


def test_the_usual_fine_tuning_run(asked: Any) -> None:
    seen = asked(notes=("one", "two"))
    verdict, lines = sft("--checkpointing_policy every_2")
    (run,) = seen
    assert run == PlannedRun(LLAMA, "sdpa", "packed", CheckpointingPolicy.parse("every_2"), router_loss=0.0)
    assert lines == ["note: one", "note: two"]
    assert verdict == Verdict("sdpa", notes=("one", "two"))


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--packing false", {"rows": "padded"}),
        ("--packing false --padding_free true", {"packing_flag": "--packing false --padding_free false"}),
        ("--attn_implementation eager", {"attention_given": True}),
        ("--trust_remote_code", {"trust_remote_code": True}),
        ('--gradient_checkpointing_kwargs {"use_reentrant":true}', {"use_reentrant": True}),
    ],
)
def test_flags_that_the_check_is_told_of(asked: Any, flags: str, changes: dict) -> None:
    seen = asked()
    sft(flags)
    plain = PlannedRun(LLAMA, "sdpa", "packed", CheckpointingPolicy("full"), router_loss=0.0)
    assert seen == [replace(plain, **changes)]


def test_zero3_recomputes_adapters_in_the_reentrant_way(asked: Any) -> None:
    seen = asked(exclude_modules=("gate_proj",))
    for flags, strategy, reentrant, named in (
        ("--method lora --lora_target_modules q_proj gate_proj", "zero3", True, True),
        ("--method lora", "fsdp2", False, False),
        ("", "zero3", False, False),
    ):
        verdict, _ = sft(flags, strategy)
        run = seen[-1]
        assert (run.use_reentrant, run.targets_given) == (reentrant, named)
        assert verdict.use_reentrant is reentrant
        assert (verdict.adapter is not None) == bool(flags)
        if verdict.adapter is not None:
            assert verdict.adapter is run.adapter
            assert "gate_proj" in verdict.adapter.exclude_modules


def test_routers_losses_are_weighed_as_trl_does(asked: Any) -> None:
    seen = asked()
    for flags, config, weight in (
        ("", MIXTRAL, 0.03), ("--router_aux_loss_coef 0.5", MIXTRAL, 0.5), ("--router_aux_loss_coef 0", MIXTRAL, 0.0),
        ("--router_aux_loss_coef 0.5", LLAMA, 0.0),
    ):  # fmt: skip
        sft(flags, config=config)
        assert seen[-1].router_loss == weight
    # For pairs, log-probabilities are compared, in rows that are not packed.
    sft("--padding_free true", config=MIXTRAL, loss="log_probs", config_class="RecipeDPOConfig")
    assert (seen[-1].router_loss, seen[-1].log_probs, seen[-1].rows) == (0.0, True, "padded")


def test_score_matrices_of_sdpa_are_noted_after_the_rest(asked: Any) -> None:
    asked(notes=("one",))
    _, lines = sft("--precision fp16", device=device_named("T4"))
    assert lines[0] == "note: one"
    assert lines[1].startswith("note: T4 has no kernel for grouped heads in float16")
    assert len(lines) == 2


# ── Pretraining ──────────────────────────────────────────────────────────────────────────────────────────────────────


def pretrain(flags: str = "", strategy: str = "single", *, isolate: bool = True, layout: ParallelLayout = PLAIN,
             config: Any = LLAMA):  # fmt: skip
    settings = pretraining(flags, strategy=strategy)
    settings.sources = {name: f"--{name}" for name in ("lora_target_modules",) if name in flags}
    model_args = settings.build(PretrainModelArguments)
    return recipes.check_pretrain_start(
        settings, model_args, config, "sdpa", isolate_documents=isolate, layout=layout, say=lambda line: None
    )


def test_the_usual_pretraining_run(asked: Any) -> None:
    seen = asked()
    pretrain()
    pretrain("--attn_implementation eager --trust_remote_code true", isolate=False)
    plain = PlannedRun(
        LLAMA, "sdpa", "lanes", CheckpointingPolicy("none"), packing_flag="--isolate_documents false",
    )  # fmt: skip
    other = replace(plain, rows="stream", attention_given=True, trust_remote_code=True)
    assert seen == [plain, other]
    assert plain.router_loss is None, "as the configuration says"


def test_adapters_in_pretraining(asked: Any) -> None:
    seen = asked()
    lora = "--method lora --lora_r 4 --lora_target_modules q_proj"
    for strategy, reentrant in (("zero3", True), ("fsdp2", False)):
        pretrain(lora, strategy)
        assert isinstance(seen[-1].adapter, LoraConfig)
        assert (seen[-1].use_reentrant, seen[-1].targets_given) == (reentrant, True)


def test_ranks_that_share_a_model_can_share_neither_its_head_nor_its_routers_loss(asked: Any) -> None:
    asked(loss_from_logits=True)
    shared = ParallelLayout(tp=2)
    assert pretrain().loss_from_logits
    with pytest.raises(ConfigError, match="more than one matrix product") as refused:
        pretrain(layout=shared)
    assert refused.value.place == "--tp_size, --pp_size and --sp_size"
    seen = asked()
    pretrain(layout=shared)
    assert len(seen) == 1
    with pytest.raises(ConfigError, match="auxiliary loss"):
        pretrain(layout=shared, config=MixtralConfig(**SIZES, output_router_logits=True, vocab_size=64))


# ── What is left to the machine ──────────────────────────────────────────────────────────────────────────────────────


def test_kernels_are_settled_before_what_is_recomputed_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "accel_scale.start_check.fused.settle_fused_kernels",
        lambda settings, config, say, **how: calls.append(("fused", how)) or settings.agreed_kernels,
    )
    monkeypatch.setattr(
        "accel_scale.settings.planned_checkpointing.settle_checkpointing",
        lambda settings, launch, config, attention, say, **how: calls.append(("policy", how)),
    )
    for device, strategy, shared, expected, divides in (
        (Device("cuda"), {}, None, torch.device("cuda", 3), False),
        (Device(), {"tensor_parallel_size": 2}, None, torch.device("cpu"), True),
        (Device(), {}, SharedModel(ParallelLayout(tp=2)), torch.device("cpu"), True),
        (Device(), {}, SharedModel(ParallelLayout(sp=2)), torch.device("cpu"), False),
    ):
        calls.clear()
        lines: list[str] = []
        settings = settle("", launch=LaunchFacts(device=device))
        settings.agreed_kernels = ("RMSNorm",)
        launch = LaunchEnvironment(LaunchStrategy("ddp", **strategy), None, 8, 4, 7, 3)
        recipes.settle_open(settings, launch, LLAMA, "sdpa", lines.append, shared=shared)
        fused, policy = calls
        assert fused == ("fused", {"device": expected, "divides_tensors": divides})
        assert policy == ("policy", {"shared": shared})
        # On a CPU, the table of the run says so.
        assert [line.startswith("fused kernels: Liger's RMSNorm") for line in lines] == [True] * (
            device.type == "cuda"
        )


# ── What is said of a twin ───────────────────────────────────────────────────────────────────────────────────────────


class Block(GradientCheckpointingLayer):
    pass


@pytest.mark.parametrize(
    ("policy", "layers", "expected"),
    [("every_3", 2, "every_2"), ("every_2", 3, "every_2"), ("every_3", 1, "full"), ("full", 2, "full"),
     ("offload", 1, "offload")],
)  # fmt: skip
def test_a_distance_between_checkpoints_that_few_layers_allow(policy: str, layers: int, expected: str) -> None:
    model = nn.ModuleList([Block() for _ in range(layers)] + [nn.Linear(1, 1)])
    given = replace(CheckpointingPolicy.parse(policy), in_tiles=True)
    found = twin_check._for_few_layers(given, model)
    assert (str(found), found.in_tiles) == (expected, True)


A, B = "m.layers.0.gate_proj.lora_A.default.weight", "m.layers.1.gate_proj.lora_A.default.weight"
Q = "m.layers.0.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("untrained", "trained", "adapter", "excluded", "note"),
    [
        ([], [Q], True, [], None),
        (["a", "b"], ["c"], False, [], "2 weights get no gradient and stay as they are: a, b."),
        (["a", "b", "c"], ["d"], False, [], "3 weights get no gradient and stay as they are: a, b, c."),
        (["a", "b", "c", "d"], [], False, [], "4 weights get no gradient and stay as they are: a, b, c, …."),
        ([A, B], [Q], True, ["gate_proj"], "no adapters on gate_proj: no gradient would reach them."),
        ([A], [B, Q], True, [], f"1 adapter weights get no gradient and stay as they are: {A}."),
        (["m.lm_head.weight"], [Q], True, [], "1 adapter weights get no gradient and stay as they are: m.lm_head.w"),
    ],
)
def test_weights_that_never_train_are_left_out_or_named(
    untrained: list[str], trained: list[str], adapter: bool, excluded: list[str], note: str | None
) -> None:
    run: Any = PlannedRun(
        LLAMA, "sdpa", "padded", CheckpointingPolicy("none"), adapter=LoraConfig() if adapter else None
    )
    found, notes = twin_check._adapters_to_leave_out(run, untrained, dict.fromkeys([*untrained, *trained]))
    assert found == excluded
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)
    named = replace(run, targets_given=True)
    if excluded:
        with pytest.raises(ConfigError, match="would never train") as refused:
            twin_check._adapters_to_leave_out(named, untrained, dict.fromkeys([*untrained, *trained]))
        assert refused.value.fix == "leave out gate_proj."
    else:
        assert twin_check._adapters_to_leave_out(named, untrained, dict.fromkeys(trained)) == (found, notes)


def test_a_routers_loss_is_set_in_a_copy_of_the_configuration() -> None:
    assert twin_check._with_router_loss(MIXTRAL, None) is MIXTRAL
    for weight, told in ((0.0, False), (0.5, True)):
        config = twin_check._with_router_loss(MIXTRAL, weight)
        assert (config.output_router_logits, config.router_aux_loss_coef) == (told, weight)
    assert (MIXTRAL.output_router_logits, MIXTRAL.router_aux_loss_coef) == (False, 0.03)
    assert not hasattr(twin_check._with_router_loss(LLAMA, 0.5), "output_router_logits")


# ── The order of a twin's steps ──────────────────────────────────────────────────────────────────────────────────────


class Scripted(twin_check.TwinCheck):
    """Steps that equal the model's own for the given heads and policies, and for no others."""

    def __init__(self, run: PlannedRun, *good: tuple[str, str]) -> None:
        self.run, self.name, self.base, self.model = run, "Toy", SimpleNamespace(config=run.config), nn.Identity()
        self.batch: Any = SimpleNamespace(inputs={})
        self.logits = torch.zeros(1)
        self.good, self.head, self.policy = good, "all", "none"
        self.applied: list[str] = []

    def add_head(self, head: Any) -> None:
        self.head = head

    def apply(self, policy: CheckpointingPolicy) -> None:
        self.policy = f"{policy} in tiles" if policy.in_tiles else str(policy)
        self.applied.append(self.policy)

    def compared(self, own: Any) -> Any:
        is_good = (self.head, self.policy) in self.good
        return (f"{self.head} {self.policy}", "") if is_good else (None, f"apart by {self.head} {self.policy}")


def planned(policy: str = "full", *, in_tiles: bool = False, config: Any = LLAMA, **changes: Any) -> PlannedRun:
    checkpointing = replace(CheckpointingPolicy.parse(policy), in_tiles=in_tiles)
    return PlannedRun(config, "eager", "padded", checkpointing, **changes)


@pytest.mark.parametrize(
    ("policy", "good", "applied", "head"),
    [
        ("none", [("labelled", "none")], [], "labelled"),
        ("none", [("all", "none")], [], "all"),
        ("full", [("labelled", "full"), ("all", "full")], ["full"], "labelled"),
        # The head is to blame, not the policy: without a policy the loss is just as far off.
        ("full", [("logits", "full")], ["full", "none", "full", "none", "full"], "logits"),
        ("none", [("logits", "none")], [], "logits"),
        # Labelled tokens alone work only without the policy, which is more important.
        ("full", [("labelled", "none"), ("all", "full")], ["full", "none", "full"], "all"),
    ],
)
def test_a_step_is_taken_with_the_cheapest_head_that_gives_the_models_own(
    policy: str, good: list, applied: list[str], head: str
) -> None:
    check = Scripted(planned(policy), *good)
    assert check.recipe_step(None) == (f"{head} {policy}", head)  # type: ignore[arg-type]
    assert check.applied == applied


@pytest.mark.parametrize(
    ("policy", "good", "fix"),
    [
        ("full", ["none"], "use none."),
        ("full", ["none", "offload"], "use offload."),
        ("selective", ["none", "offload", "full"], "use full."),
        ("offload", ["none", "full"], "use full."),
    ],
)
def test_a_policy_that_changes_gradients_is_refused_for_one_that_does_not(
    policy: str, good: list[str], fix: str
) -> None:
    with pytest.raises(PolicyRefused, match=f"{policy} does not leave Toy's .*: apart by all {policy}") as refused:
        Scripted(planned(policy), *(("all", name) for name in good)).recipe_step(None)  # type: ignore[arg-type]
    assert (refused.value.place, refused.value.fix) == ("--checkpointing_policy", fix)


def test_tiles_are_refused_where_the_policy_without_them_is_right() -> None:
    check = Scripted(planned(in_tiles=True), ("all", "none"), ("all", "full"))
    with pytest.raises(
        ConfigError, match=r"in tiles does not leave its gradients .*: apart by all full in"
    ) as refused:
        check.recipe_step(None)  # type: ignore[arg-type]
    assert (refused.value.place, refused.value.fix) == (
        "--long_rows", "leave it out, and use --checkpointing_policy full.",
    )  # fmt: skip
    with pytest.raises(PolicyRefused):
        Scripted(planned(in_tiles=True), ("all", "none")).recipe_step(None)  # type: ignore[arg-type]


def test_a_loss_that_is_no_way_the_models_own_is_refused_by_what_it_is_made_of() -> None:
    told = MixtralConfig(**SIZES, output_router_logits=True, vocab_size=64)
    for run, place, says in (
        (planned(), "start check", "the recipe's loss is not Toy's own: apart by logits none."),
        (planned(log_probs=True), "start check", "TRL's head are not Toy's own: apart by all none."),
        (planned(config=told), "--router_aux_loss_coef", "auxiliary loss is not Toy's own: apart by logits none."),
    ):
        with pytest.raises(ConfigError) as refused:
            Scripted(run).recipe_step(None)  # type: ignore[arg-type]
        assert refused.value.place == place
        assert refused.value.problem.endswith(says)


@pytest.mark.parametrize(
    ("leak", "run", "kind", "place", "fix"),
    [
        ("ahead", planned(config=BertConfig()), AttentionRefused, "--model_name_or_path",
         'set is_decoder: "is_decoder": true in its config.json.'),
        ("ahead", planned(), AttentionRefused, "--model_name_or_path", "train a causal model."),
        ("others", replace(planned(), rows="lanes", packing_flag="--isolate_documents false"), AttentionRefused,
         "--isolate_documents", None),
        ("others", planned(), ConfigError, "--per_device_train_batch_size", "use 1, with gradient accumulation."),
    ],
)  # fmt: skip
def test_leaks_by_who_notices(
    monkeypatch: pytest.MonkeyPatch, leak: str, run: PlannedRun, kind: Any, place: str, fix: str | None
) -> None:
    monkeypatch.setattr("accel_scale.start_check.isolation.find_leak", lambda *seen: leak)
    with pytest.raises(ConfigError) as refused:
        Scripted(run).refuse_leak()
    assert type(refused.value) is kind
    assert (refused.value.place, refused.value.fix) == (place, fix)
    monkeypatch.setattr("accel_scale.start_check.isolation.find_leak", lambda *seen: "none")
    Scripted(run).refuse_leak()


def test_a_twin_that_cannot_take_a_step_says_on_which_rows() -> None:
    with pytest.raises(
        Crashed, match=r"^--attn_implementation: Toy cannot take a step with eager attention on padded"
    ):
        Scripted(planned()).own_step()
