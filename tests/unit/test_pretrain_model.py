"""The model of a pretraining run: its shape, its weights, its dtypes, and how many workers read data for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_scale.data.default import default_model_path
from accel_scale.errors import ConfigError
from accel_scale.flags.pretraining import PretrainDataArguments, PretrainModelArguments
from accel_scale.modeling.precision import precision_named
from accel_scale.parallel.layout import ParallelLayout
from accel_scale.pretraining import model as pretrain_model
from accel_scale.pretraining.model import build_model, num_workers, open_batches, open_data, run_config

EMBEDDED = str(default_model_path())
TOKENIZER: Any = type("Tokenizer", (), {"__len__": lambda self: 300, "eos_token_id": 7, "pad_token_id": 8,
                                         "bos_token_id": 9})()  # fmt: skip
ALONE: Any = SimpleNamespace(local_world_size=1, local_rank=0, rank=0)


def embedded_tokenizer() -> Any:
    from accel_scale.modeling.loading import load_tokenizer

    return load_tokenizer(EMBEDDED)


def test_the_shape_of_the_embedded_model_without_its_weights() -> None:
    config = run_config(PretrainModelArguments(), 64, TOKENIZER)
    from transformers import AutoConfig

    embedded = AutoConfig.from_pretrained(EMBEDDED)
    assert (config.hidden_size, config.num_hidden_layers) == (embedded.hidden_size, embedded.num_hidden_layers)
    assert (config.name_or_path, config.dtype) == ("", None)
    assert (config.eos_token_id, config.pad_token_id) == (7, 8)
    with pytest.raises(ConfigError):
        run_config(PretrainModelArguments(), 10**7, TOKENIZER)


def test_a_shape_by_size_by_file_and_of_a_model(tmp_path: Any) -> None:
    sized = run_config(PretrainModelArguments(num_params="1M"), 64, TOKENIZER)
    assert (sized.vocab_size, sized.eos_token_id) == (300, 7)
    assert sized.max_position_embeddings >= 64
    sized.save_pretrained(tmp_path)
    of_file = run_config(PretrainModelArguments(model_config=str(tmp_path / "config.json")), 64, TOKENIZER)
    assert of_file.hidden_size == sized.hidden_size
    tokenizer = embedded_tokenizer()
    loaded = run_config(PretrainModelArguments(model_name_or_path=EMBEDDED), 64, tokenizer, dropout=0.25)
    assert loaded.attention_dropout == 0.25
    assert loaded.name_or_path == EMBEDDED
    assert run_config(PretrainModelArguments(), 64, tokenizer).attention_dropout == 0.0
    with pytest.raises(ConfigError, match="amount") as refused:
        run_config(PretrainModelArguments(num_params="many"), 64, TOKENIZER)
    assert refused.value.place == "--num_params"


def built(seed: int = 0, precision: str = "fp32", layout: ParallelLayout | None = None, **flags: Any) -> Any:
    args = PretrainModelArguments(**{"num_params": None, **flags})
    tokenizer = embedded_tokenizer() if args.model_name_or_path else TOKENIZER
    config = run_config(args, 64, tokenizer, dropout=flags.get("dropout"))
    config.num_hidden_layers = 1 if not args.model_name_or_path else config.num_hidden_layers
    wanted = precision_named(precision)
    return build_model(args, config, wanted, "eager", seed=seed, launch=ALONE, layout=layout or ParallelLayout())


def weights(made: Any) -> torch.Tensor:
    return made.model.layers[0].mlp.up_proj.weight.detach()


def test_weights_are_drawn_from_the_seed_in_the_dtype_that_is_trained() -> None:
    first, again, other = built(3), built(3), built(4)
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    assert first.config._attn_implementation == "eager"
    assert weights(first).dtype == torch.float32
    assert weights(built(precision="bf16")).dtype == torch.float32
    assert weights(built(precision="bf16", method="lora")).dtype == torch.bfloat16, "frozen: what is computed in"
    assert weights(built(precision="bf16_true")).dtype == torch.bfloat16


def test_weights_of_a_model_are_loaded_and_later_draws_follow_the_seed() -> None:
    loaded = built(5, model_name_or_path=EMBEDDED)
    drawn = torch.rand(1)
    again = built(5, model_name_or_path=EMBEDDED)
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(weights(loaded), weights(again))
    assert loaded.config._attn_implementation == "eager"
    assert not torch.equal(weights(loaded), weights(built(5))[: weights(loaded).shape[0]])


def test_ranks_of_a_server_that_share_a_model_build_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.parallel import mapped_weights

    asked: list[Any] = []

    def once(build: Any, skeleton: Any, **given: Any) -> Any:
        made = skeleton()
        asked.append((made.num_parameters(), next(made.parameters()).device.type, given))
        return build()

    monkeypatch.setattr(mapped_weights, "build_once_per_server", once)
    args = PretrainModelArguments()
    config = run_config(args, 64, TOKENIZER)
    for layout, ranks, is_shared in (
        (ParallelLayout(tp=2), 2, True), (ParallelLayout(dp_shard=2), 2, False), (ParallelLayout(tp=2), 1, False)
    ):  # fmt: skip
        asked.clear()
        launch: Any = SimpleNamespace(local_world_size=ranks, local_rank=1)
        made = build_model(args, config, precision_named("fp32"), "sdpa", seed=0, launch=launch, layout=layout)
        assert bool(asked) == is_shared
        if is_shared:
            number = made.num_parameters()
            assert asked == [(number, "meta", {"local_rank": 1, "num_bytes": 4 * number, "fits_on_each": True})]


def test_workers_are_as_given_or_as_the_cores_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.data import loaders

    monkeypatch.setattr(loaders, "available_cores", lambda: 16)
    launch: Any = SimpleNamespace(local_world_size=4)
    given, free = PretrainDataArguments(dataloader_num_workers=0), PretrainDataArguments()
    assert num_workers(given, launch, device_type="cuda", embedded=False) == 0
    assert num_workers(free, launch, device_type="cuda", embedded=False) == 3
    assert num_workers(free, launch, device_type="cpu", embedded=False) == 1
    assert num_workers(free, launch, device_type="cpu", embedded=True) == 0


def test_data_are_opened_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.data.pretraining import opening

    seen: list[Any] = []
    monkeypatch.setattr(opening, "open_pretraining_data", lambda data, **given: seen.append((data, given)))
    flags = PretrainDataArguments(
        data=["a"], max_length=96, text_column="body", text_documents="line", validation_share=0.25,
        isolate_documents=False,
    )  # fmt: skip
    open_data(flags, TOKENIZER, seed=11)
    data, given = seen[0]
    assert data == ["a"]
    assert given == {
        "tokenizer": TOKENIZER, "row_length": 96, "seed": 11, "text_column": "body", "text_documents": "line",
        "validation_data": None, "validation_share": 0.25, "isolate_documents": False,
    }  # fmt: skip
    flags.validation_data = ["b"]
    open_data(flags, TOKENIZER, seed=11)
    assert (seen[1][1]["validation_data"], seen[1][1]["validation_share"]) == (["b"], 0.0)


@pytest.mark.parametrize("has_validation", [True, False])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_ranks_that_share_a_model_read_the_same_rows(has_validation: bool, device_type: str) -> None:
    asked: dict[str, Any] = {}

    def loader(name: str) -> Any:
        return lambda **given: asked.update({name: given}) or name

    run: Any = SimpleNamespace(
        layout=ParallelLayout(dp_replicate=2, tp=2), launch=SimpleNamespace(rank=3, local_world_size=4),
        accelerator=SimpleNamespace(device=torch.device(device_type)), embedded=False, held_out=None,
        args=SimpleNamespace(per_device_train_batch_size=5, eval_rows=64),
        settings=SimpleNamespace(global_batch_size=40), data_args=PretrainDataArguments(dataloader_num_workers=2),
        data=SimpleNamespace(
            train_loader=loader("train"), validation_loader=loader("validation"), has_validation=has_validation
        ),
    )  # fmt: skip
    open_batches(run, {"at": 3})
    share = {"rank": 1, "world_size": 2}
    assert asked["train"] == {
        "global_batch_size": 40, "micro_batch_size": 5, "num_workers": 2, "state": {"at": 3},
        "pin_memory": device_type == "cuda", **share,
    }  # fmt: skip
    assert run.batches == "train"
    assert asked.get("validation") == ({"micro_batch_size": 5, "max_rows": 64, **share} if has_validation else None)
    assert run.held_out == ("validation" if has_validation else None)


def test_a_file_of_settings_has_its_tokenizer_beside_it(tmp_path: Any) -> None:
    assert pretrain_model._folder_of(str(tmp_path)) == tmp_path
    assert pretrain_model._folder_of(str(tmp_path / "config.json")) == tmp_path


REMOTE = {"model_revision": "abc", "trust_remote_code": True}


def test_a_revision_and_leave_to_run_code_reach_all_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_scale.modeling import files, loading

    asked: list[Any] = []

    def told(name: str, result: Any = None) -> Any:
        return lambda *args, **given: asked.append((name, *map(str, args[:1]), given)) or result

    config = run_config(PretrainModelArguments(), 64, TOKENIZER)
    monkeypatch.setattr(loading, "load_tokenizer", told("tokenizer"))
    monkeypatch.setattr(loading, "load_config", told("config", config))
    monkeypatch.setattr(loading, "load_model", told("model"))
    monkeypatch.setattr(files, "check_model_files", told("files"))
    monkeypatch.setattr(pretrain_model, "config_from_file", told("file", config))
    remote = {"revision": "abc", "trust_remote_code": True}
    for flags, found, place in (
        ({"tokenizer": "t", "model_name_or_path": "m"}, "t", "--tokenizer"),
        ({"model_name_or_path": "m"}, "m", "--model_name_or_path"),
        ({"model_config": "d/config.json"}, "d", "--model_config"),
    ):
        args = PretrainModelArguments(**flags, **REMOTE)
        pretrain_model.run_tokenizer(args, PretrainDataArguments(), "out", default="embedded")
        assert asked.pop() == ("tokenizer", found, {**remote, "place": place})
    args = PretrainModelArguments(model_name_or_path="m", **REMOTE)
    run_config(args, 64, TOKENIZER)
    assert asked == [("config", "m", remote), ("files", "m", {})]
    asked.clear()
    build_model(args, config, precision_named("bf16"), "sdpa", seed=0, launch=ALONE, layout=ParallelLayout())
    dropouts = {"attention_dropout": 0.0}
    expected = {"dtype": torch.float32, "attn_implementation": "sdpa", **remote, **dropouts}
    assert asked.pop() == ("model", "m", expected)
    run_config(PretrainModelArguments(model_config="d/config.json", **REMOTE), 64, TOKENIZER)
    assert asked == [("file", "d/config.json", {"tokenizer": TOKENIZER, "trust_remote_code": True})]


@pytest.mark.parametrize(("flags", "reads_all"), [({"tokenizer": "char"}, True), ({"train_tokenizer": True}, False)])
def test_characters_are_those_of_all_texts_and_a_vocabulary_is_learnt_from_a_sample(
    flags: dict[str, Any], reads_all: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def sample(data: Any, **options: Any) -> Any:
        asked.append(options)
        yield from ["abc " * 50, "xyz " * 50]

    monkeypatch.setattr("accel_scale.data.pretraining.sampling.sample_texts", sample)
    args = PretrainModelArguments(vocab_size=270, **flags)
    made = pretrain_model.run_tokenizer(args, PretrainDataArguments(), str(tmp_path), default=EMBEDDED)
    assert made.decode(made("cab")["input_ids"]).startswith("cab")
    assert [("max_bytes" in options) for options in asked] == [reads_all]
    assert not reads_all or asked[0]["max_bytes"] > 1e15
    kept = pretrain_model.run_tokenizer(args, PretrainDataArguments(), str(tmp_path), default=EMBEDDED)
    assert (len(kept), len(asked)) == (len(made), 1), "what was made is kept"
