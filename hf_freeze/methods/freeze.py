"""Freeze components, with the weights they have or with random ones that a seed regenerates (Bogoychev, 2021, "Not all
parameters are born equal: Attention is mostly what you need", https://arxiv.org/abs/2010.11859).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_freeze import surgery
from hf_freeze.architectures.base import (
    Architecture,
    base_name,
    canonical_parameters,
    check_layers_type,
    is_of_predecessor,
)
from hf_freeze.architectures.layer_parts import AttentionParts, check_parts, named_by
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import (
    check_choice,
    check_fields,
    check_integer,
    check_positive_share,
    is_number,
    one_of,
    training_span,
    wrong,
)
from hf_freeze.methods.parts import FreezePhase, InitialValues, Part, SeededValues
from hf_freeze.methods.registry import register_method
from hf_freeze.seeded import SeededTensor

_KEEP = ("trainable", "frozen")
_STORED = (*_KEEP, "redrawn")
_MODES = {
    "embeddings": (*_STORED, "random"),
    "attention": (*_STORED, "random", "diagonal", "zero_diagonal"),
    "ffn": (*_STORED, "random", "diagonal", "zero_diagonal"),
    "norm": _STORED,
    "head": _STORED,
}
# Setting -> scheme of a SeededTensor, of a matrix and of a table.
_SCHEMES = {
    "glorot_uniform": ("glorot", "embedding"),
    "glorot_normal": ("normal", "embedding_normal"),
    "orthogonal": ("orthogonal", "embedding_orthogonal"),
    "sparse": ("sparse", "embedding_sparse"),
    "blocks": ("blocks", None),
    "int8": ("int8", "embedding_int8"),
    "sign": ("sign", "embedding_sign"),
}
_DENSITY = 1 / 3  # Achlioptas (2003)


@register_method(
    "freeze", example={"ffn": "random", "attention": "frozen", "seed": 13}, facts=Facts(structural=False, shrinks=True)
)
@dataclass(frozen=True, kw_only=True)
class Freeze(Method):
    """Freeze components. The mode of each component is one of

    - `"trainable"` (default): unchanged;
    - `"frozen"`: keeps its weights, which are stored;
    - `"random"` (embeddings, attention, ffn): random matrices (of a mixture of experts, each expert's) and tables, by `scheme`,
      zero biases, and the identity for a norm within the embeddings; never stored;
    - `"redrawn"`: starts from the values of `"random"`, and norms from those of a new model, whatever it has learned before, and
      is trained; stored;
    - `"diagonal"` (attention, ffn): ones on the main diagonal of the matrix, zeros elsewhere, biases 0; never stored;
    - `"zero_diagonal"` (attention, ffn): random with zeros on the main diagonal; never stored.

    `scheme`, for `"random"` and `"redrawn"`, is one of

    - `"glorot_uniform"` (default): matrices U(±sqrt(6/(I + O))) for I inputs and O outputs, tables U(±sqrt(3/d)) for rows of d;
    - `"glorot_normal"`: normal values of the same variance, 2/(I + O) and 1/d;
    - `"orthogonal"`: matrices with orthonormal columns, or rows if there are fewer; tables of orthogonal blocks of d rows;
    - `"sparse"`: zeros, and in the share `density` of places (None: 1/3) two values ±c, of the same variance;
    - `"blocks"` (attention, ffn): `blocks` equal blocks on the diagonal, each Glorot-uniform for its own sizes, and zeros;
    - `"int8"`, `"sign"`: 256 or two equally likely values, of the same variance. They are quicker to make: one call of the
      generator gives 16 or 128 of them, and 4 uniform ones (`model.set_seeded_execution`).

    `gain` multiplies all these values. One Freeze has one scheme; give components different ones by several Freeze.

    `attention` may be a dict from parts of attentions to modes, such as `{"cross": "random", "self.q": "frozen"}`: a kind of
    attention (`"self"`, `"cross"`), a projection of all kinds (`"q"`, `"k"`, `"v"`, `"o"`), or a projection of one kind. Parts
    that it does not name are trainable.

    Biases belong to their linear. A tied table freezes together with its output matrix. `layers`, such as
    `{"encoder": [0, 1]}`, limits attention, ffn and norm to these layers; embeddings and head lie in no layer.
    Several Freeze act in their order, each on the components that it names.

    `begin` and `end` are shares of training in 0..1: the components are frozen while begin <= steps done / all steps < end.
    None means from the start (0) or to the end (1). They work for `"frozen"` only, and training then needs `VariantCallback` or
    `model.advance`.

    Raises ValueError for an unknown mode, part or scheme, a part that is named twice, different modes for projections that are
    one matrix (GPT-2's q, k and v), a seed outside 0..2^63-1, a gain that is not above 0, a density outside (0, 1], a matrix that
    `blocks` do not divide, a setting of the scheme without a component that it is for, a stack or layer that the backbone does
    not have, and a begin or end that is outside 0..1, in the wrong order or set for a component that is not stored.
    """

    embeddings: str = "trainable"
    attention: str | dict[str, str] = "trainable"
    ffn: str = "trainable"
    norm: str = "trainable"
    head: str = "trainable"
    layers: dict[str, list[int]] | None = None
    seed: int = 0
    begin: float | None = None
    end: float | None = None
    scheme: str = "glorot_uniform"
    gain: float = 1.0
    density: float | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.attention == {}:
            raise ValueError("Freeze(attention={}): must be a mode, or a dict such as {'cross': 'random'}")
        for component, modes in _MODES.items():
            for field, mode in self.modes_of(component).items():
                check_choice(mode, modes, "Freeze", field)
        check_layers_type(self.layers)
        check_fields(self, scheme=one_of(_SCHEMES))
        for component in _MODES if self.phase != (0, 1) else ():
            if self._seeds(component):
                raise ValueError(
                    f"Freeze({component}={getattr(self, component)!r}, begin={self.begin!r}, end={self.end!r}): weights that a "
                    "seed regenerates are not stored, so they cannot be unfrozen; use 'frozen' (fresh weights of a config are "
                    "random as well)"
                )
        self._check_scheme()

    def _check_scheme(self) -> None:
        if not is_number(self.gain) or not 0 < self.gain < 1e6:
            raise ValueError(f"Freeze(gain={self.gain!r}): must be a number above 0 and below 1e6")
        for field, scheme, value in (("density", "sparse", self.density), ("blocks", "blocks", self.blocks)):
            if value is not None and self.scheme != scheme:
                raise ValueError(
                    f"Freeze({field}={value!r}, scheme={self.scheme!r}): {field} belongs to scheme={scheme!r}"
                )
        check_fields(self, density=check_positive_share)
        if self.scheme == "blocks":
            check_integer(self.blocks, 2, "Freeze", "blocks")
        drawn = [component for component in _MODES if self._has(component, "random", "redrawn")]
        if not drawn and (self.scheme != "glorot_uniform" or self.gain != 1):
            raise wrong(self, "no component is 'random' or 'redrawn'", "scheme", "gain")
        if self.scheme == "blocks" and "embeddings" in drawn:
            raise ValueError(
                f"Freeze(embeddings={self.embeddings!r}, scheme='blocks'): a table has no diagonal; use a Freeze of its own for "
                "the embeddings, with another scheme"
            )

    def modes_of(self, component: str) -> dict[str, str]:
        """Field, as text, -> mode: one for a component, or one for each of its parts."""
        value = getattr(self, component)
        if component != "attention" or not isinstance(value, dict):
            return {component: value}
        return {f"attention[{part!r}]": mode for part, mode in value.items()}

    def _seeds(self, component: str) -> bool:
        """Whether a seed regenerates some of its weights."""
        return any(mode not in _STORED for mode in self.modes_of(component).values())

    def _has(self, component: str, *modes: str) -> bool:
        """Whether some of its weights have one of these modes."""
        return any(mode in modes for mode in self.modes_of(component).values())

    @property
    def phase(self) -> tuple[float, float]:
        """(begin, end) as shares of training; (0, 1) means throughout."""
        return training_span(self.begin, self.end)

    @property
    def parts(self) -> tuple[Part, ...]:
        redraws = any(self._has(component, "redrawn") for component in _MODES)
        redrawn = (InitialValues(self._redrawn),) if redraws else ()
        if self.phase != (0, 1):
            return (_Phase(self), *redrawn)
        seeded = frozenset(filter(self._seeds, _MODES))
        return (SeededValues(seeded), *redrawn) if seeded else redrawn

    def check(self, architecture: Architecture, config: Any) -> None:
        architecture.check_layers(self.layers, config)
        if isinstance(self.attention, dict):
            check_parts(self.attention, (), architecture, config, f"Freeze(attention={self.attention!r})", self.layers)

    def freeze(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        for full_name, mode, definition in self._tensors(model, architecture):
            if mode != "redrawn":
                yield full_name, definition

    def _redrawn(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, SeededTensor | None]]:
        for full_name, mode, definition in self._tensors(model, architecture):
            if mode == "redrawn":
                yield full_name, definition

    def _tensors(self, model: Model, architecture: Architecture) -> Iterable[tuple[str, str, SeededTensor | None]]:
        """(full name, mode, definition of its values) of the parameters of all components that are not "trainable"."""
        parts = AttentionParts(architecture)
        for full_name, parameter in canonical_parameters(model):
            name = base_name(model, full_name)
            component = architecture.component(name)
            mode = getattr(self, component, "trainable")
            if component == "attention" and isinstance(mode, dict):
                mode = mode.get(named_by(mode, parts.of(name)) or "", "trainable")
            if mode == "trainable" or is_of_predecessor(name) or not self._selects(architecture, component, name):
                continue
            if mode == "frozen" or component == "norm":
                yield full_name, mode, None
                continue
            if component != "embeddings":
                _check_native(model, full_name, f"Freeze({component}={mode!r})")
            definition = SeededTensor(self.seed, name, tuple(parameter.shape), "zeros")
            if is_bias(name, parameter):
                yield full_name, mode, definition
            elif parameter.ndim == 1 and _is_scale_of_norm(model, full_name):
                yield full_name, mode, replace(definition, scheme="ones")
            elif parameter.ndim not in (2, 3):  # such as the scale of a residual
                yield full_name, mode, None
            else:
                fused = surgery.fused_projections(model, architecture, name) if parameter.ndim == 2 else None
                yield full_name, mode, replace(definition, **self._scheme_of(component, mode), **(fused or {}))

    def _scheme_of(self, component: str, mode: str) -> dict[str, Any]:
        """The fields of a SeededTensor for the matrices of a component."""
        if mode in ("diagonal", "zero_diagonal"):
            return {"scheme": mode}
        fields: dict[str, Any] = {"scheme": _SCHEMES[self.scheme][component == "embeddings"], "gain": float(self.gain)}
        if self.scheme == "sparse":
            fields["density"] = _DENSITY if self.density is None else float(self.density)
        if self.scheme == "blocks":
            fields["blocks"] = self.blocks
        return fields

    def _selects(self, architecture: Architecture, component: str, name: str) -> bool:
        if self.layers is None or component in ("embeddings", "head"):
            return True
        layer = architecture.layer_of(name)
        return layer is not None and layer[1] in self.layers.get(layer[0], ())


class _Phase(FreezePhase):
    """Freezes from `begin` to `end` of training."""

    def values(self, step: int, total_steps: int) -> dict[str, float]:
        frozen = [
            component if getattr(self.method, component) == "frozen" else f"parts of {component}"
            for component in _MODES
            if "frozen" in self.method.modes_of(component).values()
        ]
        layers = "" if self.method.layers is None else f" of {self.method.layers}"
        return {f"{', '.join(frozen)}{layers} frozen": float(self.frozen_at(step / total_steps))}

    def frozen_at(self, progress: float | None) -> bool:
        begin, end = self.method.phase
        return progress is not None and begin <= progress and (progress < end or end == 1)


def _is_scale_of_norm(model: Any, parameter_name: str) -> bool:
    """Whether the parameter is the scale of a norm. The embeddings may have one, and with a zero scale it would output zeros."""
    owner, _, name = parameter_name.rpartition(".")
    return name == "weight" and isinstance(model.get_submodule(owner), nn.LayerNorm)


def is_bias(name: str, parameter: Any) -> bool:
    """Whether a parameter is the bias of a linear, or those of the experts of a mixture."""
    return parameter.ndim <= 2 and name.endswith("bias") and "relative" not in name


def _check_native(model: Any, parameter_name: str, setting: str) -> None:
    """Raise ValueError if another method has replaced the linear of this parameter."""
    name = parameter_name.rpartition(".")[0]
    module = model.get_submodule(name)
    if name and type(module).__module__.startswith("hf_freeze."):
        raise ValueError(
            f"{setting}: {name!r} is a {type(module).__name__}, and only the matrices of plain linears can be drawn from a seed; "
            "use 'frozen', or leave it out by layers="
        )
