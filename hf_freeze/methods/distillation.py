"""Learn from a teacher: from its outputs (Hinton et al., 2015, https://arxiv.org/abs/1503.02531), and patiently from its layers
too (Sun et al., 2019, "Patient Knowledge Distillation", https://arxiv.org/abs/1908.09355).

Shapes: B batch, T tokens, N labels that count, D hidden size, V classes or vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.watching import outputs_of
from hf_freeze.methods._linear import check_share
from hf_freeze.registry import Method, Step, architecture_of, register_method

if TYPE_CHECKING:
    from hf_freeze.variant import VariantMixin

_HIDDEN = ("none", "skip", "last")


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
    learns nothing from the teacher; when the teacher is set, for other outputs, and with `hidden` for fewer layers or another
    hidden size; and in training without a teacher.
    """

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
    def label_weight(self) -> float:
        return 1 - self.alpha

    @property
    def needs_teacher(self) -> bool:
        return True

    def check_teacher(self, model: "VariantMixin", architecture: Architecture, teacher: Any) -> None:
        for name in ("num_labels", *dict.fromkeys(architecture.token_tables.values())):
            one, other = getattr(model.config, name, None), getattr(teacher.config, name, None)
            if one != other:
                raise ValueError(
                    f"Distillation: the teacher has {name}={other}, the student {one}: outputs must mean the same in both"
                )
        if self.hidden == "none":
            return
        depths, above = architecture.depths(model.config), _depths(teacher)
        if depths.keys() != above.keys() or any(above[stack] < depth for stack, depth in depths.items()):
            raise ValueError(
                f"Distillation(hidden={self.hidden!r}): the teacher has the layers {above}, the student {depths}; it needs the "
                "same stacks, none of them deeper"
            )
        if teacher.config.hidden_size != model.config.hidden_size:
            raise ValueError(
                f"Distillation(hidden={self.hidden!r}): the teacher's hidden size is {teacher.config.hidden_size}, the "
                f"student's {model.config.hidden_size}; only hidden='none' learns from another size"
            )
        if max(depths.values()) < 2:
            raise ValueError(f"Distillation(hidden={self.hidden!r}): with one layer a stack there is none but the last")

    def _taught(
        self, architecture: Architecture, depths: dict[str, int], above: dict[str, int]
    ) -> dict[str, list[Any]]:
        """Stack -> (layer, layer of the teacher), names below the base models."""
        return {
            stack: [
                tuple(map(architecture.stacks[stack].layers.format, (j - 1, taught - 1)))
                for j in range(1, depth)
                for taught in [j * above[stack] // depth if self.hidden == "skip" else above[stack] - depth + j]
            ]
            for stack, depth in depths.items()
        }

    def watched(self, model: "VariantMixin", architecture: Architecture) -> Iterable[str]:
        if self.hidden == "none":
            return []
        depths = architecture.depths(model.config)
        return [layer for pairs in self._taught(architecture, depths, depths).values() for layer, _ in pairs]

    def auxiliary_loss(
        self, model: "VariantMixin", architecture: Architecture, step: Step | None = None
    ) -> torch.Tensor | None:
        if step is None:
            return None
        teacher = model.get_teacher()
        if teacher is None:
            raise ValueError(
                "Distillation: training needs the teacher, which is not stored with the variant: call "
                "model.set_teacher(...), or pass Distillation(teacher=...) to make_variant"
            )
        inputs = {name: value for name, value in step.inputs.items() if name != "labels"}
        labels = step.inputs.get("labels")
        if model.config.is_encoder_decoder:
            inputs["use_cache"] = False
            if inputs.get("decoder_input_ids") is None:
                student: Any = model
                inputs["decoder_input_ids"] = student.prepare_decoder_input_ids_from_labels(labels)
        taught = self._taught(architecture, architecture.depths(model.config), _depths(teacher))
        layers = [name for pairs in taught.values() for _, name in pairs] if self.hidden != "none" else []
        with torch.no_grad(), outputs_of(teacher.base_model, layers) as seen:
            wanted = teacher(**inputs)
        found = [name for name in step.outputs if name.endswith("logits") and step.outputs[name] is not None]
        counts = _counted(model, step.outputs[found[0]], labels, inputs) if found else None
        terms = [self.alpha * self._of_outputs(step.outputs[name], wanted[name], counts) for name in found]
        if not found:  # a model without a head: its output are the last hidden states
            tokens = _tokens(list(taught)[-1], None, inputs)
            terms.append(self.alpha * _distance(step.outputs[0], wanted[0], tokens))
        for stack, pairs in taught.items() if self.hidden != "none" else ():
            tokens = None if counts is None and stack == "encoder" and found else _tokens(stack, counts, inputs)
            terms += [self.beta * _distance(step.seen[own], seen[name], tokens) for own, name in pairs]
        return torch.stack(terms).sum()

    def _of_outputs(self, logits: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
        """(B, V) or (B, T, V), both -> scalar: a mean over the examples, or over the positions (B, T) that count."""
        if counts is not None:
            logits, wanted = logits[counts], wanted[counts]
        student, teacher = ((x.float() / self.temperature).log_softmax(-1) for x in (logits, wanted))
        divergence = functional.kl_div(student, teacher, reduction="sum", log_target=True)
        return self.temperature**2 * divergence / max(len(logits), 1)


def _depths(teacher: Any) -> dict[str, int]:
    return architecture_of(teacher.config.model_type).depths(teacher.config)


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
    return counts


def _tokens(stack: str, counts: torch.Tensor | None, inputs: dict[str, Any]) -> torch.Tensor:
    """bool (B, T): the tokens of a stack, without padding."""
    if stack == "decoder" and counts is not None:
        return counts
    decoder = stack == "decoder" and "decoder_input_ids" in inputs
    ids, mask = (inputs.get(f"decoder_{name}" if decoder else name) for name in ("input_ids", "attention_mask"))
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0  # type: ignore[arg-type]


def _distance(one: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """(B, T, D) each -> scalar: the mean squared distance of their directions."""
    one, other = (x[:, 0] if tokens is None else x[tokens] for x in (one, other))
    gap = functional.normalize(one.float(), dim=-1) - functional.normalize(other.float(), dim=-1)
    return gap.square().sum(-1).mean()
