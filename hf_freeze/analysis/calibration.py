"""What the linears of a model see on texts, what each cut would lose of their outputs, and how far one model is from another."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_freeze import surgery
from hf_freeze.analysis._probe import check_model
from hf_freeze.architectures.base import Attention
from hf_freeze.model.calibrating import collect
from hf_freeze.model.calibration import Calibration, Report, warned_once
from hf_freeze.model.fidelity import Fidelity, fidelity_on
from hf_freeze.model.samples import samples_of
from hf_freeze.progress import track
from hf_freeze.solvers.columns import eliminate, refit
from hf_freeze.solvers.low_rank import low_rank
from hf_freeze.solvers.moments import Moments, problem
from hf_freeze.solvers.rounding import Symmetric, gptq

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARES = {"75 % kept": 0.75, "50 % kept": 0.5, "25 % kept": 0.25}  # of neurons or heads
_LOW_RANK, _ROUNDED = "half the weights, low rank", "4 bits"
CUTS = (*_SHARES, _LOW_RANK, _ROUNDED)
_INT4, _GROUP = Symmetric(7), 64  # as Quantize(weights="int4", granularity="group-64")
_NO_RIDGE = 1e-12  # losses are those on the texts
_INCH = 0.28  # of a row of the picture


def calibrate(model: Any, texts: Any, tokenizer: Any = None) -> Calibration:
    """What every linear of attention and FFN of `model` sees on `texts`, in one pass: the means of its inputs and their products.

    `texts`: what `make_variant(calibration=)` takes: texts for the `tokenizer`, batches, or "samples". The result can be saved,
    loaded (`Calibration.load`) and given to `make_variant(calibration=)`, for any number of cuts of this model.

    Raises ValueError for no texts, a tokenizer of another model, an unknown architecture, and inputs that are not finite.
    """
    check_model(model)
    return collect(model, texts, tokenizer)


def fidelity(original: Any, variant: Any, texts: Any, tokenizer: Any = None) -> Fidelity:
    """How far the outputs of `variant` are from those of `original` on `texts`, which should not be those of a calibration.

    `texts`, `tokenizer`: as for `calibrate`. Raises ValueError as `calibrate`, and for models with different outputs.
    """
    return fidelity_on(original, variant, samples_of(original, texts, tokenizer).undivided().batches)


@dataclass(frozen=True)
class CutLosses:
    """`losses`: block, such as "encoder.0.ffn" or "decoder.1.cross" -> cut, one of `CUTS` -> the share of its output's variance
    that is lost, from 0 to 1, after the best refit. `texts`, `tokens`: of the calibration."""

    losses: dict[str, dict[str, float]]
    texts: int
    tokens: int

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows, with the shares in %."""
        rows = [
            [block_in_words(block), *("–" if cut not in cuts else f"{cuts[cut]:.2%}" for cut in CUTS)]
            for block, cuts in self.losses.items()
        ]
        return ["part", *CUTS], rows

    def __str__(self) -> str:
        headings, rows = self.table()
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in [headings, *rows]
        ]
        title = (
            f"Share of its output that a part loses by each cut, on {self.texts:,} texts with {self.tokens:,} tokens"
        )
        return "\n".join([title, *lines])

    def figure(self) -> "Figure":
        """The table as a picture: a line for each part, a column for each cut; dark: much is lost."""
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        values = [[cuts.get(cut, float("nan")) for cut in CUTS] for cuts in self.losses.values()]
        figure = Figure(figsize=(7.2, 1.6 + _INCH * len(values)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(
            [[max(value, 1e-4) for value in row] for row in values], cmap="Blues", norm=LogNorm(1e-4, 1), aspect="auto"
        )
        for line, row in enumerate(values):
            for column, value in enumerate(row):
                text = "" if math.isnan(value) else f"{value:.1%}"
                color = "white" if value > 0.05 else "black"
                axes.text(column, line, text, ha="center", va="center", fontsize=8, color=color)
        axes.set_yticks(range(len(values)), [block_in_words(block) for block in self.losses], fontsize=8)
        names = [
            cut.replace(" kept", " of\nneurons or\nheads kept").replace("weights, ", "\nweights,\n") for cut in CUTS
        ]
        axes.set_xticks(range(len(CUTS)), names, fontsize=8)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.suptitle("Share of its output that a part of the model loses by each cut, before training", fontsize=9)
        bar = figure.colorbar(image, ax=axes, label="share lost", ticks=[1e-4, 1e-3, 1e-2, 1e-1, 1], shrink=0.8)
        bar.ax.set_yticklabels(["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
        return figure


def block_in_words(block: str) -> str:
    """ "encoder.0.ffn" -> "encoder 0: FFN" """
    stack, layer, kind = block.split(".", 2)
    names = {"ffn": "FFN", "self": "self-attention", "cross": "cross-attention"}
    return f"{stack} {layer}: {names.get(kind, kind.replace('_', ' '))}"


@torch.no_grad()
@warned_once()
def cut_losses(model: Any, calibration: Calibration) -> CutLosses:
    """How much of the output of each part of `model` each cut would lose, exactly, by the closed forms that the methods use.

    A part is an FFN or an attention. It keeps 75, 50 or 25 % of its neurons, or heads, as FFNPruning and HeadPruning choose and
    refit them: the loss is that of its last linear. Or each of its linears gets the best low rank with half of the weights, or 4
    bits with a step for 64 inputs (GPTQ): the loss is the mean over them. A loss of 100 % would be an output that is always the
    same. There is no number where `calibration` has nothing, or where a cut would keep all or none.

    Raises ValueError for a calibration of another model.
    """
    architecture = check_model(model)
    calibration.check(model)
    blocks: dict[str, tuple[list[str], Attention | None]] = {
        **{name: (list(one.linears), one) for name, one in architecture.attentions(model.config).items()},
        **{name: (linears, None) for name, linears in architecture.ffns(model.config).items()},
    }
    seen, report = calibration.moments, Report()
    widest = max((len(each.mean) for each in seen.values()), default=0)
    for name, each in seen.items():
        report.check_tokens(name, each.count, len(each.mean), widest)
    order = {name: number for number, name in enumerate(seen)}  # as the model runs them
    places = {block: [order[name] for name in linears if name in seen] for block, (linears, _) in blocks.items()}
    losses = {}
    ran = sorted((block for block in blocks if places[block]), key=lambda block: min(places[block]))
    for block in track(ran, "Measuring cuts", len(ran)):
        linears, attention = blocks[block]
        last = linears[-1] if attention is None else attention.o
        cuts = dict(_kept_losses(model, attention, last, seen[last])) if last in seen else {}
        of_linears = [_linear_losses(model, name, seen[name]) for name in linears if name in seen]
        means = [sum(each) / len(each) for each in zip(*of_linears, strict=True)]
        losses[block] = cuts | dict(zip((_LOW_RANK, _ROUNDED), means, strict=True))
    return CutLosses(losses, calibration.texts, calibration.tokens)


def _kept_losses(model: Any, attention: Attention | None, name: str, moments: Moments) -> Iterator[tuple[str, float]]:
    """(cut, share lost) of the inputs of the linear `name`: neurons, or the heads of an attention."""
    linear = model.base_model.get_submodule(name)
    size = 1
    if attention is not None:
        size = attention.head_size(model.config)
        heads = len(moments.mean) // size
        together = surgery.group_size(model.base_model, attention, model.config, heads)
        size *= 1 if attention.thins and together == heads else together
    weight, bias = surgery.effective_weight(linear), linear.bias
    order = eliminate(weight, bias, moments, size)
    count = len(order.order)
    for cut, share in _SHARES.items():
        number = round(share * count)
        if 0 < number < count:
            kept = [group * size + column for group in order.kept(number) for column in range(size)]
            new = torch.zeros_like(weight)
            new[:, kept] = refit(weight, bias, moments, kept)[0]
            yield cut, _lost(weight, bias, moments, new)


def _linear_losses(model: Any, name: str, moments: Moments) -> tuple[float, float]:
    """The shares lost by low rank with half of the weights, and by 4 bits."""
    linear = model.base_model.get_submodule(name)
    weight, bias = surgery.effective_weight(linear), linear.bias
    up, down, _ = low_rank(weight, bias, moments).factors(max(1, weight.numel() // (2 * sum(weight.shape))))
    rounded = gptq(weight, bias, moments, _INT4, group=_GROUP).weight()
    return _lost(weight, bias, moments, up @ down), _lost(weight, bias, moments, rounded)


def _lost(weight: Tensor, bias: Tensor | None, moments: Moments, new: Tensor) -> float:
    """The share of the variance (without a bias, of the mean square) of the outputs of W, (O, I), that `new` loses, with the best
    bias."""
    solved = problem(weight, bias, moments, _NO_RIDGE)
    error = solved.target - new.to(solved.target)
    lost, whole = ((each @ solved.gram * each).sum() for each in (error, solved.target))
    return min(float(lost / whole), 1.0) if whole > 0 else 0.0
