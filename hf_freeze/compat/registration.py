"""Enters the model types of hf_freeze and its pipelines in transformers, at the moment when transformers' own are imported.

Nothing here imports torch or a model of transformers, so that `import hf_freeze` costs little. It does not matter which of the
two packages is imported first.
"""

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

Makers = Mapping[str, Callable[[str], Any]]


def register_when_imported(makers: Makers) -> None:
    """Have transformers know the model types of `makers` and the pipelines of `compat/pipelines.py`, now or once it is imported.

    `makers`: model type, or a prefix of model types that ends in `_` -> the function that gives the config class of a type.
    """
    if find_spec("transformers") is None:  # where only what `hf_freeze.runtime` needs is installed
        return
    from wrapt import register_post_import_hook

    register_post_import_hook(
        lambda module: make_configs_late(module.CONFIG_MAPPING, makers), "transformers.models.auto.configuration_auto"
    )
    # By its name: the hook also runs while `compat/pipelines.py` itself imports transformers.pipelines.
    register_post_import_hook(lambda _: importlib.import_module("hf_freeze.compat.pipelines"), "transformers.pipelines")


def make_configs_late(mapping: Any, makers: Makers) -> None:
    """Have transformers' `CONFIG_MAPPING` ask `makers` for the config class of a model type when it is asked for one."""
    mapping._extra_content = _LateConfigs(mapping, makers)


class _LateConfigs(dict[str, Any]):
    """Model type -> config class, of those registered; `makers` make and register more when they are asked for."""

    def __init__(self, mapping: Any, makers: Makers) -> None:
        super().__init__(mapping._extra_content)
        self.native, self.makers = mapping._mapping, makers

    def _maker(self, key: Any) -> Callable[[str], Any] | None:
        for name, make in self.makers.items():
            is_prefix = name.endswith("_") and isinstance(key, str) and key.startswith(name)
            if key[len(name) :] in self.native if is_prefix else key == name:
                return make
        return None

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._maker(key) is not None

    def __missing__(self, key: str) -> Any:
        if (make := self._maker(key)) is None:
            raise KeyError(key)
        return make(key)
