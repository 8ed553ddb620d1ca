"""Steps of the search one by one: what fits a described GPU, which of equals comes first, what is tried."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from accel_scale.errors import ConfigError
from accel_scale.facts.hardware import Machine, find_gpu
from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.cost.strategies import ParallelChoice
from accel_scale.planning.models.catalogue import load_model_facts
from accel_scale.planning.models.training_setup import ParallelSetup, TrainingSetup
from accel_scale.planning.search import search as steps
from accel_scale.planning.search import settings as space
from accel_scale.planning.search.model_parallel import Degrees
from accel_scale.planning.search.plan import Rejection, Request
from accel_scale.planning.search.recipe_choices import PRETRAIN_PLAN, SFT_PLAN

SMALL = load_model_facts("HuggingFaceTB/SmolLM2-135M", allow_download=False)
GIB = 2**30
FOUR = Machine(find_gpu("A100-80GB"), num_gpus=4, gpus_per_node=4)
PLAIN = TrainingSetup(micro_batch_size=4, sequence_length=256)
MEMORY = predict_memory(SMALL, PLAIN)


def choice(strategy: str, gpus: int = 4, label: str = "", effort: int = 1, **parallel: Any) -> ParallelChoice:
    return ParallelChoice(label or strategy, ParallelSetup(strategy, gpus, 4, **parallel), effort)


def asked(**changes: Any) -> Request:
    return Request(SMALL, FOUR, **{"global_batch_size": 16, "sequence_length": 256, **changes})


# ── What fits ────────────────────────────────────────────────────────────────────────────────────────────────────────


def needing(num_bytes: float) -> MemoryEstimate:
    """`MEMORY` with this upper end, and nothing that the allocator hoards."""
    return replace(MEMORY, device_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, hoarded_bytes=0.0)


def test_the_upper_end_of_the_interval_must_fit_to_the_byte() -> None:
    card = replace(FOUR.gpu, memory_bytes=24 * GIB)
    machine = replace(FOUR, gpu=card)
    assert steps.problem_of(machine, PLAIN, needing(24 * GIB)) is None
    said = steps.problem_of(machine, PLAIN, needing(24.5 * GIB))
    assert said is not None
    assert said.startswith("24.5 GiB > 24 GiB: ")
    assert said.endswith("(full checkpointing, micro-batch 4, adamw_torch_fused)")
    name, size = max(MEMORY.peak_phase.terms, key=lambda term: term[1])
    assert f": {name} " in said
    assert size == max(value for _, value in MEMORY.peak_phase.terms)


@pytest.mark.parametrize(
    ("setup", "processes"),
    [
        (PLAIN, 4),  # each process maps the model
        (replace(PLAIN, parallel=ParallelSetup("ddp", 4, 4)), 4),
        (replace(PLAIN, parallel=ParallelSetup("fsdp2", 4, 4)), 1),  # one process loads for all
        (replace(PLAIN, parallel=ParallelSetup("ddp", 4, 4, tensor_parallel=2)), 1),
        (replace(PLAIN, parallel=ParallelSetup("fsdp2", 4, 4, offload_params="cpu")), 4),  # each keeps its own part
        (replace(PLAIN, parallel=ParallelSetup("fsdp2", 4, 4), checkpointing="offload"), 4),
    ],
)
def test_host_memory_is_that_of_all_processes_of_a_server(setup: TrainingSetup, processes: int) -> None:
    memory = replace(MEMORY, high_bytes=GIB, host_bytes=10 * GIB)
    assert steps.problem_of(FOUR, setup, memory) is None, "not known"
    enough = replace(FOUR, host_memory_bytes=10 * processes * GIB)
    assert steps.problem_of(enough, setup, memory) is None
    assert steps.problem_of(replace(enough, num_gpus=8), setup, memory) is None, "a server's own"
    little = replace(enough, host_memory_bytes=enough.host_memory_bytes - 1)
    assert steps.problem_of(little, setup, memory) == f"{10 * processes} GiB of host memory > {10 * processes} GiB"


# ── Which comes first ────────────────────────────────────────────────────────────────────────────────────────────────


def candidate(seconds: float | None, *simplicity: int, accumulation: int = 1) -> Any:
    time = None if seconds is None else SimpleNamespace(step_seconds=seconds)
    return SimpleNamespace(time=time, simplicity=simplicity, setup=SimpleNamespace(accumulation=accumulation))


def test_the_simplest_of_those_that_are_about_as_fast_comes_first() -> None:
    fast, near, late = candidate(1.0, 3), candidate(1.03, 1), candidate(1.04, 0)
    assert steps._rank([late, near, fast]) == [near, fast, late]
    # Within three per cent of the fastest remaining one.
    assert steps._rank([candidate(2.0, 0), candidate(1.0, 9)])[0].time.step_seconds == 1.0
    unknown = [candidate(None, 2, accumulation=1), candidate(None, 1, accumulation=8), candidate(None, 1)]
    assert steps._rank([*unknown, fast]) == [fast, unknown[2], unknown[1], unknown[0]]


def test_of_what_does_not_fit_the_nearest_of_each_method_is_said() -> None:
    def rejection(method: str, high: float | None) -> Rejection:
        memory = None if high is None else needing(high)
        return Rejection(f"{high}", method, "too large", None, memory)

    given = [rejection("full", None), rejection("full", 9.0), rejection("lora", 5.0), rejection("full", 7.0),
             rejection("full", 8.0), rejection("qlora", None), rejection("qlora", None)]  # fmt: skip
    assert steps._nearest(given) == [given[3], given[2], given[5]]


# ── What is tried ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_micro_batches_are_powers_of_two_that_divide_a_ranks_share() -> None:
    assert [space._divisors(n) for n in (1, 6, 64, 256, 7)] == [
        (1,), (1, 2), (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64), (1,),
    ]  # fmt: skip


def settings(request: Request, chosen: ParallelChoice, method: str = "full") -> list[list[TrainingSetup]]:
    return list(space.settings_of(request, chosen, method))


def test_settings_of_one_strategy_are_tried_from_the_leanest() -> None:
    found = settings(asked(), choice("ddp"))
    assert [setup.checkpointing for sizes in found for setup in sizes][:3] == ["full"] * 3
    policies = list(dict.fromkeys(setup.checkpointing for sizes in found for setup in sizes))
    assert policies == ["full", "selective", "none"]
    optimizers = list(dict.fromkeys(setup.optimizer for sizes in found for setup in sizes))
    assert optimizers == ["adamw_torch_fused", "adamw_torch_8bit", "paged_adamw_8bit"]
    # Sixteen rows on four ranks: 1 or 2 at a time with accumulation, and all four at once in a separate list.
    assert [[s.micro_batch_size for s in sizes] for sizes in found[:2]] == [[1, 2], [4]]
    for setup in (setup for sizes in found for setup in sizes):
        assert setup.global_batch_size == 16
        assert not setup.sync_each_batch
    assert len(found) == 3 * 3 * 2


def test_fsdp2_may_reduce_the_gradients_of_every_micro_batch() -> None:
    found = settings(asked(), choice("fsdp2"))
    assert [(sizes[0].micro_batch_size, sizes[0].sync_each_batch) for sizes in found[:3]] == [
        (1, False), (1, True), (4, False),
    ]  # fmt: skip
    assert not any(setup.sync_each_batch for sizes in settings(asked(), choice("fsdp2"), "lora") for setup in sizes)
    divided = settings(asked(), choice("fsdp2", tensor_parallel=2))
    assert {setup.optimizer for sizes in divided for setup in sizes} == {"adamw_torch_fused"}
    assert not any(setup.sync_each_batch for sizes in divided for setup in sizes)
    adapters = settings(asked(), choice("ddp"), "lora")
    assert {setup.optimizer for sizes in adapters for setup in sizes} == {"adamw_torch_fused"}


def test_what_is_fixed_is_not_tried_otherwise() -> None:
    fixed = {"checkpointing": "every_2", "optimizer": "sgd", "micro_batch_size": 2, "sync_each_batch": True}
    (one,) = [sizes for sizes in settings(asked(fixed={**fixed, "precision": "fp16"}), choice("fsdp2")) if sizes]
    (setup,) = one
    assert (setup.checkpointing, setup.optimizer, setup.micro_batch_size) == ("every_2", "sgd", 2)
    assert (setup.accumulation, setup.sync_each_batch, setup.precision) == (2, True, "fp16")
    assert not any(settings(asked(fixed={"micro_batch_size": 3}), choice("ddp"))), "it does not divide four rows"


def test_pairs_come_in_twos_beside_a_reference_model() -> None:
    pairs = replace(SFT_PLAN, rows_per_example=2, has_reference_model=True)
    found = [setup for sizes in settings(asked(recipe=pairs), choice("ddp")) for setup in sizes]
    assert {setup.micro_batch_size for setup in found} == {2, 4}
    assert all(setup.reference_model for setup in found)
    lora = [setup for sizes in settings(asked(recipe=pairs), choice("ddp"), "lora") for setup in sizes]
    assert not any(setup.reference_model for setup in lora)


def test_why_a_strategy_is_none_of_those_found() -> None:
    none = steps._fastest(asked(global_batch_size=6), choice("ddp", label="DDP"), "full")
    expected = Rejection("DDP", "full", "6 sequences do not divide among 4 data-parallel ranks")
    assert none == (None, expected, 0)
    odd = steps._fastest(asked(fixed={"micro_batch_size": 3}), choice("ddp", label="DDP"), "full")
    assert odd == (None, Rejection("DDP", "full", "no micro-batch divides a rank's share of the batch"), 0)
    fixed = {"optimizer": "adamw_8bit", "checkpointing": "full"}
    best, rejection, count = steps._fastest(asked(fixed=fixed), choice("fsdp2", label="FSDP2"), "full")
    assert best is None
    assert rejection.reason == "adamw_8bit does not work there: it cannot step the sharded tensors of FSDP2."
    assert (rejection.setup, rejection.memory, count) == (None, None, 5)
    tiny = replace(FOUR, gpu=replace(FOUR.gpu, memory_bytes=GIB))
    best, rejection, _ = steps._fastest(replace(asked(), machine=tiny), choice("ddp", label="DDP"), "full")
    assert best is None
    assert rejection.setup is not None
    assert rejection.memory is not None
    # The setting that needs the least memory of all that were tried.
    assert rejection.memory.high_bytes == min(
        predict_memory(SMALL, sizes[0]).high_bytes for sizes in settings(asked(), choice("ddp")) if sizes
    )


def test_only_the_strategies_that_were_asked_for_are_tried() -> None:
    options = [choice("ddp", label="DDP"), choice("fsdp2", label="FSDP2")]
    fixed = {"checkpointing": "full", "optimizer": "adamw_torch_fused", "micro_batch_size": 4}
    request = asked(strategies=("FSDP2",), methods=("full", "lora"), fixed=fixed)
    found, rejected, considered = steps._try(request, options)
    assert [(c.choice.label, c.setup.method) for c in found] == [("FSDP2", "full"), ("FSDP2", "lora")]
    assert (rejected, considered) == ([], 2)
    everything, _, considered = steps._try(replace(request, strategies=()), options)
    assert (len(everything), considered) == (4, 4)
    given = replace(request, choices=(options[0],), strategies=())
    assert [c.choice.label for c in steps.search(given).candidates] == ["DDP", "DDP"]


def test_times_are_of_documents_and_none_where_a_speed_is_not_known() -> None:
    setup = replace(PLAIN, sequence_length=8192, micro_batch_size=1)
    whole, short = (steps.time_of(asked(document_length=length), setup) for length in (None, 128.0))
    assert whole is not None
    assert short is not None
    assert short.matmul_seconds < whole.matmul_seconds
    nameless = asked()
    nameless = replace(nameless, machine=Machine(find_gpu("24GiB")))
    assert steps.time_of(nameless, PLAIN) is None
    apart = Machine(find_gpu("A100-80GB"), num_gpus=16)
    two = replace(PLAIN, parallel=ParallelSetup("ddp", 16))
    assert steps.time_of(replace(asked(), machine=apart), two) is None, "the network is not known"


def test_who_may_share_a_model_and_when() -> None:
    long = {"sequence_length": 2**21, "fixed": {"attention": "flash_attention_2"}}
    for changes, may in (
        ({"recipe": PRETRAIN_PLAN}, True),
        ({"recipe": replace(PRETRAIN_PLAN, shared_by=())}, False),
        ({}, False),  # the recipe's rows are short
        ({"degrees": Degrees(sequence=2)}, True),
        (long, True),
    ):
        assert steps.may_share(asked(**changes)) is may, changes
    assert not steps._has_long_rows(asked(sequence_length=1024, fixed={"micro_batch_size": 64})), "of one row"


def test_batches_that_ranks_alone_cannot_share() -> None:
    with pytest.raises(ConfigError) as refused:
        steps.search(asked(global_batch_size=6))
    assert (refused.value.place, refused.value.fix) == ("--global_batch_size", "use a multiple of 4.")
    llama = load_model_facts("meta-llama/Llama-3.2-1B", allow_download=False)
    plan = steps.search(replace(asked(global_batch_size=2, recipe=PRETRAIN_PLAN), model=llama))
    assert plan.rejections[0] == Rejection("data parallelism alone", "full", "2 sequences do not divide among 4 ranks")
    assert plan.best is not None
    assert plan.best.setup.parallel.model_parallel >= 2
    alone = replace(asked(global_batch_size=3), machine=Machine(find_gpu("A100-80GB")))
    assert steps.search(alone).best is not None
