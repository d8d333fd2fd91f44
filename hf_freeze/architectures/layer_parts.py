"""Names of parts of a layer that are smaller than a component: a kind of attention ("self", "cross"), a projection of all
attentions ("q", "k", "v", "o"), or a projection of one kind ("cross.k")."""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import translate
from typing import Any

from hf_freeze.architectures.base import Architecture

ROLES = ("q", "k", "v", "o")
Part = tuple[str, str]  # (kind, role)


class AttentionParts:
    """Tells the kind and the role of parameters in attentions."""

    def __init__(self, architecture: Architecture) -> None:
        self._patterns: list[tuple[re.Pattern[str], Part]] = []
        for stack in architecture.stacks.values():
            for kind, attention in stack.attentions.items():
                for linear in attention.linears:
                    pattern = re.compile(rf"{stack.layer_pattern}\.{re.escape(linear)}\..+")
                    self._patterns.append((pattern, (kind, attention.roles(linear)[0])))
                for other in attention.others:
                    self._patterns.append((re.compile(rf"{stack.layer_pattern}\.{translate(other)}"), (kind, "")))

    def of(self, name: str) -> Part:
        """(kind, role) of the parameter `name`, below the base model; of fused projections, the first role. The role is "" for
        parameters beside the projections, the kind too where no description tells it."""
        return next((part for pattern, part in self._patterns if pattern.fullmatch(name)), ("", ""))


def named_by(names: Iterable[str], part: Part) -> str | None:
    """The first of `names` that names this part of an attention; None if none does. "attention" names all parts."""
    kind, role = part
    spellings = {"attention", *filter(None, (kind, role, kind and role and f"{kind}.{role}"))}
    return next((name for name in names if name in spellings), None)


def check_parts(
    settings: Mapping[str, Any],
    others: Collection[str],
    architecture: Architecture,
    config: Any,
    owner: str,
    stacks: Collection[str] | None = None,
) -> None:
    """Raise ValueError unless each name in `settings` (name -> its setting) names parts of attentions in `stacks` (None: all), or
    is one of `others`; if two of them name the same part; or if they set parts differently that lie in one matrix.

    `owner`: the setting, as text, for the message.
    """
    attentions = [
        (kind, attention)
        for name, stack in architecture.stacks.items()
        for kind, attention in stack.attentions_in(config).items()
        if stacks is None or name in stacks
    ]
    parts = list(dict.fromkeys((kind, role) for kind, _ in attentions for role in ROLES))
    kinds = list(dict.fromkeys(kind for kind, _ in attentions))
    for name in settings:
        if name not in others and not any(named_by([name], part) for part in parts):
            choices = [*others, *kinds, *(ROLES if kinds else ())]
            raise ValueError(
                f"{owner}: no part {name!r} in the layers of {architecture.model_type}; choose from {choices}"
                + (f", or a kind with a projection such as '{kinds[0]}.q'" if kinds else "")
            )
    for part in parts:
        naming = [name for name in settings if named_by([name], part)]
        if len(naming) > 1:
            raise ValueError(
                f"{owner}: {naming[0]!r} and {naming[1]!r} both name {'.'.join(part)!r}; leave one of them out"
            )
    for kind, attention in attentions:
        for linear in attention.linears:
            roles = attention.roles(linear)
            names = [named_by(settings, (kind, role)) for role in roles]
            if len({None if name is None else settings[name] for name in names}) > 1:
                raise ValueError(
                    f"{owner}: {', '.join(roles)} of {kind!r} are one matrix in {architecture.model_type}, {linear!r}; give "
                    "all of them one setting"
                )
