"""The longest row, the largest batch, the cheapest machine, the effect of a change, and inference with the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_schema import problems_of

from accel_scale import cheapest, inference_memory, largest_batch, longest_row, plan, what_if
from accel_scale.cli.main import main
from accel_scale.errors import ConfigError
from accel_scale.planning.search.prices import read_prices

MODEL = "meta-llama/Llama-3.1-8B"
PRICES = "H100: 2.40\nRTX 4090: 0.40\nA100 80GB SXM: {price: 1.35, num_gpus: [8]}\n"


def test_the_largest_batch_fits_and_one_more_does_not():
    settings = {"gpu": "H100", "method": "lora", "max_length": 4096}
    found = largest_batch(MODEL, **settings).best
    assert found.setup.accumulation == 1
    rows = found.setup.micro_batch_size
    fitting, failing = (
        plan(MODEL, per_device_train_batch_size=count, global_batch_size=count, **settings).best
        for count in (rows, rows + 1)
    )
    assert fitting.memory.high_bytes <= 79.2 * 2**30
    assert failing is None
    assert largest_batch(MODEL, recipe="dpo", **settings).best.setup.micro_batch_size % 2 == 0


def test_the_longest_row_is_that_of_the_command(capsys):
    found = longest_row(MODEL, gpu="24GiB", method="qlora").request.sequence_length
    assert main(["plan", MODEL, "--gpu", "24GiB", "--method", "qlora", "--longest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequence_length"] == found


def test_the_cheapest_machine_comes_first_and_its_price_is_hours_times_cards():
    found = cheapest(MODEL, {"H100": 2.4, "RTX 4090": {"price": 0.4, "num_gpus": [2]}}, 1e9, method="lora")
    prices = [item.budget.price for item in found]
    assert prices == sorted(prices)
    assert {item.price.num_gpus for item in found if "H100" in item.price.card} == {1, 2, 4, 8}
    for item in found:
        assert item.budget.price == pytest.approx(item.budget.hours * item.price.num_gpus * item.price.per_gpu_hour)


def test_a_machine_that_is_too_small_comes_last_with_the_reason():
    found = cheapest("meta-llama/Llama-3.1-70B", {"H100": {"price": 2.4, "num_gpus": 8}, "T4": 0.4}, 1e9)
    assert found[0].price.num_gpus == 8
    assert found[-1].best is None
    assert "GiB" in found[-1].reason


def test_a_change_is_compared_with_the_base():
    base, second, wider, longer, unfit = what_if(
        MODEL, ["num_gpus=2", "lora_r=x4", "max_length=x2", "gpu=4GiB"], gpu="H100", method="lora"
    )
    assert (base.change, base.memory_bytes, base.step_seconds) == ("", 0.0, 0.0)
    assert second.best.setup.parallel.num_gpus == 2
    assert second.tokens_per_second > 0.9 * base.best.time.tokens_per_second
    assert wider.best.setup.lora.rank == 64
    assert wider.memory_bytes > 0
    assert longer.best.setup.sequence_length == 2 * base.best.setup.sequence_length
    assert unfit.best is None
    assert "4 GiB" in unfit.reason


def test_a_change_without_a_time_says_why(capsys):
    assert main(["plan", MODEL, "--gpu", "H100", "--num_gpus", "8", "--what_if", "num_gpus=16", "num_gpus=4"]) == 0
    printed = capsys.readouterr().out
    assert "note: num_gpus=16: no time: the network between servers is not known. Fix: give --network" in printed
    assert printed.count("note: ") == 1


def test_answering_counts_weights_and_cache():
    sixteen, four = inference_memory(MODEL, batch=8, length=4096)
    assert sixteen.weight_bytes == pytest.approx(8.03e9 * 2, rel=0.01)
    assert four.weight_bytes == pytest.approx(5.7e9, rel=0.01), "embedding and head stay in 16 bits"
    assert sixteen.cache_bytes == four.cache_bytes == 8 * 4096 * 32 * 2 * 8 * 128 * 2
    for found in (sixteen, four):
        assert found.device_bytes > found.weight_bytes + found.cache_bytes + found.pass_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_answering_with_a_traced_model_takes_what_a_modelled_one_takes(tmp_path, monkeypatch):
    """The same class, from its source and from its operations, as a frozen base without adapters."""
    from transformers import AutoConfig

    from accel_scale.planning.cost.inference import inference_memory as needs
    from accel_scale.planning.models.model_config import facts_from_config
    from accel_scale.tracing.service import facts_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 2048, "head_dim": 64,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = json.loads(json.dumps(AutoConfig.for_model("qwen3", **shape).to_dict(), default=str))
    modelled, traced = facts_from_config(config, name="modelled"), facts_of(config, name="traced", place="here")
    for length in (256, 4096):
        pairs = zip(needs(modelled, batch=4, length=length), needs(traced, batch=4, length=length), strict=True)
        for expected, found in pairs:
            assert found.weight_bytes == expected.weight_bytes
            assert found.cache_bytes == expected.cache_bytes
            assert found.pass_bytes == pytest.approx(expected.pass_bytes, rel=0.03)


def test_answering_with_a_class_without_checkpointing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shape = {"model_type": "jetmoe", "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 256,
             "num_key_value_heads": 4, "kv_channels": 32, "vocab_size": 2048, "num_attention_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    sixteen, four = inference_memory(str(tmp_path), batch=4, length=512)
    for found in (sixteen, four):
        assert found.cache_bytes <= 4 * 512 * 3 * 2 * 4 * 32 * 2
        assert 0 < found.pass_bytes < 100 * 2**20


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu", "H100", "--method", "lora"],
        ["--gpu", "H100", "--recipe", "grpo", "--method", "lora", "--tokens", "1B"],
        ["--gpu", "8GiB"],
        ["--gpu", "H100", "--method", "lora", "--largest_batch"],
        ["--gpu", "H100", "--method", "lora", "--what_if", "num_gpus=2", "gpu=8GiB"],
        ["--inference", "8x4096"],
        ["--cheapest", "--price", "PRICES", "--tokens", "1B", "--method", "qlora"],
    ],
)
def test_json_is_as_the_schema_says(words, tmp_path, capsys):
    (tmp_path / "prices.yaml").write_text(PRICES)
    words = [str(tmp_path / "prices.yaml") if word == "PRICES" else word for word in words]
    main(["plan", MODEL, *words, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert problems_of(document) == []
    broken = {**document, "surprise": 1}
    assert problems_of(broken) == ["surprise: is not in the schema"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--longest", "--largest_batch"], "--largest_batch: one question at a time"),
        (["--cheapest"], "--cheapest: a price table and --cheapest go together"),
        (["--price", "prices.yaml"], "--price: a price table and --cheapest go together. Fix: add --cheapest"),
        (["--what_if", "speed=2"], "--what_if: 'speed=2' changes nothing that is planned"),
        (["--what_if", "method=x2"], "--what_if: method is no number"),
        (["--inference", "much"], "--inference: 'much' is no batch and length"),
        (["--inference", "8x4096", "--write", "d"], "--write: --inference makes no plan for it"),
        (["--largest_batch", "--per_device_train_batch_size", "2"], "--per_device_train_batch_size: --largest_batch"),
        (["--largest_batch", "--recipe", "grpo"], "--largest_batch: answers are written"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", MODEL, "--gpu", "H100", "--method", "lora", *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("H100: free", "'free' is no price of a H100"),
        ("H100: {cost: 2}", "H100 has 'cost'"),
        ("H100: {price: 2, num_gpus: [0]}", "0 is no number of H100 cards"),
        ("Voodoo 2: 1", "Voodoo 2"),
        ("[", "it is no YAML"),
        ("", "has no prices"),
    ],
)
def test_a_price_table_that_cannot_be_read_is_named(text, said, tmp_path: Path):
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ConfigError, match="--price") as refused:
        read_prices(str(tmp_path / "prices.yaml"))
    assert said in str(refused.value)
