"""A custom recipe for `tune.py`: a regression in plain Accelerate that writes `metrics.jsonl` as it goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from accel_scale.ending.leaving import let_go_of_collectives
from accel_scale.ending.user_errors import user_errors
from accel_scale.errors import ConfigError
from accel_scale.flags.parsing import parse_flags
from accel_scale.recipe_specs.spec import RecipeSpec

PROGRAM = "small_recipe.py"


@dataclass
class SmallArguments:
    learning_rate: float = 0.1
    max_steps: int = 40
    has_labels: bool = True
    step_seconds: float = field(default=0.0, metadata={"help": "How long a step takes at least."})
    output_dir: str = "outputs/small"


RECIPE = RecipeSpec(flags=(SmallArguments,), program=PROGRAM)


def main() -> None:
    parsed = parse_flags(RECIPE.flags, program=PROGRAM)
    args = SmallArguments(**parsed.explicit)
    if args.learning_rate <= 0:
        raise ConfigError("the learning rate must be above 0.", place=parsed.place("learning_rate"))

    from accel_scale.launching.rehearsal import enable_rehearsal_if_needed

    enable_rehearsal_if_needed()
    import torch
    from accelerate import Accelerator

    from accel_scale.reporting.metrics_log import MetricsLog

    torch.manual_seed(0)
    accelerator = Accelerator()
    inputs = torch.randn(64, 4)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=args.learning_rate))
    log = MetricsLog(args.output_dir, accelerator.is_main_process)
    for step in range(1, args.max_steps + 1):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        log.write(step, eval_loss=float(loss.detach()) if args.has_labels else 0.0)
        time.sleep(args.step_seconds)
    accelerator.print("reached the end")
    let_go_of_collectives()
    accelerator.end_training()


if __name__ == "__main__":
    with user_errors(PROGRAM):
        main()
