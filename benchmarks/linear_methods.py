"""Time and memory of the layers that replace a linear, against nn.Linear and tensorly-torch.

    python benchmarks/linear_methods.py --out linear_methods.md --plot linear_methods.png    # about 5 minutes on one core
    pip install -c constraints.txt -e ".[benchmarks]"                                        # the peer, tensorly-torch

Claims: in inference with execution="auto", each layer takes at most 1.05 of the time of the nn.Linear that it replaces. Tensor
train and Tucker are at least 2.5 times as fast as tensorly-torch's layers with the same shapes and ranks. With
execution="factors", a layer holds less memory than the dense weight. An FFN with removed neurons saves at least 0.85 of their
share in time. The report names each case that misses its claim.

Layers, built by the methods as in a model, fp32, with bias: low rank with 25 % of the parameters; tensor train of rank 2 and 8;
Tucker of rank 2 and 3 (default shapes); 90 % of the weights pruned, with a mask and finalized; variational dropout, finalized
with 10 % of the weights; a whole FFN (inputs, outputs, inputs; ReLU) with half and a quarter of its neurons. Values are random,
which does not affect the time. A second nn.Linear shows the noise, such as the effect of its position in memory.

Time: eval mode, no gradients, the turns layer, nn.Linear, nn.Linear, layer, each of at least `--turn` ms. A ratio is the median
of the ratios of the rounds, with quartiles. "Takes" is the execution that "auto" chose; "the other" is the ratio of the execution
that it did not choose. A turn repeats one layer, so its weights stay in the caches if they fit. In a model whose weights do not
fit, layers that read fewer weights gain more than here.

Peer: tensorly-torch's FactorizedLinear with the factors of our layer, after a check that both compute the same. Its fastest
implementation counts: "factorized" (for tensor train, with torch's einsum in the order of opt_einsum or from left to right) or
"reconstructed". It caches nothing between two forwards.

Training: forward and backward (gradients of inputs and parameters; for variational dropout with the KL term) of
`--training-tokens` tokens, against nn.Linear. First: the first forward minus a later one with execution="dense", the one-time
cost after loading. Held: bytes of all tensors that the module holds after forwards with all numbers of tokens, without temporary
tensors.

Limit: the larger of two times: the multiply-adds (counted by torch) at the rate of a large product, and the bytes of weights,
inputs and outputs at the rate of repeatedly reading as many bytes.
"""

import argparse
import functools
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _shared
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_freeze import methods, surgery
from hf_freeze.layers import TensorTrainLinear, TuckerLinear
from hf_freeze.layers.factorized import FactorizedLinear
from hf_freeze.layers.masked import prune_smallest

try:
    import tensorly
    import tltorch
except ImportError:
    tltorch = None

SIZES = ((512, 2048), (768, 3072), (1024, 4096))
TOKENS = (1, 64, 2048)
NOISE = "nn.Linear, another"
BARS = {"auto": 1.05, "peer": 2.5, "saved": 0.85}
INSTALL = 'peer not installed: pip install -c constraints.txt -e ".[benchmarks]" (tensorly, tensorly-torch, opt_einsum)'


@dataclass(frozen=True)
class Size:
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.inputs} x {self.outputs}"

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    def linear(self) -> nn.Linear:
        return nn.Linear(self.inputs, self.outputs, device=_shared.DEVICE)

    def rank(self, share: float) -> int:
        """The rank of a low-rank layer with this share of the weights."""
        return max(1, int(share * self.weights / (self.inputs + self.outputs)))


def layers(size: Size) -> dict[str, Callable[[], tuple[nn.Module, nn.Module]]]:
    """{name: function that returns (layer for training, layer for inference)}; the two differ only after `finalize()`."""

    def factorized(method: Any) -> Callable[[], tuple[nn.Module, nn.Module]]:
        def make() -> tuple[nn.Module, nn.Module]:
            layer = method.make(size.linear(), "linear", None)
            return layer, layer

        return make

    def pruned(finalize: bool) -> tuple[nn.Module, nn.Module]:
        masked: Any = methods.MagnitudePruning(sparsity=0.9).make(size.linear(), "linear", None)
        prune_smallest([masked], 0.9, "layer")
        layer = masked.sparse() if finalize else masked
        return layer, layer

    def variational() -> tuple[nn.Module, nn.Module]:
        layer: Any = methods.VariationalDropout(training_size=1000).make(size.linear(), "linear", None)
        with torch.no_grad():
            layer.log_sigma.uniform_(-8, 4)
            layer.threshold = float(layer.log_alpha().flatten()[: 1 << 18].quantile(0.1))
        return layer, layer.sparse()

    def another() -> tuple[nn.Module, nn.Module]:
        layer = size.linear()
        return layer, layer

    return {
        NOISE: another,
        "low rank, 25 %": factorized(methods.LowRank(rank=size.rank(0.25))),
        "tensor train, rank 2": factorized(methods.TensorTrain(rank=2)),
        "tensor train, rank 8": factorized(methods.TensorTrain(rank=8)),
        "Tucker, rank 2": factorized(methods.Tucker(rank=2)),
        "Tucker, rank 3": factorized(methods.Tucker(rank=3)),
        "90 % pruned, masked": lambda: pruned(False),
        "90 % pruned, finalized": lambda: pruned(True),
        "variational, finalized": variational,
    }


def ffn(size: Size, width: int) -> nn.Module:
    up = surgery.select_features(size.linear(), width, outputs=True)
    down = nn.Linear(size.outputs, size.inputs, device=_shared.DEVICE)
    return nn.Sequential(up, nn.ReLU(), surgery.select_features(down, width, outputs=False)).eval()


def set_execution(layer: Any, execution: str) -> None:
    layer.execution = execution
    layer._paths.clear()
    layer.eval()  # clears the cache


def held_bytes(*roots: Any) -> int:
    """Bytes of all tensors reachable from `roots`; shared storages count once."""
    storages: dict[int, int] = {}
    for tensor in _tensors(roots, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry, seen)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)


def peer_of(layer: Any) -> Any:
    """tensorly-torch's layer with our factors."""
    train = isinstance(layer, TensorTrainLinear)
    inputs = len(layer.in_modes)
    ranks = layer.ranks if train else (*layer.ranks[inputs:], *layer.ranks[:inputs])
    peer = tltorch.FactorizedLinear(
        tuple(layer.in_modes), tuple(layer.out_modes), factorization="BlockTT" if train else "Tucker", rank=tuple(ranks)
    )
    with torch.no_grad():
        peer.bias.copy_(layer.bias)
        if train:
            values = [core.permute(0, 2, 1, 3) for core in layer.cores]
        else:
            order = (*range(inputs, len(ranks)), *range(inputs))  # tensorly-torch has the outputs first
            peer.weight.core.copy_(layer.core.reshape(layer.ranks).permute(order))
            values = [*layer.factors[inputs:], *layer.factors[:inputs]]
        for factor, value in zip(peer.weight.factors, values, strict=True):
            factor.copy_(value)
    return peer.to(_shared.DEVICE).eval()


def choose_peer(layer: Any, peer: Any, x: torch.Tensor) -> str:
    """Set the peer to its fastest implementation for the tokens of `x`, and return its name.

    Raises RuntimeError if an implementation computes other results than `layer`.
    """
    expected = layer(x)
    # Without opt_einsum, Tucker would multiply every input by every entry of the core.
    use_opt_einsum = (True, False) if isinstance(layer, TensorTrainLinear) else (True,)
    candidates = [("reconstructed", True), *(("factorized", enabled) for enabled in use_opt_einsum)]

    def select(candidate: tuple[str, bool]) -> None:
        peer.implementation, torch.backends.opt_einsum.enabled = candidate

    times = {}
    for candidate in candidates:
        select(candidate)
        times[candidate] = _shared.best(lambda: peer(x), 1)
        if times[candidate] < 0.05:
            times[candidate] = _shared.best(lambda: peer(x))
        if not torch.allclose(peer(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise RuntimeError(f"{layer}: the peer's implementation {candidate[0]!r} computes other results")
    fastest = min(times, key=times.__getitem__)
    select(fastest)
    return fastest[0] if fastest[1] else f"{fastest[0]}, in order"


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.products = _shared.product_rate()
        self.ratios: dict[str, list[tuple[float, str]]] = {name: [] for name in (*BARS, "memory")}

    def rounds(self, seconds: float) -> int:
        """The number of rounds, fewer for a slow call."""
        return max(min(3, self.options.rounds), min(self.options.rounds, int(self.options.patience / (4 * seconds))))

    def turns(self, one: Callable[[], object], other: Callable[[], object]) -> _shared.Pair:
        one()
        rounds = self.rounds(_shared.seconds(one))
        return _shared.in_turns(one, other, rounds, at_least=self.options.turn / 1e3)

    def limit(self, layer: nn.Module, weights: int, x: torch.Tensor) -> tuple[float, float]:
        """(million multiply-adds, seconds)"""
        with FlopCounterMode(display=False) as counter:
            y = layer(x)
        macs = counter.get_total_flops() / 2
        size = weights + 4 * (x.numel() + y.numel())
        return macs / 1e6, max(macs / self.products, size / _shared.read_rate(max(size, 1 << 20)))

    def missed(self, name: str, holds: Callable[[float], bool]) -> str:
        return _shared.verdict(self.ratios[name], holds)

    @torch.no_grad()
    def inference(self, size: Size, pairs: dict[str, tuple[nn.Module, nn.Module]]) -> str:
        dense, lines = size.linear().eval(), []
        for name, (_, layer) in pairs.items():
            factors = isinstance(layer, FactorizedLinear)
            peer = peer_of(layer) if tltorch and isinstance(layer, TensorTrainLinear | TuckerLinear) else None
            for tokens in self.options.tokens:
                x, case = torch.randn(tokens, size.inputs, device=_shared.DEVICE), f"{size}, {name}, {tokens}"
                run, run_dense = functools.partial(layer.eval(), x), functools.partial(dense, x)
                pair = self.turns(run, run_dense)
                if name != NOISE:
                    self.ratios["auto"].append((pair.ratio, case))
                takes, other, to_peer, implementation = "dense", "", "", ""
                weights = 4 * size.weights
                if factors:
                    takes = layer.path(tokens, x.device.type)
                    if takes == "factors":
                        weights = held_bytes(layer.prepared_factors(tokens, x.device.type)[1]())
                macs, limit = self.limit(layer, weights, x)
                if peer is not None:
                    implementation = choose_peer(layer, peer, x)
                    peer_pair = self.turns(functools.partial(peer, x), run)
                    self.ratios["peer"].append((peer_pair.ratio, case))
                    to_peer = str(peer_pair)
                    torch.backends.opt_einsum.enabled = True
                if factors:
                    set_execution(layer, "dense" if takes == "factors" else "factors")
                    other = f"{self.turns(run, run_dense).ratio:.3f}"
                    set_execution(layer, "auto")
                times = [1e6 * statistics.median(rounds) for rounds in (pair.other, pair.one)]
                lines.append([name, str(tokens), *(f"{time:,.0f}" for time in times), str(pair), takes, other,
                              f"{macs:,.2f}", f"{1e6 * limit:,.0f}", f"{1e6 * limit / times[1]:.2f}", to_peer,
                              implementation])  # fmt: skip
                print(size, *lines[-1], sep=" | ", flush=True)
        header = ["layer", "tokens", "dense, µs", "layer, µs", "layer / dense", "takes", "the other / dense",
                  "multiply-adds, M", "limit, µs", "limit / time", "peer / layer", "the peer's way"]  # fmt: skip
        return _shared.markdown(header, lines)

    def other_costs(self, size: Size, pairs: dict[str, tuple[nn.Module, nn.Module]]) -> str:
        dense, lines = size.linear(), []
        dense_bytes = held_bytes(dense)
        x = torch.randn(self.options.training_tokens, size.inputs, device=_shared.DEVICE, requires_grad=True)
        for name, (trained, layer) in pairs.items():
            factors = isinstance(layer, FactorizedLinear)
            stored = sum(t.numel() * t.element_size() for t in (*layer.parameters(), *layer.buffers()))
            training = "as masked" if trained is not layer and not hasattr(trained, "kl") else ""
            if not training:
                training = str(self.turns(step(trained.train(), x), step(dense.train(), x)))
            held_sizes = []
            for execution in ("factors", "dense") if factors else ("dense",):
                if factors:
                    set_execution(layer, execution)
                layer.eval()
                for tokens in self.options.tokens:
                    with torch.no_grad():
                        layer(torch.randn(tokens, size.inputs, device=_shared.DEVICE))
                held_sizes.append(held_bytes(layer))
            if factors:
                self.ratios["memory"].append((held_sizes[0] / dense_bytes, f"{size}, {name}"))
            first = self._first(layer, size)
            if factors:
                set_execution(layer, "auto")
            cells = [f"{size_ / 1e6:.3f}" for size_ in (stored, *([0] * (2 - len(held_sizes))), *held_sizes)]
            if not factors:
                cells[1] = ""
            lines.append([name, f"{stored / dense_bytes:.4f}", *cells, f"{1e3 * first:.2f}", training])
            print(size, *lines[-1], sep=" | ", flush=True)
        header = ["layer", "stored / dense", "stored, MB", "held with factors, MB", "held with dense", "first, ms",
                  "training / dense"]  # fmt: skip
        return _shared.markdown(header, lines)

    @torch.no_grad()
    def _first(self, layer: nn.Module, size: Size) -> float:
        """Seconds of the first forward of one token minus a later one, the median over the rounds."""
        x, differences = torch.randn(1, size.inputs, device=_shared.DEVICE), []
        for _ in range(self.options.rounds):
            layer.eval()  # clears the cache
            differences.append(_shared.seconds(lambda: layer(x)) - _shared.best(lambda: layer(x)))
        return statistics.median(differences)

    @torch.no_grad()
    def neurons(self, size: Size) -> list[list[str]]:
        dense, lines = ffn(size, size.outputs), []
        for divisor in (2, 4):
            pruned, removed = ffn(size, size.outputs // divisor), 1 - 1 / divisor
            for tokens in self.options.tokens:
                x = torch.randn(tokens, size.inputs, device=_shared.DEVICE)
                pair = self.turns(functools.partial(pruned, x), functools.partial(dense, x))
                saved = (1 - pair.ratio) / removed
                self.ratios["saved"].append((saved, f"{size}, 1/{divisor}, {tokens}"))
                weights = held_bytes(*pruned.parameters())
                macs, limit = self.limit(pruned, weights, x)
                times = [1e6 * statistics.median(rounds) for rounds in (pair.other, pair.one)]
                cells = [str(size), f"1/{divisor}", str(tokens), *(f"{time:,.0f}" for time in times), str(pair)]
                lines.append([*cells, f"{saved:.2f}", f"{macs:,.2f}", f"{1e6 * limit:,.0f}",
                              f"{1e6 * limit / times[1]:.2f}"])  # fmt: skip
                print(*lines[-1], sep=" | ", flush=True)
        return lines


def step(layer: Any, x: torch.Tensor) -> Callable[[], None]:
    """A function that runs forward and backward, including the KL term of a variational layer."""
    gradient = torch.randn(x.shape[0], layer.out_features, device=x.device)

    def run() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        y = layer(x)
        if hasattr(layer, "kl"):
            torch.autograd.backward([y, layer.kl()], [gradient, None])
        else:
            y.backward(gradient)

    return run


RANKS = {
    "low rank": (8, 32, 102, 204, 409),
    "tensor train": (1, 2, 4, 8, 16),
    "Tucker": (1, 2, 3, 4),
}


@torch.no_grad()
def plot(bench: Bench, size: Size, path: Path) -> None:
    """Plot the ratio to dense against the rank: a panel for each method, and lines for each number of tokens with the executions
    "auto" and "factors"."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    from hf_freeze.lab.report.plots.style import INK, STYLE
    from hf_freeze.lab.report.signs import style_of

    kinds = {"low rank": methods.LowRank, "tensor train": methods.TensorTrain, "Tucker": methods.Tucker}
    dense = size.linear().eval()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        for axes, (name, ranks) in zip(figure.subplots(1, len(kinds), sharey=True), RANKS.items(), strict=True):
            ranks = [rank for rank in ranks if rank <= size.rank(1)] if name == "low rank" else ranks
            for index, tokens in enumerate(bench.options.tokens):
                colour, marker = style_of(index)
                x = torch.randn(tokens, size.inputs, device=_shared.DEVICE)
                for execution, line_style in (("auto", "-"), ("factors", ":")):
                    points = []
                    for rank in ranks:
                        layer = kinds[name](rank=rank, execution=execution).make(size.linear(), "linear", None).eval()
                        pair = bench.turns(functools.partial(layer, x), functools.partial(dense, x))
                        points.append(pair.ratio)
                    label = f"{tokens} token{'s' * (tokens > 1)}, {execution}"
                    axes.plot(ranks, points, line_style, color=colour, marker=marker, markersize=5, label=label)
            axes.axhline(1, color=INK, linewidth=0.8)
            axes.set(title=name, xlabel="rank", xscale="log", yscale="log")
            axes.xaxis.set_major_locator(FixedLocator(ranks))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.grid()
        figure.axes[0].set_ylabel(f"time / time of nn.Linear, {size}")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=130, facecolor="white")


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--quick", action="store_true", help="a small size and one round, as a smoke test")
    parser.add_argument("--rounds", type=int, default=15, help="largest number of rounds of four turns")
    parser.add_argument("--patience", type=float, default=1.5, help="seconds per ratio, but at least three rounds")
    parser.add_argument("--turn", type=float, default=2.0, help="shortest time of a turn in ms")
    parser.add_argument("--training-tokens", type=int, default=512)
    parser.add_argument("--plot", type=Path, help="a PNG file for the plot of time against rank, first size only")
    options = parser.parse_args()
    sizes, options.tokens = [Size(*size) for size in SIZES], TOKENS
    if options.quick:
        sizes, options.tokens, options.training_tokens = [Size(64, 128)], (1, 8), 8
        options.rounds, options.turn = 1, 0.0
    if tltorch is not None:
        tensorly.set_backend("pytorch")
    torch.manual_seed(0)
    bench, parts, neurons = Bench(options), [], []
    for size in sizes:
        pairs = {name: make() for name, make in layers(size).items()}
        for pair in pairs.values():
            for layer in pair:
                layer.eval()
        gc.collect()
        parts.append(f"**{size}**, inference:\n\n{bench.inference(size, pairs)}")
        parts.append(f"**{size}**, memory, loading and training:\n\n{bench.other_costs(size, pairs)}")
        neurons += bench.neurons(size)
    header = ["FFN", "neurons", "tokens", "dense, µs", "pruned, µs", "pruned / dense", "saved / removed",
              "multiply-adds, M", "limit, µs", "limit / time"]  # fmt: skip
    parts.append(f"Pruned neurons:\n\n{_shared.markdown(header, neurons)}")
    rates = ", ".join(f"{_shared.read_rate(size) / 1e9:.0f} of {size >> 20} MB" for size in (1 << 20, 1 << 23, 1 << 28))
    summary = "\n".join([
        f"- layer at most {BARS['auto']} of dense: {bench.missed('auto', lambda ratio: ratio <= BARS['auto'])}",
        f"- peer at least {BARS['peer']} times the layer: "
        + (bench.missed("peer", lambda ratio: ratio >= BARS["peer"]) if tltorch is not None else INSTALL),
        f"- held with factors below dense: {bench.missed('memory', lambda ratio: ratio < 1)}",
        f"- saved at least {BARS['saved']} of the removed share: {bench.missed('saved', lambda s: s >= BARS['saved'])}",
        f"- this machine: {2 * bench.products / 1e9:.0f} GFLOP/s ({bench.products / 1e9:.0f} billion multiply-adds a second), "
        f"GB/s read: {rates}",
    ])  # fmt: skip
    if tltorch is not None:
        summary += f"\n- peer: tensorly-torch {tltorch.__version__}, tensorly {tensorly.__version__}"
    _shared.report(options, "\n\n".join(parts), summary)
    if options.plot is not None:
        plot(bench, sizes[0], options.plot)


if __name__ == "__main__":
    main()
