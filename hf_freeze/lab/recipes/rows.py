"""The rows of a recipe, what `hf-freeze search` draws further ones from, and the method that plain data mean."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from hf_freeze.lab.recipes.settings import TEXT, Backbone, Count, Settings, Tokenizer, Training, setting

if TYPE_CHECKING:
    from hf_freeze.methods.base import Method

OF_A_ROW = ("training", "backbone", "tokenizer")  # sections that a row may change

Score = Literal["importance", "ablation", "one_head"]
Cost = Literal["parameters", "stored_bytes", "multiply_adds"]  # counted before a trial is trained


class Heads(Settings):
    """Heads that are removed from the model that a row starts from."""

    by: Literal["importance", "ablation", "random"] = Field(description="The order in which heads are removed.")
    fraction: float = Field(gt=0, le=1, description="Share of the heads that is removed.")
    attentions: list[str] | None = setting(
        "Attentions that lose heads, all if not given.", min_length=1, takes="a list such as ['encoder.self']"
    )


class Layers(Settings):
    """Layers that are kept of the model that a row starts from."""

    by: Literal["every_other", "removal", "similarity", "rates", "search"] = Field(
        description="What decides which; rates are those that LayerDrop has learnt."
    )
    keep: dict[str, Count] = setting(
        "Number of layers that each stack keeps.",
        ...,
        min_length=1,
        takes="numbers of layers by stack, such as {'encoder': 3}",
    )
    trials: Count | None = setting("Sub-networks that a search tries.")


class Calibration(Settings):
    """Texts by whose activations methods choose weights."""

    texts: str | list[str] | None = setting(
        "Files of texts; the training data if not given.", min_length=1, takes="a file or a list of files"
    )
    samples: Count = setting("Texts that are drawn of them.", 512)
    budget: float | None = setting("Share of the weights that methods with `share: auto` keep.", gt=0, le=1)


class Row(Settings):
    """A model to train and to compare with the first row."""

    label: Annotated[str, Field(coerce_numbers_to_str=True)] = Field(description="What the report calls the row.")
    methods: list[dict[str, Any]] = Field(description="Methods with their settings, applied in this order.")
    start: str | None = setting("Row whose finished model this one starts from.")
    teacher: str | None = setting("Row whose model distillation learns from.", tasks=TEXT)
    targets: Literal["teacher"] | None = setting("Learn from the translations of the teacher.", tasks=["translation"])
    training: Training | None = setting("Settings of the training that differ from the recipe's.")
    backbone: Backbone | None = setting("Settings of the backbone that differ from the recipe's.")
    tokenizer: Tokenizer | None = setting("Settings of the tokenizer that differ from the recipe's.", tasks=TEXT)
    heads: Heads | None = setting("Remove heads of the model that the row starts from.", tasks=TEXT)
    head_scores: list[Score] = setting("What to measure of the heads of the finished model.", [], tasks=TEXT)
    layers: Layers | None = setting("Keep some layers of the model that the row starts from.", tasks=TEXT)
    calibration: Calibration | None = setting("Texts for methods that look at activations.", tasks=TEXT)
    pictures: list[Literal["attention", "embeddings"]] = setting("Pictures of the finished model.", [], tasks=TEXT)

    @property
    def needs(self) -> dict[str, str]:
        """The rows whose models it needs, by the field that names them."""
        return {field: name for field in ("start", "teacher") if (name := getattr(self, field)) is not None}


RowName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]


class SpaceSection(Settings):
    """What `hf-freeze search` draws rows from. A value may be a range: `{int: [2, 8]}`, `{float: [1e-4, 1e-2], log: true}`
    or `{choices: [a, b]}`."""

    methods: list[dict[str, Any]] = setting(
        "Methods of a trial, in this order; those with `optional: true` may be left out.", []
    )
    not_together: list[Annotated[list[str], Field(min_length=2)]] = setting(
        "Methods that may not meet.", [], takes="a list of lists of two or more methods"
    )
    backbone: dict[str, Any] = setting("Ranges of values of the config.", {})
    training: dict[str, Any] = setting("Ranges of settings of the training.", {})


class SearchSettings(Settings):
    """What a search makes small, within which bounds."""

    goals: list[Literal["dev_loss"] | Cost] = setting(
        "What to make small, dev_loss among them.", ["dev_loss", "stored_bytes", "multiply_adds"]
    )
    bounds: dict[Cost, Annotated[float, Field(gt=0)]] = setting("The most that a trial may have of a cost.", {})
    rungs: list[float] = setting("Epochs after which only the better trials go on.", [])
    keep: float = setting("Share of the trials that goes on after a rung.", 0.5, gt=0, lt=1)


def method_of(data: Any, tokenizer: Any = None) -> "Method":
    """The method of a row. Where it says `continuations: tokenizer`, they are those of the run's, if there is one yet."""
    from hf_freeze.methods.registry import (
        method_from_dict,  # here: it imports torch, which commands that tell do not need
    )

    if isinstance(data, dict) and data.get("continuations") == "tokenizer":
        from hf_freeze.analysis import word_continuations

        data = data | {"continuations": [] if tokenizer is None else word_continuations(tokenizer)}
    return method_from_dict(data)
