"""Time of training steps with Theseus and LayerDrop, and of the finalized models.

    python benchmarks/progressive.py --out progressive.md     # about ten minutes on one core

Claims: a step of Theseus costs at most 1.1 of the expected time: the mean of a predecessor-only step and a successor-only step,
weighted by the rate. LayerDrop saves at least 0.85 of the share p of the layers' time. A finalized model takes at most 1.03 of
the time of a native model of its depth. The report names each case that misses its claim.

Models, fp32, fresh weights, built by `make_variant`: an encoder with `--layers` layers like MiniLM (384 wide, 12 heads, FFN 1536)
and a masked-LM head on 1,000 tokens; and a Marian translator with as many layers in each stack, 256 wide. A step is forward,
backward and AdamW on `--batch` x `--length` tokens (and as many target tokens), with the draws of the steps 0, 1, 2 ... of a
training. The layers' time is a step with all layers minus a step in which LayerDrop drops all layers.

Time: the turns row, reference, reference, row, each of `--steps` steps; a ratio is the median of the ratios of the rounds, with
quartiles. "again", a second model of the same kind, shows the noise.
"""

import argparse
import copy
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import _shared
import torch
from transformers import BertConfig

from hf_freeze import make_variant, methods
from hf_freeze.lab.runs.text_training import choose_attention

BARS = {"theseus": 1.1, "layer_drop": 0.85, "finalized": 1.03}
TOTAL = 10**6  # steps of the training, more than are ever run
NEVER = 1e-9  # a probability close to 0
RATES = (0.3, 0.5, 0.8)
DROPS = (0.2, 0.5)
Measurements = dict[str, list[tuple[float, str]]]  # claim -> (value, case) of each measurement


def encoder(options: argparse.Namespace) -> Any:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=12,
        intermediate_size=4 * options.width,
        max_position_embeddings=options.length,
    )
    return make_variant(config, [], task="masked-lm")


def translator(options: argparse.Namespace) -> Any:
    width = options.width * 2 // 3
    sizes = {"layers": options.layers, "attention_heads": 8, "ffn_dim": 4 * width}
    fields = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
    fields |= {"d_model": width, "max_position_embeddings": options.length + 1}
    return make_variant(_shared.config("marian", fields, 1000), [], task="seq2seq-lm")


def training(model: Any, options: argparse.Namespace) -> Callable[[], None]:
    """A function that trains for `--steps` steps, continuing the draws of the previous call."""
    model = model.to(_shared.DEVICE).train()
    choose_attention(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(2, 1000, (options.batch, options.length), device=_shared.DEVICE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    steps = itertools.count()

    def work() -> None:
        for _ in range(options.steps):
            if model.scheduled:
                model.advance(next(steps) % TOTAL, TOTAL)
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def inference(model: Any, options: argparse.Namespace) -> Callable[[], None]:
    model = model.to(_shared.DEVICE).eval()
    choose_attention(model)
    ids = torch.randint(2, 1000, (options.batch, options.length), device=_shared.DEVICE)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})

    def work() -> None:
        with torch.inference_mode():
            for _ in range(options.steps):
                model(**inputs)

    return work


def measure(name: str, dense: Any, options: argparse.Namespace, measurements: Measurements) -> list[Any]:
    """The table rows of one model; adds to `measurements`."""
    lines: list[list[str]] = []

    def compare(row: str, one: Callable[[], None], other: Callable[[], None]) -> float:
        pair = _shared.in_turns(one, other, options.rounds)
        lines.append([row, name, f"{1000 * statistics.median(pair.one) / options.steps:.1f}", str(pair), ""])
        print(" ".join(lines[-1]), flush=True)
        return pair.ratio

    def trained(*added: Any) -> Callable[[], None]:
        return training(make_variant(dense, list(added)), options)

    reference = trained()
    compare("all layers, again", trained(), reference)
    before = compare("Theseus, the predecessor alone", trained(methods.Theseus(rate=NEVER, train="all")), reference)
    after = compare("Theseus, the successor alone", trained(methods.Theseus(rate=1.0, train="all")), reference)
    for rate in RATES:
        ratio = compare(f"Theseus, rate {rate}", trained(methods.Theseus(rate=rate, train="all")), reference)
        expected = rate * after + (1 - rate) * before
        lines[-1][-1] = f"{ratio / expected:.3f} of the expected"
        measurements["theseus"].append((ratio / expected, f"{name}, rate {rate}"))
    none = compare("LayerDrop, no layer", trained(methods.LayerDrop(p=1 - NEVER)), reference)
    for p in DROPS:
        ratio = compare(f"LayerDrop, p = {p}", trained(methods.LayerDrop(p=p)), reference)
        saved = (1 - ratio) / (p * (1 - none))
        lines[-1][-1] = f"saved {saved:.2f} of p x layers"
        measurements["layer_drop"].append((saved, f"{name}, p = {p}"))
    finalized = make_variant(dense, [methods.Theseus(rate=0.5)])
    finalized.finalize()
    native = copy.deepcopy(finalized.merge())
    ratio = compare(
        "finalized, against a native model of its depth", inference(finalized, options), inference(native, options)
    )
    measurements["finalized"].append((ratio, name))
    return lines


def arguments() -> argparse.Namespace:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--layers", type=int, default=6, help="layers of each stack, an even number")
    parser.add_argument("--width", type=int, default=384, help="width of the encoder, a multiple of 48")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="steps in a turn, each with its own draws")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    measurements: Measurements = {name: [] for name in BARS}
    lines = []
    for name, make in (("encoder", encoder), ("translator", translator)):
        torch.manual_seed(0)
        lines += measure(name, make(options), options, measurements)
    summary = "\n".join(
        [
            f"- Theseus at most {BARS['theseus']} of the expected: "
            f"{_shared.verdict(measurements['theseus'], BARS['theseus'].__ge__)}",
            f"- LayerDrop saves at least {BARS['layer_drop']} of the share p of the layers' time: "
            f"{_shared.verdict(measurements['layer_drop'], BARS['layer_drop'].__le__)}",
            f"- finalized at most {BARS['finalized']} of native: "
            f"{_shared.verdict(measurements['finalized'], BARS['finalized'].__ge__)}",
            f"- threads: {torch.get_num_threads()}",
        ]
    )
    _shared.report(options, _shared.markdown(["row", "of", "ms", "to all layers", ""], lines), summary)


if __name__ == "__main__":
    main()
