"""The rows of a new recipe: what each goal compares."""

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_freeze.lab.init.backbone import Backbone
from hf_freeze.lab.recipes.rows import method_of
from hf_freeze.model.make import make_variant

GOALS = {
    "study": "which of embeddings, attention and FFN must be trained",
    "shrink": "what each way to make the model smaller costs",
    "budget": "how good a model within bytes or milliseconds can be",
}
_STUDIED = ("embeddings", "attention", "ffn")
_ROWS_OF_STUDY = (
    (),
    ("embeddings",),
    ("attention",),
    ("ffn",),
    ("embeddings", "ffn"),
    ("embeddings", "attention"),
    ("attention", "ffn"),
)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """`rows`: as in a recipe; `left_out`: the names of rows that do not work on the model -> the reason; `notes`: lines above the
    rows."""

    about: str
    rows: dict[str, dict[str, Any]]
    notes: list[str]
    left_out: dict[str, str] = field(default_factory=dict)


def goal_of(name: str, backbone: Backbone) -> Goal:
    """What the model is compared with. Methods that do not work on it are left out, each with the reason.

    Raises ValueError where none works.
    """
    if name == "budget":
        notes = ["The model that hf-freeze compress makes smaller. It needs no other row: it makes its own."]
        return Goal(about=GOALS[name], rows={"0": {"label": "dense", "methods": []}}, notes=notes)
    rows, notes = _study(backbone) if name == "study" else _shrink(backbone)
    left_out = {}
    for row, settings in rows.items():
        try:
            with torch.device("meta"):
                make_variant(backbone.model, [method_of(method) for method in settings["methods"]])
        except ValueError as error:
            left_out[row] = " ".join(str(error).split())
    rows = {row: settings for row, settings in rows.items() if row not in left_out}
    if len(rows) < 2:
        raise ValueError(f"no method of --goal {name} works on this model: {'; '.join(left_out.values())}")
    return Goal(about=GOALS[name], rows=rows, notes=notes, left_out=left_out)


def _study(backbone: Backbone) -> tuple[dict[str, Any], list[str]]:
    how = "random" if backbone.is_fresh else "frozen"
    rows = {}
    for number, parts in enumerate(_ROWS_OF_STUDY):
        kept = [part for part in _STUDIED if part not in parts]
        label = (
            f"{' and '.join(parts)} {how}" if len(parts) == 1 else f"only {kept[0]} trained" if parts else "all trained"
        )
        rows[str(number)] = {
            "label": label,
            "methods": [{"method": "freeze"} | dict.fromkeys(parts, how)] if parts else [],
        }
    notes = [
        "A part that is frozen keeps its pretrained values."
        if how == "frozen"
        else "A part that is random stays as a seed drew it.",
        "Norms and the task head are trained in all rows. `hf-freeze methods freeze` has more choices.",
    ]
    return rows, notes


def _shrink(backbone: Backbone) -> tuple[dict[str, Any], list[str]]:
    width, ffn = backbone.width, backbone.ffn
    ways: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "heads": ("half the attention heads", [{"method": "head_pruning", "share": 0.5}]),
        "layers": ("half the layers", [{"method": "layer_selection", "share": 0.5}]),
        "shared": ("one layer of each stack, used again and again", [{"method": "layer_sharing"}]),
    }
    if ffn:
        quarter = max(1, width * ffn // (4 * (width + ffn)))  # rank r has r (I + O) weights for I O
        ways |= {
            "ffn": ("half the FFN", [{"method": "ffn_pruning", "width": max(1, ffn // 2)}]),
            "low-rank": (
                "FFN and attention of low rank, a quarter of the weights",
                [
                    {"method": "low_rank", "rank": quarter},
                    {"method": "low_rank", "rank": max(1, width // 8), "components": ["attention"]},
                ],
            ),
            "table": ("token table of low rank", [{"method": "factorized_embedding", "rank": max(1, width // 4)}]),
        }
    epochs = max(1, round(backbone.sections["training"]["epochs"] / 3))
    rows: dict[str, Any] = {"0": {"label": "dense", "methods": []}}
    for name in ("heads", "ffn", "low-rank", "table", "layers", "shared"):
        if name in ways:
            label, methods = ways[name]
            rows[name] = {"label": label, "start": "0", "training": {"epochs": epochs}, "methods": methods}
    notes = [
        'Row "0" is trained first. The others start from it, made smaller, and are trained for a third of its epochs.',
        "`hf-freeze methods` lists more ways; methods of one row are applied in their order.",
    ]
    return rows, notes
