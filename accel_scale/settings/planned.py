"""The planner inside a recipe: before loading, refuse what cannot fit, or choose what the user left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from accel_scale.errors import ConfigError, NotRunError
from accel_scale.planning.cost.communication import step_collectives
from accel_scale.planning.cost.memory import MemoryEstimate, predict_memory
from accel_scale.planning.cost.timing import TimeEstimate, known_time
from accel_scale.planning.models.model_facts import ModelFacts
from accel_scale.planning.models.traced import facts_of_any
from accel_scale.planning.models.training_setup import GenerationSetup, TrainingSetup
from accel_scale.planning.search.changes import as_flag, cheapest_changes, launch_label
from accel_scale.planning.search.recipe_choices import SFT_PLAN
from accel_scale.planning.search.search import Request
from accel_scale.settings.planned_setup import SharedModel, Target, recipe_value, setup_of, target_of
from accel_scale.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from accel_scale.launching.environment import LaunchEnvironment
    from accel_scale.settings.resolved import Resolved

# Number of rows measured if rows are padded: enough to see the longest of a thousand.
_SAMPLED_ROWS = 1000
_NO_LIMIT = 2**22
_BATCH_FLAG = "--per_device_train_batch_size"


class AnswerSizes(TypedDict):
    """The fields of a `TrainingSetup` that depend on answers and prompts."""

    sequence_length: int
    generation: GenerationSetup


@dataclass(frozen=True)
class RunPlan:
    """A run as the planner sees it, and its predictions.

    Attributes:
        facts: The model's shapes.
        setup: How the model is trained on the target.
        target: The machine that the run is planned for.
        place: The flag that asks for the plan, for messages.
        memory: Memory on one rank.
        time: Time of a step; None if a speed is not known.
        here: How the model is trained on this machine, if that differs from `setup`.
        rows_per_example: Rows per example of the recipe, whose batch sizes count examples.
    """

    facts: ModelFacts
    setup: TrainingSetup
    target: Target
    place: str
    memory: MemoryEstimate
    time: TimeEstimate | None
    here: TrainingSetup | None = None
    rows_per_example: int = 1

    @property
    def limit_bytes(self) -> int:
        """The memory of the card."""
        return self.target.machine.gpu.memory_bytes

    @property
    def fits(self) -> bool:
        """True if the upper end of the predicted interval fits."""
        return self.memory.high_bytes <= self.limit_bytes

    @property
    def text(self) -> str:
        """``predicted 5.21 ± 0.42 GiB of 23.6 GiB (RTX 4090)``."""
        card = self.target.machine.gpu.name
        return f"predicted {size_text(self.memory)} of {format_bytes(self.limit_bytes)} ({card})"

    @property
    def least_rows(self) -> int:
        """The least number of rows in a micro-batch."""
        return max(self.rows_per_example, self.setup.least_rows)

    def refuse(self) -> None:
        """Raise a `ConfigError` if the run may not fit: memory predicted and available, largest term, remedies."""
        if self.setup.vllm is not None:
            self.setup.vllm.refuse_weights(self.facts.num_params)
        if self.fits:
            return
        name, size = max(memory_terms(self.memory), key=lambda term: term[1])
        raise ConfigError(
            f"this run would not fit: {self.text}, up to {format_bytes(self.memory.least_bytes)}; the largest part "
            f"is {name}, {format_bytes(size)}.",
            place=self.place,
            fix=self.remedies(),
        )

    def remedies(self) -> str:
        """The cheapest changes that fit, each with its upper end: single ones, else added to the smallest passes."""
        policy = self.setup.checkpointing if self.setup.long_rows else "full"
        smallest = replace(
            self.setup,
            micro_batch_size=self.least_rows,
            accumulation=max(1, self.setup.accumulation * self.setup.micro_batch_size // self.least_rows),
            checkpointing=policy,
        )
        texts = self._changes(self.setup)
        if texts:
            return f"{', or '.join(texts)}."
        try:
            high = memory_on(self.target, self.facts, smallest).least_bytes
        except NotRunError:  # the class is not recomputed
            policy = self.setup.checkpointing
            smallest = replace(smallest, checkpointing=policy)
            high = memory_on(self.target, self.facts, smallest).least_bytes
        first = self._change_text(_BATCH_FLAG, smallest) + f" --checkpointing_policy {policy}"
        if high <= self.limit_bytes:
            return f"{first} ({format_bytes(high)})."
        texts = self._changes(smallest)
        if not texts:
            return "shorten --max_length, take a smaller model, or spread it over more cards."
        return f"{first} together with {', or '.join(texts)}."

    def _changes(self, setup: TrainingSetup) -> list[str]:
        machine, is_cuda = self.target.machine, self.target.is_cuda
        recipe = replace(SFT_PLAN, rows_per_example=self.rows_per_example)
        request = Request(self.facts, machine, methods=(setup.method,), is_cuda=is_cuda, recipe=recipe)
        texts = []
        for flag, changed in cheapest_changes(request, setup):
            memory = memory_on(self.target, self.facts, changed)
            texts.append(f"{self._change_text(flag, changed)} ({format_bytes(memory.least_bytes)})")
        return texts

    def _change_text(self, flag: str, setup: TrainingSetup) -> str:
        if flag == _BATCH_FLAG:
            rows = setup.micro_batch_size // self.rows_per_example
            return f"{flag} {rows} --gradient_accumulation_steps {setup.accumulation}"
        return as_flag(flag, setup) or f"a launch file with {launch_label(setup, self.target.machine)}"

    def for_data(self, rows: Any, tokenizer: Any) -> RunPlan:
        """The plan for rows as long as the data set's, if rows are padded; refuses a run that does not fit.

        Streams, and chat rows without a template yet, are left at ``--max_length``.
        """
        plan = self
        columns = getattr(rows, "column_names", None) or ()
        can_render = tokenizer.chat_template is not None or "text" in columns
        can_render = can_render or ("answer" in columns and len(rows) > 0 and isinstance(rows[0]["prompt"], str))
        if not self.setup.packing and hasattr(rows, "__len__") and can_render:
            from accel_scale.data.lengths import length_distribution

            written = self.setup.generation
            # Prompts of any length are kept whole.
            limit = self.setup.sequence_length if written is None else _NO_LIMIT
            found = length_distribution(
                rows, tokenizer, max_length=limit, batch_size=self.setup.micro_batch_size, num_sampled=_SAMPLED_ROWS
            )
            longest, mean = min(limit, found.max_tokens), min(limit, found.mean_tokens)
            lengths: dict[str, Any] = {"sequence_length": longest, "mean_length": mean}
            if written is not None:
                lengths = {**sizes_of_answers(self.setup, longest, written.completion_length)}
            plan = predict(self.facts, replace(self.setup, **lengths), self.target, place=self.place)
            here = self.here and replace(self.here, **lengths)
            plan = replace(plan, here=here, rows_per_example=self.rows_per_example)
        plan.refuse()
        return plan

    def as_dict(self) -> dict[str, Any]:
        """The plan as written to ``run_summary.json``."""
        return {
            "card": self.target.machine.gpu.name,
            "limit_bytes": self.limit_bytes,
            "predicted": {
                **self.memory.as_dict(),
                "step_seconds": None if self.time is None else self.time.step_seconds,
            },
            "collectives": [asdict(entry) for entry in step_collectives(self.facts, self.here or self.setup)],
        }


def plan_run(
    settings: Resolved,
    launch: LaunchEnvironment,
    model_config: PreTrainedConfig,
    attention: str,
    say: Callable[[str], None],
    *,
    shared: SharedModel | None = None,
) -> RunPlan | None:
    """Predict a run before its model is loaded; None with ``--plan off`` or if it cannot be planned.

    Args:
        settings: The resolved flags.
        launch: How the process was launched.
        model_config: The model's `PreTrainedConfig`.
        attention: The attention implementation that will run.
        say: Prints one line: why a run cannot be planned, or what ``auto`` has set.
        shared: How ranks share the model, if the launch alone does not determine it.

    Raises:
        ConfigError: if the run cannot be expected to fit, or the card is not known.
    """
    mode = mode_of(settings)
    if mode == "off":
        return None
    for note in settings.notes:
        say(note)
    target = target_of(settings, launch)
    try:
        plan = planned_as(settings.on_card or settings, launch, model_config, attention, target, shared)
        here = replace(setup_of(settings, launch, attention, shared), chunk_logits=target.logits_here)
        plan = replace(plan, here=here)
    except ConfigError as error:
        if mode == "auto":
            raise
        say(f"warning: whether this run fits cannot be predicted: {error.problem}")
        return None
    if plan.setup.packing:
        plan.refuse()  # padded rows are checked with the data: most are far shorter than --max_length
    return plan


def mode_of(settings: Resolved) -> str:
    """The planning mode: ``off``, ``check`` or ``auto``.

    Raises:
        ConfigError: if a card to plan for is given together with ``--plan off``.
    """
    scale = settings.scale
    if scale.plan == "off" and scale.plan_gpu:
        raise ConfigError(
            "--plan off plans for no card.", place=settings.sources.get("plan_gpu", "--plan_gpu"), fix="remove it."
        )
    plans = (scale.plan_gpu or settings.launch.device_type == "cuda") and not settings.recipe.has_images
    return scale.plan or ("check" if plans else "off")


def planned_as(
    settings: Resolved,
    launch: LaunchEnvironment,
    model_config: PreTrainedConfig,
    attention: str,
    target: Target,
    shared: SharedModel | None = None,
) -> RunPlan:
    """The prediction for a run.

    Raises:
        ConfigError: if something about the run is not modelled.
    """
    name = str(settings.values.get("model_name_or_path", model_config.model_type))
    facts = facts_of_any(model_config.to_dict(), name=name)
    facts = facts.as_reward_model() if settings.recipe.rewards else facts
    if recipe_value(settings, "disable_dropout"):
        facts = replace(facts, attention_dropout=0.0, embedding_dropout=0.0, residual_dropout=0.0)
    setup = setup_of(settings, launch, attention, shared, card_bytes=target.machine.gpu.memory_bytes)
    place = next((settings.sources[flag] for flag in ("plan_gpu", "plan") if settings.sources.get(flag)), "--plan")
    plan = predict(facts, setup, target, place=place)
    return replace(plan, rows_per_example=settings.recipe.rows_per_example)


def predict(facts: ModelFacts, setup: TrainingSetup, target: Target, *, place: str = "--plan") -> RunPlan:
    """Predict memory and, if the card's speed is known, time."""
    memory = memory_on(target, facts, setup)
    return RunPlan(facts, setup, target, place, memory, known_time(facts, setup, target.machine))


def memory_on(target: Target, facts: ModelFacts, setup: TrainingSetup) -> MemoryEstimate:
    """Predicted memory on the target's card."""
    return predict_memory(facts, setup, is_cuda=target.is_cuda, limit_bytes=target.machine.gpu.memory_bytes)


def sizes_of_answers(setup: TrainingSetup, prompt: int, completion: int) -> AnswerSizes:
    """The fields of `setup` for answers of at most `completion` tokens to prompts of at most `prompt`."""
    assert setup.generation is not None
    written = replace(setup.generation, prompt_length=max(1, prompt), completion_length=max(1, completion))
    return {"sequence_length": written.total_length, "generation": written}


def memory_terms(memory: MemoryEstimate) -> tuple[tuple[str, float], ...]:
    """The parts of the card's memory in use at the peak, including the allocator's and CUDA's own."""
    return (
        *memory.peak_phase.terms,
        ("room lost between blocks", memory.reserved_bytes - memory.hoarded_bytes - memory.peak_bytes),
        *(
            [("blocks that torch gives back when the card is full", memory.hoarded_bytes)]
            if memory.hoarded_bytes
            else []
        ),
        ("CUDA's and NCCL's own", memory.device_bytes - memory.reserved_bytes),
    )


def size_text(memory: MemoryEstimate) -> str:
    """``5.21 ± 0.42 GiB``, or ``18.6 to 24.0 GiB`` where the card bounds the interval."""
    return memory.text if memory.is_bounded else with_interval(memory.device_bytes, memory.half_bytes)


def with_interval(value: float, half: float) -> str:
    """``5.21 ± 0.42 GiB``, both in the unit of the first."""
    unit, factor = next(((u, f) for u, f in _UNITS.items() if abs(value) >= f), ("B", 1))
    return f"{value / factor:.3g} ± {half / factor:.2g} {unit}"


_UNITS: Mapping[str, int] = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
