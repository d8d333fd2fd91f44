"""Time of a decoded token with a recurrent unit instead of decoder self-attention, against attention of equal size.

    python benchmarks/recurrent_decoders.py --out recurrent_decoders.md     # about a quarter of an hour on one core

Claim: SSRU decodes in under 0.7 of the time of attention, in the same engine. The report names each case that misses it.

Models, fp32, fresh weights: Marian translators of 3 + 1 layers, `--width` wide, FFNs 4 times as wide, a vocabulary of 4,000. A
decoding writes exactly as many tokens as `--lengths` says, by greedy search, one at a time, from a source of 20 tokens whose
encoding is not timed. Engines: PyTorch (forwards with a cache of transformers, without the rest of `generate`), and ONNX Runtime
on the folder that `export_model` writes.

CTranslate2 has attention alone ("attention, again"), and encodes each time. It is compared with ONNX Runtime that does so too.

"a layer": the decoder layer alone, in PyTorch, without tables, output and encoder: what the unit saves where it works.

Time: CPU seconds of the process, which has one thread, so that other work on the machine counts less. The turns are row,
attention, attention, row; a ratio is the median of the ratios of the rounds, with quartiles. "attention, again", a second such
model, shows the noise.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _shared
import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedTokenizerFast

from hf_freeze import make_variant, methods
from hf_freeze.publish.export import export_model
from hf_freeze.runtime.decoding import Decoder
from hf_freeze.runtime.sessions import OnnxSession

BAR = 0.7
LENGTHS = (10, 50, 200)
ENGINES = ("PyTorch", "a layer, PyTorch", "ONNX Runtime", "CTranslate2, fp32", "CTranslate2, int8")
VOCABULARY, SOURCE = 4000, 20
UNITS: dict[str, list[Any]] = {
    "attention": [],
    "attention, again": [],
    "SSRU": [methods.RecurrentDecoder(kind="ssru")],
    "average attention": [methods.RecurrentDecoder(kind="aan")],
    "LSTM": [methods.RecurrentDecoder(kind="lstm")],
}
Decoding = Callable[[int, int], Callable[[], object]]  # (rows, tokens) -> the work that is timed


def new_model(width: int, added: list[Any]) -> Any:
    fields = {"encoder_layers": 3, "decoder_layers": 1, "d_model": width, "max_position_embeddings": 256}
    sizes = {"attention_heads": 4, "ffn_dim": 4 * width}
    fields |= {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
    config = _shared.config("marian", fields | {"activation_function": "relu", "dropout": 0.0}, VOCABULARY)
    return make_variant(config, added, task="seq2seq-lm", init="marian").eval()


def sources(rows: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, SOURCE), generator=torch.Generator().manual_seed(0))


def in_pytorch(model: Any) -> Decoding:
    def decoding(rows: int, tokens: int) -> Callable[[], object]:
        ids = sources(rows)
        mask = torch.ones_like(ids)
        encoded = model.get_encoder()(ids, attention_mask=mask)

        def work() -> object:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            last = torch.zeros(rows, 1, dtype=torch.long)
            for _ in range(tokens):
                found = model(
                    encoder_outputs=encoded,
                    attention_mask=mask,
                    decoder_input_ids=last,
                    past_key_values=cache,
                    use_cache=True,
                )
                last = found.logits[:, -1:].argmax(-1)
            return last

        return work

    return decoding


def of_a_layer(model: Any) -> Decoding:
    layer = model.model.decoder.layers[0]

    def decoding(rows: int, tokens: int) -> Callable[[], object]:
        states = torch.randn(rows, SOURCE, model.config.d_model)
        last = torch.randn(rows, 1, model.config.d_model)

        def work() -> object:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            for _ in range(tokens):
                layer(last, encoder_hidden_states=states, past_key_values=cache)
            return cache

        return work

    return decoding


def in_onnx(model: Any, folder: Path, encode: bool = False) -> Decoding:
    """`encode`: each time, in the work that is timed."""
    model.save_pretrained(folder / "model")
    exported = export_model(folder / "model", "onnx")
    threads = {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    encoder, decoder = (OnnxSession(exported / f"{part}.onnx", **threads) for part in ("encoder", "decoder"))

    def decoding(rows: int, tokens: int) -> Callable[[], object]:
        ids = sources(rows).numpy()
        mask = np.ones_like(ids)

        def encoded() -> dict[str, np.ndarray]:
            found = encoder({"input_ids": ids, "attention_mask": mask})
            kept = {name: value for name, value in found.items() if name != "last_hidden_state"}
            return kept | {"encoder_attention_mask": mask}

        once = encoded()

        def work() -> object:
            state = Decoder(decoder, encoded() if encode else once, rows)
            last = np.zeros((rows, 1), np.int64)
            for _ in range(tokens):
                last = state.scores(last).argmax(-1)[:, None]
            return last

        return work

    return decoding


def in_ctranslate2(model: Any, folder: Path, quantization: str | None) -> Decoding:
    import ctranslate2  # which the other engines do not need

    words = {f"w{number}": number for number in range(VOCABULARY)}
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w0"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "w0")), **special)
    for one in (model, tokenizer):
        one.save_pretrained(folder / "model")
    exported = export_model(folder / "model", "ctranslate2", quantization=quantization)
    translator = ctranslate2.Translator(str(exported), intra_threads=1, inter_threads=1)

    def decoding(rows: int, tokens: int) -> Callable[[], object]:
        given = [[f"w{number}" for number in row] for row in sources(rows).tolist()]
        lengths = {"min_decoding_length": tokens, "max_decoding_length": tokens}
        return lambda: translator.translate_batch(given, beam_size=1, **lengths)

    return decoding


def decodings_in(engine: str, models: dict[str, Any], folder: Path) -> dict[str, Decoding]:
    """name -> how it decodes. In CTranslate2, "attention" is that of ONNX Runtime, which "attention, again" is compared with."""
    if engine.startswith("CTranslate2"):
        quantization = "int8" if engine.endswith("int8") else None
        plain = models["attention"]
        return {
            "attention": in_onnx(plain, folder / "onnx", encode=True),
            "attention, again": in_ctranslate2(plain, folder / "ctranslate2", quantization),
        }
    if engine == "ONNX Runtime":
        return {name: in_onnx(model, folder / str(place)) for place, (name, model) in enumerate(models.items())}
    return {name: (in_pytorch if engine == "PyTorch" else of_a_layer)(model) for name, model in models.items()}


@torch.inference_mode()
def compare(options: argparse.Namespace, folder: Path) -> tuple[list[list[str]], list[tuple[float, str]]]:
    """The table rows, and (ratio, case) of SSRU."""
    lines: list[list[str]] = []
    measured: list[tuple[float, str]] = []
    torch.manual_seed(0)
    names = ["attention", *options.decoders]
    models = {name: new_model(options.width, UNITS[name]) for name in names}
    for engine in options.engines:
        decodings = decodings_in(engine, models, folder / engine.replace(", ", "-"))
        for name in [name for name in options.decoders if name in decodings]:
            for rows in options.rows:
                for tokens in options.lengths:
                    one, other = (decodings[each](rows, tokens) for each in (name, "attention"))
                    pair = _shared.in_turns(
                        one, other, options.rounds, at_least=options.at_least, clock=time.process_time
                    )
                    own, plain = (f"{1e6 * statistics.median(times) / tokens:.0f}" for times in (pair.one, pair.other))
                    lines.append([name, engine, str(rows), str(tokens), own, plain, str(pair)])
                    print(" | ".join(lines[-1]), flush=True)
                    if name == "SSRU":
                        measured.append((pair.ratio, f"{engine}, {rows} rows, {tokens} tokens"))
    return lines, measured


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--width", type=int, default=256, help="hidden size")
    parser.add_argument("--decoders", nargs="+", default=list(UNITS)[1:], choices=list(UNITS)[1:])
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens to decode")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16), help="sentences that are decoded together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-least", type=float, default=0.2, help="seconds of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines, measured = compare(options, Path(folder))
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in new_model(options.width, added).parameters()) for name, added in UNITS.items()
        }
    parameters = ", ".join(f"{name} {size / 1e6:.2f}M" for name, size in sizes.items() if "again" not in name)
    claims = [
        f"{engine}: {_shared.verdict([one for one in measured if one[1].startswith(engine)], lambda value: value < BAR)}"
        for engine in ENGINES[:3]
        if engine in options.engines
    ]
    claimed = f"\nSSRU in under {BAR} of the time of attention; " + "\n".join(claims) if measured else ""
    summary = f"parameters: {parameters}{claimed}"
    header = ["decoder", "engine", "rows", "tokens", "µs a token", "attention, µs", "of attention"]
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
