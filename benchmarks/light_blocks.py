"""Time of Lite Transformer's and DeLighT's blocks beside plain ones of as many multiply-adds.

    python benchmarks/light_blocks.py --out light_blocks.md     # about half an hour on one core

Claims: the convolution of Lite Transformer takes no longer than the attention beside it from 128 tokens on; a training step of
DeLighT takes at most 1.3 of a plain one. Each place where that does not hold is named, with the operations that take longest.

Models, fp32, fresh weights: Marian translators, plain with six layers a stack, `--width` wide and 4 x wide FFNs; Lite Transformer
with as many layers, kernels 3, 7, 15, 31, 31, 31; DeLighT with eight blocks, N 4 to 8. The last two have the hidden size (a
multiple of 32) at which their multiply-adds per token at length 32 come nearest to the plain model's; vocabularies of 4,000.
A step: forward, backward and AdamW; as many sentences of each length as make `--tokens`. Decoding: 32 tokens, greedily, for one
and for 16 sentences of 32.

The limit: the same multiply-adds at the rate of a large matrix product take as long, so that all above 1 is the form of the work:
more and smaller operations. "operations": how many a forward starts.

Time: row, plain, plain, row; a ratio is the median of the rounds' ratios, with quartiles. "again": a second plain model, the
noise.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import _shared
import torch
from torch.profiler import ProfilerActivity, profile

from hf_freeze import make_variant, methods, multiply_adds
from hf_freeze.experiments.runs.text_training import choose_attention
from hf_freeze.layers.long_short import LongShortAttention

BARS = {"convolution": 1.0, "delight": 1.3}
LENGTHS = (32, 128, 512, 1024)
VOCABULARY = 4000
DECODED = 32  # tokens
LAYERS = 6  # of the plain model
BLOCKS = {
    "Lite Transformer": (6, [methods.LiteTransformer()]),
    "Lite Transformer, lightweight": (6, [methods.LiteTransformer(conv="lightweight")]),
    "DeLighT": (8, [methods.DeLighT(n_min=4, n_max=8, m_w=2, dropout=0.0)]),
}


def model(width: int, layers: int, added: list[Any]) -> Any:
    stacks = {"layers": layers, "attention_heads": 8, "ffn_dim": 4 * width}
    fields = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in stacks.items()}
    fields |= {"d_model": width, "max_position_embeddings": max(LENGTHS), "activation_function": "relu", "dropout": 0.0}
    config = _shared.config({"backbone": {"model_type": "marian", "config": fields}}, VOCABULARY)
    return make_variant(config, added, task="seq2seq-lm", init="marian")


def on_device(width: int, layers: int, added: list[Any]) -> Any:
    made = model(width, layers, added).to(_shared.DEVICE)
    choose_attention(made)
    return made


def forward_multiply_adds(width: int, layers: int, added: list[Any]) -> float:
    with torch.device("meta"):
        return multiply_adds(model(width, layers, added), length=32).forward


def equal_width(layers: int, added: list[Any], wanted: float, start: int) -> int:
    """The multiple of 32, from `start` on, where multiply-adds that grow with its square come nearest to those `wanted`."""
    width = -1
    while width != start:
        width = start
        exact = width * (wanted / forward_multiply_adds(width, layers, added)) ** 0.5
        start = max(32 * round(exact / 32), 32) if abs(exact - width) > 16 else width
    return width


def sentences(count: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (count, length), device=_shared.DEVICE)


def forward(made: Any, ids: torch.Tensor) -> Callable[[], object]:
    def work() -> object:
        with torch.inference_mode():
            return made.eval()(input_ids=ids, decoder_input_ids=ids)

    return work


def training(made: Any, ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], fused=True)  # as Trainer does

    def work() -> None:
        made.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def decoding(made: Any, ids: torch.Tensor) -> Callable[[], object]:
    mask = torch.ones_like(ids)

    def work() -> object:
        return made.eval().generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=DECODED,
            min_new_tokens=DECODED,
            num_beams=1,
            do_sample=False,
        )

    return work


def longest_operations(work: Callable[[], object], count: int = 4) -> tuple[int, str]:
    """(operations started, the longest of them with their shares of the time)."""
    work()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    found = [event for event in seen.key_averages() if event.key.startswith("aten::")]
    total = sum(event.self_cpu_time_total for event in found)
    longest = sorted(found, key=lambda event: event.self_cpu_time_total, reverse=True)[:count]
    names = ", ".join(f"{e.key.removeprefix('aten::')} {e.self_cpu_time_total / total:.0%}" for e in longest)
    return sum(event.count for event in found if event.self_cpu_time_total), names


def branches(made: Any, ids: torch.Tensor, rounds: int) -> list[tuple[int, _shared.Pair]]:
    """(taps, time of the convolution beside that of the attention) of the layers of the encoder, in training mode."""
    found = []
    made.train()
    for layer in made.model.encoder.layers:
        block: LongShortAttention = layer.self_attn
        x = torch.randn(*ids.shape, made.config.d_model // 2, device=_shared.DEVICE, requires_grad=True)

        def convolve(block: LongShortAttention = block, x: torch.Tensor = x) -> None:
            block.conv(block.conv.inputs(x, None)).sum().backward()

        def attend(block: LongShortAttention = block, x: torch.Tensor = x) -> None:
            block.attention(x)[0].sum().backward()

        found.append((block.conv.taps, _shared.in_turns(convolve, attend, rounds, at_least=0.02)))
    return found


def main() -> None:
    made = _shared.parser(__doc__, presets=False)
    made.add_argument("--width", type=int, default=256, help="of the plain model")
    made.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    made.add_argument("--tokens", type=int, default=2048, help="of a batch")
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    wanted = forward_multiply_adds(options.width, LAYERS, [])
    widths = {name: equal_width(*block, wanted, options.width) for name, block in BLOCKS.items()}
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in BARS}
    lines = compare(options, widths, wanted, found)
    notes = [f"{name}: {widths[name]} wide" for name in BLOCKS]
    summary = "\n".join(
        [
            f"plain: {options.width} wide, {wanted / 1e6:.2f}M multiply-adds a token; {'; '.join(notes)}",
            f"the convolution takes no longer than the attention from 128 tokens on: "
            f"{_shared.verdict(found['convolution'], lambda value: value <= BARS['convolution'])}",
            f"DeLighT's training step takes at most {BARS['delight']} of a plain one: "
            f"{_shared.verdict(found['delight'], lambda value: value <= BARS['delight'])}",
        ]
    )
    header = ["blocks", "multiply-adds", "what", "length", "ms", "of plain", "operations", "longest"]
    _shared.report(options, _shared.markdown(header, lines), summary)


def compare(
    options: argparse.Namespace, widths: dict[str, int], wanted: float, found: dict[str, list[tuple[float, str]]]
) -> list[list[str]]:
    lines: list[list[str]] = []

    def add(*cells: str) -> None:
        lines.append(list(cells))
        print(" | ".join(cells), flush=True)

    torch.manual_seed(0)
    plain = on_device(options.width, LAYERS, [])
    others = {"plain, again": (options.width, LAYERS, [])} | {name: (widths[name], *BLOCKS[name]) for name in BLOCKS}
    for name, sizes in others.items():
        block = on_device(*sizes)
        cost = f"{forward_multiply_adds(*sizes) / wanted:.2f}"
        works = [("forward", forward, length) for length in options.lengths]
        works += [("training step", training, length) for length in options.lengths]
        works += [("decoding 1", decoding, 0), ("decoding 16", decoding, 0)]
        for what, work, length in works:
            if what.startswith("decoding"):
                length, count = 32, int(what.split()[1])
            else:
                count = max(1, options.tokens // length)
            ids = sentences(count, length)
            run = work(block, ids)
            pair = _shared.in_turns(run, work(plain, ids), options.rounds)
            started, longest = longest_operations(run)
            add(
                name,
                cost,
                what,
                str(length),
                f"{1000 * statistics.median(pair.one):.1f}",
                str(pair),
                str(started),
                longest,
            )
            if name == "DeLighT" and what == "training step":
                found["delight"].append((pair.ratio, f"length {length}"))
        if name.startswith("Lite"):
            for length in options.lengths:
                for taps, pair in branches(block, sentences(max(1, options.tokens // length), length), options.rounds):
                    where = f"{name}, {taps} taps, length {length}"
                    milliseconds = f"{1000 * statistics.median(pair.one):.2f}"
                    add(name, "", f"{taps} taps, beside the attention", str(length), milliseconds, str(pair), "", "")
                    if length >= 128:
                        found["convolution"].append((pair.ratio, where))
    return lines


if __name__ == "__main__":
    main()
