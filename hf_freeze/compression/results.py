"""What a compression has tried, and what came of it."""

from dataclasses import dataclass
from pathlib import Path

from hf_freeze.compression.budget import in_bytes
from hf_freeze.compression.labels import Score
from hf_freeze.compression.shape import Shape
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.training.healing import Healed


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A shape that was cut and compared in PyTorch, before healing. `loss`: the distance from the original; `bytes`, `ms`: as
    estimated."""

    words: str
    loss: float
    expected: float
    bytes: float
    ms: float | None


@dataclass(frozen=True, kw_only=True)
class Build:
    """A shape in its engine, of these costs: see `Measured`. `model`: the folder of the variant, None for the whole model."""

    shape: Shape
    folder: Path
    bytes: int
    ms: float | None = None
    model: Path | None = None
    healed: Healed | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A folder in its engine, on inputs that nothing was chosen by. `fidelity`: to the original. `score`: by labels."""

    folder: Path
    bytes: int
    ms: float | None
    fidelity: Fidelity
    score: Score | None = None

    @property
    def loss(self) -> float:
        """In points: see `points_lost`."""
        return points_lost(self.fidelity, self.score)

    @property
    def words(self) -> str:
        """Such as "1.20 MB, 0.56 ms a text, fidelity 0.9812, accuracy 85.3"."""
        found = [in_bytes(self.bytes), *([f"{self.ms:.2f} ms a text"] if self.ms is not None else [])]
        found.append(f"fidelity {self.fidelity.score:.4f}")
        return ", ".join([*found, *([f"{self.score.name} {self.score.shown(self.score.value)}"] if self.score else [])])


def points_lost(fidelity: Fidelity, score: Score | None) -> float:
    """Of the score below the original's; without labels, of fidelity in %."""
    return 100 * (1 - (fidelity.score or 0.0)) if score is None else -score.difference


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """What came of it. `model`: the folder of the variant, None where the whole model in the engine is within the budget.
    `whole`: the model as it is, in the engine. `original_bytes`: of the model's own folder. `healed`: None without healing.
    `kept`: in words."""

    shape: Shape
    kept: str
    model: Path | None
    original_bytes: int
    whole: Measured
    after: Measured
    healed: Healed | None
    seconds: float

    @property
    def loss(self) -> float:
        """Points of the score, or of fidelity in %, below the original."""
        return self.after.loss


@dataclass(frozen=True, kw_only=True)
class LargeCompressed:
    """What came of it. `folder`: to serve; `model`: the variant. `expected`: the sum of what the parts that went were worth."""

    folder: Path
    model: Path
    shape: Shape
    kept: str
    original_bytes: int
    bytes: int
    expected: float
    fidelity: Fidelity
    seconds: float
