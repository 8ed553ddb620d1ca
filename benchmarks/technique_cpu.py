"""`techniques.py`: the ladder on this CPU, in one process and thread, with all rungs in memory, in turns of a step.

The model is the embedded one, fine-tuned on its own data in rows of one length. Time is the thread's CPU time, so that
other work on the machine does not count, and ratios are between turns of one round. Bytes are those of tensors over a
whole step, including optimizer states, counted as operations create and free them.
"""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from technique_rows import RUNGS, Stage, Values, Work, ladder, with_ratios

from accel_scale.planning.models.training_setup import TrainingSetup

SETUP = TrainingSetup(checkpointing="none", packing=False, micro_batch_size=4, sequence_length=128)
ROUNDS = 16
# Their updates are compiled, and torch does not compile while a dispatch mode is active.
COMPILED_UPDATES = ("adamw_torch_4bit", "adamw_torch_8bit")
# Learning rates that differ from AdamW's, found once by halving and doubling.
LEARNING_RATE = 1e-3
LEARNING_RATES = {"sgd": 0.3, "momentum": 0.03, "lora": 5e-3, "lora_1": 1e-2, "qlora": 5e-3, "qlora_1": 1e-2}


@dataclass
class Loop:
    """Training loop of one rung."""

    name: str
    setup: TrainingSetup
    model: Any
    optimizer: Any

    def step(self, rows: Any) -> None:
        """Take one optimizer step."""
        self.passes(rows)
        self.update()

    def passes(self, rows: Any) -> None:
        """Run forward, backward and clipping on one batch."""
        import torch

        autocast = torch.autocast("cpu", torch.bfloat16) if self.setup.autocast else nullcontext()
        for ids in rows.split(self.setup.micro_batch_size):
            with autocast:
                loss = self.loss(ids) / self.setup.accumulation
            loss.backward()
            del loss
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)

    def update(self) -> None:
        """Run the optimizer and reset the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, ids: Any) -> Any:
        """Loss of one micro-batch."""
        options = {"fast_lm_head": True} if self.setup.loss == "chunked" else {}
        return self.model(input_ids=ids, labels=ids, use_cache=False, **options).loss

    @property
    def trained(self) -> list[Any]:
        """Trainable weights."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]


def start(name: str, setup: TrainingSetup) -> Loop:
    """Set up the embedded model as the recipes would train it at this rung."""
    import torch
    from planner_models import as_trained
    from transformers import BitsAndBytesConfig, set_seed

    from accel_scale.data.default import default_model_path
    from accel_scale.modeling.loading import load_model
    from accel_scale.optimization.optimizers import create_optimizer

    set_seed(0)
    compute = torch.float32 if setup.precision == "fp32" else torch.bfloat16
    is_16_bit = setup.precision == "bf16_true" or (setup.trains_adapters and setup.precision == "bf16")
    quantised = None
    if setup.quantises_base:
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=setup.double_quantisation,
            bnb_4bit_compute_dtype=compute,
        )
    model = load_model(
        default_model_path(),
        dtype=compute if setup.quantises_base else torch.bfloat16 if is_16_bit else torch.float32,
        attn_implementation=setup.attention,
        quantization_config=quantised,
    )
    model = as_trained(model, setup)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = create_optimizer(setup.optimizer, trained, lr=LEARNING_RATES.get(name, LEARNING_RATE))
    return Loop(name, setup, model, optimizer)


def embedded_rows(num_rows: int, length: int, *, held_out: bool = False) -> Any:
    """Conversations of the embedded data, concatenated and cut into rows."""
    import torch

    from accel_scale.data.default import default_dataset, default_model_path
    from accel_scale.modeling.loading import load_tokenizer

    tokenizer = load_tokenizer(default_model_path())
    ids: list[int] = []
    for row in default_dataset()[held_out]:
        if len(ids) >= num_rows * length:
            break
        ids += tokenizer.apply_chat_template(row["messages"], return_dict=False)
    if len(ids) < num_rows * length:
        raise ValueError(f"the embedded data has no {num_rows} rows of {length} tokens")
    return torch.tensor(ids[: num_rows * length]).reshape(num_rows, length)


def bytes_of_a_step(loop: Loop, rows: Any) -> dict[str, float]:
    """Peak bytes in tensors during a step, bytes left by a forward pass, and the planner's prediction."""
    from accel_scale.data.default import default_model_path
    from accel_scale.planning.cost.memory import predict_memory
    from accel_scale.planning.models.catalogue import load_model_facts
    from accel_scale.verifying.measured_memory import StorageTracker, resident_tensors

    loop.step(rows)  # creates the optimizer states
    gc.collect()
    tracker = StorageTracker()
    with tracker:
        tracker.adopt(resident_tensors(loop.model, loop.optimizer))
        before = tracker.live_bytes
        import torch

        with torch.autocast("cpu", torch.bfloat16) if loop.setup.autocast else nullcontext():
            loss = loop.loss(rows[: loop.setup.micro_batch_size])
        kept = tracker.live_bytes - before
        del loss
        gc.collect()
        tracker.reset_peak()
        loop.passes(rows)
        if loop.setup.optimizer not in COMPILED_UPDATES:
            loop.update()
    facts = load_model_facts(default_model_path(), allow_download=False)
    planned = predict_memory(facts, loop.setup, is_cuda=False, is_tracked=True).peak_bytes
    measured = float(tracker.peak_bytes)
    return {"bytes": measured, "activation_bytes": float(kept), "planned_off": planned / measured - 1}


def rung_below_the_rest() -> str:
    """Mixed precision if this CPU has fast arithmetic for it, else the rung below, which is faster."""
    import torch

    from accel_scale.measuring.peak_flops import measured_peak_flops

    return "bf16" if measured_peak_flops("cpu", torch.bfloat16) > measured_peak_flops("cpu", torch.float32) else "loss"


def measure() -> dict[str, Values]:
    """Measure bytes of each rung, then speeds in turns, then losses on unseen rows."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    middle = rung_below_the_rest()
    setups = ladder(SETUP, middle)
    batch = SETUP.micro_batch_size
    rows = embedded_rows((ROUNDS + 1) * batch, SETUP.sequence_length)
    figures: dict[str, dict[str, float]] = {}
    for name, setup in setups.items():
        figures[name] = bytes_of_a_step(start(name, setup), rows[:batch])
    loops = [start(name, setup) for name, setup in setups.items()]
    seconds: dict[str, list[float]] = {name: [] for name in setups}
    for number in range(ROUNDS + 1):
        turn = number % len(loops)
        for loop in loops[turn:] + loops[:turn]:
            started = time.process_time()
            loop.step(rows[number * batch : (number + 1) * batch])
            seconds[loop.name].append(time.process_time() - started)
        print(f"round {number}", flush=True)
    held_out = embedded_rows(16, SETUP.sequence_length, held_out=True)
    first = seconds[RUNGS[0].name]
    for loop in loops:
        ratios = [a / b for a, b in zip(first[1:], seconds[loop.name][1:], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        figures[loop.name] |= {"speed": median, "speed_low": low, "speed_high": high}
        figures[loop.name]["loss"] = _held_out(loop, held_out)
    figures["bf16"]["loss_fp32"] = figures["loss"]["loss"]
    return {f"cpu/{name}": values for name, values in with_ratios(figures, middle).items()}


def _held_out(loop: Loop, rows: Any) -> float:
    import torch

    loop.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if loop.setup.autocast else nullcontext():
        losses = [loop.loss(ids).item() for ids in rows.split(4)]
    return statistics.mean(losses)


STAGE = Stage(
    "cpu",
    "measured",
    "The embedded model (2.8M parameters) fine-tuned in one process with one thread, "
    f"{SETUP.micro_batch_size} rows of {SETUP.sequence_length} tokens a step, {ROUNDS} rounds; CPU time; loss on "
    "held-out rows afterwards.",
    (Work(tuple(f"cpu/{rung.name}" for rung in RUNGS), measure),),
)
