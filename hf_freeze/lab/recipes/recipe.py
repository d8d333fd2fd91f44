"""A recipe and a run of it, as typed models: `recipe.rows`, `run.backbone.pretrained`, `run.training.epochs`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hf_freeze.lab.recipes.rows import Calibration, Heads, Layers, Row, RowName, SearchSettings, SpaceSection
from hf_freeze.lab.recipes.settings import (
    GENERATED,
    TEXT,
    Backbone,
    Data,
    Decoding,
    Settings,
    TaskName,
    Tokenizer,
    Training,
    setting,
)
from hf_freeze.run_folder import run_folder

Tracker = Literal["tensorboard", "trackio", "wandb"]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]


class Recipe(Settings):
    """Which data, backbone, rows and seeds a grid runs."""

    name: str = Field(description="Name of the grid; its runs are in runs/NAME.")
    about: str = setting("What it is for, in a line, for `hf-freeze recipes`.", "")
    task: TaskName = Field(description="What the models learn.")
    metric: str = setting("By which score rows are compared, where the task has several.", "")
    data: Data = setting("The texts or images.", needed=True)
    tokenizer: Tokenizer | None = setting("The tokenizer of a fresh backbone.", tasks=TEXT)
    presets: dict[str, Any] = setting("Parts of a recipe by name, of which `preset` chooses one.", {})
    preset: str | None = setting("The preset that fills what the recipe leaves open.")
    backbone: Backbone | None = setting("The model before methods change it.")
    training: Training = setting("How rows are trained.", needed=True)
    decoding: Decoding = setting("How translations are written.", Decoding(), tasks=GENERATED)
    start: str | None = setting("Folder of another grid, from whose run of the same row and seed each run starts.")
    report_to: Tracker | None = setting("A tracker that shows the curves.", tasks=TEXT)
    axis: str | None = setting("A setting that the report draws the score against, such as low_rank.rank.")
    rows: dict[RowName, Row] = setting("The models to compare, by their names.", needed=True)
    only: list[Annotated[str, Field(coerce_numbers_to_str=True)]] | None = setting("The rows to run; all if not given.")
    seeds: list[Seed] = setting(
        "Each row is run with each of them.", needed=True, min_length=1, takes="integers, each in 0..2^32-1"
    )
    space: SpaceSection | None = setting("What `hf-freeze search` draws rows from.", tasks=TEXT)
    search: SearchSettings = setting("Goals, bounds and rungs of the search.", SearchSettings())
    smoke: dict[str, Any] = setting("Changes with --smoke, which shows in little time whether all works.", {})

    @property
    def title(self) -> str:
        return self.name + (f": preset {self.preset}" if self.preset else "")


class Origin(Settings):
    """Of a finished run, what makes its model: what another run starts from or learns from."""

    grid: str | None = None  # the folder of another grid that holds it
    row: str
    seed: int
    training: Training = setting("How it was trained.")
    methods: list[dict[str, Any]] = Field([])
    heads: Heads | None = None
    layers: Layers | None = None
    calibration: Calibration | None = None
    start: "Origin | None" = None
    teacher: "Origin | None" = None
    targets: Literal["teacher"] | None = None

    def folder(self, out: Path) -> Path:
        """Where it is, for a run of the grid in `out`."""
        return run_folder(Path(self.grid or out), {"row": self.row, "seed": self.seed})

    def is_finished(self, out: Path) -> bool:
        return (self.folder(out) / "metrics.json").exists()

    @property
    def origins(self) -> "dict[str, Origin]":
        """The runs that must be finished before it, by what it does with them."""
        origins = {"starts": self.start, "learns": self.teacher}
        return {verb: origin for verb, origin in origins.items() if origin is not None}

    def needed_folders(self, out: Path) -> list[Path]:
        return [origin.folder(out) for origin in self.origins.values()]


class Run(Origin):
    """One row of a grid with one seed. `scored_on`: the split of its scores."""

    name: str
    task: TaskName
    metric: str = ""
    preset: str | None = None
    axis: str | None = None
    report_to: Tracker | None = None
    data: Data
    tokenizer: Tokenizer | None = None
    backbone: Backbone | None = None
    decoding: Decoding = Decoding()
    label: Annotated[str, Field(coerce_numbers_to_str=True)]
    head_scores: list[str] = Field([])
    pictures: list[str] = Field([])
    scored_on: Literal["test", "dev"] = "test"

    @property
    def pretrained(self) -> str | None:
        """The trained model that it starts from, if that is no run."""
        return self.backbone.pretrained if self.backbone is not None else None

    def with_bf16(self, bf16: bool) -> "Run":
        """A copy in which `training.bf16: auto` means this."""
        return self.changed(training=self.training.changed(bf16=bf16))
