"""torch.compile of a variant against its compiled merged self.

    python benchmarks/compiled.py --out compiled.md        # about 10 minutes on one core
    python benchmarks/compiled.py --methods low_rank tucker

Claim: compiled, the variant of every method's example takes at most 1.05 of the time of the native model that `merge()` gives,
compiled too, and is compiled at most twice: once before and once after it has computed what later forwards keep.

A decoder of Llama's kind with 4 layers, hidden size 256, FFN of 768, fp32, one text of 64 tokens (`--tokens`), without a cache or
gradients, after three forwards each. Processor time; a ratio is the median of the ratios of the rounds, with quartiles. Methods
whose example cannot be applied to a model with weights, or cannot be merged, are left out with the reason.
"""

import time

import _shared
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModel

from hf_freeze import make_variant
from hf_freeze.methods import LowRank, Quantize
from hf_freeze.methods.registry import METHODS

LLAMA = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA |= {"intermediate_size": 768, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
CASES = {name: method.example for name, method in METHODS.items()}
CASES |= {
    "quantize, int8": Quantize(weights="int8"),
    "quantize, int4": Quantize(weights="int4", granularity="group-64"),
    "low rank, half of the weights": LowRank(rank=64),
}


def compiled(model, ids):
    """(a function that runs the compiled model, its number of graphs, its number of graph breaks)"""
    counters.clear()
    forward = torch.compile(model.eval(), dynamic=False)
    for _ in range(3):
        forward(ids)
    return (lambda: forward(ids)), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def measured(name, options, ids):
    """The line of the table of a case, and its ratio, or None if it has none."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backbone = AutoModel.from_config(AutoConfig.for_model("llama", **LLAMA))
    try:
        variant = make_variant(backbone, [CASES[name]])
        if any(method.facts.finalizable for method in variant.methods):
            variant.finalize()
        merged = variant.merge()
    except ValueError as error:
        return [name, "–", "–", "–", str(error)[:90]], None
    ids = ids % variant.config.vocab_size
    work, graphs, breaks = compiled(variant, ids)
    other, _, _ = compiled(merged, ids)
    pair = _shared.in_turns(work, other, options.rounds, at_least=options.turn / 1000, clock=time.process_time)
    return [name, str(graphs), str(breaks), str(pair), ""], pair.ratio


@torch.no_grad()
def main():
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turn", type=int, default=100, help="milliseconds of a turn")
    parser.add_argument("--methods", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    ids = torch.randint(3, 1024, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    lines, ratios = [], []
    for name in options.methods:
        line, ratio = measured(name, options, ids)
        print(*line, sep=" | ", flush=True)
        lines.append(line)
        ratios += [] if ratio is None else [(ratio, name)]
    header = ["method", "graphs", "breaks", "time / merged", "left out because"]
    summary = f"At most 1.05 of the merged model's time: {_shared.verdict(ratios, lambda ratio: ratio <= 1.05)}"
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
