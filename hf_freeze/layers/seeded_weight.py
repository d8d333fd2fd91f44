"""A weight that is never in memory: its tiles are generated where they are used, multiplied, and forgotten.

`SeededWeight` is a parameter like any other: of the right shape, dtype and device, tied by identity, found by name. The modules
that hold it stay as they are. torch asks it what linears, tables and GPT-2's Conv1D do with it (`__torch_function__`), and here
they work by tiles. Any other operation first generates the whole weight, for as long as it runs.

Shapes: T tokens, I inputs, O outputs; the weight is (O, I), or (I, O) in a Conv1D.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from hf_freeze.compat.transformers import NeverDrawn
from hf_freeze.layers.derived import autocast_dtype
from hf_freeze.seeded import SeededTensor
from hf_freeze.seeded.tiles import TILE, Tiles, buffer

_ALIGNED = 128  # columns; a tile that starts at a multiple needs no call of the generator that another tile needs too


class SeededWeight(NeverDrawn, torch.Tensor):
    """The matrix (R, C) of `definition`, in `dtype` on `device`, without memory of its own; never trained.

    `engine`: what makes the tiles and multiplies. A cast or move makes a weight of the same definition: bf16 cast to fp32 has the
    exact values again. Raises ValueError for a tensor that can only be generated as a whole, and RuntimeError if written to.
    """

    definition: SeededTensor
    tiles: Tiles
    engine: "Engine"
    _is_param: bool

    @staticmethod
    def __new__(
        cls, definition: SeededTensor, dtype: torch.dtype, device: Any, engine: "Engine", tiles: Tiles | None = None
    ) -> "SeededWeight":
        tiles = tiles or Tiles(definition)
        device = None if device is None else torch.device(device)
        if device is not None and device.index is None and device.type not in ("cpu", "meta"):
            device = torch.empty(0, device=device).device  # "cuda" is compared to "cuda:0"
        weight = torch.Tensor._make_wrapper_subclass(cls, tiles.shape, dtype=dtype, device=device)
        weight.definition, weight.tiles, weight.engine = definition, tiles, engine
        return weight

    def like(self, *, dtype: torch.dtype | None = None, device: Any = None, engine: "Engine | None" = None) -> Any:
        """The same weight in another dtype, on another device or with another engine."""
        place = self.device if device is None else device
        return SeededWeight(self.definition, dtype or self.dtype, place, engine or self.engine, self.tiles)

    def as_parameter(self) -> Any:
        """The same weight as a frozen parameter of a module."""
        return nn.Parameter(self, requires_grad=False)

    def whole(self) -> torch.Tensor:
        """All values (R, C), in memory of their own."""
        return self.engine.tile(self, slice(None), slice(None), own_memory=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (by_tiles := _BY_TILES.get(func)) is not None:
            result = by_tiles(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        first = args[0] if args else None
        if isinstance(first, SeededWeight):
            if func in (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default):
                return first.like()
            if func is aten._to_copy.default:
                dtype, device = kwargs.get("dtype"), kwargs.get("device")
                if str(device) == "meta":
                    return torch.empty(first.shape, dtype=dtype or first.dtype, device="meta")
                return first.like(dtype=dtype, device=device)
            if func is aten.copy_.default and getattr(args[1], "definition", None) == first.definition:
                return first
            if func._schema.is_mutable and func._schema.arguments[0].is_write:
                raise RuntimeError(
                    f"{first.definition.name!r} is defined by a seed and has no memory to write to; "
                    "set_seeded_execution('resident') gives it some"
                )
        args, kwargs = tree_map_only(SeededWeight, SeededWeight.whole, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.like().as_parameter() if isinstance(self, nn.Parameter) else self.like()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.definition, self.dtype, str(self.device), self.engine, isinstance(self, nn.Parameter))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SeededWeight({self.definition}, dtype={self.dtype}, device={self.device}, {self.engine.name})"

    # By these torch knows that a move of the module must swap the tensor: there is no data to set.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if torch.compiler.is_compiling():  # both torch.compile and torch.export come here first
            raise RuntimeError(
                f"{self.definition.name!r} is generated where it is used, which can be neither compiled nor exported; call "
                "model.set_seeded_execution('resident') first"
            )
        return [], (self.definition, self.dtype, self.device, self.engine)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "SeededWeight":
        return SeededWeight(*context)


def _rebuilt(definition: SeededTensor, dtype: torch.dtype, device: str, engine: "Engine", is_parameter: bool) -> Any:
    weight = SeededWeight(definition, dtype, device, engine)
    return weight.as_parameter() if is_parameter else weight


class Engine:
    """Makes tiles and multiplies them: by numpy on the CPU, by torch elsewhere, one tile after another on one thread."""

    name = "streamed"

    def tile(self, weight: SeededWeight, rows: Any, columns: slice, *, own_memory: bool = False) -> torch.Tensor:
        """The values (rows, columns) in the dtype of `weight`, on its device. Unless `own_memory`, they are valid until the next
        call in this thread."""
        source, size = weight.tiles, weight.shape
        count = len(rows) if not isinstance(rows, slice) else len(range(*rows.indices(size[0])))
        width = len(range(*columns.indices(size[1])))
        if not own_memory and weight.device.type == "cpu" and count * width <= TILE:
            out = buffer(count * width).view(count, width)
        else:
            out = torch.empty(count, width, device=weight.device)
        self.fill(source, rows, columns, out)
        return out.to(weight.dtype)

    def digest(self, weight: SeededWeight) -> str:
        """The digest of its fp32 values, made by tiles (`hf_freeze.seeded.digest`)."""
        sha, exact = hashlib.sha256(), weight.like(dtype=torch.float32)
        for part in parts(weight.shape[0], weight.shape[1], 0):
            values: Any = self.tile(exact, part, slice(None)).cpu().numpy()
            sha.update(memoryview(values).cast("B"))
        return sha.hexdigest()[:32]

    def same(self, weight: SeededWeight, values: torch.Tensor) -> bool:
        """Whether `values` (R, C) are those of `weight`; compared by tiles."""
        tiles = parts(weight.shape[0], weight.shape[1], 0)
        return all(torch.equal(self.tile(weight, part, slice(None)), values[part]) for part in tiles)

    def fill(self, source: Tiles, rows: Any, columns: slice, out: torch.Tensor) -> None:
        """Write the fp32 values of these rows and columns to `out`."""
        source.generate(rows, columns, out=out, device=out.device)

    def multiply(self, weight: SeededWeight, x: torch.Tensor, axis: int, bias: torch.Tensor | None) -> torch.Tensor:
        """x (T, K) by the weight, whose other axis than `axis` has K entries: (T, entries of `axis`), plus `bias`.

        Every tile has all K entries of the outputs that it makes, so each output is one product of vectors, as when resident.
        """
        outputs = weight.shape[axis]
        y = x.new_empty(len(x), outputs)
        for part in parts(outputs, weight.shape[1 - axis], axis):
            whole = slice(None)
            tile = self.tile(weight, *((part, whole) if axis == 0 else (whole, part)))
            matrix = (tile.T if axis == 0 else tile).to(x.dtype)
            if bias is None:
                torch.mm(x, matrix, out=y[:, part])
            else:
                torch.addmm(bias[part], x, matrix, out=y[:, part])
        return y

    def rows(self, weight: SeededWeight, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids`, of any shape, of a table (V, D): (..., D). Each is generated once."""
        unique, places = ids.flatten().unique(return_inverse=True)
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < weight.shape[0]:
            raise IndexError(f"id outside 0..{weight.shape[0] - 1} of {weight.definition.name!r}")
        rows = self.tile(weight, unique.cpu().numpy(), slice(None))
        return rows[places].view(*ids.shape, weight.shape[1])

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = object.__hash__


def parts(outputs: int, inputs: int, axis: int) -> list[slice]:
    """Slices of the outputs whose tiles have at most TILE values."""
    step = max(TILE // max(inputs + 8 * axis, 1), 1)
    if axis == 1 and step > _ALIGNED:
        step -= step % _ALIGNED
    return [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]


class _Multiply(torch.autograd.Function):
    """x (T, K) by a seeded weight. The gradient to x is the same operation along the other axis; the weight has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Any, weight: SeededWeight, axis: int) -> torch.Tensor:  # type: ignore[override]
        ctx.weight, ctx.axis = weight, axis
        return weight.engine.multiply(weight, x, axis, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        to_x = _Multiply.apply(grad, None, ctx.weight, 1 - ctx.axis) if ctx.needs_input_grad[0] else None
        return to_x, grad.sum(0) if ctx.needs_input_grad[1] else None, None, None


def _product(x: torch.Tensor, weight: SeededWeight, bias: torch.Tensor | None, axis: int) -> torch.Tensor:
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, bias, weight = x.to(dtype), None if bias is None else bias.to(dtype), weight.like(dtype=dtype)
    if x.dtype != weight.dtype:
        raise RuntimeError(
            f"expected inputs in {weight.dtype}, as {weight.definition.name!r} is, but they are {x.dtype}"
        )
    if x.shape[-1] != weight.shape[1 - axis]:
        raise RuntimeError(
            f"{weight.definition.name!r} takes {weight.shape[1 - axis]} inputs, but they are {x.shape[-1]}"
        )
    y: Any = _Multiply.apply(x.reshape(-1, x.shape[-1]), bias, weight, axis)
    return y.view(*x.shape[:-1], weight.shape[axis])


def _linear(input: torch.Tensor, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, SeededWeight) or isinstance(input, SeededWeight) or isinstance(bias, SeededWeight):
        return NotImplemented
    return _product(input, weight, bias, 0)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    """What Conv1D calls: bias, x (T, I), weight (I, O)."""
    plain = beta == 1 and alpha == 1 and out is None and input.dim() == 1
    if not plain or not isinstance(mat2, SeededWeight) or isinstance(mat1, SeededWeight):
        return NotImplemented
    return _product(mat1, mat2, input, 1)


def _embedding(
    input: torch.Tensor,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or not isinstance(weight, SeededWeight):
        return NotImplemented
    return weight.engine.rows(weight, input)


_BY_TILES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.addmm: _addmm,
}
