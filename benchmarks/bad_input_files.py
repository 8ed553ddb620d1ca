"""Invalid inputs made from a tiny model and a few rows: truncated weights, wrong configurations, broken data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_inputs(folder: Path) -> dict[str, str]:
    """Write all inputs below `folder`; returns path by name, as used in benchmarks/data/bad_inputs.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    from accel_scale.data.default import default_model_path

    rows = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(60)]
    found: dict[str, Path] = {"missing": folder / "missing", "longname": folder / ("x" * 300)}
    found["model"] = folder / "model"
    _tiny_model(found["model"], Path(default_model_path()))
    found |= _models(folder, found["model"])
    found |= _adapters(folder, found["model"])
    found |= _data(folder, rows)
    found |= _files(folder)
    return {name: str(path) for name, path in found.items()}


def _tiny_model(folder: Path, embedded: Path, **changes: Any) -> None:
    """Save a Llama with random weights and the embedded tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=512, num_key_value_heads=2, **{**shape, **changes}
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _models(folder: Path, model: Path) -> dict[str, Path]:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

    def copy(name: str, change: Callable[[Path], None]) -> Path:
        shutil.copytree(model, folder / name)
        change(folder / name)
        return folder / name

    def configured(**values: Any) -> Callable[[Path], None]:
        def change(made: Path) -> None:
            config = json.loads((made / "config.json").read_text())
            (made / "config.json").write_text(json.dumps({**config, **values}))

        return change

    def cut(made: Path) -> None:
        weights = made / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-5000])

    def pointer(made: Path) -> None:
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1044992\n"
        (made / "model.safetensors").write_text(text)

    def grown(made: Path) -> None:
        config = json.loads((made / "config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(made)
        tokenizer.add_special_tokens({"pad_token": "<another pad>"})
        tokenizer.save_pretrained(made)
        assert len(tokenizer) > config["vocab_size"]

    gpt2 = folder / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(model)
    shape = {"n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)).save_pretrained(gpt2)
    tokenizer.save_pretrained(gpt2)
    scoring = {"rewards": 1, "classes": 3}
    for name, num_labels in scoring.items():
        made = LlamaForSequenceClassification.from_pretrained(model, num_labels=num_labels)
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {
        **{name: folder / name for name in scoring},
        "gpt2": gpt2,
        "cut": copy("cut", cut),
        "pointer": copy("pointer", pointer),
        "lying_hidden": copy("lying_hidden", configured(hidden_size=128, head_dim=32)),
        "lying_heads": copy("lying_heads", configured(num_key_value_heads=4)),
        "lying_vocabulary": copy("lying_vocabulary", configured(vocab_size=99999)),
        "big_tokenizer": copy("big_tokenizer", grown),
        "vision": copy("vision", lambda made: (made / "processor_config.json").write_text("{}")),
        "broken_config": copy("broken_config", lambda made: (made / "config.json").write_text('{"model_type": ')),
    }


def _adapters(folder: Path, model: Path) -> dict[str, Path]:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    broken = folder / "nan_base"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    weights = {name: tensor.clone().fill_(float("nan")) for name, tensor in weights.items()}
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    found = {}
    for name, base in (("adapter", model), ("cut_adapter", model), ("adapter_of_nan", broken)):
        made = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules=["q_proj"]))
        made.save_pretrained(folder / name)
        found[name] = folder / name
    file = folder / "cut_adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return found


def _data(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    from datasets import Dataset

    def written(name: str, lines: list[Any]) -> Path:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (folder / name).write_text(text)
        return folder / name

    messages = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    pairs: list[Any] = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    saved = folder / "half_saved"
    Dataset.from_list(rows).save_to_disk(saved)
    for path in saved.glob("*.arrow"):
        path.unlink()
    return {
        "rows": written("rows.jsonl", rows),
        "text": written("text.txt", [row["question"] for row in rows] * 20),
        "empty": written("empty.jsonl", []),
        "broken_rows": written("broken.jsonl", [rows[0], rows[1], '{"question": "What', *rows[2:]]),
        "mostly_pairs": written("pairs.jsonl", [*pairs[:30], {"messages": messages}, *pairs[30:]]),
        "ranked": written("ranked.jsonl", [{"chosen": row["answer"], "rejected": "It is 1."} for row in rows]),
        "unrejected": written("unrejected.jsonl", [{"prompt": r["question"], "chosen": r["answer"]} for r in rows]),
        "unlabelled": written(
            "unlabelled.jsonl", [{**pair, "label": [True, False, "maybe"][n % 3]} for n, pair in enumerate(pairs)]
        ),
        "half_saved": saved,
        "pictured": written("pictured.jsonl", [{"messages": messages, "image": f"missing-{n}.png"} for n in range(2)]),
    }


def _files(folder: Path) -> dict[str, Path]:
    texts = {
        "datasets_yaml": ("datasets.yaml", "datasets:\n- path: a\n  fractoin: 0.5\n"),
        "broken_yaml": ("broken.yaml", "learning_rate: 1e-4\nmax_steps: [1\n"),
        "launch_yaml": ("launch.yaml", "compute_environment: LOCAL_MACHINE\nnum_processes: 2\n"),
    }
    for name, text in texts.values():
        (folder / name).write_text(text)
    return {key: folder / name for key, (name, _) in texts.items()}
