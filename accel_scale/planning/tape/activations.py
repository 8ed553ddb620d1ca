"""Bytes of tensors in one forward and backward pass, from running the layers' operations on the tape."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from accel_scale.facts.checkpointing import SEGMENTS, SUBLAYERS, kind_of
from accel_scale.planning.models.model_facts import LayerFacts, ModelFacts
from accel_scale.planning.models.parameters import adapter_rank
from accel_scale.planning.models.training_setup import TrainingSetup, check_policy, period_of, with_segments
from accel_scale.planning.tape.families import check_setup, family_of, family_under
from accel_scale.planning.tape.head import Head, scores_loss
from accel_scale.planning.tape.layers import Layer
from accel_scale.planning.tape.linears import Weights, adapter_key
from accel_scale.planning.tape.marks import StepBytes
from accel_scale.planning.tape.ops import Ops
from accel_scale.planning.tape.parallel import gathered, tensor_parallel_share
from accel_scale.planning.tape.tables import Tables, make_mask, make_tables
from accel_scale.planning.tape.tape import Tape
from accel_scale.planning.tape.tensors import Parameter, Tensor
from accel_scale.planning.tape.tiles import tiled_norm


def step_bytes(
    model: ModelFacts, setup: TrainingSetup, *, is_cuda: bool = True, is_tracked: bool = False
) -> StepBytes:
    """Memory marks of one forward and backward pass on one rank.

    Walks through two and three layers of each kind; every mark is linear in the number of layers, so the rest
    follows. Micro-batch and length are those of `setup`.

    Args:
        model: Shapes of the model.
        setup: How it is trained; of `parallel`, only sequence and tensor parallel degrees matter here.
        is_cuda: Whether CUDA's kernels run, rather than the CPU's.
        is_tracked: Whether a dispatch mode (a memory tracker) is active, which makes autograd add out of place.

    Raises:
        ConfigError: for a checkpointing policy that does not exist, an architecture that is not modelled, or an
            attention that the architecture does not have.
    """
    check_policy(setup)
    setup = with_segments(setup, model.num_layers)
    family_of(model)
    check_setup(model, setup)
    model = tensor_parallel_share(model, setup.parallel.tensor_parallel)
    ends, extras = walked_layers(model, setup)
    edge = len(model.layers) * period_of(setup)
    if not extras:
        # A whole model's gradients are counted as the pass leaves them; a stage's add to earlier micro-batches'.
        is_stage = not (model.has_embedding and model.has_head)
        return _walk(model, setup, is_cuda, is_tracked, edge if is_stage and model.num_layers > edge else None)
    middle = len(ends) - edge
    base = _walk(replace(model, layers=ends), setup, is_cuda, is_tracked, edge)
    total = base
    for layer, factor in extras:
        added = (layer,) * period_of(setup)
        longer = replace(model, layers=(*ends[:middle], *added, *ends[middle:]))
        more = _walk(longer, setup, is_cuda, is_tracked, edge)
        total = total.plus(more, factor).plus(base, -factor)
    return total


def walked_layers(
    model: ModelFacts, setup: TrainingSetup
) -> tuple[tuple[LayerFacts, ...], list[tuple[LayerFacts, float]]]:
    """A few layers at either end, and the number of periods of each kind between them."""
    period, kinds = period_of(setup), model.layers
    if model.num_layers <= 4 or (period > 1 and len(kinds) > 1):
        return (), []
    fewest = [min(kind.count, 2 * period + kind.count % period) for kind in kinds]
    ends = []
    for turn in range(max(fewest)):
        ends += [replace(kind, count=1) for kind, count in zip(kinds, fewest, strict=True) if turn < count]
    extras = [
        (replace(kind, count=1), (kind.count - count) / period) for kind, count in zip(kinds, fewest, strict=True)
    ]
    return tuple(ends), [(kind, factor) for kind, factor in extras if factor]


@functools.lru_cache(maxsize=4096)
def _walk(model: ModelFacts, setup: TrainingSetup, is_cuda: bool, is_tracked: bool, edge: int | None) -> StepBytes:
    """Run all of the model's layers forward and backward; top and bottom are `edge` layers, or all."""
    autocast = setup.compute_bytes if setup.autocast else None
    tape = Tape(autocast_bytes=autocast, adds_in_place=not is_tracked, is_cuda=is_cuda)
    ops, meter = Ops(tape), tape.meter
    ops.keeps_quantised_inputs = setup.keeps_quantised_inputs and kind_of(setup.checkpointing) == "none"
    state = ShadowModel(ops, model, setup)
    peaks: list[float] = []
    gradients: list[float] = []

    def note() -> None:
        peaks.append(meter.peak_bytes)
        gradients.append(tape.gradient_bytes)
        meter.reset_peak()

    x = state.embed()
    x = tape.mark(x, note)
    x = state.run_layers(x, note)
    forward = meter.peak_bytes
    meter.reset_peak()
    x = state.finish(x)
    loss = state.loss(x)
    del x
    tape.leave_autocast()
    saved, earlier = meter.live_bytes, sum(ops.quantised_inputs.values())
    tape.backward(loss)
    note()
    if state.entry is not None:
        state.entry.grad = state.entry.node = None
    # `peaks`: loss and its backward, each layer from the last to the first, embedding.
    passes = peaks[1:] or peaks
    alone = [peak - before + gradients[0] for peak, before in zip(passes, gradients, strict=False)]
    top, top_alone = max(passes[:edge]), max(alone[:edge])
    bottom = max(passes[-edge - 1 :] if edge else passes)
    return StepBytes(saved, forward + earlier, peaks[0] + earlier, top, top_alone, bottom, meter.live_bytes)


def _adapted_modules(model: ModelFacts, setup: TrainingSetup) -> frozenset[str]:
    """Names of the layers' linears that have an adapter."""
    if setup.trains_all:
        return frozenset()
    linears = (linear for layer in model.layers for linear in layer.linears)
    return frozenset(adapter_key(linear) for linear in linears if adapter_rank(linear, setup.lora))


class ShadowModel:
    """A whole model of sizes, without values."""

    def __init__(self, ops: Ops, model: ModelFacts, setup: TrainingSetup) -> None:
        self.ops, self.model, self.setup, self.family = ops, model, setup, family_under(model, setup)
        self._kind = kind_of(setup.checkpointing)
        ranks = setup.parallel.sequence_parallel * setup.parallel.stream_ranks
        self.rows = setup.micro_batch_size * setup.sequence_length / ranks
        self.outside = Weights(setup, frozenset())
        self.adapted = _adapted_modules(model, setup)
        self.tables: Tables | None = None
        self.entry: Parameter | None = None
        # Tensors that the model's forward keeps a name for until it returns.
        self.frame: list[Tensor] = []
        # Attention weights that the last layer returned besides its result.
        self.returned: list[Tensor] | None = None
        # What a stage sends on, and keeps until its backward pass is done.
        self.sent: Tensor | None = None
        # Parameters, and so their gradients, outlive the graph.
        self.weights = [self.outside]

    def embed(self) -> Tensor:
        """Look-up (and learned positions); with adapters, checkpointing makes its result require gradients."""
        model, ops = self.model, self.ops
        if not model.has_embedding:
            return self._received()
        table = self.outside.base("embed_tokens", model.embedding_params)
        x = ops.new(self.rows * model.hidden_size, table.itemsize)
        numel, itemsize = table.numel, table.itemsize
        ops.tape.record(x, [table], [], lambda grad: [ops.new(numel, itemsize)])
        if self.family.embedding_scale == "tensor":
            x = ops.scale(x)
        if self.setup.trains_adapters and self._kind not in ("none", *SUBLAYERS, SEGMENTS):
            # The embedding's result becomes a leaf, which keeps its gradient as long as the graph lives.
            self.entry = Parameter(x.numel, itemsize)
            assert self.entry.node is not None
            self.entry.node.saved = [x.view()]
            x = ops.tape.record(x.view(), [self.entry], [], lambda grad: [grad.view()])
        if self.family.embedding_scale == "cast":
            x = ops.scale(x)
        self.frame.append(x.view())
        if self.family.embedding_norm:
            x = tiled_norm(ops, model, self.family, self.outside, "embed_norm", x)
        if model.position_params:
            looked_up = self._positions(self.outside.base("positions", model.position_params))
            self.frame.append(looked_up.view())
            x = ops.add(x, looked_up)
        if model.embedding_dropout:
            x = ops.dropout(x)
        self.tables = make_tables(ops, model, self.family, self.setup, x.itemsize)
        if self.family.makes_both_masks and len(self.tables.masks) == 1 and self.setup.attention == "eager":
            unused = make_mask(ops, model, self.family, self.setup, None, x.itemsize)
            self.frame += [unused] if unused is not None else []
        return x

    def _received(self) -> Tensor:
        """Hidden states of the previous stage, in a buffer that lives as long as the pipeline; see `cost.memory`."""
        model, ops = self.model, self.ops
        self.entry = Parameter(self.rows * model.hidden_size, self.setup.trained_bytes)
        x = Tensor(None, self.entry.numel, self.entry.itemsize)
        x = ops.tape.record(x, [self.entry], [], lambda grad: [grad.view()])
        # Stands for the embeddings in the model's own forward.
        self.frame.append(ops.new(x.numel, x.itemsize))
        self.tables = make_tables(ops, model, self.family, self.setup, x.itemsize)
        return x

    def _positions(self, positions: Parameter) -> Tensor:
        ops, numel, itemsize = self.ops, positions.numel, positions.itemsize
        width = self.rows / self.setup.micro_batch_size * self.model.hidden_size
        return ops.tape.record(ops.new(width, itemsize), [positions], [], lambda grad: [ops.new(numel, itemsize)])

    def run_layers(self, x: Tensor, note: Callable[[], None]) -> Tensor:
        """Run every layer under the checkpointing policy."""
        layers = (self._layer(facts) for facts in self.model.each_layer())
        if self._kind != SEGMENTS:
            return self._chain(layers, x, note)
        while segment := list(itertools.islice(layers, period_of(self.setup))):
            x = self.ops.tape.checkpoint(functools.partial(self._chain, segment, x, note), [x])
        return x

    def _chain(self, layers: Iterable[Layer], x: Tensor, note: Callable[[], None]) -> Tensor:
        for index, layer in enumerate(layers):
            layer.returned = [] if self.family.returns_weights else None
            x = self.ops.tape.mark(self._run(layer, x, index), note)
            self.returned, layer.returned = layer.returned, None
        return x

    def _run(self, layer: Layer, x: Tensor, index: int) -> Tensor:
        if self._kind in ("none", *SUBLAYERS, SEGMENTS) or index % period_of(self.setup):
            return layer(x)
        if self._kind == "offload":
            return self._offloaded(layer, x, index)
        keeps, every = self._kind == "selective", self.setup.keeps_every
        return self.ops.tape.checkpoint(lambda: layer(x), [x], keeps_products=keeps, every=every)

    def _layer(self, facts: LayerFacts) -> Layer:
        assert self.tables is not None
        tables = self.tables.of_window(facts.sliding_window)
        weights = Weights(self.setup, self.adapted)
        self.weights.append(weights)
        return Layer(self.ops, self.model, facts, self.family, self.setup, weights, tables)

    def _offloaded(self, layer: Layer, x: Tensor, index: int) -> Tensor:
        """A checkpoint whose input is moved to host memory and back; a CPU copies it within its own memory."""
        ops, numel, itemsize, node = self.ops, x.numel, x.itemsize, x.node
        host = None if ops.tape.is_cuda else ops.new(numel, itemsize)
        mask = self.tables.masks.get(None) if self.tables is not None and self.family.passes_mask else None
        # The first copy replaces the mask itself.
        is_copied = mask is not None and index and not ops.tape.is_cuda
        host_mask = ops.new(mask.numel, mask.itemsize) if mask is not None and is_copied else None
        first = [x]

        def run() -> Tensor:
            if first:
                return layer(first.pop())
            back = ops.new(numel, itemsize) if host is None else host.view()
            back.node = node
            return layer(back)

        return ops.tape.checkpoint(run, [] if host_mask is None else [host_mask])

    def finish(self, x: Tensor) -> Tensor:
        """The final norm. The model's forward then returns, which frees what only its frame held."""
        if self.model.has_head:
            x = tiled_norm(self.ops, self.model, self.family, self.outside, "norm", x)
        self.tables = self.returned = None
        self.frame.clear()
        return x

    def loss(self, x: Tensor) -> Tensor:
        """Head and loss; for a stage without them, what it sends on."""
        model = self.model
        if not model.has_head:
            self.sent, numel, itemsize = x.view(), x.numel, x.itemsize
            # The gradient arrives in a buffer that lives as long as the pipeline.
            return self.ops.tape.record(
                Tensor(None, 1, itemsize), [x], [], lambda grad: [Tensor(None, numel, itemsize)]
            )
        if model.num_scores:
            return scores_loss(self.ops, x, self.outside.base("score", model.head_params), model.num_scores)
        x = gathered(self.ops, x, self.setup.parallel.stream_ranks)
        name = "embed_tokens" if model.tied_embeddings else "lm_head"
        weight = self.outside.base(name, model.embedding_params)
        bias = self.outside.base("lm_head.bias", model.vocab_size) if model.head_bias else None
        return Head(self.ops, model, self.family, self.setup, weight, bias)(x)
