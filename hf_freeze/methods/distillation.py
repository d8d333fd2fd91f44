"""Learn from a teacher: from its outputs (Hinton et al., 2015, https://arxiv.org/abs/1503.02531), and patiently from its layers
too (Sun et al., 2019, "Patient Knowledge Distillation", https://arxiv.org/abs/1908.09355).

Shapes: B batch, T tokens, D hidden size, V classes or vocabulary.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from hf_freeze.architectures.base import Architecture, hidden_size
from hf_freeze.architectures.registry import VARIANT_PREFIX
from hf_freeze.architectures.tasks import tasks_of
from hf_freeze.compat.transformers import mask_of_frames
from hf_freeze.layers.hooks import captured_outputs
from hf_freeze.methods.base import Facts, Method, Model
from hf_freeze.methods.checks import check_fields, check_share, is_number, one_of
from hf_freeze.methods.parts import Objective, Part, Step
from hf_freeze.methods.registry import register_method

_HIDDEN = ("none", "skip", "last")
_ONE_CLASS, _REGRESSION = "single_label_classification", "regression"  # transformers' problem_type


@register_method("distillation", example={"temperature": 2.0, "alpha": 0.5}, facts=Facts(structural=False, exact=True))
@dataclass(frozen=True, kw_only=True)
class Distillation(Method):
    """Train with (1 - alpha) · the loss of the labels + alpha · T² · KL(teacher ‖ student), where KL compares outputs at
    `temperature` T and is a mean over the labels, with CTC over the frames, and in models of texts and images over either.

    Unless `hidden` is `"none"`, add beta · the squared distance between normalised hidden states, summed over all layers but the
    last. A classifier with an encoder compares the first token; other models take the mean over all tokens. In each stack,
    layer j of the student's m learns from layer j·n/m of the teacher's n (`"skip"`) or from layer n - m + j (`"last"`).

    A model without a head learns the directions of the last hidden states instead of outputs. For a classifier whose labels are
    numbers (`problem_type` "regression"), the squared error of the teacher's numbers, a mean over examples and outputs, replaces
    T² · KL.

    `teacher`: a model of the same task and tokenizer. If one of the two has more rows in its vocabulary, as in padded ones of
    Qwen2.5, shared outputs are compared; both must have been opened with the tokenizer beside them. The teacher is put in eval
    mode and never trained. It is not stored with the variant: to train a reloaded variant, call `model.set_teacher`. A loss that
    is computed from outputs must weigh the labels by `outputs["label_weight"]` and add `outputs["auxiliary_loss"]`, as
    `label_smoothed_loss` does.

    Raises ValueError for an alpha outside 0..1, a temperature or beta that is not above 0, an unknown `hidden`, and a setting
    that learns nothing from the teacher. Setting a teacher raises it for another task or other outputs and, with `hidden`, for
    fewer layers, another hidden size or another architecture. Training without a teacher raises it too.
    """

    teacher: Any = field(default=None, compare=False, repr=False, metadata={"runtime": True})
    temperature: float = 2.0
    alpha: float = 0.5
    hidden: str = "none"
    beta: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self, alpha=check_share, hidden=one_of(_HIDDEN))
        for name in ("temperature", "beta"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"Distillation({name}={value!r}): must be a number above 0")
        if self.alpha == 0 and self.hidden == "none":
            raise ValueError("Distillation(alpha=0, hidden='none') learns nothing from the teacher; give one of them")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (_TeacherLoss(self),)


class _TeacherLoss(Objective):
    """The loss terms that compare the student with the teacher."""

    needs_teacher = True

    def __init__(self, method: Distillation) -> None:
        self.method, self.label_weight = method, 1 - method.alpha

    def check_teacher(self, model: Model, architecture: Architecture, teacher: Any) -> None:
        own_tasks, tasks = tasks_of(model), tasks_of(teacher)
        if own_tasks and tasks and not own_tasks & tasks:
            raise ValueError(
                f"Distillation: the teacher, a {type(teacher).__name__}, is for {sorted(tasks)}, the student for "
                f"{sorted(own_tasks)}"
            )
        problem_type = _problem_type(model)
        if problem_type not in (None, _ONE_CLASS, _REGRESSION) and self.method.alpha:
            raise ValueError(
                f"Distillation: problem_type={problem_type!r}: the outputs of a classifier can only be learnt if it chooses one "
                "class of several, or gives numbers; give alpha=0 and hidden='skip' or 'last'"
            )
        for name in ("num_labels", *dict.fromkeys(architecture.token_tables.values())):
            own_size, size = (_size(each.config, name) for each in (model, teacher))
            if own_size == size:
                continue
            sizes = f"Distillation: the teacher has {name}={size}, the student {own_size}"
            if name == "num_labels" or None in (own_size, size):
                raise ValueError(f"{sizes}: outputs must mean the same in both")
            if (reason := model.tokens_differ(teacher)) is not None:
                raise ValueError(
                    f"{sizes}: outputs must mean the same in both, and {reason}; if only rows of padding differ, "
                    f"teacher.resize_token_embeddings({own_size}) makes them equal"
                )
            shared = min(own_size, size)
            warnings.warn(f"{sizes}, with one tokenizer: the first {shared} outputs are compared", stacklevel=4)
            break  # the tables of an encoder-decoder have one tokenizer
        setting = f"hidden={self.method.hidden!r}" if self.method.hidden != "none" else "a model without a head"
        if (self.method.hidden != "none" or own_tasks == {"feature-extraction"}) and (
            hidden_size(teacher.config) != hidden_size(model.config)
        ):
            raise ValueError(
                f"Distillation, {setting}: the teacher's hidden size is {hidden_size(teacher.config)}, the student's "
                f"{hidden_size(model.config)}; only outputs can be learnt from another size"
            )
        if self.method.hidden == "none":
            return
        if teacher.config.model_type.removeprefix(VARIANT_PREFIX) != architecture.model_type:
            raise ValueError(
                f"Distillation, {setting}: the teacher is a {teacher.config.model_type}, the student a "
                f"{architecture.model_type}; only hidden='none' learns from another architecture"
            )
        depths, teacher_depths = architecture.depths(model.config), architecture.depths(teacher.config)
        if any(teacher_depths[stack] < depth for stack, depth in depths.items()):
            raise ValueError(
                f"Distillation, {setting}: the teacher has the layers {teacher_depths}, the student {depths}; it needs at least "
                "as many"
            )
        if max(depths.values()) < 2:
            raise ValueError(
                f"Distillation, {setting}: each stack has only one layer, and the last layer does not learn from the teacher"
            )

    def _layer_pairs(
        self, architecture: Architecture, depths: dict[str, int], teacher_depths: dict[str, int]
    ) -> dict[str, list[tuple[str, str]]]:
        """Stack -> (layer, layer of the teacher that it learns from), as names below the base models."""
        pairs: dict[str, list[tuple[str, str]]] = {}
        for stack, depth in depths.items():
            layers, teacher_depth = architecture.stacks[stack].layers, teacher_depths[stack]
            pairs[stack] = []
            for j in range(1, depth):  # from 1, as in the paper
                taught_by = j * teacher_depth // depth if self.method.hidden == "skip" else teacher_depth - depth + j
                pairs[stack].append((layers.format(j - 1), layers.format(taught_by - 1)))
        return pairs

    def watched(self, model: Model, architecture: Architecture) -> Iterable[str]:
        if self.method.hidden == "none":
            return []
        depths = architecture.depths(model.config)
        return [layer for pairs in self._layer_pairs(architecture, depths, depths).values() for layer, _ in pairs]

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
            if "input_ids" in inputs:  # the teacher runs its own encoder, not on the student's encoder outputs
                inputs.pop("encoder_outputs", None)
            if "decoder_input_ids" not in inputs:
                inputs["decoder_input_ids"] = _shifted(labels, model.config)
        layer_pairs: dict[str, list[tuple[str, str]]] = {}
        if self.method.hidden != "none":
            depths, teacher_depths = architecture.depths(model.config), architecture.depths(teacher.config)
            layer_pairs = self._layer_pairs(architecture, depths, teacher_depths)
        teacher_layers = [name for pairs in layer_pairs.values() for _, name in pairs]
        with torch.no_grad(), captured_outputs(teacher.base_model, teacher_layers) as teacher_states:
            teacher_outputs = teacher(**inputs, return_dict=True)
        # Models of pairs give two: how well each image fits each text, and each text each image.
        names = [name for name in step.outputs if name.endswith("logits") or name.startswith("logits_per_")]
        names = [name for name in names if step.outputs[name] is not None]
        labelled = _labelled_positions(model, step.outputs[names[0]], labels, inputs) if names else None
        difference = self._squared_error if _problem_type(model) == _REGRESSION else self._divergence
        terms = [self.method.alpha * difference(step.outputs[name], teacher_outputs[name], labelled) for name in names]
        if not names:  # a model without a head: its outputs are the last hidden states
            states = step.outputs[0]
            tokens = _real_tokens(model, list(architecture.stacks)[-1], None, inputs, states)
            terms.append(self.method.alpha * _distance(states, teacher_outputs[0], tokens))
        for stack, pairs in layer_pairs.items():
            for layer, teacher_layer in pairs:
                if layer not in step.seen or teacher_layer not in teacher_states:  # a native LayerDrop skipped it
                    continue
                states = step.seen[layer]
                first_token = labelled is None and stack == "encoder" and "logits" in names
                tokens = None if first_token else _real_tokens(model, stack, labelled, inputs, states)
                terms.append(self.method.beta * _distance(states, teacher_states[teacher_layer], tokens))
        return torch.stack(terms).sum()

    def _squared_error(self, values: torch.Tensor, teacher_values: torch.Tensor, _: object) -> torch.Tensor:
        """The mean squared error of two outputs (B, V), numbers."""
        return functional.mse_loss(values.float(), teacher_values.float())

    def _divergence(
        self, logits: torch.Tensor, teacher_logits: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """T² · KL of two logits (B, V), as a mean over the examples, or of two (B, T, V), as a mean over `positions`, bool
        (B, T)."""
        shared = min(logits.shape[-1], teacher_logits.shape[-1])  # one may have rows of padding
        logits, teacher_logits = logits[..., :shared], teacher_logits[..., :shared]
        if positions is not None:
            logits, teacher_logits = logits[positions], teacher_logits[positions]
        student, teacher = ((x.float() / self.method.temperature).log_softmax(-1) for x in (logits, teacher_logits))
        divergence = functional.kl_div(student, teacher, reduction="sum", log_target=True)
        return self.method.temperature**2 * divergence / max(len(logits), 1)


def _problem_type(model: Any) -> str | None:
    """What the labels of a classifier of texts are, in transformers' words. A config may lack them before the first labels.
    None for other tasks."""
    if tasks_of(model) != {"sequence-classification"}:
        return None
    return getattr(model.config, "problem_type", None) or (_REGRESSION if model.config.num_labels == 1 else _ONE_CLASS)


def _size(config: Any, name: str) -> Any:
    """The number in a field, which may lie in a config inside; None if there is none."""
    return getattr(config if "." not in name else config.get_text_config(), name.rpartition(".")[2], None)


def _shifted(labels: Any, config: Any) -> torch.Tensor:
    """int (B, T): what a decoder reads to predict `labels` (B, T): the start token, then all labels but the last."""
    start = getattr(config, "decoder_start_token_id", None)
    start = torch.full_like(labels[:, :1], config.pad_token_id if start is None else start)
    return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, config.pad_token_id)], dim=1)


def _labelled_positions(
    model: Any, logits: torch.Tensor, labels: torch.Tensor | None, inputs: dict[str, Any]
) -> torch.Tensor | None:
    """bool (B, T): the positions whose output has a label; None if each example has one output. With CTC, which aligns the labels
    itself, all frames but padding. Raises ValueError if only the labels could tell and there are none."""
    if logits.ndim == 2:
        return None
    if "ctc" in tasks_of(model):
        return _real_tokens(model, "encoder", None, inputs, logits)
    if labels is not None:
        positions = labels != -100
    elif (
        model.config.is_encoder_decoder
    ):  # the decoder reads a start token, which may equal the padding, and the labels
        ids = inputs["decoder_input_ids"]
        positions = (ids != model.config.pad_token_id) & (ids != model.config.eos_token_id)
        positions[:, 0] = True
    elif model.shifts_labels:
        positions = inputs.get("attention_mask", torch.ones(logits.shape[:2], device=logits.device)) != 0
    else:
        raise ValueError("Distillation: only the labels tell which outputs count; pass labels to the forward")
    if model.shifts_labels:  # the label of a position is the next token
        positions = torch.cat([positions[:, 1:], torch.zeros_like(positions[:, :1])], dim=1)
    return positions[:, -logits.shape[1] :]  # the forward may have been asked for the last logits only


def _real_tokens(
    model: Model, stack: str, labelled: torch.Tensor | None, inputs: dict[str, Any], states: torch.Tensor
) -> torch.Tensor:
    """bool (B, T): the tokens of a stack with hidden states (B, T, D), without padding. `labelled`: bool (B, T), the labelled
    positions of the decoder, if they are known."""
    if stack == "decoder" and labelled is not None and labelled.shape == states.shape[:2]:
        return labelled
    mask = inputs.get(
        "decoder_attention_mask" if stack == "decoder" and "decoder_input_ids" in inputs else "attention_mask"
    )
    if mask is not None and "input_values" in inputs:
        mask = mask_of_frames(model, mask, states.shape[1])
    if mask is None or mask.shape != states.shape[:2]:  # images have no padding, also beside texts that have
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    return mask != 0


def _distance(states: torch.Tensor, teacher_states: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """The mean squared distance of the directions of two hidden states (B, T, D), over `tokens`, bool (B, T), or over the first
    token of each example if that is None."""
    states, teacher_states = (x[:, 0] if tokens is None else x[tokens] for x in (states, teacher_states))
    difference = functional.normalize(states.float(), dim=-1) - functional.normalize(teacher_states.float(), dim=-1)
    return difference.square().sum() / max(len(difference.flatten(0, -2)), 1)
