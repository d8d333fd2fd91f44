"""What a variant does in training: its loss is scaled right, and what its methods schedule follows the progress."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel

from hf_freeze.architectures.base import Architecture
from hf_freeze.layers.adaptive_embedding import AdaptiveSoftmax
from hf_freeze.layers.hooks import captured_outputs
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import Objective, Schedule, Step, frozen_at, parts_of

if TYPE_CHECKING:  # what the mixin is always combined with
    _Model = PreTrainedModel
else:
    _Model = object


class TrainingMixin(_Model):
    """The part of a variant that only training uses.

    `scheduled`: whether a method depends on the progress of training. `progress`: the share of the steps done, in 0..1; None
    until the first `advance`. Neither is ever saved: both follow from the config and the step.
    """

    native_class: ClassVar[type[PreTrainedModel]]
    architecture: Architecture  # of the class, until methods put in other blocks
    shifts_labels: ClassVar[bool]  # a causal language model: the label of a position is the token after it
    progress: float | None = None
    methods: list[Method]
    _reached: set[str] | None = None  # by gradients since the last forward: the "outputs", the "term" that methods add
    _active: tuple[int, ...] = ()  # the methods, by number, that freeze at `progress` and not always
    _teacher: "_Teacher | None" = None
    _held: frozenset[str] = frozenset()  # what they froze: what somebody else has frozen is not ours to thaw

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether the Trainer passes `num_items_in_batch`, which `trained_forward` makes right for every backbone.

        Where the Trainer's own label smoothing ignores it (older versions), the Trainer must divide by the accumulation steps.
        """
        from transformers.trainer_pt_utils import LabelSmoother

        return "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters

    @property
    def scheduled(self) -> bool:
        """Whether a method follows the progress of training."""
        return any(True for _ in parts_of(self.methods, Schedule))

    def advance(self, step: int, total_steps: int) -> None:
        """Say before an optimiser step that `step` of `total_steps` are done; `VariantCallback` does it in the Trainer.

        Whatever is scheduled is a function of `step` alone, so that a resumed training continues as if undisturbed. Give the
        optimiser all of `parameters()`, or make it before the first `advance`, when all that will ever be trained is
        trainable. Under DistributedDataParallel, what is frozen for a while needs `find_unused_parameters=True`.

        Raises ValueError unless both are integers and 0 <= step <= total_steps >= 1, and where nothing is left to train.
        """
        for name, value, least in (("step", step, 0), ("total_steps", total_steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"advance({name}={value!r}): must be an integer of at least {least}")
        if step > total_steps:
            raise ValueError(f"advance(step={step}): must be in 0..{total_steps}, the total_steps")
        self.progress = step / total_steps
        self._freeze_phase()
        model: Any = self
        for _, schedule in parts_of(self.methods, Schedule):
            schedule.advance(model, self.architecture, step, total_steps)

    def rewind(self) -> None:
        """Back to before training, for a new optimiser or another training: thaws what a schedule froze."""
        self.progress = None
        self._freeze_phase()
        model: Any = self
        for _, schedule in parts_of(self.methods, Schedule):
            schedule.rewind(model, self.architecture)

    @property
    def not_broadcast(self) -> list[str]:
        """Names that DistributedDataParallel need not send: a seed has filled these parameters in every process. Those that the
        user has made trainable are sent."""
        tied, seeded = self.all_tied_weights_keys, getattr(self, "seeded_tensors", {})
        named = self.named_parameters(remove_duplicate=False)
        return [name for name, p in named if tied.get(name, name) in seeded and not p.requires_grad]

    @property
    def finalizable(self) -> bool:
        """Whether a method has something to end training with."""
        return any(method.finalizable for method in self.methods)

    def finalize(self) -> None:
        """End training, in place and at any step: masks are fixed, and what only training needs is dropped. The config then
        describes what is left, and an optimiser made before holds parameters that are gone.

        Raises ValueError where nothing is to be finalized, as in a second call, and on meta.
        """
        if not self.finalizable:
            raise ValueError(
                f"nothing to finalize: the methods {[method.name for method in self.methods]} are finalized, or need it not"
            )
        if self.device.type == "meta":
            raise ValueError("finalize() looks at the weights, which on meta have no values")
        model: Any = self
        self.methods = [
            method.finalize(model, self.architecture) if method.finalizable else method for method in self.methods
        ]
        self.config.set_methods(self.methods)
        model._apply_freeze()

    def set_teacher(self, teacher: Any) -> None:
        """Give the model that Distillation learns from, or None. It is neither stored nor copied with this one.

        Raises ValueError where it is none for this model.
        """
        model: Any = self
        if teacher is not None and not isinstance(teacher, PreTrainedModel):
            raise ValueError(f"the teacher must be a model of transformers, not a {type(teacher).__name__}")
        if teacher is self:
            raise ValueError("a model cannot be its own teacher: give a copy of it")
        for _, objective in parts_of(self.methods if teacher is not None else (), Objective):
            objective.check_teacher(model, self.architecture, teacher)
        self._teacher = _Teacher(teacher)

    def get_teacher(self) -> Any:
        """The model that Distillation learns from; None where none was set."""
        return None if self._teacher is None else self._teacher.model

    def auxiliary_loss(self, step: Step | None = None) -> torch.Tensor | None:
        """What methods add to the mean loss of a label, in the forward `step`; None where there is nothing."""
        model: Any = self
        teacher = self.get_teacher()
        if step is not None and teacher is not None and (teacher.training or teacher.device != self.device):
            teacher.to(self.device).eval()
        terms = [part.loss(model, self.architecture, step) for _, part in parts_of(self.methods, Objective)]
        found = [term for term in terms if term is not None]
        return torch.stack(found).sum() if found else None

    def frozen_for_a_while(self) -> list[str]:
        """Names of the parameters that a schedule freezes in a part of training only."""
        names = self._names_of(i for i, method in enumerate(self.methods) if not frozen_at(method, None))
        return [name for name in sorted(names) if name in self._held or self.get_parameter(name).requires_grad]

    @property
    def needs_teacher(self) -> bool:
        """Whether training needs `set_teacher`."""
        return any(part.needs_teacher for _, part in parts_of(self.methods, Objective))

    @property
    def skips(self) -> bool:
        """Whether a step of training may leave without a gradient what is trainable."""
        return any(part.skips for _, part in parts_of(self.methods, Schedule))

    def _names_of(self, numbers: Iterable[int]) -> set[str]:
        model: Any = self
        found = (pair for i in numbers for pair in self.methods[i].freeze(model, self.architecture))
        return {name for name, definition in found if definition is None}

    def _freeze_phase(self) -> None:
        """Freeze and thaw for `progress`. Called in every step: looks at the parameters only where the phase changes."""
        active = tuple(
            i
            for i, method in enumerate(self.methods)
            if not frozen_at(method, None) and frozen_at(method, self.progress)
        )
        if active == self._active:
            return
        wanted = self._names_of(active)
        held = set(self._held & wanted)
        tied = self.all_tied_weights_keys
        for alias, parameter in self.named_parameters(remove_duplicate=False):
            name = tied.get(alias, alias)
            if name in self._held and name not in wanted:
                parameter.requires_grad_(True)
            elif name in wanted and parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None  # with a gradient of zero, weight decay and momentum would still move it
                held.add(name)
        self._active, self._held = active, frozenset(held)
        if held and not any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError(
                f"nothing is left to train at progress {self.progress}: {sorted(held)[0]!r} and all else is frozen"
            )

    def _forget_phase(self) -> None:
        """After every `requires_grad` was set as before training."""
        self._active, self._held = (), frozenset()
        self._freeze_phase()


def _reach_a_parameter(model: Any, outputs: Any) -> Any:
    """Where a step has left out all that is trained, its loss would have no gradient, which is an error in torch, and
    DistributedDataParallel would wait. One parameter then gets a gradient of zero."""
    named = dict(enumerate(outputs)) if isinstance(outputs, tuple) else outputs
    floating = [name for name, value in named.items() if torch.is_tensor(value) and value.is_floating_point()]
    # The loss is the first; where there is none, it is computed outside, from one of the others.
    if not floating or named[floating[0]].requires_grad:
        return outputs
    least = min((p for p in model.parameters() if p.requires_grad), key=torch.Tensor.numel, default=None)
    if least is None:
        return outputs
    for name in floating:
        if not named[name].requires_grad:
            named[name] = named[name] + 0.0 * least.sum()
    return tuple(named.values()) if isinstance(outputs, tuple) else outputs


class _Teacher:
    """Holds a model that is no part of the one that has it: not among its parameters, nor copied or pickled with it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, memo: Any) -> "_Teacher":
        return self

    def __reduce__(self) -> Any:
        return type(self), (None,)


def _add_auxiliary_loss(model: Any, outputs: Any, inputs: dict[str, Any], seen: dict[str, torch.Tensor]) -> None:
    """Into `outputs.loss`, where there is one, and under `auxiliary_loss` for losses that are computed outside, with the
    `label_weight` where that is not 1.

    Raises ValueError where the last gradients were those of a loss that left it out.
    """
    adding = [method.name for method, _ in parts_of(model.methods, Objective)]
    if adding and isinstance(outputs, tuple):
        raise ValueError(f"the methods {adding} add a term to the loss, which needs return_dict=True")
    added = model.auxiliary_loss(Step(inputs=inputs, outputs=outputs, seen=seen))
    if added is None:
        return
    if model._reached is None:
        model._reached = set()
    forgotten = model._reached == {"outputs"}
    model._reached.clear()
    if forgotten:
        raise ValueError(
            f"the methods {adding} add a term to the loss, and the last step was trained without it: a loss of your own must "
            "add outputs['auxiliary_loss'] (label_smoothed_loss of hf_freeze.training does; the Trainer's "
            "label_smoothing_factor does not)"
        )
    if added.requires_grad:
        reached = model._reached
        for value in outputs.values():
            if torch.is_tensor(value) and value.requires_grad:
                value.register_hook(lambda _: reached.add("outputs"))
        added.register_hook(lambda _: reached.add("term"))
    weight = math.prod(part.label_weight for _, part in parts_of(model.methods, Objective))
    if outputs.get("loss") is not None:
        outputs.loss = weight * outputs.loss + added
    outputs["auxiliary_loss"] = added
    if weight != 1:
        outputs["label_weight"] = added.new_tensor(weight)


def _needs_no_logits(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the output computes the loss of plain labels without the logits of every token."""
    if model.needs_teacher:
        return False
    plain = inputs.get("shift_labels") is None and not torch.is_tensor(inputs.get("logits_to_keep", 0))
    return plain and not inputs.get("logits_to_keep") and isinstance(model.get_output_embeddings(), AdaptiveSoftmax)


def _forward_without_logits(model: Any, native_forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """What the native forward returns with labels, but for the logits: None, or left out of a tuple."""
    labels = inputs["labels"]
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    if model.config.is_encoder_decoder:  # as these do where they are given labels
        inputs["use_cache"] = False
        if inputs.get("decoder_input_ids") is None and inputs.get("decoder_inputs_embeds") is None:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    output = model.get_output_embeddings()
    with output.recording() as recorded:
        outputs = native_forward(model, **inputs)
    hidden = recorded[0]
    labels = labels.to(hidden.device)
    if model.shifts_labels:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    counted = labels != -100
    loss = output.loss(hidden[counted], labels[counted]) / counted.sum()
    if isinstance(outputs, tuple):
        return (loss, *outputs[1:])
    return type(outputs)(**{**outputs, "loss": loss, "logits": None})


def trained_forward(native_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a variant, from that of its backbone; `wraps` keeps the signature, which the Trainer reads.

    Native losses are a mean over this batch; with `num_items_in_batch` (Trainer: all labels of an optimiser step, over
    accumulation and processes) the sum is divided by that instead. With an adaptive softmax, the loss of `labels` is
    computed without all the logits, which are then None. To train a scheduled variant that nobody advances is a ValueError.
    """

    signature = inspect.signature(native_forward)
    names = list(signature.parameters)[1:]

    @functools.wraps(native_forward)
    def forward(self: Any, *args: Any, num_items_in_batch: torch.Tensor | int | None = None, **kwargs: Any) -> Any:
        unadvanced = self.scheduled and self.progress is None
        # On meta nothing is trained; multiply-adds are counted there.
        if unadvanced and self.training and torch.is_grad_enabled() and self.device.type != "meta":
            raise ValueError(
                f"the methods {[method.name for method, _ in parts_of(self.methods, Schedule)]} follow the progress of "
                "training: pass Trainer(callbacks=[VariantCallback()]), or call model.advance(step, total_steps) before "
                "each step"
            )
        inputs = kwargs
        if args:  # by name from here on, so that labels given by position are labels too
            signature.bind(self, *args, **kwargs)  # raises TypeError for wrong arguments, as any call does
            inputs = kwargs | dict(zip(names, args, strict=False))
        labels = inputs.get("labels")
        trained = self.training and torch.is_grad_enabled()
        objectives = parts_of(self.methods if trained else (), Objective)
        watched = {name for _, part in objectives for name in part.watched(self, self.architecture)}
        with captured_outputs(self.base_model, watched) as seen:
            if trained and labels is not None and _needs_no_logits(self, inputs):
                outputs = _forward_without_logits(self, native_forward, inputs)
            else:
                outputs = native_forward(self, **inputs)
        if trained and self.device.type != "meta":
            if self.skips:
                outputs = _reach_a_parameter(self, outputs)
            _add_auxiliary_loss(self, outputs, inputs, seen)
        if num_items_in_batch is None or labels is None:
            return outputs
        counted = ((labels[..., 1:] if self.shifts_labels else labels) != -100).sum()
        mean = outputs[0] if isinstance(outputs, tuple) else outputs.loss
        loss = torch.where(counted > 0, mean * (counted / num_items_in_batch), 0)  # the mean over no label is no number
        if isinstance(outputs, tuple):
            return (loss, *outputs[1:])
        outputs.loss = loss
        return outputs

    return forward
