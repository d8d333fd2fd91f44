"""Exports for web browsers: the folder that `@huggingface/transformers` 4 of npm opens with ONNX Runtime in WebAssembly.

    config.json   of the native model, by whose type transformers.js chooses a class
    onnx/         model.onnx; of a translator encoder_model.onnx and decoder_model_merged.onnx; each in one file, with its weights

Names of files in fp16 end in `_fp16`, in int8 in `_quantized`; transformers.js calls them the dtypes fp16 and q8. fp16 is for
storage: products are in fp32, as WebAssembly has none in fp16. Graphs are those of `onnx`, so what is smaller stays smaller.
Inputs and outputs have the names of optimum. transformers.js reads the shapes of the past from the file, so layers may have
different numbers of heads.

Shapes: B rows, S source tokens, H hidden size.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_freeze.architectures.registry import architecture_of
from hf_freeze.layers.recurrent import RecurrentAttention
from hf_freeze.model.config import native_config
from hf_freeze.publish.export import onnx_nodes
from hf_freeze.publish.export.caches import PAST, PRESENT
from hf_freeze.publish.export.comparison import largest_difference, tolerance
from hf_freeze.publish.export.engine_parts import Part, cross_attention, engine_parts, positions
from hf_freeze.publish.export.folders import Export, Format
from hf_freeze.publish.export.onnx import FORMAT as ONNX
from hf_freeze.publish.export.onnx import STORED, traced_parts, write_parts
from hf_freeze.publish.export.onnx_nodes import SMALL, computed
from hf_freeze.publish.export.runners import OnnxRunner
from hf_freeze.publish.sentence_files import read_sentence_files

SUFFIXES = {"fp32": "", "fp16": "_fp16", "int8": "_quantized"}
DTYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "q8"}  # as transformers.js calls them
FOLDER = "onnx"
_MOST = 2**31 - 1  # bytes of a file of ONNX with its weights
_FROM_PADDING = (
    "camembert",
    "esm",
    "mpnet",
    "roberta",
    "xlm-roberta",
)  # their first position follows that of the pad token
_STATES, _CACHED = "encoder_hidden_states", "use_cache_branch"
_ENCODERS = "albert bert camembert convbert deberta-v2 distilbert electra esm mpnet roberta roformer xlm-roberta"
# task -> the model types that are tested, of those that transformers.js 4.3 has classes for
TYPES = {
    "feature-extraction": _ENCODERS,
    "masked-lm": _ENCODERS,
    "sequence-classification": _ENCODERS,
    "token-classification": _ENCODERS.removeprefix("albert "),
    "causal-lm": "bloom gpt2 gpt_neo gpt_neox gptj llama mistral olmo2 opt phi qwen2 qwen3 smollm3 stablelm",
    "seq2seq-lm": "bart blenderbot m2m_100 marian mbart mt5 t5",
}


def write(export: Export, folder: Path) -> None:
    """Write the model to `folder`. Raises ValueError for a model that transformers.js has no class for, a tokenizer that has no
    file it can read, and as `onnx` does."""
    _check(export)
    kinds = list(SUFFIXES) if export.quantization is None else [export.quantization]
    parts = _parts(export.model.float(), export.task)
    graphs = traced_parts(export, parts)
    (folder / FOLDER).mkdir()
    for quantization in dict.fromkeys("int8" if kind == "int8" else None for kind in kinds):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            engine = Path(temporary)
            write_parts(replace(export, quantization=quantization), parts, graphs, engine)
            for kind in kinds:
                if (kind == "int8") == (quantization == "int8"):
                    _save(_browser_graphs(engine, parts), folder / FOLDER, kind)
                    _compare(export, parts, folder / FOLDER, kind)


FORMAT = Format(write, packages=ONNX.packages, quantizations=tuple(SUFFIXES), needs_tokenizer=True, for_browsers=True)


def _check(export: Export) -> None:
    model_type = architecture_of(export.model.config).model_type
    known = TYPES.get(export.task, "").split()
    if not known:
        raise ValueError(f"transformers-js takes no models for {export.task}; choose from {', '.join(TYPES)}")
    if model_type not in known:
        raise ValueError(f"transformers-js takes no {model_type} for {export.task}; choose from {', '.join(known)}")
    if any(isinstance(module, RecurrentAttention) for module in export.model.modules()):
        raise ValueError(
            "transformers-js keeps keys and values, and no states of recurrent units; choose --format onnx"
        )
    if not export.tokenizer.is_fast:
        raise ValueError(
            f"transformers.js reads tokenizer.json alone, which {type(export.tokenizer).__name__} does not write; save a fast "
            "tokenizer beside the model"
        )


def write_configs(export: Export, folder: Path) -> None:
    """Write the config of the native model, and have tokenizer_config.json, which is there, say what transformers.js asks it."""
    config: Any = native_config(export.model.config)
    config.architectures = [getattr(export.model, "native_class", type(export.model)).__name__]
    if export.quantization is not None:  # or else it takes int8
        setattr(config, "transformers.js_config", {"dtype": DTYPES[export.quantization]})
    config.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if export.task == "causal-lm" and export.tokenizer("").input_ids:  # without this, no token comes before a text
        settings["add_bos_token"] = True
    longest = read_sentence_files(folder).get("longest") if export.task == "feature-extraction" else None
    unused = config.pad_token_id + 1 if config.model_type in _FROM_PADDING else 0
    limits = [export.tokenizer.model_max_length, longest, *(limit - unused for limit in positions(config))]
    settings["model_max_length"] = min(limit for limit in limits if limit)  # where it cuts texts
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- parts -------------------------------------------------------------------------------------------------------------------


class _States(nn.Module):
    """The encoder without the keys and values of cross-attention."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.model = encoder, encoder.model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.encoder(*inputs)[:1]


class _Cross(nn.Module):
    """The encoder's states (B, S, H) -> the keys and values of cross-attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(cross_attention(self.model, *inputs).values())


@torch.no_grad()
def _parts(model: Any, task: str) -> list[Part]:
    """Those of the engine; of a translator, cross-attention is a part of its own: in a browser, the decoder computes it."""
    parts = engine_parts(model, task)
    if len(parts) == 1:
        return parts
    encoder, decoder = parts
    states = encoder.module(*encoder.inputs.values())[0]
    axes = {_STATES: {0: "batch", 1: "source_length"}}
    return [
        replace(encoder, module=_States(encoder.module), outputs=encoder.outputs[:1]),
        Part("cross", _Cross(model), {_STATES: states}, encoder.outputs[1:], axes),
        decoder,
    ]


# -- graphs ------------------------------------------------------------------------------------------------------------------


def _browser_graphs(folder: Path, parts: list[Part]) -> dict[str, Any]:
    """file -> its graph, from the files of the parts"""
    import onnx_ir

    graphs: dict[str, Any] = {}
    for part in parts:
        graphs[part.name] = onnx_ir.load(folder / f"{part.name}.onnx")
        onnx_ir.external_data.load_to_model(graphs[part.name])
    if "cross" in graphs:
        cross = graphs.pop("cross")
        _merge(graphs["decoder"].graph, cross.graph)
        graphs = {"encoder_model": graphs["encoder"], "decoder_model_merged": graphs["decoder"]}
    for name, graph in graphs.items():
        for value in (*graph.graph.inputs, *graph.graph.outputs):
            value.name = _name(name, value.name)
            if value.shape is not None:
                sizes = ("batch_size" if str(size) == "batch" else size for size in value.shape)
                value.shape = onnx_ir.Shape(sizes)
    return graphs


def _name(part: str, name: str) -> str:
    """The name in a browser of an input or output: the past of a language model has one side."""
    return name.replace(".decoder.", ".") if part == "model" else name


def _merge(decoder: Any, cross: Any) -> None:
    """Have the decoder compute the keys and values of cross-attention from the encoder's states in the first step, where
    `use_cache_branch` is false, and read them from its past in the others. It gives them too."""
    import onnx_ir

    for value in list(cross.initializers.values()):
        del cross.initializers[value.name]
        value.name = f"cross.{value.name}"
        decoder.register_initializer(value)
    (states,), results = cross.inputs, list(cross.outputs)
    cross.inputs.clear()
    cross.outputs.clear()
    nodes = list(cross)
    cross.remove(nodes)
    reads_states, first = {states}, next(iter(decoder))
    branch = []
    for node in nodes:
        for value in node.outputs:
            value.name = f"cross.{value.name}"
        if reads_states.intersection(node.inputs):
            reads_states |= set(node.outputs)
            branch.append(node)
        else:  # computes a weight, which is done once, when the file is opened
            decoder.insert_before(first, node)
    past = {value.name: value for value in decoder.inputs}
    names = [value.name.removeprefix("cross.") for value in results]
    stored = [past[name.replace(PRESENT, PAST)] for name in names]
    cached = onnx_ir.Value(name=_CACHED, shape=onnx_ir.Shape([1]), type=onnx_ir.TensorType(onnx_ir.DataType.BOOL))
    chosen = [onnx_ir.Value(name=name, type=value.type) for name, value in zip(names, stored, strict=True)]
    for old, new, result in zip(stored, chosen, results, strict=True):
        old.replace_all_uses_with(new)
        result.type = old.type
    kept = [onnx_ir.node("Identity", [value], name=f"kept.{number}") for number, value in enumerate(stored)]
    for node, value in zip(kept, stored, strict=True):
        node.outputs[0].name, node.outputs[0].type = node.name, value.type
    branches = {
        "then_branch": onnx_ir.Graph([], [node.outputs[0] for node in kept], nodes=kept, name="later_steps"),
        "else_branch": onnx_ir.Graph([], results, nodes=branch, name="first_step"),
    }
    decoder.insert_before(first, onnx_ir.node("If", [cached], branches, outputs=chosen, name="cross_attention"))
    decoder.opset_imports.update(cross.opset_imports)
    decoder.inputs.extend([states, cached])
    decoder.outputs.extend(chosen)


def _save(graphs: Mapping[str, Any], folder: Path, kind: str) -> None:
    """Write the files of a kind. Raises ValueError for one that a browser cannot hold."""
    import onnx_ir
    from onnx_ir.passes.common import DeduplicateHashedInitializersPass

    for name, graph in graphs.items():
        if kind == "fp16":
            _halve(graph.graph)
        DeduplicateHashedInitializersPass()(graph)
        size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
        if size > _MOST:
            raise ValueError(f"{name} takes {size / 1e9:.1f} GB in {kind}, and a browser takes 2; choose int8")
        onnx_ir.save(graph, folder / f"{name}{SUFFIXES[kind]}.onnx")


def _halve(graph: Any) -> None:
    """Store weights in 16 bits, except those that fp16 has no numbers for."""
    import onnx_ir

    first = next(iter(graph))
    for value in list(graph.initializers.values()):
        if value.const_value.dtype == onnx_ir.DataType.FLOAT and value.const_value.nbytes >= SMALL:
            with np.errstate(over="ignore"):
                halves = value.const_value.numpy().astype(np.float16)
            if np.isfinite(halves).all():
                onnx_nodes.replace(
                    graph, value, computed(graph, first, "Cast", halves, to=onnx_ir.DataType.FLOAT.value)
                )


# -- comparing ---------------------------------------------------------------------------------------------------------------


def _compare(export: Export, parts: list[Part], folder: Path, kind: str) -> None:
    """Raises ValueError if files in fp32 compute other outputs than the model, and files in other formats none."""
    runners = {part.name: _runner(part, folder, SUFFIXES[kind]) for part in parts}
    difference = largest_difference(parts, runners)
    limit = tolerance(export.model, parts) if kind == "fp32" else float("inf")
    if not difference <= max(limit, STORED):  # to which numbers that a seed generates may be stored in 16 bits
        raise ValueError(
            f"the files in {kind} do not compute the same as {type(export.model).__name__}: outputs differ by "
            f"{difference:.3g}, and rounding explains {limit:.3g}; choose --format onnx"
        )
    export.say(f"in {kind}, outputs for random tokens differ by at most {difference:.2g}")


def _runner(part: Part, folder: Path, suffix: str) -> Any:
    """Runs a part by the file that holds it."""
    file = {"encoder": "encoder_model", "model": "model"}.get(part.name, "decoder_model_merged")
    run = OnnxRunner(folder / f"{file}{suffix}.onnx")

    def outputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = len(next(iter(inputs.values())))
        feed = {_name(part.name, name): value for name, value in inputs.items()}
        feed[_CACHED] = torch.tensor([part.name == "decoder"])
        if part.name == "cross":
            feed["input_ids"] = torch.zeros(rows, 1, dtype=torch.long)
            feed["encoder_attention_mask"] = torch.ones(inputs[_STATES].shape[:2], dtype=torch.long)
        for name, shape in run.shapes.items():
            if name not in feed:  # the states in a later step, or the past in the first one
                feed[name] = torch.zeros(rows, *(size if isinstance(size, int) else 0 for size in shape[1:]))
        found = run(feed)
        return {name: found[_name(part.name, name)] for name in part.outputs}

    return outputs
