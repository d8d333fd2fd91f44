"""Time and memory of factorised, adaptive and trimmed embeddings and of shared layers in a small Marian, against dense tables.

    python benchmarks/embeddings.py --out embeddings.md    # about half an hour on one core
    python benchmarks/embeddings.py --vocabularies 16000 32000 --patience 0.2 --out embeddings.md    # six minutes

Claims: the factorised output (d -> E -> V, E = d/4) is faster than the dense matrix from V = 16,000 on. A vocabulary trimmed to
1/2 or 1/4 saves at least 0.85 of the removed share of the output's time. Looking up the cached rows of DeFINE takes at most 1.05
of the time of a plain table. A decoding step with factorised embeddings, DeFINE, shared layers or both takes at most 1.05 of the
dense model's. A training step with an adaptive softmax is faster than with the full softmax from V = 32,000 on. The report names
each case that misses its claim.

Models: Marian with one tied table for source, target and output, 2 + 2 layers of width d (`--width`), FFN 4d, fp32, fresh
weights, built by `make_variant`:
- FactorizedEmbedding of rank d/4 and d/8;
- DeFINE: a table of d/4 columns, three layers of 4, 2 and 1 groups, the last of width d; eval mode caches its rows;
- VocabularyTrimming of the dense model to the first half and quarter of its ids, after a check that the kept logits are equal;
- LayerSharing of both stacks, with and without FactorizedEmbedding of rank d/4;
- AdaptiveEmbedding with the widths d, d/4 and d/16 below V/16, V/4 and V, and an adaptive softmax as output.

Operations, in eval mode without gradients except for the last two:
- look-up: rows of 64 and 2048 random ids, projected if factorised; eight sets of ids in turn (DeFINE has cached its rows);
- output: logits of 1 and 64 hidden states; for the adaptive softmax, the log-probabilities of all tokens;
- decoding step: of the whole model, batch 1 and 64: one token after 16 with cache (source of 16), including the greedy choice;
- training step: forward, label-smoothed loss and backward of 64 sentences of 16 source and 16 target tokens, with dropout,
  without the optimiser;
- loss by labels: the same, but the model gets the labels and computes its own loss, cross-entropy without smoothing, for which an
  adaptive softmax needs only some of its bands. Here the ids, and so the labels, follow Zipf's law: p(id) is proportional to
  1/id. Everywhere else ids are uniform, so that most rows of adaptive embeddings are narrow.

Time: the turns row, dense, dense, row, each of at least `--turn` ms; a ratio is the median of the ratios of the rounds, with
quartiles. "Dense again", a second dense model, shows the noise (for training steps, which take long, only up to V = 16,000). A
turn repeats one operation, so data that fits into a cache is read from there; in a real model other layers run in between, as
in the decoding step here.

Saved / removed: the time saved, divided by the removed share of the ids and by the time of the dense output for as many tokens
in the same run. 1 means proportional. In a decoding step, where only the output gets faster, at most about 1 is possible.

Limit: the larger of two times: the multiply-adds (counted by torch) at the rate of a large product, and the bytes that must be
read and written once, at the rate of repeatedly reading as many bytes. The bytes are: for the look-up, the rows, the projection
and the result; for the output, the table, inputs and logits; for a decoding step, the parameters of the decoder and the output,
cache and logits; for a training step, all parameters twice and their gradients once.
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _shared
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_freeze import make_variant, methods, surgery
from hf_freeze.lab.runs.text_training import choose_attention
from hf_freeze.layers import DeFINEEmbedding
from hf_freeze.training import label_smoothed_loss

VOCABULARIES = (8_000, 16_000, 32_000, 64_000)
LENGTH = 16
NUMBERS = {"look-up": (64, 2048), "output": (1, 64), "decoding step": (1, 64), "training step": (64,),
           "loss by labels": (64,)}  # fmt: skip
QUICK = {"look-up": (2, 8), "output": (1, 4), "decoding step": (1, 4), "training step": (4,), "loss by labels": (4,)}
UNITS = {"look-up": "tokens", "output": "tokens", "decoding step": "batch", "training step": "batch",
         "loss by labels": "batch"}  # fmt: skip
TRAINING = ("training step", "loss by labels")
USUAL = ("look-up", "output", "decoding step", "training step")
BARS = {"output": 1.0, "saved": 0.85, "kept": 1.05, "decoding": 1.05, "labels": 1.0}
FROM = 16_000
LABELS_FROM = 32_000


@dataclass(frozen=True)
class Row:
    methods: list[Any]
    works: tuple[str, ...] = USUAL
    removed: float = 0.0


@dataclass(frozen=True)
class Work:
    run: Callable[[], object]
    bytes: int


def rows(vocabulary: int, width: int) -> dict[str, Row]:
    """{name: row}; "dense again" comes first, because its dense times are the reference of later rows."""
    quarter, eighth = (methods.FactorizedEmbedding(rank=width // divisor) for divisor in (4, 8))
    half, quarter_of_ids = (methods.VocabularyTrimming(keep=[*range(vocabulary // divisor)]) for divisor in (2, 4))
    define = methods.DeFINE(map_dim=width // 4, depth=3, width=width, groups=4)
    shared = methods.LayerSharing()
    adaptive = methods.AdaptiveEmbedding(cutoffs=[vocabulary // 16, vocabulary // 4])
    return {
        "dense again": Row([], tuple(work for work in NUMBERS if vocabulary <= FROM or work not in TRAINING)),
        "E = d/4": Row([quarter]),
        "E = d/8": Row([eighth]),
        "DeFINE": Row([define], ("look-up", "decoding step", "training step")),
        "adaptive": Row([adaptive], (*USUAL[:-1], "loss by labels")),
        "1/2 of the ids": Row([half], ("output", "decoding step"), removed=0.5),
        "1/4 of the ids": Row([quarter_of_ids], ("output", "decoding step"), removed=0.75),
        "layers shared": Row([shared], ("decoding step",)),
        "layers shared, E = d/4": Row([shared, quarter], ("decoding step",)),
    }


def make_model(vocabulary: int, width: int, row: Row, dense: Any = None) -> Any:
    """The model of a row, built from a config; a trimmed model is built from `dense`."""
    stack = {"layers": 2, "attention_heads": max(1, width // 64), "ffn_dim": 4 * width}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in stack.items()}
    backbone = {"d_model": width, "max_position_embeddings": 4 * LENGTH, "scale_embedding": True, **sizes}
    config = _shared.config("marian", backbone, vocabulary)
    if row.removed:
        model: Any = make_variant(dense, row.methods)
    else:
        model = make_variant(config, row.methods, task="seq2seq-lm", init="marian")
    model = model.to(_shared.DEVICE).eval()
    choose_attention(model)
    return model


def bytes_of(*modules: Any) -> int:
    """Bytes of the parameters of the modules; shared parameters count once."""
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def tables_of(model: Any) -> list[Any]:
    return [*surgery.token_tables(model, model.architecture).values(), model.get_output_embeddings()]


def random_ids(model: Any, *shape: int) -> torch.Tensor:
    return torch.randint(2, model.config.vocab_size, shape, device=_shared.DEVICE)


def lookup(model: Any, tokens: int) -> Work:
    table = model.base_model.encoder.embed_tokens
    width = model.config.d_model
    batches = itertools.cycle([random_ids(model, tokens) for _ in range(8)])
    if isinstance(table, DeFINEEmbedding):
        rank, projection = table.cached_table().shape[1], 0
    else:
        entries = sum(band.weight.numel() for band in getattr(table, "bands", [table]))
        rank, projection = entries // model.config.vocab_size, bytes_of(table) - 4 * entries
    return Work(lambda: table(next(batches)), 4 * tokens * (rank + width) + projection)


def output(model: Any, tokens: int) -> Work:
    matrix = model.get_output_embeddings()
    x = torch.randn(tokens, model.config.d_model, device=_shared.DEVICE)
    return Work(functools.partial(matrix, x), bytes_of(matrix) + 4 * (x.numel() + tokens * model.config.vocab_size))


def decoding_step(model: Any, batch: int) -> Work:
    source, start = random_ids(model, batch, LENGTH), random_ids(model, batch, LENGTH + 1)
    encoded = model.base_model.encoder(source)
    # Only the backbone runs, which computes no logits of the previous tokens.
    cache = model.base_model(encoder_outputs=encoded, decoder_input_ids=start[:, :-1], use_cache=True).past_key_values

    def step() -> torch.Tensor:
        outputs = model(encoder_outputs=encoded, decoder_input_ids=start[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return outputs.logits[:, -1].argmax(-1)

    cached = (tensor for part in (cache.self_attention_cache, cache.cross_attention_cache) for layer in part.layers
              for tensor in (layer.keys, layer.values))  # fmt: skip
    size = bytes_of(model.base_model.decoder, model.get_output_embeddings())
    return Work(step, size + 4 * (sum(tensor.numel() for tensor in cached) + batch * model.config.vocab_size))


def training_step(model: Any, batch: int) -> Work:
    source, labels = random_ids(model, batch, LENGTH), random_ids(model, batch, LENGTH)
    inputs = model.prepare_decoder_input_ids_from_labels(labels)
    loss_of = label_smoothed_loss(0.1)

    def step() -> None:
        model.zero_grad()
        with torch.enable_grad():
            loss_of(model(input_ids=source, decoder_input_ids=inputs), labels).backward()

    return Work(step, 3 * bytes_of(model))


def loss_by_labels(model: Any, batch: int) -> Work:
    frequencies = 1 / torch.arange(2, model.config.vocab_size, device=_shared.DEVICE)
    drawn = torch.multinomial(frequencies, 2 * batch * LENGTH, replacement=True) + 2
    source, labels = drawn.view(2, batch, LENGTH)

    def step() -> None:
        model.zero_grad()
        with torch.enable_grad():
            model(input_ids=source, labels=labels).loss.backward()

    return Work(step, 3 * bytes_of(model))


MAKE = {"look-up": lookup, "output": output, "decoding step": decoding_step, "training step": training_step,
        "loss by labels": loss_by_labels}  # fmt: skip


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.products = _shared.product_rate()
        self.ratios: dict[str, list[tuple[float, str]]] = {name: [] for name in BARS}

    def limit(self, macs: float, size: int) -> float:
        """The limit in seconds for so many multiply-adds and bytes."""
        power = 1 << (size - 1).bit_length()
        return max(macs / self.products, size / _shared.read_rate(max(1 << 20, min(power, 1 << 28))))

    def turns(self, one: Work, other: Work, expected: float | None) -> tuple[_shared.Pair, float]:
        """(times, multiply-adds of `one`). `expected`: seconds of a call of `other`, if known; slow calls get fewer rounds."""
        with FlopCounterMode(display=False) as counter:
            call_seconds = _shared.seconds(one.run)
        round_seconds = 2 * (call_seconds + (call_seconds if expected is None else expected))
        rounds = max(min(2, self.options.rounds), min(self.options.rounds, int(self.options.patience / round_seconds)))
        turn = self.options.turn / 1e3
        # A function far slower than a turn is called once per turn; `at_least=0` skips the calls that would determine this.
        pair = _shared.in_turns(one.run, other.run, rounds, at_least=turn if call_seconds < 10 * turn else 0.0)
        return pair, counter.get_total_flops() / 2

    @torch.no_grad()
    def measure(self, vocabulary: int) -> tuple[str, dict[str, float]]:
        """(a table of times, {row: MB of its tables})."""
        width = self.options.width
        dense = make_model(vocabulary, width, Row([]))
        dense_seconds: dict[tuple[str, int], float] = {}
        lines, tables = [], {}
        for name, row in rows(vocabulary, width).items():
            model = make_model(vocabulary, width, row, dense)
            if row.removed:
                check_logits(model, dense)
            tables[name] = bytes_of(*tables_of(model)) / 1e6
            for work in row.works:
                for compared in (model, dense):
                    compared.train(work in TRAINING)
                for number in self.options.numbers[work]:
                    one, other = MAKE[work](model, number), MAKE[work](dense, number)
                    pair, macs = self.turns(one, other, dense_seconds.get((work, number)))
                    times = [statistics.median(rounds) for rounds in (pair.other, pair.one)]
                    dense_seconds.setdefault((work, number), times[0])
                    saved = None
                    if row.removed:
                        saved = (1 - pair.ratio) * times[0] / (row.removed * dense_seconds["output", number])
                        if work == "output":
                            saved = (1 - pair.ratio) / row.removed
                    case = f"V = {vocabulary:,}, {name}, {work} {number}"
                    self.judge(case, vocabulary, name, work, pair.ratio, saved)
                    limit = self.limit(macs, one.bytes)
                    lines.append([name, f"{work}, {UNITS[work]} {number}", *(f"{1e6 * time:,.0f}" for time in times), str(pair),
                                  "" if saved is None else f"{saved:.2f}", f"{macs / 1e6:,.2f}", f"{one.bytes / 1e6:,.2f}",
                                  f"{1e6 * limit:,.0f}", f"{limit / times[1]:.2f}"])  # fmt: skip
                    print(f"V = {vocabulary:,}", *lines[-1], sep=" | ", flush=True)
            for compared in (model, dense):
                compared.zero_grad()
        header = ["model", "work", "dense, µs", "takes, µs", "takes / dense", "saved / removed", "multiply-adds, M", "MB",
                  "limit, µs", "limit / time"]  # fmt: skip
        return _shared.markdown(header, lines), tables

    def judge(self, case: str, vocabulary: int, name: str, work: str, ratio: float, saved: float | None) -> None:
        """Record the measurement for the claims that it concerns."""
        if work == "output" and name == "E = d/4" and vocabulary >= FROM:
            self.ratios["output"].append((ratio, case))
        if work == "output" and saved is not None:
            self.ratios["saved"].append((saved, case))
        if work == "look-up" and name == "DeFINE":
            self.ratios["kept"].append((ratio, case))
        if work == "decoding step" and saved is None and name not in ("dense again", "adaptive"):
            self.ratios["decoding"].append((ratio, case))
        if work == "loss by labels" and name == "adaptive" and vocabulary >= LABELS_FROM:
            self.ratios["labels"].append((ratio, case))


def check_logits(trimmed: Any, dense: Any) -> None:
    """Raise RuntimeError if the logit of a kept token differs from the dense model's."""
    x = torch.randn(4, dense.config.d_model, device=_shared.DEVICE)
    one, other = (model.get_output_embeddings()(x) for model in (trimmed, dense))
    if not torch.allclose(one, other[:, : one.shape[1]], rtol=1e-5, atol=1e-5):
        raise RuntimeError("the trimmed output and the dense output differ in the logits of the kept ids")


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round, as a smoke test")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES, help="V, multiples of 4")
    parser.add_argument("--width", type=int, default=512, help="d, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=15, help="largest number of rounds of four turns")
    parser.add_argument("--patience", type=float, default=1.2, help="seconds per ratio, but at least two rounds")
    parser.add_argument("--turn", type=float, default=2.0, help="shortest time of a turn in ms")
    options = parser.parse_args()
    options.numbers = NUMBERS
    if options.quick:
        options.vocabularies, options.width, options.numbers = (400, FROM), 32, QUICK
        options.rounds, options.turn = 1, 0.0
    torch.manual_seed(0)
    bench, parts, tables = Bench(options), [], {}
    for vocabulary in options.vocabularies:
        table, tables[vocabulary] = bench.measure(vocabulary)
        parts.append(f"**V = {vocabulary:,}**, d = {options.width}:\n\n{table}")
    names = [*tables[options.vocabularies[0]]]
    memory = [[name, *(f"{tables[vocabulary][name]:.3f}" for vocabulary in tables)] for name in names]
    header = ["model", *(f"V = {vocabulary:,}" for vocabulary in tables)]
    parts.append(f"Tables with their projections, MB (tied: stored once):\n\n{_shared.markdown(header, memory)}")
    rates = ", ".join(f"{_shared.read_rate(1 << power) / 1e9:.0f} of {1 << power - 20} MB" for power in (20, 23, 28))
    verdict = _shared.verdict
    summary = "\n".join([
        f"- output at E = d/4 faster than dense from V = {FROM:,} on: "
        + verdict(bench.ratios["output"], lambda ratio: ratio < BARS["output"]),
        f"- saved at least {BARS['saved']} of the removed share of the output: "
        + verdict(bench.ratios["saved"], lambda saved: saved >= BARS["saved"]),
        f"- look-up of rows that DeFINE keeps at most {BARS['kept']} of dense: "
        + verdict(bench.ratios["kept"], lambda ratio: ratio <= BARS["kept"]),
        f"- decoding step, factorised, DeFINE or shared, at most {BARS['decoding']} of dense: "
        + verdict(bench.ratios["decoding"], lambda ratio: ratio <= BARS["decoding"]),
        f"- adaptive softmax, training step faster than full from V = {LABELS_FROM:,} on: "
        + verdict(bench.ratios["labels"], lambda ratio: ratio < BARS["labels"]),
        f"- this machine: {bench.products / 1e9:.0f} billion multiply-adds a second, GB/s read: {rates}; "
        f"{torch.get_num_threads()} threads",
    ])  # fmt: skip
    _shared.report(options, "\n\n".join(parts), summary)


if __name__ == "__main__":
    main()
