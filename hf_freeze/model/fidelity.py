"""How far a model is from the one that it was made of: their outputs on the same inputs, without labels."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_freeze.model.running import in_eval_mode, on_device, without_cache


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Means over the real tokens, or over the texts where there is one output for each.

    `score`: from 0 to 1, how faithful the model is as it is served: `analysis.answers` says by what, for each task. `intervals`:
    of 95 %, by the name of the field. `compared`, `left_out`: inputs. These are of `analysis.answers.compare_answers` alone, as
    `error` is of `fidelity_on`.

    `kl`: KL(original ‖ variant) of next-token or class probabilities, in nats. `agreement`: share of equal top choices.
    `perplexity`: of the variant on the next tokens, where the model predicts them; `original_perplexity` likewise. `cosine`: of
    hidden states or sentence vectors, for models without a head. `error`: ‖variant − original‖² / ‖original‖² of the raw outputs.
    What does not apply is None.
    """

    error: float | None = None
    score: float | None = None
    kl: float | None = None
    agreement: float | None = None
    cosine: float | None = None
    perplexity: float | None = None
    original_perplexity: float | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    compared: int = 0
    left_out: int = 0

    @property
    def distance(self) -> float:
        """One number to compare variants by, smaller is better: the KL, else 1 - cosine, else the error, else 1 - score."""
        if self.kl is not None:
            return self.kl
        if self.cosine is not None:
            return 1 - self.cosine
        return self.error if self.error is not None else 1 - (self.score or 0.0)

    def in_words(self, original: str, variant: str) -> list[tuple[str, ...]]:
        """(what, value, its interval) of each measure with one. `original`, `variant`: what they are called."""
        words = {
            "score": (f"fidelity of {variant} to {original}, 0 to 1", ".4f"),
            "kl": ("KL of the predictions (nats)", ".4g"),
            "agreement": ("same first choice", ".2%"),
            "cosine": ("cosine of the vectors", ".4f"),
            "perplexity": (f"perplexity of {variant}", ".4g"),
            "original_perplexity": (f"perplexity of {original}", ".4g"),
        }
        shown = [(words[name], getattr(self, name), self.intervals[name]) for name in words if name in self.intervals]
        return [
            (label, format(value, form), f"{format(low, form)} to {format(high, form)}")
            for (label, form), value, (low, high) in shown
        ]


def fidelity_on(original: Any, variant: Any, batches: Iterable[Mapping[str, Any]]) -> Fidelity:
    """See `Fidelity`. Both models in eval mode; `batches`: dicts of tensors for the forward."""
    sums: dict[str, float] = {}

    def add(**values: float) -> None:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value

    with (
        in_eval_mode(original),
        in_eval_mode(variant),
        without_cache(original),
        without_cache(variant),
        torch.no_grad(),
    ):
        for batch in batches:
            first, second = (model(**on_device(model, batch)) for model in (original, variant))
            (a, kind), (b, _) = compared_output(first), compared_output(second)
            if a.shape != b.shape:
                raise ValueError(
                    f"the models give different outputs, of the shapes {tuple(a.shape)} and {tuple(b.shape)}: compare models of "
                    "the same task and vocabulary"
                )
            rows = real_tokens(batch, a).to(a.device)
            b = b.to(a.device)
            x, y = a[rows].double(), b[rows].double()
            add(count=len(x), error=float((y - x).square().sum()), size=float(x.square().sum()))
            if kind == "states":
                add(cosine=float(torch.cosine_similarity(x, y, dim=-1).sum()))
            elif x.shape[-1] > 1:
                p, q = x.log_softmax(-1), y.log_softmax(-1)
                add(kl=float((p.exp() * (p - q)).sum()), agreement=float((p.argmax(-1) == q.argmax(-1)).sum()))
                if (targets := _next_tokens(original, batch, a)) is not None:
                    known = targets.to(a.device) >= 0
                    labels = targets.to(a.device)[known][:, None]
                    add(
                        labels=len(labels),
                        nats=-float(b[known].double().log_softmax(-1).gather(-1, labels).sum()),
                        original_nats=-float(a[known].double().log_softmax(-1).gather(-1, labels).sum()),
                    )
    if not sums.get("count"):
        raise ValueError("no texts to compare the models on")
    means: dict[str, Any] = {name: sums[name] / sums["count"] for name in ("kl", "agreement", "cosine") if name in sums}
    if sums.get("labels"):
        means["perplexity"] = math.exp(min(sums["nats"] / sums["labels"], 700))
        means["original_perplexity"] = math.exp(min(sums["original_nats"] / sums["labels"], 700))
    return Fidelity(error=sums["error"] / max(sums["size"], 1e-300), **means)


def compared_output(result: Any) -> tuple[Tensor, str]:
    """What models are compared by, of a forward's result, and its kind: "logits", "states", or "other". Raises ValueError if it
    has none of them."""
    if result.get("logits") is not None:
        return result["logits"], "logits"
    if result.get("last_hidden_state") is not None:
        return result["last_hidden_state"], "states"
    if result.get("start_logits") is not None:
        return torch.stack([result["start_logits"], result["end_logits"]], -1), "other"
    raise ValueError(f"the model gives neither logits nor hidden states, only {list(result)}")


def real_tokens(batch: Mapping[str, Any], output: Tensor) -> Tensor:
    """bool, in the shape of `output` without its last axis: the tokens that are not padding."""
    shape = output.shape[:-1]
    labels = batch.get("labels")
    masks = (
        batch.get("decoder_attention_mask"),
        None if labels is None else labels != -100,
        batch.get("attention_mask"),
    )
    for mask in masks:
        if mask is not None and mask.shape == shape:
            return mask.bool()
    return torch.ones(shape, dtype=torch.bool)


def _next_tokens(model: Any, batch: Mapping[str, Any], logits: Tensor) -> Tensor | None:
    """(B, T) the token that each position predicts, -1 where there is none; None for models that predict no next tokens."""
    if not model.can_generate() or logits.dim() != 3:
        return None
    if model.config.is_encoder_decoder:
        if batch.get("labels") is not None:
            return batch["labels"].masked_fill(batch["labels"] < 0, -1)
        ids, mask = batch.get("decoder_input_ids"), batch.get("decoder_attention_mask")
    else:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or ids.shape != logits.shape[:2]:
        return None
    targets = torch.full_like(ids, -1)
    targets[:, :-1] = ids[:, 1:]
    return targets if mask is None else targets.masked_fill(mask.roll(-1, 1) == 0, -1)
