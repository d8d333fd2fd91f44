"""Time of attentions with removed heads, of heads with fixed patterns, and of scoring heads.

    python benchmarks/heads.py --out heads.md           # about 10 minutes on one core
    python benchmarks/heads.py --peer --out heads.md    # with Torch-Pruning, installed by hand

Claims: removing heads saves at least 0.85 of the time that it could save. From length 128 on, an encoder with eight fixed heads,
or with seven fixed heads and one learned head, is faster than with eight learned heads. `analysis.head_importance` takes at most
1.15 of the time of a training forward and backward on the same batches. The report names each case that misses its claim.

Models, fp32, fresh weights, built by `make_variant`:
- encoder: `--layers` layers like BERT-base (768 wide, 12 heads, FFN 3072); layers are identical, so two represent twelve;
- decoder: the same number of layers like Transformer-base (512 wide, 8 heads, FFN 2048); one step decodes a token after `length`
  tokens with cache, with `length` source tokens;
- fixed: an encoder as wide as that decoder.

Heads removed: 0.25, 0.5 and 0.75 of each attention (exact shares of 8 or 12 heads), and all. Removing all shows the possible
saving: an attention with half of its heads could save half of it. Saved / possible: (dense - row) / (share x (dense - none)),
from the medians.

Time: the turns row, dense, dense, row, each of at least `--turn` ms; a ratio is the median of the ratios of the rounds, with
quartiles. "dense again", a second dense model, shows the noise. No text is padded.

`--peer` compares with Torch-Pruning (`pip install torch-pruning`, not a dependency; Fang et al., 2023,
https://arxiv.org/abs/2301.12900), which removes the same heads of the same encoder by its dependency graph. The outputs must be
equal, and ours should take at most 1.03 of its time. It also reports whether `from_pretrained` opens the saved model of each.
"""

import argparse
import copy
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import _shared
import torch
from transformers import AutoModelForMaskedLM, BertConfig, DynamicCache, EncoderDecoderCache, MarianConfig

from hf_freeze import make_variant, methods
from hf_freeze.analysis import head_importance
from hf_freeze.lab.runs.text_training import choose_attention

SHARES = (0.25, 0.5, 0.75)
BARS = {"saved": 0.85, "fixed": 1.0, "scoring": 1.15, "peer": 1.03}
FIXED_FROM = 128
Measurements = dict[str, list[tuple[float, str]]]  # claim -> (value, case) of each measurement


def encoder(options: argparse.Namespace) -> Any:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=12,
        intermediate_size=4 * options.width,
        max_position_embeddings=max(options.lengths),
    )
    return _ready(make_variant(config, [], task="masked-lm"))


def translator(options: argparse.Namespace) -> Any:
    width, stacks = options.width * 2 // 3, ("encoder", "decoder")
    sizes = {"layers": options.layers, "attention_heads": 8, "ffn_dim": 4 * width}
    fields = {f"{stack}_{name}": size for stack in stacks for name, size in sizes.items()}
    fields |= {"d_model": width, "max_position_embeddings": max(options.lengths) + 1}
    config = _shared.config("marian", fields, 1000)
    assert isinstance(config, MarianConfig)
    return _ready(make_variant(config, [], task="seq2seq-lm"))


def _ready(model: Any) -> Any:
    model = model.to(_shared.DEVICE).eval()
    choose_attention(model)
    return model


def without(model: Any, share: float) -> Any:
    """A copy of the model in which this share of the heads of each attention is removed."""
    attentions = model.architecture.attentions(model.config)
    heads = {name: list(range(round(share * a.head_count(model.config)))) for name, a in attentions.items()}
    return _ready(make_variant(model, [methods.HeadPruning(heads=heads)]))


def encode(model: Any, batch: int, length: int) -> Callable[[], object]:
    ids = torch.randint(2, 1000, (batch, length), device=_shared.DEVICE)
    stack = model.base_model

    def work() -> object:
        with torch.inference_mode():
            return stack.encoder(ids) if model.config.is_encoder_decoder else stack(ids)

    return work


def decode(model: Any, batch: int, length: int) -> Callable[[], object]:
    ids = torch.randint(2, 1000, (batch, length), device=_shared.DEVICE)
    with torch.inference_mode():
        source = model.base_model.encoder(ids)
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        model(encoder_outputs=source, decoder_input_ids=ids, past_key_values=cache, use_cache=True)

    def work() -> object:
        with torch.inference_mode():
            outputs = model(encoder_outputs=source, decoder_input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)
            return outputs.logits.argmax(-1)

    return work


def pruning(options: argparse.Namespace, measurements: Measurements) -> list[list[str]]:
    """Table rows of models with removed heads; adds to `measurements`, as the functions below."""
    lines = []
    for name, make, work in (("encoder", encoder, encode), ("decoder", translator, decode)):
        torch.manual_seed(0)
        dense = make(options)
        models = {"dense again": (copy.deepcopy(dense), 0.0)}
        models |= {f"{share:.0%} of the heads removed": (without(dense, share), share) for share in (*SHARES, 1.0)}
        for batch in options.batches:
            for length in options.lengths:
                reference, cells = work(dense, batch, length), {}
                for row, (model, _) in models.items():
                    cells[row] = _shared.in_turns(
                        work(model, batch, length), reference, options.rounds, at_least=options.turn / 1000
                    )
                possible = 1 - cells["100% of the heads removed"].ratio
                for row, pair in cells.items():
                    share = models[row][1]
                    saved = (1 - pair.ratio) / (share * possible) if 0 < share < 1 else None
                    if saved is not None:
                        measurements["saved"].append((saved, f"{name}, batch {batch}, length {length}, {share:.0%}"))
                    ms = 1000 * statistics.median(pair.one)
                    saved_cell = "" if saved is None else f"{saved:.2f}"
                    lines.append([row, name, f"{batch} x {length}", f"{ms:.2f}", str(pair), saved_cell])
                    print(" ".join(lines[-1]), flush=True)
    return lines


def fixed(options: argparse.Namespace, measurements: Measurements) -> list[list[str]]:
    torch.manual_seed(0)
    dense, lines = translator(options), []
    models = {"dense again": copy.deepcopy(dense)}
    for number, row in ((7, "7 fixed, 1 learnt"), (8, "8 fixed")):
        models[row] = _ready(make_variant(dense, [methods.FixedAttention(patterns=number)]))
    for batch in options.batches:
        for length in options.lengths:
            reference = encode(dense, batch, length)
            for row, model in models.items():
                pair = _shared.in_turns(
                    encode(model, batch, length), reference, options.rounds, at_least=options.turn / 1000
                )
                if row != "dense again" and length >= FIXED_FROM:
                    measurements["fixed"].append((pair.ratio, f"{row}, batch {batch}, length {length}"))
                ms = 1000 * statistics.median(pair.one)
                lines.append([row, "fixed", f"{batch} x {length}", f"{ms:.2f}", str(pair), ""])
                print(" ".join(lines[-1]), flush=True)
    return lines


def scoring(options: argparse.Namespace, measurements: Measurements) -> list[list[str]]:
    torch.manual_seed(0)
    model, lines = encoder(options), []
    batch, length = max(options.batches), options.lengths[len(options.lengths) // 2]
    ids = torch.randint(2, 1000, (batch, length), device=_shared.DEVICE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def train() -> None:
        model.train()
        model(**inputs).loss.backward()
        model.zero_grad()

    pair = _shared.in_turns(
        lambda: head_importance(model, [inputs]), train, options.rounds, at_least=options.turn / 1000
    )
    measurements["scoring"].append((pair.ratio, f"batch {batch}, length {length}"))
    ms = 1000 * statistics.median(pair.one)
    lines.append(["head_importance, against training", "encoder", f"{batch} x {length}", f"{ms:.2f}", str(pair), ""])
    return lines


def peer(options: argparse.Namespace, measurements: Measurements) -> list[list[str]]:
    """Compare our pruned models with Torch-Pruning's. Raises RuntimeError if their logits differ."""
    torch.manual_seed(0)
    dense, lines = encoder(options), []
    native = _ready(dense.merge())
    for share in SHARES:
        count = round(share * dense.config.num_attention_heads)
        ours, theirs = without(dense, share), by_peer(native, count)
        with torch.inference_mode():
            ids = torch.randint(2, 1000, (2, min(options.lengths)), device=_shared.DEVICE)
            difference = float((ours(ids).logits - theirs(ids).logits).abs().max())
        if difference > 1e-4:
            raise RuntimeError(f"with {count} heads removed, our logits and Torch-Pruning's differ by {difference:.2g}")
        opened = "; ".join(
            f"{name} opens again: {'yes' if reopens(m) else 'no'}" for name, m in (("ours", ours), ("theirs", theirs))
        )
        for batch in options.batches:
            for length in options.lengths:
                pair = _shared.in_turns(
                    encode(ours, batch, length),
                    encode(theirs, batch, length),
                    options.rounds,
                    at_least=options.turn / 1000,
                )
                measurements["peer"].append((pair.ratio, f"{share:.0%}, batch {batch}, length {length}"))
                ms = 1000 * statistics.median(pair.one)
                row = f"{share:.0%} of the heads removed, against Torch-Pruning ({opened})"
                lines.append([row, "encoder", f"{batch} x {length}", f"{ms:.2f}", str(pair), ""])
                print(" ".join(lines[-1]), flush=True)
    return lines


def by_peer(native: Any, count: int) -> Any:
    """A copy of this BERT in which Torch-Pruning removed the first `count` heads of each attention."""
    import torch_pruning  # pyright: ignore[reportMissingImports]

    model = copy.deepcopy(native)
    size = model.config.hidden_size // model.config.num_attention_heads
    example = {"input_ids": torch.randint(2, 1000, (2, 8), device=_shared.DEVICE)}
    graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example)
    for layer in model.bert.encoder.layer:
        channels = list(range(count * size))
        graph.get_pruning_group(layer.attention.self.query, torch_pruning.prune_linear_out_channels, channels).prune()
    return _ready(model)


def reopens(model: Any) -> bool:
    """Whether `from_pretrained` can load the saved model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            AutoModelForMaskedLM.from_pretrained(folder)
        except RuntimeError:  # tensor sizes that do not match its config
            return False
    return True


def arguments() -> argparse.Namespace:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="width of the encoder, a multiple of 48")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn", type=float, default=100, help="shortest time of a turn in ms")
    parser.add_argument("--peer", action="store_true", help="also compare with Torch-Pruning, which must be installed")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    measurements: Measurements = {name: [] for name in BARS}
    parts = (pruning, fixed, scoring, *([peer] if options.peer else []))
    lines = [line for part in parts for line in part(options, measurements)]
    header = ["row", "of", "batch x length", "ms", "to dense", "saved / possible"]
    summary = "\n".join(
        [
            f"- saved at least {BARS['saved']} of what could be: {_shared.verdict(measurements['saved'], BARS['saved'].__le__)}",
            f"- fixed heads faster than dense from length {FIXED_FROM} on: "
            f"{_shared.verdict(measurements['fixed'], BARS['fixed'].__gt__)}",
            f"- scoring at most {BARS['scoring']} of training: "
            f"{_shared.verdict(measurements['scoring'], BARS['scoring'].__ge__)}",
            *(
                [
                    f"- at most {BARS['peer']} of Torch-Pruning's: "
                    f"{_shared.verdict(measurements['peer'], BARS['peer'].__ge__)}"
                ]
                if options.peer
                else []
            ),
            f"- threads: {torch.get_num_threads()}",
        ]
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
