"""Time of attentions that have lost heads, of heads that attend by position, and of scoring heads.

    python benchmarks/heads.py --out heads.md           # about 10 minutes on one core
    python benchmarks/heads.py --peer --out heads.md    # with Torch-Pruning, installed by hand

Claims: removing heads saves at least .85 of what it could; an encoder with seven fixed heads and one that learns, or with eight
fixed, is faster than one whose eight learn, from length 128 on; `analysis.head_importance` takes at most 1.15 of forward and
backward in training on the same batches. Each place where that does not hold is named.

Models, fp32, fresh weights, made by `make_variant`:
- encoder: `--layers` layers as BERT-base has them (768 wide, 12 heads, FFN 3072), all alike, so that two stand for twelve;
- decoder: as many of Transformer-base (512 wide, 8 heads, FFN 2048), one step: a token after `length` tokens with cache, with as
  many source tokens;
- fixed: an encoder as wide as that decoder.

Heads removed: .25, .5 and .75 of each attention (of 8 or 12, exactly so many), and all, which is what could be saved: an
attention of half the heads could save half of what none saves. Saved / possible: (dense - row) / (share x (dense - none)), of
the medians.

Time: row, dense, dense, row, each called for at least `--turn` ms; a ratio is the median of the rounds' ratios, with quartiles.
"dense again", a second model like the first, shows the noise. No text is padded.

`--peer` compares with Torch-Pruning (`pip install torch-pruning`, not a dependency; Fang et al., 2023,
https://arxiv.org/abs/2301.12900): the same heads of the same encoder removed by its dependency graph, the outputs equal, ours at
most 1.03 of its time; and whether `from_pretrained` opens what `save_pretrained` wrote of each.
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
from hf_freeze.experiments.runs.text_training import choose_attention

SHARES = (0.25, 0.5, 0.75)
BARS = {"saved": 0.85, "fixed": 1.0, "scoring": 1.15, "peer": 1.03}
FIXED_FROM = 128


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
    config = _shared.config(
        {
            "backbone": {
                "model_type": "marian",
                "config": {f"{stack}_{name}": size for stack in stacks for name, size in sizes.items()}
                | {"d_model": width, "max_position_embeddings": max(options.lengths) + 1},
            }
        },
        1000,
    )
    assert isinstance(config, MarianConfig)
    return _ready(make_variant(config, [], task="seq2seq-lm"))


def _ready(model: Any) -> Any:
    model = model.to(_shared.DEVICE).eval()
    choose_attention(model)
    return model


def without(model: Any, share: float) -> Any:
    """The model without this share of the heads of each attention."""
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
            made = model(encoder_outputs=source, decoder_input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)
            return made.logits.argmax(-1)

    return work


def pruning(options: argparse.Namespace, found: dict[str, list[tuple[float, str]]]) -> list[list[str]]:
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
                        found["saved"].append((saved, f"{name}, batch {batch}, length {length}, {share:.0%}"))
                    ms = 1000 * statistics.median(pair.one)
                    where = [
                        name,
                        f"{batch} x {length}",
                        f"{ms:.2f}",
                        str(pair),
                        "" if saved is None else f"{saved:.2f}",
                    ]
                    lines.append([row, *where])
                    print(" ".join(lines[-1]), flush=True)
    return lines


def fixed(options: argparse.Namespace, found: dict[str, list[tuple[float, str]]]) -> list[list[str]]:
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
                    found["fixed"].append((pair.ratio, f"{row}, batch {batch}, length {length}"))
                ms = 1000 * statistics.median(pair.one)
                lines.append([row, "fixed", f"{batch} x {length}", f"{ms:.2f}", str(pair), ""])
                print(" ".join(lines[-1]), flush=True)
    return lines


def scoring(options: argparse.Namespace, found: dict[str, list[tuple[float, str]]]) -> list[list[str]]:
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
    found["scoring"].append((pair.ratio, f"batch {batch}, length {length}"))
    ms = 1000 * statistics.median(pair.one)
    lines.append(["head_importance, against training", "encoder", f"{batch} x {length}", f"{ms:.2f}", str(pair), ""])
    return lines


def peer(options: argparse.Namespace, found: dict[str, list[tuple[float, str]]]) -> list[list[str]]:
    """Ours against Torch-Pruning's."""
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
            raise RuntimeError(f"{count} heads removed in two ways give logits that differ by {difference:.2g}")
        opened = "; ".join(
            f"{who} opens again: {'yes' if reopens(m) else 'no'}" for who, m in (("ours", ours), ("theirs", theirs))
        )
        for batch in options.batches:
            for length in options.lengths:
                pair = _shared.in_turns(
                    encode(ours, batch, length),
                    encode(theirs, batch, length),
                    options.rounds,
                    at_least=options.turn / 1000,
                )
                found["peer"].append((pair.ratio, f"{share:.0%}, batch {batch}, length {length}"))
                ms = 1000 * statistics.median(pair.one)
                row = f"{share:.0%} of the heads removed, against Torch-Pruning ({opened})"
                lines.append([row, "encoder", f"{batch} x {length}", f"{ms:.2f}", str(pair), ""])
                print(" ".join(lines[-1]), flush=True)
    return lines


def by_peer(native: Any, count: int) -> Any:
    """The first `count` heads of each attention of this BERT removed by Torch-Pruning."""
    import torch_pruning  # pyright: ignore[reportMissingImports]

    model = copy.deepcopy(native)
    size = model.config.hidden_size // model.config.num_attention_heads
    example = {"input_ids": torch.randint(2, 1000, (2, 8), device=_shared.DEVICE)}
    graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example)
    for layer in model.bert.encoder.layer:
        places = list(range(count * size))
        graph.get_pruning_group(layer.attention.self.query, torch_pruning.prune_linear_out_channels, places).prune()
    return _ready(model)


def reopens(model: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            AutoModelForMaskedLM.from_pretrained(folder)
        except RuntimeError:  # sizes that its config does not know
            return False
    return True


def arguments() -> argparse.Namespace:
    made = _shared.parser(__doc__, presets=False)
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--width", type=int, default=768, help="of the encoder; a multiple of 48")
    made.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512])
    made.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--turn", type=float, default=100, help="ms that a turn takes at least")
    made.add_argument("--peer", action="store_true", help="compare with Torch-Pruning too, which must be installed")
    return made.parse_args()


def main() -> None:
    options = arguments()
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in BARS}
    parts = (pruning, fixed, scoring, *([peer] if options.peer else []))
    lines = [line for part in parts for line in part(options, found)]
    header = ["row", "of", "batch x length", "ms", "to dense", "saved / possible"]
    summary = "\n".join(
        [
            f"- saved at least {BARS['saved']} of what could be: {_shared.verdict(found['saved'], BARS['saved'].__le__)}",
            f"- fixed heads faster than dense from length {FIXED_FROM} on: "
            f"{_shared.verdict(found['fixed'], BARS['fixed'].__gt__)}",
            f"- scoring at most {BARS['scoring']} of training: {_shared.verdict(found['scoring'], BARS['scoring'].__ge__)}",
            *(
                [f"- at most {BARS['peer']} of Torch-Pruning's: {_shared.verdict(found['peer'], BARS['peer'].__ge__)}"]
                if options.peer
                else []
            ),
            f"- threads: {torch.get_num_threads()}",
        ]
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
