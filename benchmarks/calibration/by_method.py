"""Each method that a calibration changes, with and without one, on one trained model: the figures of the methods' guides.

    python benchmarks/calibration/by_method.py --model stories260k/hf
    python benchmarks/calibration/by_method.py --model stories260k/hf --only low_rank tucker

Claim: with a calibration, each method is nearer to the whole model than without.

A Llama of 260 thousand parameters, 128 samples of its own for the calibration and 128 others to compare on, as in run.py; nothing
is trained. One thread. Columns: the perplexity of those samples (that of the whole model in the first row) without and with a
calibration, the latter a mean over choices of samples with its range; KL to the whole model, in nats; CPU seconds with it.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import measures
import peer_hf_freeze
import torch

from hf_freeze import make_variant, methods
from hf_freeze.layers.shapes import modes_of
from hf_freeze.methods.registry import METHODS


def cuts(config: Any) -> dict[str, list[tuple[str, Any]]]:
    """Method -> (the cut in words, the method)."""
    hidden, width = config.hidden_size, config.intermediate_size
    low, train = int(hidden * width / (hidden + width) / 2), peer_hf_freeze.train_rank(0.5, hidden, width)
    return {
        "low_rank": [("half of the FFN weights", methods.LowRank(rank=low))],
        "tensor_train": [("half of the FFN weights", methods.TensorTrain(rank=train))],
        "tucker": [("half of the FFN weights", methods.Tucker(rank=tucker_rank(0.5, hidden, width)))],
        "ffn_pruning": [
            ("3/4 of the neurons left", methods.FFNPruning(width=width * 3 // 4)),
            ("1/2 of the neurons left", methods.FFNPruning(width=width // 2)),
        ],
        "head_pruning": [("half of the heads", methods.HeadPruning(share=0.5))],
        "hidden_pruning": [("3/4 of the channels left", methods.HiddenPruning(width=hidden * 3 // 4))],
        "layer_selection": [("4 of 5 layers left", methods.LayerSelection(share=0.8))],
        "layer_sharing": [("2 sets of FFNs for 5 layers", methods.LayerSharing(components=["ffn"], groups=2))],
        "magnitude_pruning": [
            ("half of the FFN weights zero, magnitude", methods.MagnitudePruning(sparsity=0.5)),
            ("the same, wanda", methods.MagnitudePruning(sparsity=0.5, criterion="wanda")),
            ("the same, obs", methods.MagnitudePruning(sparsity=0.5, criterion="obs")),
        ],
        "quantize": [("4 bits in groups of 64", methods.Quantize(weights="int4", granularity="group-64"))],
        "factorized_embedding": [("half of the rank of the table", methods.FactorizedEmbedding(rank=hidden // 2))],
    }


def tucker_rank(share: float, hidden: int, width: int) -> int:
    """The largest rank of a Tucker decomposition of at most `share` of the weights of a (hidden, width) matrix."""
    modes = [size for side in modes_of(hidden, width, None) for size in side]

    def count(rank: int) -> int:
        ranks = [min(rank, size) for size in modes]
        core = int(torch.tensor(ranks).prod())
        return core + sum(rank * size for rank, size in zip(ranks, modes, strict=True))

    return max(rank for rank in range(1, max(modes) + 1) if count(rank) <= share * hidden * width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of stories260K as a LlamaForCausalLM")
    parser.add_argument("--only", nargs="+", help="methods, such as low_rank")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the choice of samples")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = measures.LanguageModel(options.model, Path(), "test", Path())
    every = cuts(task.whole.config)
    missing = {name for name, each in METHODS.items() if each.registered.calibration} - every.keys()
    assert not missing, f"no cut of {missing}"

    def scores(model: Any) -> tuple[float, float]:
        found = task.measure(model)
        perplexity, distance = (
            float(measures.score_of(name)(found[name].sum(0))) for name in ("perplexity", "KL, nats")
        )
        return perplexity, distance

    samples = [task.calibration(seed, measures.CALIBRATION_TEXTS["stories260k"])[1] for seed in options.seeds]
    print(
        "| method | cut | without | with (range) | KL without | with | CPU s |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    )
    print(f"| | none | {scores(task.whole)[0]:.2f} | | | | |", flush=True)
    for name in options.only or every:
        for words, method in every[name]:
            plain = ["–", "–"]  # of a method that there is only with a calibration
            if method.facts.calibration != "needed":
                perplexity, distance = scores(make_variant(task.whole, [method]).eval())
                plain = [f"{perplexity:.2f}", f"{distance:.3f}"]
            began, found = time.process_time(), []
            for batches in samples:
                found.append(make_variant(task.whole, [method], calibration=batches).eval())
            seconds = (time.process_time() - began) / len(samples)
            perplexities, distances = zip(*map(scores, found), strict=True)
            mean, away = sum(perplexities) / len(found), sum(distances) / len(found)
            spread = f"{mean:.2f} ({min(perplexities):.2f} to {max(perplexities):.2f})"
            cells = [name, words, plain[0], spread, plain[1], f"{away:.3f}", f"{seconds:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
