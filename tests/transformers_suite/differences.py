"""Where variants are meant to differ from their backbones in transformers' model tests, and why."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_freeze import surgery
from hf_freeze.layers.adaptive_embedding import AdaptiveInputEmbedding
from hf_freeze.layers.fixed_heads import FixedHeads
from hf_freeze.layers.masked import Masked
from hf_freeze.layers.quantized import Quantized


@dataclass(frozen=True)
class Difference:
    """The tests whose whole name matches `tests` need not pass for the variants that `applies` is true of."""

    tests: str
    applies: Callable[[Any], bool]  # of a variant on meta
    why: str

    def covers(self, test: str) -> bool:
        return re.fullmatch(self.tests, test) is not None


def differences_of(model: Any) -> list[Difference]:
    return [difference for difference in DIFFERENCES if difference.applies(model)]


def _has(kind: type) -> Callable[[Any], bool]:
    return lambda model: any(isinstance(module, kind) for module in model.modules())


def _has_other_heads(model: Any) -> bool:
    for attention in model.architecture.attentions(model.config).values():
        try:
            heads = surgery.count_heads(model, attention, "")
        except ValueError:  # its linears are no plain ones
            continue
        if heads != model.config.num_attention_heads:
            return True
    return False


def _classifies_sequences(model: Any) -> bool:
    return "sequence-classification" in model.architecture.tasks


def _cannot_be_resized_untied(model: Any) -> bool:
    tables = surgery.token_tables(model, model.architecture)
    changed = model.config.original_fields.keys() & set(model.architecture.token_tables.values())
    replaced = any(type(table) is not nn.Embedding for table in tables.values())
    return len(tables) > 1 and (bool(changed) or replaced)


TRAINS = "test_training.*|test_problem_types|test_retain_grad_.*|test_resize_tokens_embeddings"
INPUT_GRADIENTS = "test_enable_input_require_grads_with_gradient_checkpointing"

DIFFERENCES = [
    Difference(
        tests="test_model_weights_reload_no_missing_tied_weights|test_can_init_all_missing_weights",
        applies=lambda model: True,
        why="The tests load a file without any of the weights. For a variant that is an error, not a new draw.",
    ),
    Difference(
        tests=f"{TRAINS}|{INPUT_GRADIENTS}",
        applies=lambda model: model.scheduled or model.needs_teacher,
        why="Training needs `model.advance` or `model.set_teacher` first. Omitting it raises an error that says so.",
    ),
    Difference(
        tests=INPUT_GRADIENTS,
        applies=lambda model: model.auxiliary_loss() is not None,
        why="The test computes gradients of the logits and leaves the method's term of the loss out, which is an error.",
    ),
    Difference(
        tests="test_attention_outputs",
        applies=_has_other_heads,
        why="The test expects the number of heads of the config in every layer.",
    ),
    Difference(
        tests="test_attention_outputs|test_retain_grad_.*",
        applies=_has(FixedHeads),
        why="Heads of fixed patterns return no attention weights.",
    ),
    Difference(
        tests="test_resize_.*|test_load_with_mismatched_shapes",
        applies=_has(AdaptiveInputEmbedding),
        why="Its `weight` is the first band alone, which no resizing changes, and 10 tokens are fewer than its cutoffs.",
    ),
    Difference(
        tests="test_load_with_mismatched_shapes",
        applies=lambda model: "vocab_size" in model.config.original_fields and _classifies_sequences(model),
        why="The test sets another `vocab_size`; the number of rows follows from the kept tokens, so nothing mismatches.",
    ),
    Difference(
        tests="test_resize_embeddings_untied.*",
        applies=_cannot_be_resized_untied,
        why="Natively, resizing makes one of tables that are apart; with tables that a method has changed it is refused.",
    ),
    Difference(
        tests=f"test_resize_.*|test_correct_missing_keys|test_retain_grad_.*|{INPUT_GRADIENTS}",
        applies=_has(Quantized),
        why="A quantised table cannot be resized and is not trained; a buffer remembers what the module stands for.",
    ),
    Difference(
        tests="test_init_weights_can_init_buffers",
        applies=lambda model: _has(Masked)(model) or _has(Quantized)(model),
        why="Masks and quantised values come from trained weights; there is no fresh draw of them.",
    ),
]

# These cost as much as all the others together. Each runs in one cell, with HF_FREEZE_TESTS=all in every one.
SLOW = {"test_bc_torch_dtype"}  # loads each class in seven precisions, twice
