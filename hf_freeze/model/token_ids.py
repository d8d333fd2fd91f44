"""Token ids in the settings of a model, after methods have removed tokens and renumbered the others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.shrink import is_token_field
from hf_freeze.architectures.token_numbers import fixed_numbers
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import KeptTokens, parts_of
from hf_freeze.model.config import native_config


def renumber_token_ids(settings: Any, methods: Iterable[Method], vocabulary: int) -> None:
    """Renumber the token ids in `settings`, the config or generation config of a model, in place; in configs inside it too.

    `vocabulary`: number of ids before. Forbidden or biased sequences with a removed id are dropped: they can no longer occur.
    Languages and tasks whose token is removed are dropped too. Ids outside the vocabulary, as in some configs on the Hub, stay.

    Raises ValueError if a field such as `pad_token_id` names a removed id.
    """
    for method, part in parts_of(methods, KeptTokens):
        numbers = dict(zip(part.kept, range(len(part.kept)), strict=True))
        for inner in _with_configs_inside(settings):
            _renumber(inner, numbers, vocabulary, method)
        vocabulary = len(part.kept)


def _with_configs_inside(settings: Any) -> Iterator[Any]:
    yield settings
    for name in getattr(settings, "sub_configs", ()):
        if hasattr(inner := getattr(settings, name, None), "to_dict"):
            yield from _with_configs_inside(inner)


def _renumber(settings: Any, numbers: Mapping[int, int], vocabulary: int, method: Method) -> None:
    for name in settings.to_dict():
        value: Any = getattr(settings, name, None)
        if value is None:
            continue
        if is_token_field(name):
            new: Any = [_number(name, token, numbers, vocabulary, method) for token in _listed(value)]
            setattr(settings, name, type(value)(new) if isinstance(value, list | tuple) else new[0])
        elif name in ("suppress_tokens", "begin_suppress_tokens"):
            setattr(settings, name, [numbers[token] for token in value if token in numbers] or None)
        elif name in ("bad_words_ids", "force_words_ids"):
            setattr(settings, name, [new for tokens in value if (new := _sequence(tokens, numbers))] or None)
        elif name == "sequence_bias":  # {(5, 3): -1.0}, or [[[5, 3], -1.0]] once it was JSON
            pairs = value.items() if isinstance(value, dict) else value
            biased = [[new, bias] for tokens, bias in pairs if (new := _sequence(tokens, numbers))]
            setattr(settings, name, biased or None)
        elif name == "forced_decoder_ids":  # [[position, token]]
            forced = [[place, _number(name, token, numbers, vocabulary, method)] for place, token in value]
            setattr(settings, name, forced)
        elif name in ("lang_to_id", "task_to_id", "text_decoder_lang_to_code_id"):
            setattr(settings, name, {key: numbers[token] for key, token in value.items() if token in numbers})


def named_token_ids(settings: Any, vocabulary: int) -> set[int]:
    """The ids below `vocabulary` that fields such as `pad_token_id` of `settings`, a config or generation config, name."""
    ids = set()
    for inner in _with_configs_inside(settings):
        for name in inner.to_dict():
            value: Any = getattr(inner, name, None)
            if is_token_field(name) and value is not None:
                ids |= {token for token in _listed(value) if token is not None and 0 <= token < vocabulary}
    return ids


def fixed_token_ids(config: Any) -> dict[str, int]:
    """Field -> id, of the tokens of a model with this `config` that must keep their numbers; see `fixed_numbers`."""
    return fixed_numbers(native_config(config), architecture_of(config).token_tables)


def check_fixed_token_ids(config: Any, methods: Iterable[Method]) -> None:
    """Raise ValueError if a method gives another number to a token that a trained model with this `config` computes with."""
    for method, part in parts_of(methods, KeptTokens):
        kept = set(part.kept)
        least = next(number for number in range(len(kept) + 1) if number not in kept)
        if least == len(kept):
            continue  # all keep their numbers
        native = native_config(config)
        for field, number in fixed_numbers(native, architecture_of(config).token_tables, least).items():
            raise ValueError(
                f"method {method.name!r}: {native.model_type} computes with the number {number} of {field}, so keep must have "
                f"all ids up to it; it lacks {[token for token in range(number + 1) if token not in kept]}"
            )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _number(name: str, token: Any, numbers: Mapping[int, int], vocabulary: int, method: Method) -> Any:
    if token is None or token in numbers or not 0 <= token < vocabulary:
        return numbers.get(token, token)
    raise ValueError(
        f"method {method.name!r}: the token {token}, {name} of the model, is not kept; the special tokens of the config must be"
    )


def _sequence(tokens: Sequence[Any], numbers: Mapping[int, int]) -> list[Any] | None:
    """The new ids of a sequence, or of a list of sequences; None if one is removed."""
    new = [_sequence(token, numbers) if isinstance(token, list) else numbers.get(token) for token in tokens]
    return None if None in new else new


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
