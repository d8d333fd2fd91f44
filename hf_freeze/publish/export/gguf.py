"""Exports to GGUF, the files of llama.cpp (https://github.com/ggml-org/llama.cpp), by the package `gguf`.

llama.cpp computes a few native families. Methods are merged, then heads and neurons that are zero are left out: a layer may keep
fewer than another where llama.cpp can hold that, and else all keep as many as the layer that needs most.
"""

from pathlib import Path
from typing import Any

from hf_freeze.publish.export import gguf_model, gguf_tokens
from hf_freeze.publish.export.folders import Export, Format, require
from hf_freeze.publish.export.llama_cpp import FILE
from hf_freeze.publish.export.zero_parts import without_zeros
from hf_freeze.publish.sentence_files import read_sentence_files

_TYPES = ("f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_FLOATS = ("position_embd.weight", "token_types.weight")  # llama.cpp reads them in fp32


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError if llama.cpp computes such a model otherwise, or has no such tokenizer."""
    gguf, model = require("gguf", "gguf"), export.model.float()
    family = gguf_model.check(model)
    if (window := gguf_model.ignored_window(model.config)) is not None:
        export.say(f"llama.cpp lets this model look back at all tokens, not {window}: longer texts get other outputs")
    layers = gguf_model.Layers.of(model)
    arch = family.arch_for(layers, model.config.hidden_size)
    writer = gguf.GGUFWriter(folder / FILE, arch)
    kind = gguf.GGMLQuantizationType[(export.quantization or "f32").upper()]
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if export.quantization is None else 'MOSTLY'}_{kind.name}"])
    sentence = read_sentence_files(export.source) if export.task == "feature-extraction" else {}
    gguf_model.add_settings(writer, model, export.task, layers, sentence)
    gguf_tokens.add_tokens(writer, export.tokenizer, model)
    export.say(f"writing {FILE}")
    wide = []
    for name, values in gguf_model.tensors(model, family, arch, layers):
        data, stored = values.contiguous().numpy(), kind
        if data.ndim < 2 or name in _FLOATS:
            stored = gguf.GGMLQuantizationType.F32
        elif data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            stored = gguf.GGMLQuantizationType.F16
            wide.append(name)
        writer.add_tensor(name, gguf.quants.quantize(data, stored), raw_dtype=stored)
    if wide:
        export.say(
            f"{len(wide)} tensors are in f16, such as {wide[0]}: their rows are no multiple of 32, as {kind.name} needs"
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _cut(model: Any) -> Any:
    """The merged model without zero heads and neurons, as far as llama.cpp holds that."""
    family = gguf_model.FAMILIES[model.config.model_type]
    uneven = family.uneven is not None
    return without_zeros(model, uneven=uneven, heads=family.heads or uneven)


FORMAT = Format(
    write,
    packages=("gguf",),
    quantizations=_TYPES,
    tasks={kind: family.tasks for kind, family in gguf_model.FAMILIES.items()},
    needs_tokenizer=True,
    keeps_structure=False,
    after_merge=_cut,
)
