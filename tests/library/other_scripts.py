"""Training scripts of the kinds that other people write, as short as possible: run here, or under `accelerate launch`.

Each function is a script: it makes and passes what such scripts make and pass, and `scale` is the only addition.
It returns its trainer or, for a plain loop, a namespace with the objects it made.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from accel_scale import ScalePlugin

TOKENIZER = Path(__file__).parents[2] / "accel_scale" / "assets" / "default" / "model"
PROMPT, GOOD, BAD = "Tell me two and three.", "It is five.", "No."
NUM_ROWS = 16


def make_model(folder: Path) -> Path:
    """Save a tiny Llama with the embedded tokenizer, for `from_pretrained`."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=768,
        eos_token_id=2,
        pad_token_id=3,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


def _arguments(out: Path, **own: Any) -> dict[str, Any]:
    common = {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 2,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return {**common, **own}


def _rows(**columns: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list([columns] * NUM_ROWS)


def sft(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**_arguments(out, **own))
    data = _rows(text=f"{PROMPT} {GOOD}")
    trainer = scale.trainer(SFTTrainer)(model=str(model), args=args, train_dataset=data)
    trainer.train()
    return trainer


def dpo(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**_arguments(out, **own))
    data = _rows(prompt=PROMPT, chosen=GOOD, rejected=BAD)
    trainer = scale.trainer(DPOTrainer)(model=str(model), args=args, train_dataset=data)
    trainer.train()
    return trainer


def kto(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(**_arguments(out, **own))
    rows = [{"prompt": PROMPT, "completion": text, "label": text == GOOD} for text in (GOOD, BAD)]
    data = Dataset.from_list(rows * (NUM_ROWS // 2))
    trainer = scale.trainer(KTOTrainer)(model=str(model), args=args, train_dataset=data)
    trainer.train()
    return trainer


def reward(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(**_arguments(out, **own))
    data = _rows(chosen=f"{PROMPT} {GOOD}", rejected=f"{PROMPT} {BAD}")
    trainer = scale.trainer(RewardTrainer)(model=str(model), args=args, train_dataset=data)
    trainer.train()
    return trainer


def _length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def grpo(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    own = {"num_generations": 2, "max_completion_length": 4, "max_steps": 1, "save_steps": 1, **own}
    args = GRPOConfig(**_arguments(out, **own))
    trainer = scale.trainer(GRPOTrainer)(
        model=str(model), reward_funcs=_length_reward, args=args, train_dataset=_rows(prompt=PROMPT)
    )
    trainer.train()
    return trainer


def rloo(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    own = {"num_generations": 2, "max_completion_length": 4, "max_steps": 1, "save_steps": 1, **own}
    args = RLOOConfig(**_arguments(out, **own))
    trainer = scale.trainer(RLOOTrainer)(
        model=str(model), reward_funcs=_length_reward, args=args, train_dataset=_rows(prompt=PROMPT)
    )
    trainer.train()
    return trainer


def trainer(scale: ScalePlugin, model: Path, out: Path, *, by: str = "args", **own: Any) -> Any:
    """A script with HF's `Trainer`.

    Args:
        by: Where model and optimizer come from: ``args``, ``optimizers`` (trains a head alone, with a schedule),
            ``model_init``, or ``override`` (of `create_optimizer`, with rates that fall from layer to layer).
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler

    def make() -> Any:
        return AutoModelForCausalLM.from_pretrained(model)

    class LayerwiseTrainer(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            layers = self.model.model.layers
            groups = [{"params": list(layer.parameters()), "lr": 1e-3 / (n + 1)} for n, layer in enumerate(layers)]
            self.optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
            return self.optimizer

    ids = list(range(4, 20))
    given: dict[str, Any] = {"model_init": make} if by == "model_init" else {"model": make()}
    if by == "optimizers":
        optimizer = torch.optim.AdamW(given["model"].lm_head.parameters(), lr=1e-3, betas=(0.8, 0.9))
        given["optimizers"] = (optimizer, get_scheduler("linear", optimizer, 1, 4))
    made = scale.trainer(LayerwiseTrainer if by == "override" else Trainer)(
        args=TrainingArguments(**_arguments(out, **{"bf16": True, **own})),
        train_dataset=_rows(input_ids=ids, labels=ids),
        **given,
    )
    made.train()
    return made


def loop(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    """Fine-tunes a head in a plain loop in the style of accelerate's examples, with a warm-up."""
    from transformers import AutoModelForCausalLM, get_scheduler

    accelerator = scale.accelerator(**own)
    module = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(module.lm_head.parameters(), lr=1e-3, betas=(0.8, 0.9))
    loader = torch.utils.data.DataLoader(torch.arange(4, 4 + 8 * NUM_ROWS).view(NUM_ROWS, 8), batch_size=2)
    scheduler = get_scheduler("linear", optimizer, 2 * accelerator.num_processes, 100)
    module, optimizer, loader, scheduler = accelerator.prepare(module, optimizer, loader, scheduler)
    rates, losses = [], []
    for batch in loader:
        with accelerator.accumulate(module):
            loss = module(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(str(out / "state"))
    accelerator.end_training()
    return SimpleNamespace(**{k: v for k, v in locals().items() if k not in ("scale", "own", "batch", "loss")})


def gan(scale: ScalePlugin, model: Path, out: Path, **own: Any) -> Any:
    """Two models and two optimizers, as where one model judges the other."""
    accelerator = scale.accelerator(**own)
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    optimizers = [torch.optim.Adam(maker.parameters(), lr=1e-3), torch.optim.Adam(judge.parameters(), lr=1e-4)]
    maker, judge, *optimizers = accelerator.prepare(maker, judge, *optimizers)
    for _ in range(2):
        noise = torch.ones(2, 8, device=accelerator.device)
        accelerator.backward(judge(maker(noise).detach()).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        accelerator.backward(-judge(maker(noise)).mean())
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    accelerator.save_state(str(out / "state"))
    return SimpleNamespace(accelerator=accelerator, models=[maker, judge], optimizers=optimizers)


KINDS: dict[str, Callable[..., Any]] = {
    "sft": sft,
    "dpo": dpo,
    "kto": kto,
    "reward": reward,
    "grpo": grpo,
    "rloo": rloo,
    "trainer": trainer,
    "loop": loop,
    "gan": gan,
}


def facts(run: Any) -> dict[str, Any]:
    """The facts about a finished run, as JSON values."""
    accelerator, optimizer = run.accelerator, getattr(run, "optimizer", None)
    found: dict[str, Any] = {
        "distributed_type": accelerator.distributed_type.value,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
    }
    inner = getattr(optimizer, "optimizer", optimizer)
    inner = getattr(inner, "optimizer", inner)  # DeepSpeed wraps once more
    if inner is not None:
        found["optimizer"] = type(inner).__name__
        found["betas"] = [list(group["betas"]) for group in inner.param_groups if "betas" in group]
    if hasattr(run, "state"):
        found["steps"] = run.state.global_step
        found["losses"] = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        found["rates"] = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
        found["rows_per_step"] = run.get_total_train_batch_size(run.args)
        found["second_model"] = getattr(run, "ref_model", None) is not None
    else:
        found["losses"] = getattr(run, "losses", [])
        found["rates"] = getattr(run, "rates", [])
        found["verified"] = accelerator.first_verification.num_tensors if accelerator.first_verification else None
    return found


def main() -> None:
    """``other_scripts.py FOLDER JSON``: each kind in turn, with its plugin's fields and its script's own settings."""
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    # All plugins are made first, as a script makes its own one, before anything looks for other processes.
    plugins = [(kind, ScalePlugin(**_with_adapter(fields)), own) for kind, fields, own in plan]
    seen = {}
    for kind, scale, own in plugins:
        seen[kind] = facts(KINDS[kind](scale, folder / "model", folder / kind, **own))
    if os.environ.get("RANK", "0") == "0":
        (folder / "facts.json").write_text(json.dumps(seen))


def _with_adapter(fields: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig

    rank = fields.get("adapter")
    return {**fields, "adapter": LoraConfig(r=rank, target_modules=["q_proj"])} if rank else fields


if __name__ == "__main__":
    main()
