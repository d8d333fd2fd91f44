"""The sections of a recipe as typed models: a field has its type, its limits, the tasks that take it, and a sentence of help.

From them come the checks (`explain.py`, `check.py`), the JSON schema and the table of the documentation (`describe.py`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool
from typing_extensions import Self

SPLITS = ("train", "dev", "test")
BLOCK_SIZE = 128  # tokens of a piece of running text, where a recipe does not say
AUTO = "auto"  # of training.bf16: where the machine is faster with it

TaskName = Literal[
    "translation",
    "language-modelling",
    "image-classification",
    "masked-lm",
    "sequence-classification",
    "regression",
    "token-classification",
    "question-answering",
    "multiple-choice",
]


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What recipes of a task may say, beyond the fields that it takes.

    `files`: what the two files of a split are; None where a split is a list of any number of files. `tables`: it may also be a
    list of tables. `tokenizers`: the kinds that fit. `is_per_token`: the score is per token, so rows with different tokenizers
    cannot be compared. `metrics`: by which rows may be compared, where there is a choice; the first is the default. `builtin`:
    whether there are built-in data.
    """

    files: str | None = None
    tables: bool = False
    tokenizers: tuple[str, ...] = ("wordpiece",)
    is_per_token: bool = False
    metrics: tuple[str, ...] = ()
    builtin: bool = True


TASKS: dict[str, TaskFacts] = {
    "translation": TaskFacts(files="[source, target]", tables=True, tokenizers=("bpe", "unigram")),
    "language-modelling": TaskFacts(is_per_token=True, tokenizers=("bpe", "unigram")),
    "image-classification": TaskFacts(files="[images, labels]"),
    "masked-lm": TaskFacts(is_per_token=True),
    "sequence-classification": TaskFacts(metrics=("accuracy", "f1", "matthews")),
    "regression": TaskFacts(builtin=False),
    **dict.fromkeys(("token-classification", "question-answering", "multiple-choice"), TaskFacts(builtin=False)),
}
IMAGES = ("image-classification",)
TEXT = tuple(task for task in TASKS if task not in IMAGES)
GENERATED = ("translation", "language-modelling")
RUNNING_TEXT = ("language-modelling", "masked-lm")
LABELLED = ("sequence-classification", "regression")


def setting(
    help: str,
    default: Any = None,
    *,
    tasks: Collection[str] = tuple(TASKS),
    forms: Collection[str] = (),
    needed: bool = False,
    takes: str = "",
    **limits: Any,
) -> Any:
    """A field. `tasks`: those that take it; `forms`: the forms of data that it is for, all if none is named; `needed`: a recipe
    must have it once all that it extends is read; `takes`: its values in words, for the message about a wrong one."""
    facts: Any = {"tasks": list(tasks), "forms": list(forms), "needed": needed, "takes": takes}
    return Field(default, description=help, json_schema_extra=facts, **limits)


Count = Annotated[int, Field(strict=True, ge=1)]


class Settings(BaseModel):
    """A section. What nobody set has its default, and is not written."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), validate_default=False)

    def changed(self, **values: Any) -> Self:
        """A copy with other values, which are not checked."""
        return self.model_copy(update=values)

    def given(self) -> dict[str, Any]:
        """What was set, as plain data: for files, and for comparing runs."""
        return self.model_dump(exclude_unset=True)


class Builtin(Settings):
    """Text of a generated language, which needs no download."""

    seed: int = setting("Seed of the language.", 0)
    train: int = setting("Sentences to train on.", 12_000)
    dev: int = setting("Sentences of the dev split.", 300)
    test: int = setting("Sentences of the test split.", 300)


_SPLIT = "a list of files, or the name of a split on the Hub"
_READ = ["hub", "files"]  # the forms of data that have columns
_ITEMS = "a number of training items"
_NAMES = "a list of one or two names of columns"
_TEXT_OR_TOKENS = (*RUNNING_TEXT, "token-classification")
_LABEL_OR_TAGS = (*LABELLED, "token-classification")


class Data(Settings):
    """The texts or images, in one of three forms: built in, files, or a data set of the Hub."""

    builtin: Builtin | None = setting("Text of a generated language, which needs no download.", tasks=TEXT)
    root: str = setting("Folder of the files; `--set data.root=FOLDER` changes it.", ".")
    train: str | list[str] = setting("Files to train on, or the split of the data set of the Hub.", takes=_SPLIT)
    dev: str | list[str] = setting("Files of the dev split, which decides which epoch is kept.", takes=_SPLIT)
    test: str | list[str] = setting("Files of the test split, which is used once, at the end.", takes=_SPLIT)
    hub: str | None = setting("Name of a data set of the Hub, or a folder of one.", tasks=TEXT)
    name: str | None = setting("Configuration of the data set of the Hub.", tasks=TEXT, forms=["hub"])
    source: str | None = setting("Column of the source of a translation.", tasks=TEXT)
    target: str | None = setting("Column of the target of a translation.", tasks=TEXT)
    column: str | None = setting(
        "Column of the text; text, or tokens, if not given.", tasks=_TEXT_OR_TOKENS, forms=_READ
    )
    columns: Annotated[list[str], Field(min_length=1, max_length=2)] = setting(
        "Columns of the texts; two are a pair.", ["sentence"], tasks=LABELLED, forms=_READ, takes=_NAMES
    )
    label: str | None = setting(
        "Column of the label; label, or ner_tags, if not given.", tasks=_LABEL_OR_TAGS, forms=_READ
    )
    header: list[str] | None = setting("Names of the columns of files without them.", tasks=LABELLED, forms=["files"])
    mismatched: str | list[str] = setting("A second test split.", tasks=LABELLED[:1], forms=_READ, takes=_SPLIT)
    unit: Literal["lines", "documents"] = setting(
        "What a text is: a line, or what lies between empty lines.", "lines", tasks=RUNNING_TEXT, forms=["files"]
    )
    holdout: Count = setting("Items of train that are the dev split instead.", 0, takes=_ITEMS)
    holdout_test: Count = setting("Items of train that are the test split instead.", 0, tasks=TEXT, takes=_ITEMS)
    limit: int | None = setting("Items that are taken of each split, the first; all if not given.")

    @property
    def form(self) -> str | None:
        return data_form(self.model_fields_set)


def data_form(data: Collection[str]) -> str | None:
    """The forms of the fields of `data`, which exclude each other: the built-in corpus, a data set of the Hub, or files."""
    marks = {"builtin": "builtin", "hub": "hub", "train": "files"}
    return next((form for mark, form in marks.items() if mark in data), None)


class Tokenizer(Settings):
    """The tokenizer of a fresh backbone, which is trained on the training split."""

    kind: str | None = setting("bpe, unigram or wordpiece; that of the task if not given.")
    vocab_size: int = setting("Types of the tokenizer.")


_SIZES = "a list of positive numbers such as [784, 256, 10]"


class Backbone(Settings):
    """The model before methods change it: fresh, or pretrained."""

    model_type: str = setting("Architecture of a fresh model, such as marian.", tasks=TEXT)
    init: str = setting(
        "How fresh weights are drawn: backbone, as transformers does, or marian.", "backbone", tasks=TEXT
    )
    config: dict[str, Any] = setting("Fields of the config of a fresh model, such as d_model.", {}, tasks=TEXT)
    pretrained: str | None = setting(
        "Folder or name on the Hub of a trained model, with its own tokenizer.", tasks=TEXT
    )
    sizes: Annotated[list[Count], Field(min_length=2)] = setting(
        "Inputs, hidden units and classes of a perceptron.", tasks=IMAGES, needed=True, takes=_SIZES
    )


class Steps(Settings):
    """A rate that falls in steps."""

    gamma: float = Field(description="What the rate is multiplied by.")
    at: list[int] = Field(description="Before which epochs, counted from 0.")


_LEVEL = Steps(gamma=1, at=[])
_AT = "{'gamma': a number, 'at': [epochs]}"
_RATES = "a number for each component, such as {'embeddings': 0.001}"
_BF16 = "true, false or 'auto'"
_IN_CLASSES = tuple(task for task in TEXT if task != "regression")


class Training(Settings):
    """How a row is trained."""

    epochs: float = setting("Passes over train; the best on the dev split is kept.", needed=True, ge=0)
    max_tokens: int = setting("Tokens of a batch, padding included.", tasks=TEXT, needed=True)
    batch_size: int = setting("Images of a batch.", tasks=IMAGES, needed=True, ge=1)
    learning_rate: float = setting("The highest rate, after the warm-up.", needed=True)
    learning_rates: dict[str, float] = setting("Rates of their own for some components.", {}, tasks=TEXT, takes=_RATES)
    warmup_steps: int = setting("Steps in which the rate rises; then it falls to 0.", tasks=TEXT, needed=True)
    schedule: str = setting("How the rate falls: a name of transformers' schedules.", "linear", tasks=TEXT)
    lr_steps: Steps = setting(
        "The rate is multiplied by `gamma` before each of the epochs `at`.", _LEVEL, tasks=IMAGES, takes=_AT
    )
    adam_betas: tuple[float, float] = setting("Decay rates of AdamW.", (0.9, 0.98), tasks=TEXT, takes="two numbers")
    adam_epsilon: float = setting("Epsilon of AdamW.", 1e-9, tasks=TEXT)
    weight_decay: float = setting("Weight decay of AdamW.", 0.0)
    max_grad_norm: float = setting("Gradients of a larger norm are scaled down to it.", 1.0, tasks=TEXT)
    label_smoothing: float = setting("Share of the target that all classes have in common.", 0.0, tasks=_IN_CLASSES)
    bf16: StrictBool | Literal["auto"] = setting(
        "Train in bfloat16; auto is where the machine is faster with it.", AUTO, tasks=TEXT, takes=_BF16
    )
    accumulation: int = setting("Batches whose gradients make one step.", 1, tasks=TEXT)
    patience: int = setting("Evaluations without a lower dev loss, after which training ends.", 10, tasks=TEXT)
    block_size: int | None = setting(
        "Tokens of a piece of running text, 128 if not given, or of a question and its text, 384.", tasks=TEXT, ge=1
    )
    evaluations: int = setting("Evaluations on the dev split in each epoch.", 1, tasks=TEXT, ge=1)
    masking: float | None = setting("Share of the tokens that are masked.", tasks=["masked-lm"], gt=0, le=1)


class Decoding(Settings):
    """How a model writes translations."""

    num_beams: int = setting("Beams of the search; 1 is greedy.", 1)
    max_tokens: int = setting("Tokens of a batch, padding included.", 4096)
