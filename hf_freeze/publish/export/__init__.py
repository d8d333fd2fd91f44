"""Models for other engines: CTranslate2, ONNX Runtime, and plain transformers without hf_freeze.

from hf_freeze.publish.export import CTranslate2Translator, export_model

folder = export_model("runs/theseus/row-0-seed-1/model", "ctranslate2", quantization="int8")
CTranslate2Translator(folder)("Guten Morgen")                       # [{"translation_text": "good morning"}]
"""

from hf_freeze.publish.export.convert import export_model as export_model
from hf_freeze.publish.export.ctranslate2 import CTranslate2Translator as CTranslate2Translator
from hf_freeze.publish.export.onnx import OnnxTranslator as OnnxTranslator
