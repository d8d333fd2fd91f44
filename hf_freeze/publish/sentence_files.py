"""What lies beside a model: how it reads images or sound, and what sentence-transformers writes: how token vectors become one."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import nn

_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "[0-9]_*/*")


_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_EXPORTED = "hf_freeze.publish.sentence_module.ExportedEncoder"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def copy_sentence_files(source: str | os.PathLike[str], target: Path, *, exported: bool = False) -> None:
    """Copy those of sentence-transformers from a directory or Hub id, if it has them. `exported`: an engine computes the vectors
    of tokens, through a module of hf_freeze."""
    root = _folder(source, _FILES)
    if not (root / "modules.json").is_file():
        return
    _copy(root, target, _FILES)
    if exported:
        modules = _json(target / "modules.json")
        modules[0]["type"] = _EXPORTED
        (target / "modules.json").write_text(json.dumps(modules, indent=2), encoding="utf-8")


def read_sentence_files(source: str | os.PathLike[str]) -> dict[str, Any]:
    """How a directory or Hub id makes one vector of those of the tokens; {} if it has no files of sentence-transformers.

    "mode": of pooling, such as "mean" or "cls"; several with + between them. "dense": (weight, bias, activation) of each linear
    after it. "prompt": what is put before each text. "longest": tokens of a text. "lower": whether texts are in small letters.
    """
    root = _folder(source, _FILES)
    modules = _json(root / "modules.json")
    if not modules:
        return {}
    settings, prompts = _json(root / "sentence_bert_config.json"), _json(root / "config_sentence_transformers.json")
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name"), "")
    found: dict[str, Any] = {"mode": "mean", "dense": [], "prompt": prompt}
    found |= {"longest": settings.get("max_seq_length"), "lower": settings.get("do_lower_case", False)}
    for module in modules:
        folder, kind = root / module["path"], module["type"].rpartition(".")[2]
        config = _json(folder / "config.json")
        if kind == "Pooling":
            names = [name for name in _MODES if config.get(_MODES[name])]
            found["mode"] = config.get("pooling_mode") or "+".join(names) or "mean"
        elif kind == "Dense":
            weights = load_file(folder / "model.safetensors")
            activation = getattr(nn, config.get("activation_function", "Identity").rpartition(".")[2])()
            found["dense"].append((weights["linear.weight"], weights.get("linear.bias"), activation))
    return found


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def copy_processors(source: str | os.PathLike[str], target: Path) -> None:
    """Copy the settings of the image processor or feature extractor from a directory or Hub id, if it has them."""
    _copy(_folder(source, _PROCESSORS), target, _PROCESSORS)


def _folder(source: str | os.PathLike[str], patterns: tuple[str, ...]) -> Path:
    root = Path(source)
    return root if root.is_dir() else Path(snapshot_download(os.fspath(source), allow_patterns=list(patterns)))


def _copy(root: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for path in root.glob(pattern):
            if path.is_file():
                (target / path.relative_to(root)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target / path.relative_to(root))
