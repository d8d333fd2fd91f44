"""Choose ranks for each linear from the spectra of trained weights, for an energy, a number of parameters or a measured time.

Shapes: I inputs, O outputs of a linear.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from hf_freeze import methods, surgery
from hf_freeze.analysis._probe import check_model
from hf_freeze.analysis.latency import check_tokens, median_ms
from hf_freeze.layers.derived import features
from hf_freeze.layers.shapes import modes_of
from hf_freeze.layers.tensor_train import check_ranks
from hf_freeze.methods.checks import is_number
from hf_freeze.progress import track

_ROUNDING = 1e-10  # a smaller share of the energy may be a rounding error of fp32 weights and their Gram matrices
_STEP, _TRAIN_STEP = (
    1e-9,
    1e-4,
)  # of energy, in the search for a number of parameters; each loss of a train is computed again
_LATENCY_STEP = 1e-3  # of energy; measured times vary by more than a finer step changes them

Ranks = tuple[int, ...]


def choose_ranks(
    model: Any,
    method: type[Any],
    *,
    budget: float | None = None,
    energy: float | None = None,
    max_latency: float | None = None,
    tokens: int = 64,
    **settings: Any,
) -> Any:
    """The config of `method` (`methods.LowRank`, `TensorTrain` or `Tucker`) with separate ranks for each linear.

    Give one of:

    - `energy`, in (0, 1]: for each linear the smallest ranks that keep this share of its squared Frobenius norm. Tensor trains
      use the bound of TT-SVD (Oseledets, 2011, https://doi.org/10.1137/090752286, theorem 2.2), Tucker that of HOSVD (De
      Lathauwer et al., 2000, https://doi.org/10.1137/S0895479896305696, property 10). Both are upper bounds of the loss, so the
      factors may keep more.
    - `budget`, in (0, 1]: the share of the weights of all chosen linears, without biases, that may remain. All linears get the
      same energy, the highest that fits (to 1e-4 for tensor trains, whose ranks depend on one another).
    - `max_latency`: the ms that all chosen linears may take one after another, in a forward of `tokens` tokens without
      gradients, in eval mode, on the device of the model. It is compared with the sum of the medians of real layers of these
      ranks, each measured warm and alone; in the model they compete for the cache. The energy is the highest that fits, to 1e-3.

    `settings` go to the method: `components`, `layers`, `shape`, `execution`. A linear whose factors would not be smaller stays
    as it is: the config does not name it, and it counts as it is in budget and latency. LowRank takes linears that are of low
    rank already, too: they may get a smaller one. A share of the energy below 1e-10 counts as a rounding error.

    Raises ValueError for another method, an unknown setting, a share outside (0, 1], a budget or latency that even rank 1 exceeds
    (the message says what is possible), a model on meta, an unknown architecture, a linear that a method has changed, weights
    that are not finite, and if every linear would stay dense.
    """
    if method not in _SPECTRA:
        raise ValueError(f"method={method!r}: choose from {[f'methods.{m.__name__}' for m in _SPECTRA]}")
    goal = _check_goal(budget=budget, energy=energy, max_latency=max_latency)
    check_tokens(tokens)
    architecture = check_model(model)
    pattern = _pattern(method, settings)
    pattern.check(architecture, model.config)
    names = pattern.present_names(model, architecture)
    if not names:
        raise ValueError(
            f"{method.__name__}(components={pattern.components}): earlier methods have removed all of these linears; choose "
            "other components or layers"
        )
    chooser = _Chooser(model, method, pattern, settings, names)
    chosen: dict[str, Ranks] = {}
    if energy is not None:
        chosen = chooser.at(1 - energy)
    elif budget is not None:
        chosen = chooser.within_budget(budget)
    elif max_latency is not None:
        chosen = chooser.within_latency(max_latency, tokens)
    if not chosen:
        raise ValueError(f"{goal}: no factors would be smaller than the dense weights, so all linears would stay dense")
    return chooser.config(chosen)


def _check_goal(**goals: Any) -> str:
    """The one goal that is not None, as text for messages. Raises ValueError for none, several or an invalid value."""
    chosen = {name: value for name, value in goals.items() if value is not None}
    if len(chosen) != 1:
        raise ValueError(f"choose_ranks: give one of {list(goals)}, not {list(chosen) or 'none'}")
    ((name, value),) = chosen.items()
    finite = is_number(value) and math.isfinite(value)
    if not finite or value <= 0 or (name != "max_latency" and value > 1):
        raise ValueError(
            f"{name}={value!r}: must be {'a number of ms above 0' if name == 'max_latency' else 'a share in (0, 1]'}"
        )
    return f"{name}={value}"


def _pattern(method: type[Any], settings: dict[str, Any]) -> Any:
    """The method with rank 1, which checks the settings."""
    known = [field.name for field in fields(method) if field.name not in ("rank", "ranks")]
    for name in settings:
        if name not in known:
            raise ValueError(f"choose_ranks: unknown setting {name!r} of {method.__name__}; choose from {known}")
    return method(rank=1, **settings)


# A spectrum relates the ranks of a linear to the share of its energy that they lose. `losses`: the loss at which all ranks are 1.
# `ranks(loss)`: the smallest ones that lose at most this share of the squared norm. `size(ranks)`: parameters without a bias.


class _LowRankSpectrum:
    losses = 1

    def __init__(self, linear: nn.Module, shape: Any) -> None:
        self.sizes = features(linear)
        self.lost = _lost(surgery.effective_weight(linear).double())

    def ranks(self, loss: float) -> Ranks:
        return (_smallest(self.lost, loss),)

    def size(self, ranks: Ranks) -> int:
        return ranks[0] * sum(self.sizes)


class _TuckerSpectrum:
    """As `layers.tucker.tucker` with a loss: each mode may lose the same share."""

    def __init__(self, linear: nn.Module, shape: Any) -> None:
        in_modes, out_modes = modes_of(*features(linear), shape)
        self.modes = (*in_modes, *out_modes)
        self.losses = len(self.modes)
        tensor = surgery.effective_weight(linear).T.double().reshape(self.modes)
        self.lost = [_lost(tensor.movedim(k, 0).reshape(mode, -1)) for k, mode in enumerate(self.modes)]

    def ranks(self, loss: float) -> Ranks:
        return tuple(_smallest(lost, loss / self.losses) for lost in self.lost)

    def size(self, ranks: Ranks) -> int:
        return math.prod(ranks) + sum(mode * rank for mode, rank in zip(self.modes, ranks, strict=True))


class _TensorTrainSpectrum:
    """As `layers.tensor_train.tt_svd` with a loss, but several times faster: it computes no factors, and takes eigenvectors of
    the smaller Gram matrix instead of singular vectors. Each rank depends on the previous ones, so each loss is computed
    again."""

    def __init__(self, linear: nn.Module, shape: Any) -> None:
        self.linear, (self.in_modes, self.out_modes) = linear, modes_of(*features(linear), shape)
        check_ranks(self.in_modes, self.out_modes, [1] * (len(self.in_modes) + 1))
        self.losses = len(self.in_modes) - 1

    def ranks(self, loss: float) -> Ranks:
        d = len(self.in_modes)
        rest = surgery.effective_weight(self.linear).T.double().reshape(*self.in_modes, *self.out_modes)
        rest = rest.permute(*(axis for k in range(d) for axis in (k, d + k)))
        allowed = loss * rest.square().sum() / self.losses
        ranks = [1]
        for n, m in zip(self.in_modes[:-1], self.out_modes[:-1], strict=True):
            rest = rest.reshape(ranks[-1] * n * m, -1)
            tall = rest.shape[0] > rest.shape[1]
            energies, vectors = torch.linalg.eigh(rest.T @ rest if tall else rest @ rest.T)
            energies = energies.clamp_min(0)
            rank = max(int((energies.cumsum(0) > allowed).sum()), 1)
            axes = vectors[:, -rank:]
            rest = energies[-rank:, None].sqrt() * axes.T if tall else axes.T @ rest  # S Vᵀ
            ranks.append(rank)
        return (*ranks, 1)

    def size(self, ranks: Ranks) -> int:
        return sum(
            before * n * m * after
            for before, n, m, after in zip(ranks, self.in_modes, self.out_modes, ranks[1:], strict=False)
        )


_SPECTRA: dict[type, Any] = {
    methods.LowRank: _LowRankSpectrum,
    methods.TensorTrain: _TensorTrainSpectrum,
    methods.Tucker: _TuckerSpectrum,
}


def _lost(matrix: torch.Tensor) -> torch.Tensor:
    """The share of the squared norm that is lost if the k largest singular values are kept, for k = 0, 1, ...: descending."""
    gram = matrix.T @ matrix if matrix.shape[0] > matrix.shape[1] else matrix @ matrix.T
    lost = torch.linalg.eigvalsh(gram).clamp_min(0).cumsum(0).flip(0)
    return (lost / lost[0].clamp_min(torch.finfo(lost.dtype).tiny)).cpu()


def _size(linear: nn.Module) -> int:
    """Number of parameters, without a bias: of the dense weight, or of the factors that an earlier method has put in."""
    return sum(parameter.numel() for name, parameter in linear.named_parameters() if name != "bias")


def _smallest(lost: torch.Tensor, allowed: float) -> int:
    return max(int((lost > allowed).sum()), 1)


class _Chooser:
    """Finds the smallest loss that fits a limit. A choice maps each linear that becomes smaller to its ranks."""

    def __init__(
        self, model: Any, method: type[Any], pattern: Any, settings: dict[str, Any], names: Sequence[str]
    ) -> None:
        self.model, self.method, self.settings = model, method, settings
        self.linears: dict[str, Any] = {}
        self.spectra: dict[str, Any] = {}
        self.times: dict[Any, float] = {}  # (shape, dtype, ranks ...) -> ms; ranks None is the dense linear
        for name in track(names, "Decomposing linears"):
            linear = surgery.dense_module(model, name, method.name, method.replaces)
            if not linear.weight.isfinite().all():
                raise ValueError(f"the weight of {name!r} is not finite")
            try:
                self.spectra[name] = _SPECTRA[method](linear, getattr(pattern, "shape", None))
            except ValueError as error:
                raise ValueError(f"method {method.name!r}, {name!r}: {error}") from None
            self.linears[name] = linear
        self.sizes = {name: _size(linear) for name, linear in self.linears.items()}
        self.largest_loss = max(spectrum.losses for spectrum in self.spectra.values()) + 1  # at which every rank is 1

    def at(self, loss: float) -> dict[str, Ranks]:
        """The choice at this loss."""
        ranks = {name: spectrum.ranks(max(loss, _ROUNDING)) for name, spectrum in self.spectra.items()}
        return {name: each for name, each in ranks.items() if self.spectra[name].size(each) < self.sizes[name]}

    def config(self, chosen: dict[str, Ranks]) -> Any:
        if self.method is methods.LowRank:
            return self.method(rank={name: ranks[0] for name, ranks in chosen.items()}, **self.settings)
        return self.method(ranks={name: list(ranks) for name, ranks in chosen.items()}, **self.settings)

    def within_budget(self, budget: float) -> dict[str, Ranks]:
        def share(chosen: dict[str, Ranks]) -> float:
            smaller = {name: self.spectra[name].size(ranks) for name, ranks in chosen.items()}
            return sum((self.sizes | smaller).values()) / sum(self.sizes.values())

        least = self.at(self.largest_loss)
        if share(least) > budget:
            raise ValueError(
                f"budget={budget}: at rank 1, {share(least):.3g} of the parameters of the chosen linears are left; that is the "
                "least possible"
            )
        step = _TRAIN_STEP if self.method is methods.TensorTrain else _STEP
        return self._search(lambda chosen: share(chosen) <= budget, least, step)

    def within_latency(self, limit: float, tokens: int) -> dict[str, Ranks]:
        def ms(chosen: dict[str, Ranks]) -> float:
            return sum(self._measure(name, chosen.get(name), tokens) for name in self.linears)

        least = self.at(self.largest_loss)
        for name in track(self.linears, "Measuring layers"):  # the slowest and the fastest, which are kept
            self._measure(name, None, tokens)
            self._measure(name, least.get(name), tokens)
        if ms({}) <= limit:
            raise ValueError(
                f"max_latency={limit}: the dense linears take only {ms({}):.3g} ms for {tokens} tokens; nothing to do"
            )
        if ms(least) > limit:
            raise ValueError(
                f"max_latency={limit}: for {tokens} tokens the dense linears take {ms({}):.3g} ms, and at rank 1 it is still "
                f"{ms(least):.3g} ms"
            )
        return self._search(lambda chosen: ms(chosen) <= limit, least, _LATENCY_STEP)

    def _search(
        self, fits: Callable[[dict[str, Ranks]], bool], least: dict[str, Ranks], step: float
    ) -> dict[str, Ranks]:
        """The choice at the smallest loss that fits, by bisection; `least` fits."""
        if fits(largest := self.at(0.0)):
            return largest
        below, above, best = 0.0, self.largest_loss, least
        for _ in track(range(math.ceil(math.log2(above / step))), "Searching"):
            middle = (below + above) / 2
            if fits(chosen := self.at(middle)):
                above, best = middle, chosen
            else:
                below = middle
        return best

    def _measure(self, name: str, ranks: Ranks | None, tokens: int) -> float:
        """The time in ms of the linear `name` at these ranks (None: dense)."""
        linear = self.linears[name]
        key = (features(linear), type(linear), _size(linear), linear.weight.dtype, linear.bias is not None, ranks)
        if key not in self.times:
            if ranks is None:
                layer = linear
            else:
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    layer = self.config({name: ranks}).make(linear, name, self.model).eval()
            self.times[key] = median_ms([layer], tokens)[0]
        return self.times[key]
