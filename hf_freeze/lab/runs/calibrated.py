"""What a run that starts from weights is calibrated with: files of texts, or its training data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_freeze.lab import data as hf_data
from hf_freeze.lab.recipes.recipe import Run


def calibration(run: Run, encoded: Callable[[], Any], batches: Callable[[Any], Any]) -> Any:
    """What `make_variant(calibration=)` takes for the row's `calibration`, drawn by the seed of the run; None without.

    `encoded()`: the training data as the model reads them, `batches(examples)`: batches of some of them.
    """
    if run.calibration is None:
        return None
    samples, named = run.calibration.samples, run.calibration.texts
    if named is not None:
        files = [Path(run.data.root) / name for name in ([named] if isinstance(named, str) else named)]
        texts: Any
        if run.task == "translation" and len(files) == 2:
            pairs = hf_data.read_pairs(files)
            texts = list(zip(pairs["source"], pairs["target"], strict=True))
        else:
            texts = hf_data.read_text(files, unit="filled lines", column=run.data.column or "text")["text"]
        return hf_data.sample(texts, samples, run.seed)
    examples = encoded()
    examples = examples.rows if isinstance(examples, hf_data.TokenDataset) else examples
    return batches(examples.select(hf_data.sample(range(len(examples)), samples, run.seed)))
