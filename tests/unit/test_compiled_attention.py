"""Layers compiled around the packed attention: one graph, compiled once, with the same numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

from accel_scale.modeling import packed_attention
from accel_scale.modeling.packed_attention import packed_attention_forward, register_packed_attention
from accel_scale.modeling.packed_mask import attach_layout, packed_layout
from benchmarks import varlen_reference


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        yield
    torch.compiler.reset()


@contextlib.contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rounds_products() -> bool:
    """True if this processor rounds fp32 products to bf16 where torch lets it: Intel's with AMX."""
    with fp32_products("medium"):
        ones = torch.full((128, 128), 1 + 2**-12)
        return not torch.equal(ones @ torch.eye(128), ones)


def small_model() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=50,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = register_packed_attention()
    return LlamaModel(config).train()


def attend(q, k, v, mask=None):
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, q.shape[1] // k.shape[1]
    return packed_attention_forward(module, q, k, v, mask)[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_is_compiled_as_one_graph(autocast: bool) -> None:
    model = small_model()
    model.layers[0].compile(fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(input_ids=torch.randint(50, (2, 40)), use_cache=False).last_hidden_state.float().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [96, 256, 300])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_queries_in_blocks_give_the_kernels_numbers(length: int, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, num, length, 16, dtype=dtype) for num in (heads[0], heads[1], heads[1]))
    found, compiled = [], torch.compile(attend, fullgraph=True)
    for run, precision, values in ((compiled, "medium", (q, k, v)), (attend, "highest", (q, k, v))):
        with fp32_products(precision):
            inputs = [value.float() if run is attend else value for value in values]
            leaves = [value.clone().requires_grad_() for value in inputs]
            output = run(*leaves)
            output.float().square().mean().backward()
        found.append([output, *(leaf.grad for leaf in leaves)])
    for ours, kernels in zip(*found, strict=True):
        error = (ours.float() - kernels).norm() / kernels.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 or rounds_products() else 1e-5)


def graphs_of_documents(compiled: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[int]:
    """How many graphs there are after each of several rows of documents; the outputs are checked."""
    graphs = []
    torch.manual_seed(0)
    for starts in ([0, 10, 35], [0, 3, 9, 20, 41], [0, 50], [0, 7]):
        is_start = torch.zeros(1, 64, dtype=torch.bool)
        is_start[0, starts] = True
        layout = packed_layout(is_start, None, torch.device("cpu"))
        assert layout.bounds.shape == (len(starts) + 1,)  # on a GPU, `attach_layout` computes them
        mask = attach_layout(layout)
        q, k, v = (torch.randn(1, 2, 64, 16, dtype=dtype, requires_grad=True) for _ in range(3))
        assert torch.allclose(compiled(q, k, v, mask), attend(q, k, v, mask))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def test_documents_of_other_lengths_compile_nothing_again() -> None:
    graphs = graphs_of_documents(torch.compile(attend), torch.float32)
    assert 0 < graphs[0] == graphs[-1]


def test_documents_in_the_kernel_are_one_graph_of_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators with the reference as their bodies: one graph, and a second for sizes that vary."""
    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", varlen_reference.forward, "CPU", allow_override=True)
    library.impl("_varlen_attn_backward", varlen_reference.backward, "CPU", allow_override=True)
    always = torch.compiler.assume_constant_result(lambda *_: True)
    monkeypatch.setattr(packed_attention, "_is_varlen", always)
    try:
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert graphs_of_documents(compiled, torch.bfloat16) == [1, 2, 2, 2]
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("dtype", "precision", "length", "is_short"),
    [
        (torch.bfloat16, "highest", 512, True),
        (torch.bfloat16, "highest", 513, False),
        (torch.float32, "highest", 64, False),
        (torch.float32, "medium", 512, True),
        (torch.float32, "medium", 513, False),
    ],
)
def test_fp32_rows_leave_the_kernel_where_onednn_multiplies(dtype, precision, length, is_short) -> None:
    """The kernel's small blocks are slow there."""
    with fp32_products(precision):
        assert packed_attention._is_short(torch.empty(1, dtype=dtype), length) is is_short


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_fp32_rows_keep_no_weights_for_the_backward_pass(heads: tuple[int, int]) -> None:
    """Plans count what the kernel keeps: queries, keys, values and outputs."""
    torch.manual_seed(0)
    length, found = 200, []
    values = [torch.randn(2, num, length, 16) for num in (heads[0], heads[1], heads[1])]
    for precision in ("medium", "highest"):
        kept: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = kept) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        leaves = [value.clone().requires_grad_() for value in values]
        with fp32_products(precision), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = attend(*leaves)
            output.square().mean().backward()
        assert max(kept) < length * length
        found.append([output, *(leaf.grad for leaf in leaves)])
    for ours, kernels in zip(*found, strict=True):
        if rounds_products():
            assert (ours - kernels).norm() < 1e-2 * kernels.norm()
        else:
            assert torch.allclose(ours, kernels, rtol=1e-4, atol=1e-6)
