"""Exports that keep the structure of a variant, to ONNX, torch.export and AOTInductor: folders that open as models of
transformers, compute what the variant computes, and hold what its checkpoint holds."""

import copy
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from families.contract import tiny_config
from support.cases import ALL, PLAIN, Case, native_config, once_on_each_architecture, plain
from support.models import add_noise, build
from support.tracing import trace_once
from test_export import save, words
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.publish.export import comparison, export_model
from hf_freeze.publish.export import onnx as onnx_format
from hf_freeze.publish.export.comparison import largest_difference, tolerance
from hf_freeze.publish.export.convert import FORMATS
from hf_freeze.publish.export.engine_parts import Part, engine_parts
from hf_freeze.publish.export.exported import CLASSES
from hf_freeze.publish.export.torch_export import traced

KEEPING = [
    name for name, kind in FORMATS.items() if kind.keeps_structure and not kind.for_browsers and not kind.is_complete
]


def size(folder: Path, *kinds: str) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in kinds)


def test_some_formats_keep_the_structure():
    assert KEEPING == ["onnx", "openvino", "torch", "aotinductor", "executorch"]


# -- every method ------------------------------------------------------------------------------------------------------------


# `export_model` compares the outputs with those of the variant, at several lengths, and raises for any that differ. By default:
# every second method with layers of its own, several at once, on a BERT of one layer, which is traced fastest. The tests below
# have more.
def one_layer(case: Case):
    """The variant of a case of BERT, with a single layer."""
    config = native_config(case.architecture)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    native = add_noise(AUTO_CLASSES[case.task].from_config(config), case.architecture)
    return make_variant(native.eval(), list(case.methods))


def layers_of_ours(case: Case) -> Counter[str]:
    """How many layers of each class of hf_freeze it has; none where the methods do not go together."""
    if case.id not in _LAYERS:
        _LAYERS[case.id] = _layers_of_ours(case)
    return _LAYERS[case.id]


_LAYERS: dict[str, Counter[str]] = {}


def _layers_of_ours(case: Case) -> Counter[str]:
    try:
        classes = [type(module) for module in one_layer(case).modules()]
    except ValueError:
        return Counter()
    return Counter(one.__name__ for one in classes if one.__module__.startswith("hf_freeze.layers"))


def together(cases: list[Case]) -> list[Case]:
    """Few cases with all methods of these, in which each method still has all of its layers."""
    groups: list[Case] = []
    for case in cases:
        for place, group in enumerate(groups):
            both = replace(group, methods=group.methods + case.methods)
            if both.accepted and layers_of_ours(both) == layers_of_ours(group) + layers_of_ours(case):
                groups[place] = both
                break
        else:
            groups.append(case)
    return groups


CASES = [case for case in (once_on_each_architecture() if ALL else PLAIN) if case.accepted and not case.finalized]


if not ALL:
    CASES = [case for case in CASES if case.architecture.model_type == "bert" and case.methods and layers_of_ours(case)]
    CASES = together(CASES[::2])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_method_is_traced_as_it_is(case: Case, tmp_path):
    model = build(case) if ALL else one_layer(case)
    model.save_pretrained(tmp_path / "model")
    for format in ("torch", "onnx")[: 1 + ALL]:
        if "cross_attention" in case.config and case.generates:
            with pytest.raises(ValueError, match="keeps its past in EncoderDecoderCache"):
                export_model(tmp_path / "model", format)
            continue
        folder = export_model(tmp_path / "model", format)
        assert AutoConfig.from_pretrained(folder).native.model_type == model.config.model_type


# -- classification and features -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The folder of a BERT of one layer whose FFN is sparse, with a tokenizer."""
    case = plain(ARCHITECTURES["bert"], methods.MagnitudePruning(sparsity=0.75), task="sequence-classification")
    model = one_layer(case)
    return save(tmp_path_factory.mktemp("bert") / "model", model, words(model.config.vocab_size))


@pytest.fixture(scope="module")
def graphs():
    """Of the classifier, by the names of its parts: traced once for all tests that export it."""
    return {}


@pytest.fixture
def traced_once(graphs, monkeypatch):
    trace_once(graphs, monkeypatch)


def test_classes_are_those_of_the_variant(classifier, traced_once):
    texts = ["w5 w9 w3", "w8 w4 w4 w7 w30"]
    expected = pipeline("text-classification", model=str(classifier))(texts, top_k=None)
    folder = export_model(classifier, "onnx")
    for found, wanted in zip(
        pipeline("text-classification", model=str(folder))(texts, top_k=None), expected, strict=True
    ):
        assert [each["label"] for each in found] == [each["label"] for each in wanted]
        np.testing.assert_allclose([e["score"] for e in found], [e["score"] for e in wanted], rtol=1e-4)


def test_a_graph_is_a_valid_one_and_keeps_only_what_an_engine_reads(classifier, traced_once):
    """Names and shapes of what is computed within it take as many bytes as all the rest."""
    path = export_model(classifier, "onnx") / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path, load_external_data=False).graph
    assert {"input_ids", "attention_mask"} <= {value.name for value in graph.input}
    assert [value.name for value in graph.output] == ["logits"]
    assert not graph.value_info
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names) > 10  # other tools tell nodes apart by their names
    assert max(map(len, names)) <= 4


def weights_of_products(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """The integers (inputs, outputs) and scales of each weight that a product reads."""
    graph = onnx.load(path).graph
    stored = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
    read = {node.input[1] for node in graph.node if node.op_type in ("MatMulInteger", "MatMul", "Gemm")}
    names = read & stored.keys() | {
        node.input[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] in read
    }
    found = []
    for name in names & stored.keys():
        scales = stored[f"{name.removesuffix('_quantized')}_scale"]
        found.append((stored[name] if stored[name].shape[-1:] == scales.shape else stored[name].T, scales))
    return found


@pytest.mark.parametrize("quantization", ["int8", "int8-static"])
def test_int8_is_smaller_and_near(classifier, traced_once, quantization, tmp_path):
    said: list[str] = []
    numbers = torch.randint(3, 30, (40, 9), generator=torch.Generator().manual_seed(1)).tolist()
    texts = [" ".join(f"w{number}" for number in row) for row in numbers]
    folder = export_model(
        classifier,
        "onnx",
        quantization=quantization,
        texts=texts,
        say=said.append,
        out=tmp_path / "out",
    )
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    ids = torch.randint(3, model.config.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids).logits.detach()
    found = AutoModelForSequenceClassification.from_pretrained(folder)(input_ids=ids).logits
    assert 0 < (found - expected).abs().mean() < 0.1 * expected.std()
    weights = weights_of_products(folder / "model.onnx")
    assert len(weights) == 6 + 2  # the matrices of the layer, of the pooler and of the classes
    for numbers, scales in weights:
        assert np.abs(numbers.astype(int)).max() <= 64
        assert numbers.dtype == np.int8
        assert scales.shape == numbers.shape[-1:]
    assert said[-1].startswith(f"in {quantization}, outputs for random tokens differ by at most 0.")


@pytest.mark.skipif(not ALL, reason="compiles for a minute: only in make test-all")
def test_aotinductor(classifier):
    folder = export_model(classifier, "aotinductor")
    ids = torch.tensor([[5, 9, 3, 7]])
    one, other = (
        AutoModelForSequenceClassification.from_pretrained(path)(input_ids=ids).logits for path in (classifier, folder)
    )
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


# -- how far an engine may be off ----------------------------------------------------------------------------------------------


def modernbert(**changes):
    """22 layers, as published, with weights so large that outputs depend strongly on rounding."""
    tokens = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    config = ModernBertConfig(**tokens, **sizes | {"num_hidden_layers": 22, "local_attention": 8} | changes)
    torch.manual_seed(0)
    model = ModernBertForMaskedLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.4)
    return model


def engine(model, dtype):
    """A runner: PyTorch in another dtype."""
    (part,) = engine_parts(copy.deepcopy(model), "masked-lm")
    part.module.to(dtype)

    @torch.no_grad()
    def run(inputs):
        outputs = part.module(*(v.to(dtype) if v.is_floating_point() else v for v in inputs.values()))
        return dict(zip(part.outputs, (output.float() for output in outputs), strict=True))

    return {"model": run}


def test_rounding_is_told_from_a_wrong_graph():
    model = modernbert()
    parts = engine_parts(model, "masked-lm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    limit = tolerance(model, parts)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    rounding = largest_difference(parts, engine(model, torch.float64))
    assert 1e-4 < rounding < limit / 4  # far from 0, and far from the limit
    for change in (
        {"local_attention": 10},
        {"norm_eps": 1e-4},
        {"hidden_activation": "gelu_pytorch_tanh"},
        {"global_attn_every_n_layers": 4},
    ):
        assert largest_difference(parts, engine(modernbert(**change), torch.float32)) > 2 * limit, change


def test_a_shallow_model_is_held_to_more():
    """An epsilon that is another is a fault, though outputs differ by less than 1e-4."""
    torch.manual_seed(0)
    model = build(plain(ARCHITECTURES["bert"], task="masked-lm")).eval()
    parts = engine_parts(model, "masked-lm")
    limit = tolerance(model, parts)
    assert largest_difference(parts, engine(model, torch.float64)) < limit / 4
    wrong = copy.deepcopy(model)
    for module in wrong.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1.5e-6  # in the middle of the limit, 3e-5 to 4.5e-5 on several CPUs, and 1e-4
    assert limit < largest_difference(parts, engine(wrong, torch.float32)) < 1e-4


@pytest.mark.parametrize(("caused", "limit"), [(0.3, 0.6), (0.01, 0.1)])
def test_a_step_of_a_rounded_input_is_no_fault(caused, limit, monkeypatch):
    """Seldom one move of the weights takes an input over the middle between two integers: here the third."""
    int8 = methods.Quantize(weights="int8", activations="int8")
    model = make_variant(build(plain(ARCHITECTURES["bert"], task="masked-lm")), [int8]).eval()
    moves = []
    original = comparison._moved

    def moved(model, seed):
        moves.append(seed)
        return original(model, seed)

    monkeypatch.setattr(comparison, "_moved", moved)
    monkeypatch.setattr(comparison, "_difference", lambda found, expected: caused if len(moves) == 3 else 0.0)
    assert tolerance(model, engine_parts(model, "masked-lm")) == limit
    assert len(set(moves)) == 4


def test_a_file_that_computes_something_else_is_refused(classifier, traced_once, tmp_path, monkeypatch):
    original = onnx_format._traced

    def wrong(part):
        graph = original(part)
        pooler = next(node for node in graph.graph.all_nodes() if node.op_type == "Tanh")
        pooler.op_type = "Sigmoid"
        return graph

    monkeypatch.setattr(onnx_format, "_traced", wrong)
    with pytest.raises(
        ValueError, match=r"onnxruntime does not compute the same as .*: outputs differ by .*, and rounding"
    ):
        export_model(classifier, "onnx", out=tmp_path / "out")


# -- wrong input -------------------------------------------------------------------------------------------------------------


def test_wrong_input_is_one_line_and_leaves_nothing(classifier, tmp_path, monkeypatch):
    def refused(message: str, *arguments, **options):
        with pytest.raises(ValueError, match=message) as error:
            export_model(*arguments, out=tmp_path / "out", **options)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".hf_freeze*"))

    static = {"quantization": "int8-static"}
    refused("int8-static needs texts to calibrate with, .*: --texts FILE", classifier, "onnx", **static)
    refused("unknown quantization 'int8' for torch; it has none", classifier, "torch", quantization="int8")
    alone = shutil.copytree(classifier, tmp_path / "alone")
    for path in alone.glob("token*"):
        path.unlink()
    refused("int8-static needs a tokenizer beside the model", alone, "onnx", texts=["w3"], **static)
    torch.manual_seed(0)
    vit = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    ViTForImageClassification(vit).save_pretrained(tmp_path / "vit")
    message = "int8-static calibrates with texts, but ViTForImageClassification reads pixel_values; choose int8"
    refused(message, tmp_path / "vit", "onnx", texts=["w3"], **static)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    refused("onnx needs onnxscript, which is missing", classifier, "onnx")
    monkeypatch.setitem(sys.modules, "executorch", None)
    missing = r'executorch needs executorch.runtime, which is missing; from a clone: pip install .* "\.\[executorch\]"'
    refused(missing, classifier, "executorch")


def test_a_full_disk_leaves_the_earlier_export(classifier, tmp_path, monkeypatch):
    folder = export_model(classifier, "dense", out=tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(FORMATS, "dense", replace(FORMATS["dense"], write=full))
    with pytest.raises(OSError, match="No space left"):
        export_model(classifier, "dense", out=folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@torch.no_grad()
def test_a_family_whose_layers_read_their_weights():
    """The FFN of T5 looks at the dtype of a weight, which a variant computes when it is read."""
    torch.manual_seed(0)
    config = tiny_config("t5")
    config.num_layers = 1
    model = make_variant(T5ForConditionalGeneration(config), [methods.LowRank(rank=3)]).eval()
    ffn = model.encoder.block[0].layer[-1]
    states = torch.randn(2, 5, config.d_model)
    axes = {"states": {0: "batch", 1: "length"}}
    part = Part("ffn", _ManyInputs(ffn), {"states": states}, ["states"], axes)
    torch.testing.assert_close(traced(part).module()(states)[0], ffn(states), rtol=1e-5, atol=1e-5)


class _ManyInputs(torch.nn.Module):
    """As the modules of parts."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return (self.module(*inputs),)


def test_an_image_classifier_too(tmp_path):
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    model = make_variant(ViTForImageClassification(config), [methods.FFNPruning(width=8)]).eval()
    model.save_pretrained(tmp_path / "vit")
    opened = CLASSES["image-classification"].from_pretrained(export_model(tmp_path / "vit", "torch"))
    pixels = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(opened(pixel_values=pixels).logits, model(pixels).logits.detach(), rtol=1e-4, atol=1e-4)
