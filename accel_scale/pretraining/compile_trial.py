"""Compiled layers if they pay: a long run on a CPU tries them after its first steps, and keeps them if faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING

from accel_scale.facts.checkpointing import SEGMENTS
from accel_scale.modeling.gathering import broadcast_from_main, gather_values

if TYPE_CHECKING:
    from torch import nn

    from accel_scale.pretraining.run import Run

# Compiling takes about a minute on two cores: a shorter run does not regain it.
LONG_RUN_SECONDS = 900.0
# A tenth exceeds the noise of a few steps on a shared machine.
WORTH = 0.9
_TIMED = 5
_SETTLING = {"eager": 1, "trial": 5}  # steps with the cost of allocation, or of compiling

OPEN, TRIAL, KEPT, LEFT = "open", "trial", "kept", "left"


class CompileTrial:
    """Decides for one run. Report every step taken to it; all processes decide alike, by rank 0's clock.

    A resumed run keeps the earlier decision, so that its figures equal those of an uninterrupted run.

    Args:
        model: The prepared model; its layers are compiled in place.
        say: Prints one line on one process.
        can_try: False leaves the layers as they are.
        state: The decision, stored in every checkpoint. Empty for a new run.
        long_run_seconds: Remaining time needed for a trial.
    """

    def __init__(
        self,
        model: nn.Module,
        say: Callable[[str], None],
        *,
        can_try: bool,
        state: MutableMapping[str, object],
        long_run_seconds: float = LONG_RUN_SECONDS,
    ) -> None:
        self._model, self._say, self._long_run_seconds = model, say, long_run_seconds
        self._state, self._seconds, self._was_fused = state, list[float](), False
        self._eager_seconds = float(str(state.setdefault("eager_seconds", 0.0)))
        state.setdefault("phase", OPEN)
        if not can_try or (self.phase in (TRIAL, KEPT) and not self._compiler_works()):
            self._enter(LEFT)
        if self.phase in (TRIAL, KEPT):
            self._compile()

    @classmethod
    def of(cls, run: Run) -> CompileTrial:
        """Create from a run of the recipe; a trial needs an open flag, a CPU, and the whole model on each rank.

        Attention over isolated documents is not compiled, so layers gain less from compiling.
        """
        is_whole = run.parallel is None and not run.launch.parallel.kind.shards_states
        is_open = run.model_args.torch_compile is None and not run.data_args.isolate_documents
        is_traceable = run.settings.checkpointing.kind != SEGMENTS
        can_try = is_open and is_whole and is_traceable and run.accelerator.device.type == "cpu"
        return cls(run.model, run.say, can_try=can_try, state=run.compiling)

    @property
    def phase(self) -> str:
        """One of open, trial, kept and left."""
        return str(self._state["phase"])

    def _enter(self, phase: str) -> None:
        self._state["phase"] = phase

    def close(self) -> None:
        """Call after the last step: text of growing length would be recompiled for every length."""
        if self.phase in (TRIAL, KEPT):
            import torch

            torch.compiler.set_stance("force_eager")

    def stepped(self, seconds: float, steps_left: int, *, taken: bool) -> None:
        """Call after a step that took `seconds`, including waiting for data; a step not taken does not count."""
        if not taken or self.phase not in (OPEN, TRIAL):
            return
        self._seconds.append(seconds)
        timed = self._seconds[_SETTLING["eager" if self.phase == OPEN else "trial"] :]
        if len(timed) < _TIMED:
            return
        usual, self._seconds = broadcast_from_main(statistics.median(timed)), []
        if self.phase == OPEN:
            self._eager_seconds = self._state["eager_seconds"] = usual
            self._begin(steps_left)
        else:
            self._judge(usual)

    def _begin(self, steps_left: int) -> None:
        if self._eager_seconds * steps_left < self._long_run_seconds or not self._compiler_works():
            self._enter(LEFT)
            return
        self._enter(TRIAL)
        self._say("layers are compiled for a trial: the next step takes up to minutes (--torch_compile false: never)")
        self._compile()

    def _judge(self, compiled_seconds: float) -> None:
        gain = self._eager_seconds / compiled_seconds
        if compiled_seconds <= WORTH * self._eager_seconds:
            self._enter(KEPT)
            self._say(f"layers stay compiled: steps are {gain:.2f} x as fast")
            return
        self.close()
        if self._was_fused:
            from accel_scale.modeling.fused.own import fuse_own_layers

            fuse_own_layers(self._model)
        self._enter(LEFT)
        self._say(f"layers are not compiled: steps would be {gain:.2f} x as fast")

    def _compile(self) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        from accel_scale.modeling.fused.own import restore_layers

        self._was_fused = restore_layers(self._model)  # the compiler fuses the model's own layers
        for module in self._model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile()

    @staticmethod
    def _compiler_works() -> bool:
        """True if every process can compile: that needs a C++ compiler, which not every machine has."""
        import torch

        try:
            torch.compile(lambda x: x * 2 + 1)(torch.ones(64))
        except Exception:  # whatever is missing, the run continues without compiling
            return all(gather_values(False))
        return all(gather_values(True))
