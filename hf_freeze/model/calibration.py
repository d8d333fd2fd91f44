"""What the linears of a model see, kept for later: moments that can be saved, and that `make_variant` takes in place of texts."""

import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_freeze import surgery
from hf_freeze.architectures.base import LINEAR_COMPONENTS
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.roles import EXPERT_OUTPUT
from hf_freeze.io import sync
from hf_freeze.layers.derived import features
from hf_freeze.solvers.moments import Moments

_FORMAT = "hf_freeze calibration 1"
_LEAST_TOKENS = 0.25  # of the inputs of the last linear of an expert: with fewer, it is cut as without a calibration
_SAMPLED = 16  # weights of each linear, by which a model is known again
_OTHER_DTYPE = 1e-2  # relative difference of weights that were rounded to another dtype


@dataclass
class Report:
    """What a calibration has used and changed: `texts`, `tokens`, for each linear the relative error of its outputs, (as the
    method cuts without calibration, with it), and in words what else was decided."""

    texts: int = 0
    tokens: int = 0
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _is_warned: bool = False
    _idle: dict[str, list[str]] = field(default_factory=dict)

    def note(self, text: str) -> bool:
        """Whether it was not noted before."""
        is_new = text not in self.notes
        if is_new:
            self.notes.append(text)
        return is_new

    def check_tokens(self, name: str, count: int, inputs: int, widest: int) -> None:
        """Warn, once, where a linear has seen fewer tokens than it has inputs. `widest`: the most inputs of any linear."""
        if count < inputs and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"few tokens: {name!r} has {inputs} inputs and has seen {count} tokens of the calibration, so a larger ridge is "
                f"used: give texts of at least {widest} tokens, better {10 * widest}",
                stacklevel=2,
            )

    def enough(self, experts: str, moments: Mapping[str, Moments | None]) -> dict[str, Moments | None]:
        """`moments` of linears of `experts`, or None for those of experts that have seen too few tokens."""
        kept = {
            name: each if each is not None and each.count >= _LEAST_TOKENS * len(each.mean) else None
            for name, each in moments.items()
        }
        if idle := [name.rpartition(".")[2] for name, each in kept.items() if each is None and EXPERT_OUTPUT in name]:
            self._idle[experts] = idle
        return kept

    def warn_of_experts(self) -> None:
        """Warn of all experts that have seen too few tokens."""
        idle, self._idle = self._idle, {}
        listed = "; ".join(f"{experts!r}: {', '.join(numbers)}" for experts, numbers in idle.items())
        text = f"experts that no or too few tokens of the calibration reach are cut as without: {listed}"
        if idle and self.note(text):
            warnings.warn(text, stacklevel=2)


@contextmanager
def warned_once() -> Iterator[None]:
    """Inside, solvers do not warn of few tokens for each linear: `Report.check_tokens` does, once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"calibration has \d+ tokens for a linear")
        yield


@dataclass(frozen=True)
class Calibration:
    """The moments of the linears of a model, from `analysis.calibrate`.

    `moments`: linear (below the base model) -> what it sees; linears that read the same states share one object. `texts`,
    `tokens`: of how many. The rest tells whether a model is the one that it was made of: its `model_type`, `dtype`, the `sizes`
    (O, I) of its linears and some of their `weights`, fp32 (16,).
    """

    moments: dict[str, Moments]
    texts: int
    tokens: int
    model_type: str
    dtype: str
    sizes: dict[str, tuple[int, int]]
    weights: dict[str, Tensor]

    def __str__(self) -> str:
        return (
            f"Calibration of {len(self.moments)} linears of a {self.model_type}, on {self.texts:,} texts with {self.tokens:,} "
            "tokens"
        )

    @classmethod
    def of(cls, model: Any, moments: Mapping[str, Moments | None], texts: int, tokens: int) -> "Calibration":
        """`moments`: those of the linears of `model`; None for one that has not run."""
        sizes, weights = {}, {}
        for name, linear in surgery.modules(model, calibrated_linears(model)):
            sizes[name], weights[name] = _known_by(linear)
        seen = {name: each for name, each in moments.items() if each is not None}
        model_type = architecture_for(model).model_type
        return cls(seen, texts, tokens, model_type, str(model.dtype), sizes, weights)

    def check(self, model: Any) -> None:
        """Raise ValueError for another model than the one that it was made of."""
        model_type = architecture_for(model).model_type
        if model_type != self.model_type:
            raise ValueError(f"this calibration is of a {self.model_type}, but the model is a {model_type}")
        linears = dict(surgery.modules(model, calibrated_linears(model)))
        if differ := sorted(linears.keys() ^ self.sizes.keys()):
            where = "the calibration" if differ[0] in self.sizes else "the model"
            raise ValueError(f"this calibration is of another {model_type}: only {where} has a linear {differ[0]!r}")
        known = {name: _known_by(linear) for name, linear in linears.items()}
        for name, (size, _) in known.items():
            if size != self.sizes[name]:
                raise ValueError(
                    f"this calibration is of another {model_type}: {name!r} has {self.sizes[name]} outputs and inputs there, but "
                    f"{size} in the model"
                )
        tolerance = 1e-6 if str(model.dtype) == self.dtype else _OTHER_DTYPE
        others = [
            name
            for name, (_, weights) in known.items()
            if (weights - self.weights[name]).norm() > tolerance * self.weights[name].norm()
        ]
        if others:
            raise ValueError(
                f"this calibration is of another {model_type} of the same sizes: the weights of {others[0]!r} differ, and those "
                f"of {len(others) - 1} other linears"
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a safetensors file: 8 bytes for each pair of inputs of a linear (4 above 4,096 inputs), once where several
        linears read the same states. Returns the path."""
        path = Path(path)
        shared = {id(each): each for each in self.moments.values()}
        numbers = {key: number for number, key in enumerate(shared)}
        tensors = {f"weights {name}": weights for name, weights in self.weights.items()}
        for key, each in shared.items():
            tensors |= {f"gram {numbers[key]}": each.gram.cpu(), f"mean {numbers[key]}": each.mean.cpu()}
        facts = {
            "texts": self.texts,
            "tokens": self.tokens,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "sizes": self.sizes,
            "moments": {name: numbers[id(each)] for name, each in self.moments.items()},
            "counts": [each.count for each in shared.values()],
        }
        part = path.with_name(f".{path.name}.part")
        save_file(tensors, part, {"format": _FORMAT, "facts": json.dumps(facts)})
        sync(part)
        os.replace(part, path)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read a file of `save`. Raises ValueError for any other file, FileNotFoundError for none."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {_FORMAT!r}")
                facts = json.loads(metadata["facts"])
                shared = [
                    Moments(file.get_tensor(f"gram {number}"), file.get_tensor(f"mean {number}"), count)
                    for number, count in enumerate(facts["counts"])
                ]
                return cls(
                    moments={name: shared[number] for name, number in facts["moments"].items()},
                    sizes={name: (outputs, inputs) for name, (outputs, inputs) in facts["sizes"].items()},
                    weights={name: file.get_tensor(f"weights {name}") for name in facts["sizes"]},
                    **{name: facts[name] for name in ("texts", "tokens", "model_type", "dtype")},
                )
        except (SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{path} is no calibration: {error}") from error


def digest_of(calibration: Any, tokenizer: Any) -> str:
    """Of what `make_variant(calibration=, tokenizer=)` takes: equal for equal texts, batches or moments, in the same order, and
    an equal vocabulary."""
    digest = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Calibration):
            add([item.sizes, item.weights, [[name, each.gram, each.mean] for name, each in item.moments.items()]])
        elif torch.is_tensor(item):
            add([str(item.dtype), list(item.shape)])
            digest.update(item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(item, Mapping):
            add([[name, item[name]] for name in sorted(item)])
        elif isinstance(item, list | tuple):
            digest.update(f"[{len(item)}".encode())
            for each in item:
                add(each)
        else:
            digest.update(f"{item!r},".encode())

    add([calibration, None if tokenizer is None else tokenizer.get_vocab()])
    return digest.hexdigest()


def calibrated_linears(model: Any) -> list[str]:
    """The linears of attention and FFN, below the base model, that no method has removed; of experts, the last ones."""
    architecture = architecture_for(model)
    names = surgery.linear_names(architecture, model.config, LINEAR_COMPONENTS, None)
    blocks = surgery.neurons_of(architecture, model.config)
    names += [name for block in architecture.experts(model.config) for name in blocks[block].outputs(model)]
    return [name for name in dict.fromkeys(names) if not surgery.is_removed(model, name)]


def _known_by(linear: Any) -> tuple[tuple[int, int], Tensor]:
    """The size (O, I) of a linear and some of its weights, fp32 (16,) on the CPU."""
    weight = surgery.effective_weight(linear)
    places = torch.linspace(0, weight.numel() - 1, _SAMPLED).round().long().tolist()
    values = [weight[place // weight.shape[1], place % weight.shape[1]] for place in places]
    return (weight.shape[0], weight.shape[1]), torch.stack(values).float().cpu()


class StoredMoments:
    """The statistics of a method's conversion of `old` (`hf_freeze.methods.parts.Statistics`) from a saved calibration: moments
    of the model before all methods, without pairs and curvature. A linear that has got another width has none."""

    def __init__(self, moments: Mapping[str, Moments], old: Any, report: Report) -> None:
        self.report = report
        self._moments, self._old = moments, old

    def walk(
        self,
        names: Sequence[str],
        before: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *,
        curvature: bool = False,
        fit: bool = False,
        norms: Sequence[str] = (),
        channels: Sequence[int] = (),
        resumes: bool | None = None,
    ) -> Iterator[dict[str, Moments | None]]:
        widths = {name: features(linear)[0] for name, linear in surgery.modules(self._old, names)}
        fitting = {
            name: each
            for name in names
            if (each := self._moments.get(name)) is not None and len(each.mean) == widths[name]
        }
        owners = {name: surgery.owner_of(self._old, name) for name in names}
        seen = {owners[name] for name in fitting}
        if missing := [name for name in names if owners[name] not in seen]:
            text = (
                "the saved calibration has nothing for linears that it has not seen, or that earlier methods have changed: they "
                "are converted as without"
            )
            if self.report.note(text):
                warnings.warn(f"{text}; the first is {missing[0]!r}", stacklevel=2)
        order: dict[str, int] = {}
        for number, name in enumerate(self._moments):
            order.setdefault(owners.get(name, name), number)
        ranked = sorted(names, key=lambda name: order.get(owners[name], len(order)))

        def group_of(name: str) -> Any:
            return id(fitting.get(name, name)) if owners[name] == name else owners[name]

        for _, group in itertools.groupby(ranked, group_of):
            found: dict[str, Moments | None] = {name: fitting.get(name) for name in group}
            if (owner := owners[next(iter(found))]) not in found and owner in seen:
                found = self.report.enough(owner, found)
            for name, each in found.items():
                if each is not None:
                    self.report.check_tokens(name, each.count, len(each.mean), max(widths.values()))
            yield found
            surgery.let_go(self._old)
        self.report.warn_of_experts()

    def lookups(self, tables: Any) -> Tensor | None:
        """None: nothing is known of tokens."""

    def routed(self, modules: Any) -> None:
        """None: nothing is known of factors of experts."""

    def output_moments(self) -> Moments | None:
        """None: nothing is known of the output matrix."""

    def across(self, linear: str, first: str, last: str) -> None:
        """None: nothing is known of layers together."""

    def fit(self, stack: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        """Nothing, as above."""

    def distance(self, method: Any) -> float:
        raise ValueError(
            f"method {method.name!r} compares models on texts, and a saved calibration has none: give texts"
        )

    def record(self, name: str, plain: float, calibrated: float) -> None:
        self.report.errors[name] = (plain, calibrated)

    def note(self, text: str) -> None:
        self.report.note(text)
