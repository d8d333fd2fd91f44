"""Token ids that a native model computes with, so that these tokens must keep their numbers."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_freeze.architectures.fields import change
from hf_freeze.architectures.probe import Probe, difference, on_cpu
from hf_freeze.architectures.roles import has_module
from hf_freeze.architectures.shrink import config_key, shrink, token_fields
from hf_freeze.compat.transformers import quiet

_HARD_CODED = 5  # ids below this may stand in the code of a family: MPNet takes 1 for padding, whatever its config says
_LARGEST = 20  # a small model has few positions
_APART = 30  # added to the ids of a probe's inputs, so that none of them is one of the numbers above
_OTHER = 70  # a token that is in no input
_SAME = 1e-4


def fixed_numbers(config: Any, tables: Iterable[str], least: int = 0) -> dict[str, int]:
    """Field -> id, of the tokens from `least` on that the model of a native `config` does not only compare ids with. In RoBERTa,
    positions count from `pad_token_id`. Ids that a family has in its code are under "its code". `tables`: its token tables.

    Found with small models: the same weights with another number in a field compute something else, though no input holds the
    token; or the same token at a hard-coded number does.
    """
    fields = {name: number for name, number in token_fields(config).items() if number > least}
    small = shrink(config)
    key = config_key(small), str(fields), least
    if key not in _KNOWN:
        with quiet(), torch.random.fork_rng(devices=[]), on_cpu(), torch.no_grad():
            fixed: dict[str, int] = {}
            if _moves(small, fields):  # all at once first: in most families none matters
                fixed = {name: number for name, number in fields.items() if _moves(small, {name: number})}
            coded = [number for number in range(least, _HARD_CODED) if _is_coded(small, tables, number)]
        _KNOWN[key] = fixed | ({"its code": coded[-1]} if coded else {})
    return _KNOWN[key]


_KNOWN: dict[Any, dict[str, int]] = {}


def _moves(small: Any, fields: dict[str, int]) -> bool:
    """Whether the outputs change with the numbers in `fields`."""
    numbers = {name: min(number, _LARGEST) for name, number in fields.items()}
    try:
        before = _outputs(Probe(change(small, **numbers)))
        after = _outputs(Probe(change(small, **{name: number - 1 for name, number in numbers.items()})))
    except Exception:  # whatever the native class raises for a number beyond its positions
        return True
    return _differ(before, after)


def _is_coded(small: Any, tables: Iterable[str], number: int) -> bool:
    """Whether a token computes something else with this number, which no field of the config holds."""
    try:
        probe = Probe(change(small, **dict.fromkeys(token_fields(small), _LARGEST)))
    except Exception:  # whatever the native class raises for these numbers, of which `_moves` tells
        return False
    before = _outputs(probe, number)
    present = [probe.model.get_submodule(name).weight for name in tables if has_module(probe.model, name)]
    with probe.changed():
        for weight in {id(weight): weight for weight in present}.values():  # tied ones once
            weight[[number, _OTHER]] = weight[[_OTHER, number]]
        return _differ(before, _outputs(probe, _OTHER))


def _outputs(probe: Probe, token: int | None = None) -> list[torch.Tensor]:
    """All outputs for inputs without low ids; the second token of each is `token`."""
    ids = {name: value + _APART for name, value in probe.inputs.items() if name.endswith("input_ids")}
    for value in ids.values():
        value[:, 1] = value[:, 1] if token is None else token
    return list(_tensors(probe.model(**probe.inputs | ids)))


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    for value in outputs.values() if isinstance(outputs, dict) else outputs:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value.float()


def _differ(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return any(difference(b, a) > _SAME for a, b in zip(after, before, strict=True))
