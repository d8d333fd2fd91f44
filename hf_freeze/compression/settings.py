"""How a model is compressed, besides the budget."""

from dataclasses import dataclass

from hf_freeze.training.healing import DEFAULT, HealLimit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See `run.compress`, whose arguments they are."""

    engine: str | None = None
    samples: int = 512
    heal: HealLimit = DEFAULT
    native: bool = False
    keep_vocabulary: bool = False
    min_fidelity: float | None = None
    seed: int = 1
