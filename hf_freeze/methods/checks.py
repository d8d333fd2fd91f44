"""Checks of settings that several methods share. Each raises a one-line ValueError with the owner, the field, its value and the
limit or the choices. `owner` is the name of the method (or function) whose field is checked.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any


def wrong(method: Any, reason: str, *fields: str) -> ValueError:
    """The error for what these fields of a method are: `LowRank(rank=0): must be at least 1`."""
    setting = ", ".join(f"{field}={getattr(method, field)!r}" for field in fields)
    return ValueError(f"{type(method).__name__}({setting}): {reason}")


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float. A bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_fields(method: Any, **checks: Callable[[Any, str, str], Any]) -> None:
    """Apply to each field its check, with the value, the name of the class and that of the field. None passes if it is the
    default. The fields `seed`, `begin` and `end` mean the same in all methods, and are checked in any case."""
    defaults = {field.name: field.default for field in fields(method)}
    owner = type(method).__name__
    if "seed" in defaults:
        check_seed(method.seed, owner)
    if {"begin", "end"} <= defaults.keys():
        check_training_span(method.begin, method.end, owner)
    for field, check in checks.items():
        if (value := getattr(method, field)) is not None or defaults[field] is not None:
            check(value, owner, field)


def one_of(choices: Iterable[Any]) -> Callable[[Any, str, str], None]:
    """For `check_fields`: a check that the value is one of `choices`."""
    return lambda value, owner, field: check_choice(value, choices, owner, field)


def number_in(least: float, most: float) -> Callable[[Any, str, str], None]:
    """For `check_fields`: a check that the value is a number in `least`..`most`."""
    return lambda value, owner, field: check_number(value, least, most, owner, field)


def check_choice(value: Any, choices: Iterable[Any], owner: str, field: str) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{owner}({field}={value!r}): choose from {choices}")


def check_bool(value: Any, owner: str, field: str) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}({field}={value!r}): must be True or False")


def check_one_given(owner: str, **settings: Any) -> None:
    """Raise ValueError unless exactly one of `settings` is not None."""
    if sum(value is not None for value in settings.values()) != 1:
        shown = ", ".join(f"{field}={value!r}" for field, value in settings.items())
        raise ValueError(f"{owner}({shown}): give one of them")


def check_integer(value: Any, least: int, owner: str, field: str) -> int:
    """Return `value`. Raises ValueError unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}({field}={value!r}): must be an integer of at least {least}")
    return value


def check_positive(value: Any, owner: str, field: str) -> int:
    """Return `value`. Raises ValueError unless it is an integer of at least 1."""
    return check_integer(value, 1, owner, field)


def check_positive_list(values: Any, owner: str, field: str) -> list[int]:
    """Return `values` as a list. Raises ValueError unless they are a list or tuple of integers of at least 1, and not empty."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{owner}({field}={values!r}): must be a list of integers such as [1, 4, 4, 1]")
    return [check_positive(value, owner, f"{field}[{position}]") for position, value in enumerate(values)]


def check_number(value: Any, least: float, most: float, owner: str, field: str) -> None:
    """Raise ValueError unless `value` is a number in `least`..`most`."""
    if not is_number(value) or not least <= value <= most:
        raise ValueError(f"{owner}({field}={value!r}): must be a number in {least:g}..{most:g}")


def check_seed(seed: Any, owner: str) -> None:
    """Raise ValueError unless `seed` is an integer in 0..2^63-1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"{owner}(seed={seed!r}): must be an integer in 0..2^63-1")


def check_share(value: Any, owner: str, field: str, *, below_one: bool = False) -> None:
    """Raise ValueError unless `value` is a number in [0, 1], or in [0, 1) with `below_one`."""
    if not is_number(value) or not 0 <= value <= 1 or (below_one and value == 1):
        limits = "of at least 0 and below 1" if below_one else "in 0..1"
        raise ValueError(f"{owner}({field}={value!r}): must be a share {limits}")


def check_share_below_one(value: Any, owner: str, field: str) -> None:
    """Raise ValueError unless `value` is a number in [0, 1)."""
    check_share(value, owner, field, below_one=True)


def check_positive_share(value: Any, owner: str, field: str) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{owner}({field}={value!r}): must be a share in (0, 1]")


def check_training_span(begin: Any, end: Any, owner: str) -> None:
    """Raise ValueError unless `begin` and `end` are shares of training (None: 0 and 1) and `begin` is below `end`."""
    for field, share in (("begin", begin), ("end", end)):
        if share is not None and not (is_number(share) and 0 <= share <= 1):
            raise ValueError(f"{owner}({field}={share!r}): must be None or a share of training in 0..1")
    first, last = training_span(begin, end)
    if first >= last:
        raise ValueError(f"{owner}(begin={begin!r}, end={end!r}): begin must be below end (None: 0 and 1)")


def training_span(begin: float | None, end: float | None) -> tuple[float, float]:
    """(begin, end) as shares of training, with 0 and 1 instead of None."""
    return begin or 0.0, 1.0 if end is None else end


def is_ascending(numbers: Any) -> bool:
    """Whether `numbers` is a list of different integers of at least 0, in ascending order. An empty list is."""
    integers = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
    return integers and numbers == sorted(set(numbers))


def check_numbers_by_name(value: Any, owner: str, field: str, *, items: str, example: str) -> None:
    """Raise ValueError unless `value` is a dict of names and lists of different numbers in ascending order, none of them empty.

    `items`: the plural noun for these numbers, such as "heads"; `example`: such a dict, as text.
    """
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{owner}({field}={value!r}): must be a dict such as {example}")
    for name, numbers in value.items():
        if not numbers or not is_ascending(numbers):
            raise ValueError(
                f"{owner}({field}={{{name!r}: {numbers!r}}}): must be a list of different {items}, at least one, in ascending "
                "order"
            )


def check_any_selected(selection: Any, layers: Any, owner: str) -> None:
    """Raise ValueError if `selection`, which the setting `layers` limits, is empty."""
    if not selection:
        raise ValueError(f"{owner}(layers={layers!r}) names no layer: leave it out for all")


def nearest_multiples(value: int, step: int) -> list[int]:
    """The multiples of `step` above 0 on both sides of `value`, which is none: choices for an error message."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple]
