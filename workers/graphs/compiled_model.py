"""--level 1 and 2: a model's forward pass compiled by torch.compile, in pieces between its token mixers.

    traced   norms, activations, sums, embedding: by their torch functions, for the compiler to fuse
    opaque   GEMMs, routing, experts: the kernels that an eager pass runs
    split    token mixers: attention and its cache run eagerly

        ids ─ piece ─ attention ─ piece ─ attention ─ … ─ piece ─ hidden states

The pass is traced once, with a symbolic number of tokens; weights become arguments, so that layers of the
same shape share one compiled piece.

T tokens, D hidden.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from atom.shared.config.device import COMPILERS
from atom_ops.op import REGISTRY, Op, Provider
from workers.layers.attention.rotation import Rotation
from workers.layers.causal_lm import CausalLM
from workers.layers.context import ForwardContext, Mixing

_TRACED = {
    *("rms_norm", "add_rms_norm", "gated_rms_norm", "silu_and_mul", "sigmoid_and_mul", "embedding"),
    *("gelu_tanh_and_mul", "rotation_at", "add_norm_linear", "silu_and_mul_linear", "weigh_inputs"),
}
_TOKENS = 7
"""Number of tokens of the traced pass: any above 1 that no other dimension has."""
_VARIANTS = 64
"""Most compiled forms of a piece: one for a single token, one for more, others for very many."""

Step = Callable[[int], tuple[Tensor, Tensor, ForwardContext]]
"""Makes the inputs of a step of so many tokens of padding."""
_Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class _Calls:
    """The opaque calls of one model, by their number."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.number = next(_numbers)
        _tables[self.number] = self

    def add(self, call: _Call) -> Tensor:
        """A handle of the call: a tensor, since a constant would make the pieces of all layers differ."""
        self.calls.append(call)
        return torch.tensor([self.number, len(self.calls) - 1])


_numbers = count()
_tables: "WeakValueDictionary[int, _Calls]" = WeakValueDictionary()
_library = torch.library.Library("atom_compiled", "DEF")
_library.define("call(Tensor[] tensors, Tensor handle, str results) -> Tensor[]")
_library.define("mix(Tensor[] tensors, Tensor handle, str results) -> Tensor[]")


def _run(tensors: Sequence[Tensor], handle: Tensor, results: str) -> list[Tensor]:
    table, number = handle.tolist()
    return list(_tables[table].calls[number](tensors))


def _shapes(tensors: Sequence[Tensor], handle: Tensor, results: str) -> list[Tensor]:
    """Empty tensors as described: "DTYPE:SIZE,SIZE" for each result, without its first dimension, T."""
    found = []
    for result in results.split():
        dtype, _, sizes = result.partition(":")
        shape = [int(size) for size in sizes.split(",") if size]
        like = tensors[-1]
        # Not len(like), which would make the number of tokens a constant.
        found.append(like.new_empty((like.shape[0], *shape), dtype=getattr(torch, dtype)))
    return found


for _name in ("call", "mix"):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"atom_compiled::{_name}", _shapes, lib=_library)


def _described(results: Sequence[Tensor]) -> str:
    if any(len(result) != _TOKENS for result in results):
        raise ValueError("an op between token mixers returns a tensor that has no row for each token")
    return " ".join(
        f"{str(result.dtype).removeprefix('torch.')}:{','.join(map(str, result.shape[1:]))}"
        for result in results
    )


class _Tracer:
    """Runs a pass twice: eagerly, to see the results of opaque calls, then with symbolic tensors."""

    def __init__(self, context: Callable[[], ForwardContext]):
        self.calls = _Calls()
        self._context = context
        self._results: list[str] = []
        self._next = 0
        self._depth = 0
        """Above 0 within an opaque call, whose ops are its own affair."""
        self._rotation: Rotation | None = None

    def trace(
        self, model: CausalLM, ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext
    ) -> fx.GraphModule:
        """The pass from ids and positions to hidden states; `ctx` is of a step of `_TOKENS` tokens."""
        traced = replace(ctx, splitter=self)

        def forward(ids_T: Tensor, positions_T: Tensor) -> Tensor:
            return model(ids_T, positions_T, traced)

        with self._opaque():
            forward(ids_T, positions_T)
            make = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)
            graph = make(ids_T, positions_T)
        (output,) = graph.graph.find_nodes(op="output")
        if not isinstance(output.args[0].meta["val"].shape[0], torch.SymInt):
            raise ValueError("the model's code between token mixers depends on the number of tokens")
        return graph

    def split(
        self, mix: Mixing, ctx: ForwardContext, rotation: Rotation, tensors: Sequence[Tensor]
    ) -> Tensor:
        if not isinstance(tensors[0], FakeTensor):
            return self._recorded(lambda: mix(ctx, rotation, *tensors))
        interleaved = rotation.interleaved

        def call(given: Sequence[Tensor]) -> Sequence[Tensor]:
            angles = self._angles(given[0], given[1], interleaved)
            return [self._context().mix(mix, angles, *given[2:])]

        return self._emit("mix", call, [rotation.cos_T1R, rotation.sin_T1R, *tensors])[0]

    def _recorded(self, compute: Callable[[], Any]) -> Any:
        """The result of an opaque call, of which the traced pass will know the shape."""
        self._depth += 1
        result = compute()
        self._depth -= 1
        if not self._depth:
            self._results.append(_described([result] if isinstance(result, Tensor) else result))
        return result

    def _angles(self, cos_T1R: Tensor, sin_T1R: Tensor, interleaved: bool) -> Rotation:
        """One object in a pass: all layers share what it caches."""
        if self._rotation is None or self._rotation.cos_T1R is not cos_T1R:
            self._rotation = Rotation(cos_T1R, sin_T1R, interleaved)
        return self._rotation

    def _emit(self, kind: str, call: _Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        results = self._results[self._next]
        self._next += 1
        emitted = getattr(torch.ops.atom_compiled, kind)
        found: list[Tensor] = emitted(list(tensors), self.calls.add(call), results)
        return found

    @contextmanager
    def _opaque(self) -> Iterator[None]:
        """Ops are traced by their torch functions, or opaque; afterwards as they were."""
        before = {name: each.order for name, each in REGISTRY.items()}
        try:
            for name, each in REGISTRY.items():
                each.use([])
                if name not in _TRACED:
                    each._preferred = (self._provider(each, before[name]),)
            yield
        finally:
            for name, each in REGISTRY.items():
                each.use(before[name])

    def _provider(self, op: Op[..., Any], order: Sequence[str]) -> Provider:
        def run(*args: Any, **kwargs: Any) -> Any:
            kept = op._preferred
            op.use(order)
            try:
                return op(*args, **kwargs)
            finally:
                op._preferred = kept

        def function(*args: Any, **kwargs: Any) -> Any:
            places = [place for place, arg in enumerate(args) if isinstance(arg, FakeTensor)]
            if any(map(_holds_fake, args)):
                raise ValueError(
                    f"{op.name} is called with a view of a weight: make it when weights are loaded"
                )
            if not places:
                return self._recorded(lambda: run(*args, **kwargs))

            def call(given: Sequence[Tensor]) -> Sequence[Tensor]:
                filled = dict(zip(places, given, strict=True))
                result = op(*(filled.get(place, arg) for place, arg in enumerate(args)), **kwargs)
                return [result] if isinstance(result, Tensor) else result

            found = self._emit("call", call, [args[place] for place in places])
            return found[0] if len(found) == 1 else tuple(found)

        return Provider(op.name, function, "nothing", lambda device: True, None, None)


def _holds_fake(arg: Any) -> bool:
    """Whether a dataclass has a traced tensor, where it would be taken for a weight."""
    return is_dataclass(arg) and any(isinstance(getattr(arg, f.name), FakeTensor) for f in fields(arg))


@dataclass
class _Piece:
    """A compiled piece, of all layers with this graph."""

    compiled: Callable[..., Any]
    by_token: list[int]
    """Arguments whose first dimension is T."""
    marks: bool = True
    """Whether a compilation may come: then T is marked as one that changes."""

    def __call__(self, *args: Any) -> Any:
        if self.marks:
            for place in self.by_token:
                torch._dynamo.maybe_mark_dynamic(args[place], 0)
        return self.compiled(*args)


class CompiledForward:
    """In place of a model's `forward`."""

    def __init__(self, model: CausalLM, step: Step, level: int):
        """Traces and compiles; `step` makes ids, positions and context of so many tokens of padding."""
        self._ctx: ForwardContext | None = None
        self._pieces: dict[Any, _Piece] = {}
        self._backend = COMPILERS[level]
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
        tracer = _Tracer(self._context)
        self._calls = tracer.calls  # the table has only a weak reference
        graph = tracer.trace(model, *step(_TOKENS))
        self._constants = _lift_constants(graph)
        self._forward = self._split(graph)
        for tokens in (_TOKENS, 1):
            self(*step(tokens))
        for piece in self._pieces.values():
            piece.marks = False

    @property
    def num_pieces(self) -> int:
        """Compiled pieces: layers of the same shape share theirs."""
        return len(self._pieces)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        self._ctx = ctx
        hidden_TD: Tensor = self._forward(ids_T, positions_T, *self._constants)
        return hidden_TD

    def _context(self) -> ForwardContext:
        assert self._ctx is not None, "mixers run within a pass"
        return self._ctx

    def _split(self, graph: fx.GraphModule) -> fx.GraphModule:
        parts: dict[fx.Node, int] = {}
        part = 0
        for node in graph.graph.nodes:
            is_mixer = _is_mixer(node)
            part += is_mixer
            # The first element of a mixer's results belongs to it: a piece takes and returns tensors alone.
            of_mixer = node.target is operator.getitem and _is_mixer(node.args[0])
            parts[node] = parts[node.args[0]] if of_mixer else part
            part += is_mixer
        whole = split_module(graph, graph, parts.__getitem__, keep_original_order=True)
        for name, piece in list(whole.named_children()):
            assert isinstance(piece, fx.GraphModule)
            if not any(map(_is_mixer, piece.graph.nodes)):
                setattr(whole, name, _Shared(self._compiled(piece)))
        return whole

    def _compiled(self, piece: fx.GraphModule) -> _Piece:
        key = _key(piece.graph)
        if key not in self._pieces:
            by_token = [
                place
                for place, node in enumerate(piece.graph.find_nodes(op="placeholder"))
                if _has_tokens(node.meta.get("val"))
            ]
            compiled = torch.compile(piece, backend=self._backend, fullgraph=True)
            self._pieces[key] = _Piece(compiled, by_token)
        return self._pieces[key]


def _has_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and isinstance(value.shape[0], torch.SymInt)


class _Shared(torch.nn.Module):
    """A piece within the module of the whole pass."""

    def __init__(self, piece: _Piece):
        super().__init__()
        self.forward = piece


def _is_mixer(node: fx.Node) -> bool:
    return node.target is torch.ops.atom_compiled.mix.default


def _lift_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Make every constant, such as a weight, an argument after the others; returns their values."""
    last = list(graph.graph.find_nodes(op="placeholder"))[-1]
    lifted: dict[str, fx.Node] = {}
    values = []
    for node in list(graph.graph.find_nodes(op="get_attr")):
        if node.target not in lifted:
            value = getattr(graph, node.target)
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"constant_{len(lifted)}")
            last.meta = dict(node.meta) | {"val": value}
            lifted[node.target] = last
            values.append(value)
        node.replace_all_uses_with(lifted[node.target])
        graph.graph.erase_node(node)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_numel.default):
        # The compiler cannot trace it; only vectors of ids and positions are counted so.
        assert node.args[0].meta["val"].ndim == 1
        node.target = torch.ops.aten.sym_size.int
        node.args = (node.args[0], 0)
    graph.recompile()
    return values


def _key(graph: fx.Graph) -> Any:
    """Equal for pieces that compute the same of tensors of the same shapes."""
    names: Mapping[fx.Node, int] = {node: number for number, node in enumerate(graph.nodes)}

    def canonical(value: Any) -> Any:
        return repr(fx.node.map_arg(value, lambda node: f"%{names[node]}"))

    def meta(node: fx.Node) -> str:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device}"
        return str(value)

    return tuple(
        (node.op, "" if node.op == "placeholder" else str(node.target), canonical(node.args),
         canonical(node.kwargs), meta(node) if node.op == "placeholder" else "")
        for node in graph.nodes
    )  # fmt: skip
