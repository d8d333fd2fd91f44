"""Time of the blocks of Lite Transformer and DeLighT, against plain blocks with as many multiply-adds.

    python benchmarks/light_blocks.py --out light_blocks.md     # about half an hour on one core

Claims: from 128 tokens on, the convolution of Lite Transformer takes no longer than the attention beside it. A training step of
DeLighT takes at most 1.3 of a plain one. The report names each case that misses its claim, and lists the slowest operations.

Models, fp32, fresh weights, vocabularies of 4,000: Marian translators. "Plain" has six layers per stack, `--width` wide with FFNs
4 times as wide; Lite Transformer has as many layers, with kernels 3, 7, 15, 31, 31, 31; DeLighT has eight blocks, N from 4 to 8.
The last two have the hidden size (a multiple of 32) whose multiply-adds per token at length 32 come nearest to the plain
model's. A step is forward, backward and AdamW on `--tokens` tokens in sentences of one length. Decoding generates 32 tokens by
greedy search, for one and for 16 sentences of 32 tokens.

Limit: the same multiply-adds take the same time at the rate of a large matrix product, so a ratio above 1 comes from more and
smaller operations. "operations" is the number of operations that a forward starts.

Time: the turns row, plain, plain, row; a ratio is the median of the ratios of the rounds, with quartiles. "again", a second
plain model, shows the noise.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import _shared
import torch
from torch.profiler import ProfilerActivity, profile

from hf_freeze import make_variant, methods, multiply_adds
from hf_freeze.lab.runs.text_training import choose_attention
from hf_freeze.layers.long_short import LongShortAttention

BARS = {"convolution": 1.0, "delight": 1.3}
LENGTHS = (32, 128, 512, 1024)
VOCABULARY = 4000
DECODED = 32  # tokens to decode
Measurements = dict[str, list[tuple[float, str]]]  # claim -> (value, case) of each measurement
LAYERS = 6  # of the plain model
BLOCKS = {
    "Lite Transformer": (6, [methods.LiteTransformer()]),
    "Lite Transformer, lightweight": (6, [methods.LiteTransformer(conv="lightweight")]),
    "DeLighT": (8, [methods.DeLighT(n_min=4, n_max=8, m_w=2, dropout=0.0)]),
}


def new_model(width: int, layers: int, added: list[Any]) -> Any:
    stacks = {"layers": layers, "attention_heads": 8, "ffn_dim": 4 * width}
    fields = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in stacks.items()}
    fields |= {"d_model": width, "max_position_embeddings": max(LENGTHS), "activation_function": "relu", "dropout": 0.0}
    config = _shared.config("marian", fields, VOCABULARY)
    return make_variant(config, added, task="seq2seq-lm", init="marian")


def on_device(width: int, layers: int, added: list[Any]) -> Any:
    model = new_model(width, layers, added).to(_shared.DEVICE)
    choose_attention(model)
    return model


def forward_multiply_adds(width: int, layers: int, added: list[Any]) -> float:
    with torch.device("meta"):
        return multiply_adds(new_model(width, layers, added), length=32).forward


def equal_width(layers: int, added: list[Any], target: float, start: int) -> int:
    """The width, a multiple of 32, whose multiply-adds come nearest to `target`; a search that starts at `start`.

    Multiply-adds grow about with the square of the width.
    """
    width = -1
    while width != start:
        width = start
        exact = width * (target / forward_multiply_adds(width, layers, added)) ** 0.5
        start = max(32 * round(exact / 32), 32) if abs(exact - width) > 16 else width
    return width


def sentences(count: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (count, length), device=_shared.DEVICE)


def forward(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    def work() -> object:
        with torch.inference_mode():
            return model.eval()(input_ids=ids, decoder_input_ids=ids)

    return work


def training(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)  # as in the Trainer

    def work() -> None:
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def decoding(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    mask = torch.ones_like(ids)

    def work() -> object:
        return model.eval().generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=DECODED,
            min_new_tokens=DECODED,
            num_beams=1,
            do_sample=False,
        )

    return work


def longest_operations(work: Callable[[], object], count: int = 4) -> tuple[int, str]:
    """(number of operations, the slowest ones with their shares of the time)."""
    work()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    events = [event for event in profiler.key_averages() if event.key.startswith("aten::")]
    total = sum(event.self_cpu_time_total for event in events)
    longest = sorted(events, key=lambda event: event.self_cpu_time_total, reverse=True)[:count]
    names = ", ".join(f"{e.key.removeprefix('aten::')} {e.self_cpu_time_total / total:.0%}" for e in longest)
    return sum(event.count for event in events if event.self_cpu_time_total), names


def branches(model: Any, ids: torch.Tensor, rounds: int) -> list[tuple[int, _shared.Pair]]:
    """(taps, times of the convolution and of the attention) for each layer of the encoder, in training mode."""
    pairs = []
    model.train()
    for layer in model.model.encoder.layers:
        block: LongShortAttention = layer.self_attn
        x = torch.randn(*ids.shape, model.config.d_model // 2, device=_shared.DEVICE, requires_grad=True)

        def convolve(block: LongShortAttention = block, x: torch.Tensor = x) -> None:
            block.conv(block.conv.inputs(x, None)).sum().backward()

        def attend(block: LongShortAttention = block, x: torch.Tensor = x) -> None:
            block.attention(x)[0].sum().backward()

        pairs.append((block.conv.taps, _shared.in_turns(convolve, attend, rounds, at_least=0.02)))
    return pairs


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--width", type=int, default=256, help="width of the plain model")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    plain_cost = forward_multiply_adds(options.width, LAYERS, [])
    widths = {name: equal_width(*block, plain_cost, options.width) for name, block in BLOCKS.items()}
    measurements: Measurements = {name: [] for name in BARS}
    lines = compare(options, widths, plain_cost, measurements)
    notes = [f"{name}: {widths[name]} wide" for name in BLOCKS]
    summary = "\n".join(
        [
            f"plain: {options.width} wide, {plain_cost / 1e6:.2f}M multiply-adds a token; {'; '.join(notes)}",
            f"the convolution takes no longer than the attention from 128 tokens on: "
            f"{_shared.verdict(measurements['convolution'], lambda value: value <= BARS['convolution'])}",
            f"DeLighT's training step takes at most {BARS['delight']} of a plain one: "
            f"{_shared.verdict(measurements['delight'], lambda value: value <= BARS['delight'])}",
        ]
    )
    header = ["blocks", "multiply-adds", "what", "length", "ms", "of plain", "operations", "longest"]
    _shared.report(options, _shared.markdown(header, lines), summary)


def compare(
    options: argparse.Namespace, widths: dict[str, int], plain_cost: float, measurements: Measurements
) -> list[list[str]]:
    """The table rows of all models; adds to `measurements`. `plain_cost`: multiply-adds per token of the plain model."""
    lines: list[list[str]] = []

    def add(*cells: str) -> None:
        lines.append(list(cells))
        print(" | ".join(cells), flush=True)

    torch.manual_seed(0)
    plain = on_device(options.width, LAYERS, [])
    others = {"plain, again": (options.width, LAYERS, [])} | {name: (widths[name], *BLOCKS[name]) for name in BLOCKS}
    for name, sizes in others.items():
        block = on_device(*sizes)
        cost = f"{forward_multiply_adds(*sizes) / plain_cost:.2f}"
        works = [("forward", forward, length) for length in options.lengths]
        works += [("training step", training, length) for length in options.lengths]
        works += [("decoding 1", decoding, 0), ("decoding 16", decoding, 0)]
        for label, work, length in works:
            if label.startswith("decoding"):
                length, count = 32, int(label.split()[1])
            else:
                count = max(1, options.tokens // length)
            ids = sentences(count, length)
            run = work(block, ids)
            pair = _shared.in_turns(run, work(plain, ids), options.rounds)
            operations, longest = longest_operations(run)
            milliseconds = f"{1000 * statistics.median(pair.one):.1f}"
            add(name, cost, label, str(length), milliseconds, str(pair), str(operations), longest)
            if name == "DeLighT" and label == "training step":
                measurements["delight"].append((pair.ratio, f"length {length}"))
        if name.startswith("Lite"):
            for length in options.lengths:
                for taps, pair in branches(block, sentences(max(1, options.tokens // length), length), options.rounds):
                    milliseconds = f"{1000 * statistics.median(pair.one):.2f}"
                    add(name, "", f"{taps} taps, beside the attention", str(length), milliseconds, str(pair), "", "")
                    if length >= 128:
                        measurements["convolution"].append((pair.ratio, f"{name}, {taps} taps, length {length}"))
    return lines


if __name__ == "__main__":
    main()
