"""Learn from a teacher: from its outputs (Hinton et al., 2015, https://arxiv.org/abs/1503.02531), and patiently from its layers
too (Sun et al., 2019, "Patient Knowledge Distillation", https://arxiv.org/abs/1908.09355).

Shapes: B batch, T tokens, N labels that count, D hidden size, V classes or vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn import functional

from hf_freeze.architectures.base import Architecture
from hf_freeze.architectures.registry import VARIANT_PREFIX
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.compat.transformers import mapped_class
from hf_freeze.layers.hooks import captured_outputs
from hf_freeze.methods._linear import check_share
from hf_freeze.methods.base import Method, Model
from hf_freeze.methods.parts import Objective, Part, Step
from hf_freeze.methods.registry import register_method

_HIDDEN = ("none", "skip", "last")
_ONE_CLASS = "single_label_classification"  # transformers' problem_type


@register_method("distillation", example={"temperature": 2.0, "alpha": 0.5}, exact=True)
@dataclass(frozen=True, kw_only=True)
class Distillation(Method):
    """Train with (1 - alpha) · the loss of the labels + alpha · T² · KL(teacher ‖ student), of outputs at `temperature` T, a mean
    over the labels; plus, unless `hidden` is `"none"`, beta · the squared distance of normalised hidden states, summed over the
    layers but the last: of the first token for a classifier with an encoder, else a mean over all tokens. Layer j of m learns
    from layer j·n/m of the teacher's n (`"skip"`) or from layer n - m + j (`"last"`), in each stack.

    A model without a head learns the directions of the last hidden states instead of outputs.

    `teacher`: a model of the same task, vocabulary and tokenizer; it is put in eval mode and never trained. It is not stored with
    the variant: to train one that was opened again, call `model.set_teacher`. A loss of your own that is computed from outputs
    must weigh the labels by `outputs["label_weight"]` and add `outputs["auxiliary_loss"]`, as `label_smoothed_loss` does.

    Raises ValueError for an alpha outside 0..1, a temperature or beta that is not above 0, an unknown `hidden`, a setting that
    learns nothing from the teacher; when the teacher is set, for another task or other outputs, and with `hidden` for fewer
    layers, another hidden size or architecture; and in training without a teacher.
    """

    structural: ClassVar[bool] = False
    teacher: Any = field(default=None, compare=False, repr=False, metadata={"runtime": True})
    temperature: float = 2.0
    alpha: float = 0.5
    hidden: str = "none"
    beta: float = 10.0

    def __post_init__(self) -> None:
        check_share(self.alpha, "Distillation: alpha")
        for name in ("temperature", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"Distillation({name}={value!r}): must be a number above 0")
        if self.hidden not in _HIDDEN:
            raise ValueError(f"Distillation(hidden={self.hidden!r}): choose from {list(_HIDDEN)}")
        if self.alpha == 0 and self.hidden == "none":
            raise ValueError("Distillation(alpha=0, hidden='none') learns nothing from the teacher; give one of them")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_Imitation(self),)


class _Imitation(Objective):
    """The terms by which the student learns from the teacher."""

    needs_teacher = True

    def __init__(self, method: Distillation) -> None:
        self.method, self.label_weight = method, 1 - method.alpha

    def check_teacher(self, model: Model, architecture: Architecture, teacher: Any) -> None:
        own, tasks = tasks_of(model), tasks_of(teacher)
        if own and tasks and not own & tasks:
            raise ValueError(
                f"Distillation: the teacher, a {type(teacher).__name__}, is for {sorted(tasks)}, the student for {sorted(own)}"
            )
        kind = getattr(model.config, "problem_type", None) or _ONE_CLASS
        if (
            own == {"sequence-classification"}
            and (model.config.num_labels == 1 or kind != _ONE_CLASS)
            and self.method.alpha
        ):
            raise ValueError(
                f"Distillation: num_labels={model.config.num_labels}, problem_type={kind!r}: of a classifier's outputs "
                "only one class of several can be learnt; give alpha=0 and hidden='skip' or 'last'"
            )
        for name in ("num_labels", *dict.fromkeys(architecture.token_tables.values())):
            one, other = getattr(model.config, name, None), getattr(teacher.config, name, None)
            if one != other:
                raise ValueError(
                    f"Distillation: the teacher has {name}={other}, the student {one}: outputs must mean the same in both"
                )
        compared = f"hidden={self.method.hidden!r}" if self.method.hidden != "none" else "a model without a head"
        if (self.method.hidden != "none" or own == {"feature-extraction"}) and (
            teacher.config.hidden_size != model.config.hidden_size
        ):
            raise ValueError(
                f"Distillation, {compared}: the teacher's hidden size is {teacher.config.hidden_size}, the student's "
                f"{model.config.hidden_size}; only outputs can be learnt from another size"
            )
        if self.method.hidden == "none":
            return
        if teacher.config.model_type.removeprefix(VARIANT_PREFIX) != architecture.model_type:
            raise ValueError(
                f"Distillation, {compared}: the teacher is a {teacher.config.model_type}, the student a "
                f"{architecture.model_type}; only hidden='none' learns from another architecture"
            )
        depths, above = architecture.depths(model.config), architecture.depths(teacher.config)
        if any(above[stack] < depth for stack, depth in depths.items()):
            raise ValueError(
                f"Distillation, {compared}: the teacher has the layers {above}, the student {depths}; it needs at least as many"
            )
        if max(depths.values()) < 2:
            raise ValueError(f"Distillation, {compared}: with one layer a stack there is none but the last")

    def _taught(
        self, architecture: Architecture, depths: dict[str, int], above: dict[str, int]
    ) -> dict[str, list[Any]]:
        """Stack -> (layer, layer of the teacher), names below the base models."""
        return {
            stack: [
                tuple(map(architecture.stacks[stack].layers.format, (j - 1, taught - 1)))
                for j in range(1, depth)
                for taught in [j * above[stack] // depth if self.method.hidden == "skip" else above[stack] - depth + j]
            ]
            for stack, depth in depths.items()
        }

    def watched(self, model: Model, architecture: Architecture) -> Iterable[str]:
        if self.method.hidden == "none":
            return []
        depths = architecture.depths(model.config)
        return [layer for pairs in self._taught(architecture, depths, depths).values() for layer, _ in pairs]

    def loss(self, model: Model, architecture: Architecture, step: Step | None = None) -> torch.Tensor | None:
        if step is None:
            return None
        teacher = model.get_teacher()
        if teacher is None:
            raise ValueError(
                "Distillation: training needs the teacher, which is not stored with the variant: call "
                "model.set_teacher(...), or pass Distillation(teacher=...) to make_variant"
            )
        inputs = {name: value for name, value in step.inputs.items() if name != "labels" and value is not None}
        labels = step.inputs.get("labels")
        if model.config.is_encoder_decoder:
            inputs["use_cache"] = False
            if "input_ids" in inputs:  # what the student's encoder made of them is not the teacher's
                inputs.pop("encoder_outputs", None)
            if "decoder_input_ids" not in inputs:
                student: Any = model
                inputs["decoder_input_ids"] = student.prepare_decoder_input_ids_from_labels(labels)
        taught: dict[str, list[Any]] = {}
        if self.method.hidden != "none":
            taught = self._taught(architecture, architecture.depths(model.config), architecture.depths(teacher.config))
        layers = [name for pairs in taught.values() for _, name in pairs]
        with torch.no_grad(), captured_outputs(teacher.base_model, layers) as seen:
            wanted = teacher(**inputs, return_dict=True)
        found = [name for name in step.outputs if name.endswith("logits") and step.outputs[name] is not None]
        counts = _counted(model, step.outputs[found[0]], labels, inputs) if found else None
        terms = [self.method.alpha * self._of_outputs(step.outputs[name], wanted[name], counts) for name in found]
        if not found:  # a model without a head: its output are the last hidden states
            states = step.outputs[0]
            tokens = _tokens(list(architecture.stacks)[-1], None, inputs, states)
            terms.append(self.method.alpha * _distance(states, wanted[0], tokens))
        for stack, pairs in taught.items():
            for own, name in pairs:
                if own not in step.seen or name not in seen:  # left out in this step, by a native LayerDrop
                    continue
                first = counts is None and stack == "encoder" and found
                tokens = None if first else _tokens(stack, counts, inputs, step.seen[own])
                terms.append(self.method.beta * _distance(step.seen[own], seen[name], tokens))
        return torch.stack(terms).sum()

    def _of_outputs(self, logits: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """(B, V) or (B, T, V), both -> scalar: a mean over the examples, or over the positions (B, T) that count."""
        if counts is not None:
            logits, wanted = logits[counts], wanted[counts]
        student, teacher = ((x.float() / self.method.temperature).log_softmax(-1) for x in (logits, wanted))
        divergence = functional.kl_div(student, teacher, reduction="sum", log_target=True)
        return self.method.temperature**2 * divergence / max(len(logits), 1)


def tasks_of(model: Any) -> set[str]:
    """Those of `make_variant` that the class of `model` is for; empty where it is none of its classes."""
    found = {}
    for task, auto in AUTO_CLASSES.items():
        if (model_class := mapped_class(auto, type(model.config))) is not None:
            found[task] = model_class
    return {task for task, classes in found.items() if isinstance(model, classes)}


def _counted(
    model: Any, logits: torch.Tensor, labels: torch.Tensor | None, inputs: dict[str, Any]
) -> torch.Tensor | None:
    """bool (B, T): the positions whose output has a label; None for one output an example. Raises ValueError where it cannot be
    known without the labels."""
    if logits.ndim == 2:
        return None
    if labels is not None:
        counts = labels != -100
    elif model.config.is_encoder_decoder:  # the labels, shifted to the right behind a token that may look like padding
        ids = inputs["decoder_input_ids"]
        counts = (ids != model.config.pad_token_id) & (ids != model.config.eos_token_id)
        counts[:, 0] = True
    elif model.shifts_labels:
        counts = inputs.get("attention_mask", torch.ones(logits.shape[:2], device=logits.device)) != 0
    else:
        raise ValueError("Distillation: which outputs count is known from the labels: the forward must be given them")
    if model.shifts_labels:  # the label of a position is the token after it
        counts = torch.cat([counts[:, 1:], torch.zeros_like(counts[:, :1])], dim=1)
    return counts[:, -logits.shape[1] :]  # the last ones, where the forward was asked for these alone


def _tokens(stack: str, counts: torch.Tensor | None, inputs: dict[str, Any], states: torch.Tensor) -> torch.Tensor:
    """bool (B, T): the tokens of a stack with hidden states (B, T, D), without padding."""
    if stack == "decoder" and counts is not None and counts.shape == states.shape[:2]:
        return counts
    mask = inputs.get(
        "decoder_attention_mask" if stack == "decoder" and "decoder_input_ids" in inputs else "attention_mask"
    )
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device) if mask is None else mask != 0


def _distance(one: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """(B, T, D) each -> scalar: the mean squared distance of their directions."""
    one, other = (x[:, 0] if tokens is None else x[tokens] for x in (one, other))
    gap = functional.normalize(one.float(), dim=-1) - functional.normalize(other.float(), dim=-1)
    return gap.square().sum() / max(len(gap.flatten(0, -2)), 1)
