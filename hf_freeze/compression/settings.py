"""How a model is compressed, besides the budget."""

from dataclasses import dataclass

from hf_freeze.training.healing import DEFAULT, HealLimit, parse_limit


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See `run.compress`, whose arguments they are. Raises ValueError for a `heal` that is no limit."""

    engine: str | None = None
    samples: int = 512
    heal: HealLimit = DEFAULT
    native: bool = False
    keep_vocabulary: bool = False
    min_fidelity: float | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        parse_limit(self.heal)
