"""The inputs of a compression: those that it learns from, is chosen by, and is compared on at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_freeze.compression.labels import Labels
from hf_freeze.data.sampling import sample
from hf_freeze.model.calibration import digest_of
from hf_freeze.model.samples import Samples, own_targets, samples_of
from hf_freeze.publish.export.served import Served, forward_batches

LEAST = 16  # inputs
_HELD_OUT, _MOST_HELD_OUT = 0.2, 256  # share and number of those to choose by, and of those for the final comparison


@dataclass(frozen=True)
class Inputs:
    """`learnt`: for statistics (the first ones), the choice of tokens and healing. `dev`: shapes are compared and chosen on them.
    `test`: nothing is chosen by them. `labels`: of dev and test, if there are any."""

    learnt: list[Any]
    dev: list[Any]
    test: list[Any]
    labels: Labels | None = None

    @classmethod
    def of(cls, items: Sequence[Any], seed: int, labels: Labels | None = None) -> "Inputs":
        """Raises ValueError for fewer than `LEAST`."""
        items = [item for item in items if not isinstance(item, str) or item.strip()]
        if len(items) < LEAST:
            raise ValueError(
                f"{len(items)} texts: give at least {LEAST}, better some hundred, to learn from and to compare on"
            )
        drawn = sample(items, len(items), seed)
        if labels is not None:
            return cls(drawn, [item for item, _ in labels.dev], [item for item, _ in labels.test], labels)
        count = min(max(round(_HELD_OUT * len(items)), LEAST // 4), _MOST_HELD_OUT)
        return cls(drawn[2 * count :], drawn[count : 2 * count], drawn[:count])

    @property
    def dev_subset(self) -> list[Any]:
        """Those of dev by which shapes are compared in PyTorch."""
        return self.dev[:_MOST_HELD_OUT]

    @property
    def texts(self) -> list[str]:
        """What `learnt` has in words."""
        return [text for item in self.learnt for text in self.words(item)]

    @classmethod
    def words(cls, item: Any) -> list[str]:
        """The texts of an input, which may be a pair, or a text with choices; none of an image."""
        if isinstance(item, tuple | list):
            return [text for part in item for text in cls.words(part)]
        return [item] if isinstance(item, str) else []


def batches_of(served: Served, items: Sequence[Any]) -> Samples:
    """For a forward of the model; models that write read what they themselves write."""
    if isinstance(items[0], dict):
        return samples_of(served.model, items).undivided()
    if served.extractor is None and served.task != "multiple-choice":
        items = [served.read(item) if isinstance(item, str) else item for item in items]
        return samples_of(served.model, items, served.tokenizer).undivided()
    batches = forward_batches(served, items)
    if served.task == "speech-seq2seq":
        batches = [batch | own_targets(served.model, batch) for batch in batches]
    return samples_of(served.model, batches).undivided()


def digest_of_items(items: Any) -> str:
    """Of texts, batches, images, sound, and pairs of them."""

    def plain(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [plain(each) for each in item]
        return torch.from_numpy(np.array(item)) if hasattr(item, "__array_interface__") else item

    return digest_of(plain(items), None)
