"""Models for other engines: ONNX Runtime, OpenVINO, torch.export, AOTInductor, ExecuTorch, CTranslate2, llama.cpp, web
browsers, and transformers without hf_freeze.

from hf_freeze.publish.export import CTranslate2Translator, export_model

folder = export_model("runs/theseus/row-0-seed-1/model", "ctranslate2", quantization="int8")
CTranslate2Translator(folder)("Guten Morgen")                   # [{"translation_text": "good morning"}]
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_freeze.publish.export.convert import export_model as export_model
    from hf_freeze.publish.export.ctranslate2 import CTranslate2Translator as CTranslate2Translator
    from hf_freeze.publish.export.onnx import OnnxTranslator as OnnxTranslator

# Public name -> the module that is imported when the name is first used: what opens a folder must not import what writes one.
_MODULES = {
    "export_model": "hf_freeze.publish.export.convert",
    "CTranslate2Translator": "hf_freeze.publish.export.ctranslate2",
    "OnnxTranslator": "hf_freeze.publish.export.onnx",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value
