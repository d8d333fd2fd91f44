"""What is understood of each family of transformers, as data and as a page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from hf_freeze.architectures.describe import first_line
from hf_freeze.architectures.published import PUBLISHED, default_config
from hf_freeze.architectures.registry import LOOKUP, architecture_of

FAILURES = Path(__file__).with_name("known_failures.json")  # written by `make families`, with docs/families.json
# What a method may need (`Facts.needs`) -> in words.
CAPABILITIES = {
    "linears": "linears are modules that compute x Wᵀ + b",
    "heads": "heads can be exchanged, and one that is zero removed",
    "neurons": "neurons of the FFN can be exchanged, and those that are zero removed",
    "layers": "a layer that does nothing can be removed",
    "hidden": "channels of the hidden states can be exchanged, and one of two equal ones removed",
    "vocabulary": "tokens can be renumbered",
}
_TEXT_MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
_TESTED = (
    "Every method that it offers was then built, trained for a step, saved, opened in a new process and merged, and generated",
    "with and without a cache alike, unless the native model itself does not.",
)
_OF_HEADS = {"heads", "head_pruning", "head_mask"}
_OF_CHANNELS = {"hidden", "hidden_pruning"}
BEYOND_TEXT = ("vit", "deit", "clip", "siglip", "dinov2", "beit", "wav2vec2", "hubert", "whisper")


def model_types() -> list[str]:
    """The model types for text of this version of transformers, and a few beyond text."""
    text = {model_type: None for mapping in _TEXT_MAPPINGS for model_type in mapping}
    return list(text | dict.fromkeys(BEYOND_TEXT))


def describe_family(model_type: str) -> dict[str, Any]:
    """What is derived and proved of the default config of a model type, as JSON data."""
    try:
        architecture = architecture_of(default_config(model_type))
    except Exception as error:  # a default config may not work at all
        reason = first_line(error, longest=500).removesuffix(LOOKUP)  # this page is where it points to
        return {"understood": False, "reason": reason.removeprefix(f"{model_type}: ")[:200]}
    stacks = {
        name: {
            "layers": stack.layers,
            "depth": stack.depth,
            "attentions": sorted(stack.attentions),
            "ffn": list(stack.ffn),
        }
        for name, stack in architecture.stacks.items()
    }
    refusals = {name: reason for name, reason in architecture.refusals.items() if name in CAPABILITIES}
    return {
        "understood": True,
        "reason": "",
        "tasks": list(architecture.tasks),
        "stacks": stacks,
        "refusals": refusals,
    }


def failures_file(families: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of `FAILURES`: model type -> method -> what went wrong with it on a small model of this family, although what it
    needs is proved."""
    failures = {name: contract for name, family in families.items() if (contract := family.get("contract"))}
    return json.dumps(failures, indent=1) + "\n"


def families_page(families: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of all families, in Markdown. A tick is a proof; `contract` tells what failed although it was proved."""
    understood = {name: family for name, family in families.items() if family["understood"]}
    universal = [name for name, family in understood.items() if not _missing(family) - _OF_HEADS - _OF_CHANNELS]
    heads = [name for name in universal if not _missing(understood[name]) & _OF_HEADS]
    channels = [name for name in universal if not _missing(understood[name]) & _OF_CHANNELS]
    lines = [
        "# Families",
        "",
        "<!-- Written by `make families` (`hf-freeze describe --all` writes it without the contract); do not edit. -->",
        "",
        f"transformers {transformers.__version__}: {len(families)} model types were tried, with their default configs.",
        f"All universal methods work on **{len(universal)}**, HeadPruning and HeadMask too on **{len(heads)}** of these, and",
        f"HiddenPruning on **{len(channels)}**;",
        f"of the others, some methods work on {len(understood) - len(universal)},",
        f"and none on {len(families) - len(understood)}.",
        "",
        "Universal methods: Freeze, LowRank, TensorTrain, Tucker, MagnitudePruning, VariationalDropout, Quantize, FFNPruning,",
        "LayerSelection, LayerSharing, LayerDrop, Theseus, Distillation, FactorizedEmbedding, VocabularyTrimming.",
        "",
        "A tick is a proof on a small model of the family.",
        *(
            _TESTED
            if any("contract" in family for family in families.values())
            else ("No method was tried on any family.",)
        ),
        "What a column means:",
        "",
        *(f"- **{name}**: {meaning}" for name, meaning in CAPABILITIES.items()),
        "",
        *_completed(families),
        "| model type | stacks | " + " | ".join(CAPABILITIES) + " | what is not understood, or failed |",
        "| --- | --- |" + " :-: |" * len(CAPABILITIES) + " --- |",
    ]
    for name, family in families.items():
        if not family["understood"]:
            lines.append(f"| {name} | – |" + " – |" * len(CAPABILITIES) + f" {_cell(family['reason'])} |")
            continue
        marks = ["–" if need in family["refusals"] else "✓" for need in CAPABILITIES]
        failed = [f"{method or 'all'} failed: {problem}" for method, problem in family.get("contract", {}).items()]
        reasons = "; ".join([*family["refusals"].values(), *failed])
        lines.append(f"| {name} | {', '.join(family['stacks'])} | {' | '.join(marks)} | {_cell(reasons)} |")
    return "\n".join(lines) + "\n"


def _completed(families: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which default configs were completed, and with what, as lines of the page."""
    completed = {name: PUBLISHED[name] for name in families if name in PUBLISHED}
    if not completed:
        return []
    items = [
        f"- {name}: " + ", ".join(f"`{field}={_short(value)}`" for field, value in fields.items())
        for name, fields in completed.items()
    ]
    return [
        "transformers cannot build or run some default configs; these were completed with fields of published checkpoints:",
        "",
        *items,
        "",
    ]


def _short(value: Any) -> str:
    """A value on one line; a long list as its different entries."""
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} entries of {' and '.join(map(repr, dict.fromkeys(value)))}]"
    return repr(value)


def _missing(family: Mapping[str, Any]) -> set[str]:
    """What was not proved, and the methods that failed although what they need was."""
    return {*family["refusals"], *family.get("contract", {})}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
