"""Token ids in the settings of a model, after methods have removed tokens and renumbered the others."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import KeptTokens, parts_of


def renumber_token_ids(settings: Any, methods: Iterable[Method], vocabulary: int) -> None:
    """Renumber the token ids in `settings`, the config or generation config of a model, in place.

    `vocabulary`: number of ids before. Forbidden or biased sequences with a removed id are dropped: they can no longer occur.
    Ids outside the vocabulary, as in some configs on the Hub, stay.

    Raises ValueError if a field such as `pad_token_id` names a removed id.
    """
    for method, part in parts_of(methods, KeptTokens):
        _renumber(settings, dict(zip(part.kept, range(len(part.kept)), strict=True)), vocabulary, method)
        vocabulary = len(part.kept)


def _renumber(settings: Any, numbers: Mapping[int, int], vocabulary: int, method: Method) -> None:
    for name in settings.to_dict():
        value: Any = getattr(settings, name, None)
        if value is None:
            continue
        if name.endswith("_token_id"):
            new: Any = [_number(name, token, numbers, vocabulary, method) for token in _listed(value)]
            setattr(settings, name, new if isinstance(value, list) else new[0])
        elif name in ("suppress_tokens", "begin_suppress_tokens"):
            setattr(settings, name, [numbers[token] for token in value if token in numbers] or None)
        elif name == "bad_words_ids":
            setattr(settings, name, [new for tokens in value if (new := _sequence(tokens, numbers))] or None)
        elif name == "sequence_bias":  # {(5, 3): -1.0}, or [[[5, 3], -1.0]] once it was JSON
            pairs = value.items() if isinstance(value, dict) else value
            biased = [[new, bias] for tokens, bias in pairs if (new := _sequence(tokens, numbers))]
            setattr(settings, name, biased or None)


def named_token_ids(settings: Any, vocabulary: int) -> set[int]:
    """The ids below `vocabulary` that fields such as `pad_token_id` of `settings`, a config or generation config, name."""
    ids = set()
    for name in settings.to_dict():
        value: Any = getattr(settings, name, None)
        if name.endswith("_token_id") and value is not None:
            ids |= {token for token in _listed(value) if 0 <= token < vocabulary}
    return ids


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _number(name: str, token: Any, numbers: Mapping[int, int], vocabulary: int, method: Method) -> Any:
    if token in numbers or not 0 <= token < vocabulary:
        return numbers.get(token, token)
    raise ValueError(
        f"method {method.name!r}: the token {token}, {name} of the model, is not kept; the special tokens of the config must be"
    )


def _sequence(tokens: Sequence[int], numbers: Mapping[int, int]) -> list[int] | None:
    return [numbers[token] for token in tokens] if all(token in numbers for token in tokens) else None


def resize_kept_tokens(methods: Sequence[Method], vocabulary: int, added: int) -> tuple[list[Method], int]:
    """(methods, vocabulary of the backbone) after the model has got `added` more (or fewer) ids at its end.

    New rows at the end of the model are new rows at the end of the backbone, which the methods keep; rows that are cut off are
    no longer kept.
    """
    new = list(methods)
    trimming = [(number, part) for number, method in enumerate(new) for _, part in parts_of([method], KeptTokens)]
    if not trimming:
        return new, vocabulary
    if added < 0:
        last, part = trimming[-1]
        new[last] = part.with_kept(list(part.kept)[:added])
        return new, vocabulary
    before = vocabulary
    for number, part in trimming:
        new[number] = part.with_kept([*part.kept, *range(before, before + added)])
        before = len(part.kept)
    return new, vocabulary + added
