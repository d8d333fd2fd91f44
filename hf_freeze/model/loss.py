"""The forward of a variant in training: its loss is scaled right and holds the terms that methods add."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from hf_freeze.layers.adaptive_embedding import AdaptiveSoftmax
from hf_freeze.layers.hooks import captured_outputs
from hf_freeze.methods.parts import Objective, Schedule, Step, parts_of


def trained_forward(native_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a variant, made from that of its backbone. It keeps the signature, which the Trainer reads.

    Native losses are a mean over the batch. With `num_items_in_batch` (the Trainer passes the number of labels of the whole
    optimiser step, over accumulation and processes) the sum is divided by that number instead. With an adaptive softmax, the
    loss of `labels` is computed without all the logits, which are then None. Training a scheduled variant that is never
    advanced raises ValueError.
    """

    signature = inspect.signature(native_forward)
    names = list(signature.parameters)[1:]

    @functools.wraps(native_forward)
    def forward(self: Any, *args: Any, num_items_in_batch: torch.Tensor | int | None = None, **kwargs: Any) -> Any:
        unadvanced = self.scheduled and self.progress is None
        # Multiply-adds are counted on a twin, mostly on meta, in training mode but without training.
        counted_only = self.only_counted or self.device.type == "meta"
        if unadvanced and self.training and torch.is_grad_enabled() and not counted_only:
            raise ValueError(
                f"the methods {[method.name for method, _ in parts_of(self.methods, Schedule)]} follow the progress of "
                "training: pass Trainer(callbacks=[VariantCallback()]), or call model.advance(step, total_steps) before "
                "each step"
            )
        inputs = kwargs
        if args:  # name them, so that labels passed by position are recognised
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
        if trained and not counted_only:
            if self.skips:
                outputs = _reach_a_parameter(self, outputs)
            _add_auxiliary_loss(self, outputs, inputs, seen)
        if num_items_in_batch is None or labels is None:
            return outputs
        counted = ((labels[..., 1:] if self.shifts_labels else labels) != -100).sum()
        mean = outputs[0] if isinstance(outputs, tuple) else outputs.loss
        loss = torch.where(counted > 0, mean * (counted / num_items_in_batch), 0)  # the mean over no labels is NaN
        if isinstance(outputs, tuple):
            return (loss, *outputs[1:])
        outputs.loss = loss
        return outputs

    return forward


def _reach_a_parameter(model: Any, outputs: Any) -> Any:
    """Give one parameter a gradient of zero if the step has left out every trainable one: torch raises an error for a loss
    without gradient, and DistributedDataParallel would wait for it."""
    named = dict(enumerate(outputs)) if isinstance(outputs, tuple) else outputs
    floating = [name for name, value in named.items() if torch.is_tensor(value) and value.is_floating_point()]
    # The loss comes first. If there is none, the caller computes it from one of the others.
    if not floating or named[floating[0]].requires_grad:
        return outputs
    least = min((p for p in model.parameters() if p.requires_grad), key=torch.Tensor.numel, default=None)
    if least is None:
        return outputs
    for name in floating:
        if not named[name].requires_grad:
            named[name] = named[name] + 0.0 * _unsharded(least.sum())
    return tuple(named.values()) if isinstance(outputs, tuple) else outputs


def _unsharded(value: Any) -> torch.Tensor:
    """A number that was computed from parameters in shards (FSDP2), outside of the layers that put them together, as a tensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _add_auxiliary_loss(model: Any, outputs: Any, inputs: dict[str, Any], seen: dict[str, torch.Tensor]) -> None:
    """Add the terms of methods to `outputs.loss`, if there is one. For losses that are computed outside, return them as
    `auxiliary_loss`, and as `label_weight` the factor on the loss of the labels if it is not 1.

    Raises ValueError if the last gradients came from a loss that left the terms out.
    """
    adding = [method.name for method, _ in parts_of(model.methods, Objective)]
    if adding and isinstance(outputs, tuple):
        raise ValueError(f"the methods {adding} add a term to the loss, which needs return_dict=True")
    added = model.auxiliary_loss(Step(inputs=inputs, outputs=outputs, seen=seen))
    if added is None:
        return
    added = _unsharded(added)
    if model.reached is None:
        model.reached = set()
    forgotten = model.reached == {"outputs"}
    model.reached.clear()
    if forgotten:
        raise ValueError(
            f"the methods {adding} add a term to the loss, and the last step was trained without it: a loss of your own must "
            "add outputs['auxiliary_loss'] (label_smoothed_loss of hf_freeze.training does; the Trainer's "
            "label_smoothing_factor does not)"
        )
    if added.requires_grad:
        reached: set[str] = model.reached
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
    """Whether the output module can compute the loss of plain labels without the logits of every token."""
    if model.needs_teacher:
        return False
    plain = inputs.get("shift_labels") is None and not torch.is_tensor(inputs.get("logits_to_keep", 0))
    return plain and not inputs.get("logits_to_keep") and isinstance(model.get_output_embeddings(), AdaptiveSoftmax)


def _forward_without_logits(model: Any, native_forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """The native outputs with a loss, but without logits: None, or left out of a tuple."""
    labels = inputs["labels"]
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    if model.config.is_encoder_decoder:  # as the native forward does for labels
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
