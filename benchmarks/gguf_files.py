"""GGUF files in llama.cpp: the same continuations, perplexity in each type, bytes, and the speed of layers of different sizes.

    python benchmarks/gguf_files.py stories260k/hf --texts texts.txt --out gguf.md

Claims: in fp32, greedy continuations of 50 prompts are those of `generate`; in f16, perplexity is
within 0.1 % of that in transformers; the tensors of a variant take at most 1.02 of its stored bytes; a Llama with half of its
neurons and uneven heads decodes at least 1.3 times as fast as the whole one.

The first table is of MODEL: tokens of the first 50 texts, of which half is the prompt. Perplexity is over all tokens of the
texts. The second is of a Llama of 110 million parameters with fresh weights (time only), on one thread, by `hf-freeze latency`:
each text gets exactly `--new-tokens` tokens. Even layers keep half of their groups of heads, the others all.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import _shared
import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_freeze import make_variant, methods, stored_bytes
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.llama_cpp import FILE, LlamaCpp
from hf_freeze.publish.latency import measure

PROMPTS, WRITTEN = 50, 32
TYPES = (None, "f16", "bf16", "q8_0", "q5_0", "q4_0")


def nats(logits: Any, ids: list[int]) -> float:
    """The sum over the tokens after the first one."""
    log_probs = torch.as_tensor(logits)[:-1].float().log_softmax(-1)
    return -float(log_probs[range(len(ids) - 1), ids[1:]].sum())


@torch.no_grad()
def compared(source: str, texts: list[str], folder: Path) -> tuple[list[list[str]], dict[str, bool]]:
    """(rows of the first table, claim -> whether it holds)"""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    rows = [ids for text in texts if len(ids := tokenizer(text).input_ids[:256]) > 3]
    count = sum(len(ids) - 1 for ids in rows)
    expected = math.exp(sum(nats(model(torch.tensor([ids])).logits[0], ids) for ids in rows) / count)
    prompts = [ids[: len(ids) // 2] for ids in rows[:PROMPTS]]
    options = {"max_new_tokens": WRITTEN, "do_sample": False}
    written = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    table, holds = [["transformers", "", f"{expected:.4f}", "", ""]], {}
    for kind in TYPES:
        path = export_model(source, "gguf", quantization=kind, out=folder / str(kind)) / FILE
        engine = LlamaCpp(path.parent, "causal-lm", exact=kind is None)
        found = math.exp(sum(nats(engine.logits(ids), ids) for ids in rows) / count)
        same = sum(engine.continued(ids, WRITTEN) == after for ids, after in zip(prompts, written, strict=True))
        engine.close()
        size = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
        change = f"{100 * (found / expected - 1):+.3f} %"
        table.append([kind or "f32", f"{size / 1e3:,.0f}", f"{found:.4f}", change, f"{same} of {len(prompts)}"])
        if kind is None:
            holds["the continuations of 50 prompts in fp32"] = same == len(prompts) == PROMPTS
        if kind == "f16":
            holds["perplexity in f16 within 0.1 %"] = abs(found / expected - 1) <= 1e-3
    return table, holds


def timed(tokenizer: Any, texts: list[str], options: Any, folder: Path) -> tuple[list[list[str]], dict[str, bool]]:
    """(rows of the second table, claim -> whether it holds)"""
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=6, max_position_embeddings=1024,
    )  # fmt: skip
    heads = {f"decoder.{layer}.self": list(range(6)) for layer in range(0, 12, 2)}
    cut = [methods.HeadPruning(heads=heads), methods.FFNPruning(width=1024)]
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config)
    table, holds, exported = [], {}, {}
    for name, model in (("whole", make_variant(whole, [])), ("cut", make_variant(whole, cut))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        for kind in (None, "q8_0"):
            exported[name, kind] = export_model(folder / name, "gguf", quantization=kind, out=folder / f"{name}-{kind}")
        tensors = gguf.GGUFReader(exported[name, None] / FILE).tensors
        ratio = sum(tensor.n_bytes for tensor in tensors) / stored_bytes(model)
        holds[f"the bytes of the {name} model ({ratio:.4f} of those stored)"] = ratio <= 1.02
    results = measure(
        list(exported.values()),
        texts[:8],
        batches=(1,),
        new_tokens=options.new_tokens,
        exactly=True,
        rounds=options.rounds,
    )
    found = dict(zip(exported, results, strict=True))
    for (name, kind), result in found.items():
        middle, low, high = result.ratio_to(found["whole", kind], 1)
        speed = f"{1 / middle:.2f} ({1 / high:.2f} to {1 / low:.2f})"
        table.append(
            [f"{name}, {kind or 'f32'}", f"{result.megabytes:.1f}", f"{result.tokens_per_second(1):.1f}", speed]
        )
        if name == "cut":
            holds[f"1.3 times as fast in {kind or 'f32'} ({1 / middle:.2f})"] = 1 / middle >= 1.3
    return table, holds


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("model", help="a directory or Hub id of a language model")
    parser.add_argument("--texts", type=Path, required=True, help="a text per line")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        table, holds = compared(options.model, texts, Path(folder))
        speeds, more = timed(AutoTokenizer.from_pretrained(options.model), texts, options, Path(folder))
    heading = ["type", "tensors, kB", "perplexity", "difference", "equal continuations"]
    tables = [
        _shared.markdown(heading, table),
        _shared.markdown(["Llama of 110M", "MB", "tokens a second", "speed, of the whole"], speeds),
    ]
    summary = "\n".join(f"{'holds' if held else 'MISSED'}: {claim}" for claim, held in (holds | more).items())
    _shared.report(options, "\n\n".join(tables), summary)


if __name__ == "__main__":
    main()
