"""Exports of models that were quantised before: the file has their integers, and the engine computes what PyTorch does."""

import re
from types import SimpleNamespace

import ctranslate2
import numpy as np
import onnx
import onnxruntime.quantization
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support.cases import ALL, MODEL, Case, native_config
from support.models import add_noise, build_anew
from support.text import words
from support.training import training_step
from transformers import PreTrainedConfig

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.quantized import QuantizedEmbedding, QuantizedLinear
from hf_freeze.publish.export import ctranslate2 as ctranslate2_format
from hf_freeze.publish.export import export_model, onnx_int8
from hf_freeze.publish.export import onnx as onnx_format
from hf_freeze.publish.export.engine_parts import Part
from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.runners import open_parts

EVERYWHERE = ["ffn", "attention", "embeddings"]


def fixed(architecture, task, **settings):
    quantize = methods.Quantize(train=True, activations="int8", components=EVERYWHERE, **settings)
    case = Case(ARCHITECTURES[architecture], task, MODEL, (quantize,))
    config = native_config(case.architecture)
    for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):  # which are traced one by one
        if name in case.tiny_config:
            setattr(config, name, 1)
    torch.manual_seed(0)
    model = make_variant(add_noise(AUTO_CLASSES[task].from_config(config), case.architecture), [quantize])
    for step in range(2):
        training_step(model, case.batch(), step, 2)
    if model.scheduled:
        model.advance(2, 2)
    model.finalize()
    return model.eval(), case


class MatMulInteger(OpRun):
    """As x86 computes it without VNNI: of an unsigned and a signed byte, two products are added in 16 bits."""

    op_domain = ""

    def _run(self, x, weight, x_zero=None, zero=None):
        x, x_zero = x.astype(np.int64), np.int64(0 if x_zero is None else x_zero)
        numbers, zero = weight.astype(np.int64), np.int64(0) if zero is None else zero.astype(np.int64)
        pairs = [x[..., k : k + 2] @ numbers[k : k + 2] for k in range(0, len(numbers), 2)]
        if weight.dtype == np.int8:
            pairs = [pair.clip(-(2**15), 2**15 - 1) for pair in pairs]
        sums = sum(pairs) - x_zero * numbers.sum(0) - zero * x.sum(-1, keepdims=True) + len(numbers) * x_zero * zero
        return (sums.astype(np.int32),)


def without_vnni(path):
    """As `OnnxRunner`, with this product."""
    evaluator = ReferenceEvaluator(str(path), new_ops=[MatMulInteger])

    def run(inputs):
        outputs = evaluator.run(None, {name: inputs[name].numpy() for name in evaluator.input_names})
        return dict(zip(evaluator.output_names, map(torch.from_numpy, outputs), strict=True))

    return run


ONNX = [
    {"weights": "int8", "activation_ranges": "moving"},
    {"weights": "int4", "weight_ranges": "learnt"},
    {"weights": "int4", "granularity": "group-64"},
]


@pytest.mark.parametrize(
    "settings",
    ONNX if ALL else ONNX[:1],
    ids=lambda settings: "-".join(settings.values()),
)
def test_onnx_holds_and_multiplies_the_integers(settings, tmp_path):
    model, case = fixed("bert", "feature-extraction", **settings)
    model.save_pretrained(tmp_path / "model")
    folder = export_model(tmp_path / "model", "onnx")
    graph = onnx.load(folder / "model.onnx")
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    products = [node for node in graph.graph.node if node.op_type == "MatMulInteger"]
    assert len(products) == (0 if "granularity" in settings else len(layers))
    stored = {onnx.numpy_helper.to_array(value).tobytes() for value in graph.graph.initializer}
    for layer in layers:  # of small ones, the exporter has unpacked and transposed the numbers
        numbers = layer.integers()
        forms = (layer.packed, numbers, numbers.T.contiguous())
        assert any(form.numpy().tobytes() in stored for form in forms)
    runner = open_parts(folder, "onnx", {})["model"]
    batch = case.batch()
    with torch.no_grad():
        expected = model(**batch)
    for run in (runner, without_vnni(folder / "model.onnx")):
        for name, value in run({name: batch[name] for name in runner.shapes}).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


def test_torch_programs_are_exact_on_processors_whose_product_of_integers_is_not(tmp_path):
    model, case = fixed("bert", "feature-extraction", weights="int8", activation_ranges="moving")
    model.save_pretrained(tmp_path / "model")
    folder = export_model(tmp_path / "model", "torch")
    program = torch.export.load(folder / "model.pt2")
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten._int_mm.default)
    batch = case.batch()
    with torch.no_grad():
        expected = model(**batch)
    runner = open_parts(folder, "torch", {})["model"]
    for name, value in runner({name: batch[name] for name in runner.shapes}).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


class Product(torch.nn.Module):
    """A product whose 8-bit integers overflow in pairs. `model` is read for its config."""

    def __init__(self):
        super().__init__()
        self.model = SimpleNamespace(config=PreTrainedConfig())
        signs = torch.randint(0, 2, (32, 24, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        self.linear = torch.nn.Linear(48, 32)
        self.linear.weight.data = (signs * torch.linspace(0.1, 2, 32)[:, None, None]).expand(-1, -1, 2).flatten(1)

    def forward(self, *inputs):
        return (self.linear(*inputs),)


def test_an_export_whose_integers_overflow_is_refused(tmp_path, monkeypatch):
    """The engine here is one without VNNI."""
    part = Part("model", Product().eval(), {"x": torch.randn(3, 48)}, ["y"], {"x": {0: "batch"}})
    graphs, said = {"model": onnx_format._traced(part)}, []
    export = Export(part.module, "feature-extraction", None, "int8", said.append)
    opened = onnx_format.open_parts
    monkeypatch.setattr(
        onnx_format,
        "open_parts",
        lambda folder, *rest: (
            {"model": without_vnni(folder / "model.onnx")} if folder == tmp_path else opened(folder, *rest)
        ),
    )
    onnx_format._write_quantized(export, graphs, [part], tmp_path, tmp_path, 1e-5)
    assert float(re.search(r"differ by at most ([\d.e-]+)", said[-1])[1]) < 0.2  # of outputs up to 40
    monkeypatch.setattr(onnx_int8, "LEVELS", 127)
    whole = onnxruntime.quantization.quantize_dynamic
    monkeypatch.setattr(
        onnxruntime.quantization,
        "quantize_dynamic",
        lambda *files, **options: whole(*files, **options | {"reduce_range": False}),
    )
    with pytest.raises(
        ValueError, match=r"\Aonnxruntime multiplies integers wrongly on this CPU: outputs differ by \d.+\Z"
    ):
        onnx_format._write_quantized(export, graphs, [part], tmp_path, tmp_path, 1e-5)


@pytest.mark.skipif(not ALL, reason="exports for ten seconds: only in make test-all")
def test_onnx_computes_with_the_cores_of_a_tensor_train(tmp_path):
    applied = (methods.TensorTrain(rank=4, execution="factors"), methods.Quantize(weights="int4"))
    case = Case(ARCHITECTURES["bert"], "feature-extraction", MODEL, applied)
    model = build_anew(case).eval()
    model.save_pretrained(tmp_path / "model")
    runner = open_parts(export_model(tmp_path / "model", "onnx"), "onnx", {})["model"]
    with torch.no_grad():
        expected = model(**case.batch())
    for name, value in runner({name: case.batch()[name] for name in runner.shapes}).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "int8"},
        {"weights": "int8", "weight_ranges": "learnt"},
        {"weights": "int4", "activation_ranges": "max"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_ctranslate2_gets_the_integers_and_steps(settings, tmp_path, monkeypatch):
    model, _ = fixed("marian", "seq2seq-lm", **settings)
    model.save_pretrained(tmp_path / "model")
    words(model.config.vocab_size).save_pretrained(tmp_path / "model")
    specs, said = [], []
    set_integers = ctranslate2_format._set_integers
    monkeypatch.setattr(
        ctranslate2_format, "_set_integers", lambda spec, trained: (set_integers(spec, trained), specs.append(spec))
    )
    folder = export_model(tmp_path / "model", "ctranslate2", quantization="int8", say=said.append)
    assert any("those of the training are left out" in text for text in said) == ("activation_ranges" in settings)
    held = {}

    def collect(owner, name, value):
        if name.endswith("weight") and hasattr(owner, "weight_scale") and hasattr(value, "numpy"):
            rows = value.numpy()
            assert rows.dtype == np.int8
            held[name] = rows, owner.weight_scale.numpy()

    ctranslate2.specs.model_spec.visit_spec(specs[-1], collect)
    steps = {
        r.tobytes(): 1 / scale for values, scales in held.values() for r, scale in zip(values, scales, strict=True)
    }
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear | QuantizedEmbedding)]
    assert len(layers) > 10
    for layer in layers:
        for numbers, step in zip(layer.integers().numpy(), layer.steps()[:, 0].tolist(), strict=True):
            if numbers.any():
                assert steps[numbers.tobytes()] == pytest.approx(step, rel=1e-6)
    assert ctranslate2.Translator(str(folder), compute_type="int8").translate_batch(
        [["w5", "w3"]], max_decoding_length=4
    )


def test_what_no_format_can_hold_is_refused(tmp_path):
    model, _ = fixed("marian", "seq2seq-lm", weights="int8")
    model.save_pretrained(tmp_path / "model")
    words(model.config.vocab_size).save_pretrained(tmp_path / "model")
    for format, quantization in (("dense", None), ("ctranslate2", None), ("ctranslate2", "float16")):
        with pytest.raises(
            ValueError, match=rf"\A{format} cannot hold this model: method 'quantize' cannot be merged: .+\Z"
        ):
            export_model(tmp_path / "model", format, quantization=quantization)
