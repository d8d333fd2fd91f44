"""Names of earlier versions: modules and functions that are in the laboratory now. They work, with a warning, until 0.2."""

import importlib
import importlib.abc
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_DATA = "blocks builtin cache conll csv_files hub idx masking questions tables text tokens"
_TRAINING = "classification decoding masked_lm precision question_answering regression token_classification trainer"
_COMMANDS = "init places recipes report run score search"
_MODULES = {  # old name of a module, or of a package and all in it -> new name
    "hf_freeze.experiments": "hf_freeze.lab",
    "hf_freeze.metrics": "hf_freeze.lab.metrics",
    "hf_freeze.cli.terminal": "hf_freeze.terminal",
    **{
        f"hf_freeze.{room}.{module}": f"hf_freeze.lab.{room}.{module}"
        for room, modules in (("data", _DATA), ("training", _TRAINING), ("cli", _COMMANDS))
        for module in modules.split()
    },
}
_NAMES = {  # package -> what it held, and the package of the same name in the laboratory holds
    "hf_freeze.data": "Masking Progress Texts TokenDataset builtin_corpus builtin_tenses cached_blocks load_hub_labelled "
    "load_hub_parallel load_hub_questions load_hub_text masked_blocks read_conll read_idx read_images read_labelled read_pairs "
    "read_parallel read_race read_squad read_table read_text text_blocks tokenise tokenizer_for",
    "hf_freeze.training": "ClassificationTrainer MaskedTokenTrainer RegressionTrainer TokenBatchTrainer teacher_translations",
}


def moved_name(package: str, name: str) -> Any:
    """For `__getattr__` of a package: what it held under this name. Raises AttributeError."""
    if name not in _NAMES[package].split():
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    new = package.replace("hf_freeze.", "hf_freeze.lab.", 1)
    _warn(f"{package}.{name}", f"{new}.{name}", stacklevel=4)
    return getattr(importlib.import_module(new), name)


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module by its old name: the same module, not a copy of it."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("hf_freeze."):
            return None
        parts = fullname.split(".")
        olds = (".".join(parts[:count]) for count in range(2, len(parts) + 1))
        old = next((old for old in olds if old in _MODULES), None)
        return None if old is None else ModuleSpec(fullname, self, origin=_MODULES[old] + fullname.removeprefix(old))

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        _warn(spec.name, spec.origin, stacklevel=3)
        sys.modules[spec.name] = importlib.import_module(spec.origin)


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is {new} now; the old name works until 0.2", DeprecationWarning, stacklevel)


def find_moved_modules() -> None:
    """From now on, old names of modules can be imported."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(
            0, _Moved()
        )  # before the finder that would import the files of the new package a second time
