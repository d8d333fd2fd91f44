"""Invariant 5 of `generate`: neither the cache nor padding changes the result."""

from typing import Any

import torch
import transformers
from packaging.version import Version

from support.models import differences

# Beam search then counts the scores of native models by `vocab_size`, which is that of the source.
OLD_BEAMS = Version(transformers.__version__) < Version("5.18")


def generation_problems(
    model: Any,
    batch: dict[str, torch.Tensor],
    widths: tuple[int, ...] = (1, 3),
    tokens: int = 4,
    *,
    apart: bool = True,
) -> list[str]:
    """Invariant 5 of `generate`: the cache and the padding change nothing, in greedy and in beam search.

    `apart`: which of the two does is told. Else one comparison finds either, with a sentence that has neither of them.
    """
    model.eval()
    if OLD_BEAMS and getattr(model.config, "decoder_vocab_size", None) not in (None, model.config.vocab_size):
        widths = tuple(beams for beams in widths if beams == 1)
    sentences = [
        ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]  # of unequal lengths
    states = {name: value for name, value in batch.items() if name.startswith("encoder_")}  # for cross-attention
    # Alone, a sentence that is padded in the batch has no padding, and no other beside it.
    padded = [row for row, ids in enumerate(sentences) if len(ids) < max(map(len, sentences))]
    assert padded
    problems: list[str] = []
    for beams in widths:
        cached = _generate(model, sentences, tokens, num_beams=beams, **states)
        pairs = {}
        if apart:
            uncached = _generate(model, sentences, tokens, num_beams=beams, use_cache=False, **states)
            pairs["without cache"] = uncached, cached
        for row in padded:
            rest = {name: value[row : row + 1] for name, value in states.items()}
            alone = _generate(model, [sentences[row]], tokens, num_beams=beams, use_cache=apart, **rest)
            pairs[f"row {row} alone"] = (alone, cached[:, row : row + 1])
        for name, (actual, expected) in pairs.items():
            found = differences({"scores": actual}, {"scores": expected}, 1e-4)
            problems += [f"{beams} beams, {name}: {problem}" for problem in found]
    return problems


def _generate(model: Any, sentences: list[torch.Tensor], tokens: int, **arguments: Any) -> torch.Tensor:
    """Scores of the tokens of `generate`, (tokens, sentences, vocabulary); of beams, the best one's tokens and score."""
    length = max(map(len, sentences))
    pad = model.config.pad_token_id or 0
    rows, masks = [], []
    for sentence in sentences:
        fill, ones = torch.full((length - len(sentence),), pad), torch.ones(len(sentence), dtype=torch.long)
        left = not model.config.is_encoder_decoder  # the last token of each prompt must be a real one
        rows.append(torch.cat([fill, sentence] if left else [sentence, fill]))
        masks.append(torch.cat([0 * fill, ones] if left else [ones, 0 * fill]))
    result = model.generate(
        torch.stack(rows),
        attention_mask=torch.stack(masks),
        pad_token_id=pad,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **({"use_cache": True} | arguments),
    )
    assert (result.past_key_values is not None) == arguments.get("use_cache", True), "the cache was not switched"
    new = result.sequences[:, -tokens:].T  # (tokens, sentences)
    if arguments["num_beams"] == 1:
        return torch.cat([new[..., None].float(), torch.stack(result.logits)], dim=-1)
    return torch.stack([new.float(), result.sequences_scores.expand_as(new)], dim=-1)
