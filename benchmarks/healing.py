"""What a step of healing costs beside a step of plain training, and what it stores (`training.healing`).

    python benchmarks/healing.py MODEL --texts multi30k/train.de.gz

Claim: a step costs at most 1.1 times one of plain training, once the outputs of the original are stored.

MODEL is a language model or a translator. The student has half of the neurons. Healing and plain training have the same batches
and the same optimizer, and take turns; plain training learns the tokens themselves. Columns: seconds of a step (medians), their
ratio with the least and the largest of all turns, bytes that are stored for each token, and seconds that the original needs for
the outputs of as many tokens as a step has.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _shared
import torch
from torch.nn import functional

import hf_freeze
from hf_freeze import methods
from hf_freeze.compression.inputs import batches_of
from hf_freeze.io import bytes_of
from hf_freeze.lab.data import read_text, sample
from hf_freeze.publish.export.served import opened
from hf_freeze.training.healing import _Healer, _Run
from hf_freeze.training.healing_targets import Objective, texts_of

_MOST = 1.1


class _Plain(_Healer):
    """Learns the tokens themselves."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        batch = {name: value for name, value in inputs.items() if name != "targets"}
        ids = batch.get("decoder_input_ids", batch["input_ids"])
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=self.texts.pad)


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of language models or translators")
    parser.add_argument("--texts", type=Path, required=True, help="a file of texts, a line each")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=24, help="of each turn")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = sample(list(read_text([options.texts], unit="filled lines")["text"]), options.samples)
    rows, ratios = [], []
    for name in options.models:
        served, objective = opened(name), Objective("mean")
        samples = batches_of(served, texts)
        student = hf_freeze.make_variant(served.model, [methods.FFNPruning(share=0.5)], calibration=samples)
        train, _ = texts_of(served.model, samples, seed=0)
        with tempfile.TemporaryDirectory() as temporary:
            began = time.perf_counter()
            train.compute_targets(Path(temporary) / "outputs", served.model, objective, lambda message: None)
            of_token = (time.perf_counter() - began) / train.tokens
            size = bytes_of(Path(temporary) / "outputs") / train.tokens
            times: dict[type[_Healer], list[float]] = {_Plain: [], _Healer: []}
            for turn in range(options.turns):
                for kind, found in times.items():
                    run = _Run(options.steps, rate=1e-5, seed=turn)
                    trainer = kind(student, train, objective, Path(temporary), run, None)
                    trainer.train()
                    found.append(trainer.clock.of_step)
        plain, healing = (statistics.median(found) for found in times.values())
        of_turns = [b / a for a, b in zip(*times.values(), strict=True)]
        ratios.append((statistics.median(of_turns), Path(name).name))
        shown = f"{ratios[-1][0]:.2f} ({min(of_turns):.2f} to {max(of_turns):.2f})"
        of_step = of_token * train.tokens / train.steps(0)
        rows.append(
            [f"{type(served.model).__name__}", f"{plain:.4f}", f"{healing:.4f}", shown, f"{size:.0f}", f"{of_step:.4f}"]
        )
    headings = ["", "plain, s", "healing, s", "ratio", "bytes a token", "original, s a step"]
    worst = max(ratios)[0]
    verdict = "passed" if worst <= _MOST else "missed"
    _shared.report(options, _shared.markdown(headings, rows), f"at most {_MOST} times: {worst:.2f}, {verdict}")


if __name__ == "__main__":
    main()
