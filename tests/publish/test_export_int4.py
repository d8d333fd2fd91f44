"""ONNX of weights in four bits: products and look-ups read them as the file holds them, once, beside weights in int8."""

import functools
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from hf_freeze import make_variant, methods
from hf_freeze.layers.grids import Grid
from hf_freeze.layers.quantized import QuantizedEmbedding, QuantizedLinear
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export import onnx as onnx_format
from hf_freeze.publish.export.engine_parts import Part
from hf_freeze.publish.export.folders import Export
from hf_freeze.publish.export.runners import open_parts

TOKENS = 160
GROUPS = Grid(weights="int4", granularity="group-64")


def in_four_bits(layer: nn.Module, grid: Grid) -> nn.Module:
    """The layer on the grid, with rows of very different sizes."""
    kind = QuantizedEmbedding if isinstance(layer, nn.Embedding) else QuantizedLinear
    result = kind(layer, grid)
    result.fill(layer.weight * torch.logspace(-3, 0, len(layer.weight))[:, None])
    result.store_numbers()
    return result


def dense(layer: nn.Module) -> np.ndarray:
    """The weight, read from the bytes by other means than those of the layer."""
    if isinstance(layer, nn.Linear | nn.Embedding) and not hasattr(layer, "packed"):
        return layer.weight.detach().numpy()
    rows, columns = layer.shape
    pairs = layer.packed.numpy().astype(np.int32)
    numbers = np.stack([pairs >> 4, pairs & 15], -1).reshape(rows, -1)[:, :columns] - 8
    steps = layer.scales.numpy().reshape(rows, -1)
    return (numbers * np.repeat(steps, 64 if steps.shape[1] > 1 else columns, 1)[:, :columns]).astype(np.float32)


class Tied(nn.Module):
    """A table, a linear, and an output matrix with the bytes of the table. With `plain`, another table and linear in fp32."""

    def __init__(self, width: int, grid: Grid, *, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = SimpleNamespace(config=PreTrainedConfig())
        self.table = in_four_bits(nn.Embedding(TOKENS, width), grid)
        self.linear = in_four_bits(nn.Linear(width, width), grid)
        self.output = in_four_bits(nn.Linear(width, TOKENS, bias=False), grid)
        self.output.packed, self.output.scales = self.table.packed, self.table.scales
        self.plain = nn.ModuleList([nn.Embedding(TOKENS, width), nn.Linear(width, width)] if plain else [])

    def forward(self, *inputs):
        x = self.table(inputs[0])
        if self.plain:
            x = self.plain[1](x + self.plain[0](inputs[0]))
        return (self.output(self.linear(x).tanh()),)

    def expected(self, ids: torch.Tensor, product) -> np.ndarray:
        """The outputs, by `product` (x, W) of linears in four bits."""
        x = dense(self.table)[ids]
        if self.plain:
            x = (x + dense(self.plain[0])[ids]) @ dense(self.plain[1]).T + self.plain[1].bias.detach().numpy()
        return product(np.tanh(product(x, dense(self.linear)) + self.linear.bias.detach().numpy()), dense(self.output))


@functools.cache
def traced(width: int, grid: Grid, plain: bool):
    """(a model, its part, its graph): traced once for all tests that export it."""
    ids = torch.randint(TOKENS, (3, 7), generator=torch.Generator().manual_seed(0))
    model = Tied(width, grid, plain=plain).eval()
    part = Part("model", model, {"ids": ids}, ["y"], {"ids": {0: "batch", 1: "length"}})
    return model, part, onnx_format._traced(part)


def exported(folder, width: int, grid: Grid = GROUPS, quantization=None, *, plain: bool = False):
    """(the model, the number of nodes of each kind, the bytes of weights, what the engine computes, the ids)"""
    model, part, graph = traced(width, grid, plain)
    graph, ids = graph.clone(), part.inputs["ids"]
    if quantization is None:
        onnx_format._save({"model": graph}, folder, {})
    else:
        export = Export(model, "feature-extraction", None, quantization, lambda text: None)
        onnx_format._write_quantized(export, {"model": graph}, [part], folder, folder, 1e-5)
    kinds = Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)
    with torch.no_grad():
        found = open_parts(folder, "onnx", {})["model"]({"ids": ids})["y"]
    return model, kinds, (folder / "weights.data").stat().st_size, found.numpy(), ids


def close(found: np.ndarray, expected: np.ndarray, share: float) -> None:
    assert np.abs(found - expected).max() < share * np.abs(expected).max()


@pytest.mark.parametrize(
    ("width", "stored"), [(128, 128), (120, 128), (59, 64)], ids=["whole groups", "filled up", "one group, odd"]
)
def test_products_and_look_ups_read_the_bytes_of_the_file(width, stored, tmp_path):
    model, kinds, size, found, ids = exported(tmp_path, width)
    assert kinds["MatMulNBits"] == 2
    assert kinds["GatherBlockQuantized"] == 1
    assert not kinds["MatMul"] + kinds["GatherND"] + kinds["Mod"]
    rows = TOKENS + width  # the output matrix takes nothing
    assert rows * stored / 2 <= size <= rows * stored * (1 / 2 + 4 / 64) + 4 * width + 4 * 64
    close(found, model.expected(ids, lambda x, weight: x @ weight.T), 1e-5)


@pytest.mark.parametrize(
    ("width", "grid"),
    [(100, GROUPS), (128, Grid(weights="int4"))],
    ids=["groups would lengthen rows", "one step for a row"],
)
def test_what_the_operators_cannot_hold_is_computed_once(width, grid, tmp_path):
    model, kinds, size, found, ids = exported(tmp_path, width, grid)
    assert not kinds["MatMulNBits"] + kinds["GatherBlockQuantized"]
    held = [model.table.packed, model.table.scales, model.linear.packed, model.linear.scales]
    assert size <= sum(tensor.nbytes for tensor in held) + 4 * width + 6 * 64
    close(found, model.expected(ids, lambda x, weight: x @ weight.T), 1e-5)


def test_int8_keeps_the_steps_of_rows(tmp_path):
    """The smallest of them are a thousandth of the largest, and would be 0 in int8."""
    model, _, _, found, ids = exported(tmp_path, 100, quantization="int8")
    expected = model.expected(ids, lambda x, weight: x @ weight.T)
    largest = np.abs(expected).max((0, 1))
    assert (np.abs(found - expected).max((0, 1)) < 0.2 * largest).all()


def rounding_inputs(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x Wᵀ with inputs in int8, by a step for 64 of them."""
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % 64)])
    groups = padded.reshape(*x.shape[:-1], -1, 64)
    steps = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.rint(groups / steps) * steps).reshape(padded.shape)[..., : x.shape[-1]] @ weight.T


@pytest.mark.parametrize("width", [128, 120])
def test_int8_rounds_the_inputs_and_not_the_weights_again(width, tmp_path):
    model, kinds, size, found, ids = exported(tmp_path, width, quantization="int8")
    assert (kinds["MatMulNBits"], kinds["GatherBlockQuantized"], kinds["MatMulInteger"]) == (2, 1, 0)
    rows = TOKENS + width
    assert size <= rows * 128 * (1 / 2 + 4 / 64) + 4 * width + 4 * 64
    expected = model.expected(ids, rounding_inputs)
    close(found, expected, 1e-3)
    with pytest.raises(AssertionError):  # it does round
        close(found, model.expected(ids, lambda x, weight: x @ weight.T), 1e-3)


def test_four_and_eight_bits_lie_side_by_side(tmp_path):
    model, kinds, size, found, ids = exported(tmp_path, 128, quantization="int8", plain=True)
    assert (kinds["MatMulNBits"], kinds["GatherBlockQuantized"], kinds["MatMulInteger"]) == (2, 1, 1)
    rows = TOKENS + 128
    assert size <= rows * 128 * (1 / 2 + 4 / 64 + 1) + 4 * (rows + 3 * 128) + 8 * 64
    close(found, model.expected(ids, lambda x, weight: x @ weight.T), 0.1)


class MatMulNBits(OpRun):
    """As an engine would compute it that adds the products of a group in 16 bits."""

    op_domain = "com.microsoft"

    def _run(self, x, blocks, steps, **settings):
        numbers = np.stack([blocks & 15, blocks >> 4], -1).reshape(*steps.shape, 64).astype(np.int32) - 8
        groups = x.reshape(-1, steps.shape[1], 64)
        x_steps = np.abs(groups).max(-1) / 127
        sums = np.einsum("tgk,ogk->tog", np.rint(groups / x_steps[..., None]).astype(np.int32), numbers)
        if settings["accuracy_level"] == 4:
            sums = sums.clip(-(2**15), 2**15 - 1)
        y = (sums * steps * x_steps[:, None]).sum(-1)
        return (y.reshape(*x.shape[:-1], len(steps)).astype(np.float32),)


class Large(nn.Module):
    """A product whose sums of a group exceed 16 bits. `model` is read for its config."""

    def __init__(self):
        super().__init__()
        self.model = SimpleNamespace(config=PreTrainedConfig())
        self.linear = QuantizedLinear(nn.Linear(128, 64), GROUPS)
        self.linear.fill(torch.ones(64, 128))
        self.linear.store_numbers()

    def forward(self, *inputs):
        return (self.linear(inputs[0].sign() * 0 + 1 + 0.01 * inputs[0].tanh()),)


def test_an_engine_that_multiplies_four_bits_wrongly_is_refused(tmp_path, monkeypatch):
    part = Part("model", Large().eval(), {"x": torch.randn(3, 5, 128)}, ["y"], {"x": {0: "batch", 1: "length"}})
    graphs, said = {"model": onnx_format._traced(part)}, []
    export = Export(part.module, "feature-extraction", None, "int8", said.append)
    onnx_format._write_quantized(export, graphs, [part], tmp_path, tmp_path, 1e-5)
    assert float(re.search(r"differ by at most ([\d.e-]+)", said[-1])[1]) < 0.01
    opened = onnx_format.open_parts

    def wrong(inputs):
        evaluator = ReferenceEvaluator(str(tmp_path / "model.onnx"), new_ops=[MatMulNBits])
        return {"y": torch.from_numpy(evaluator.run(None, {"x": inputs["x"].numpy()})[0])}

    monkeypatch.setattr(
        onnx_format,
        "open_parts",
        lambda folder, *rest: {"model": wrong} if folder == tmp_path else opened(folder, *rest),
    )
    with pytest.raises(ValueError, match=r"\Aonnxruntime multiplies integers wrongly on this CPU: outputs differ by"):
        onnx_format._write_quantized(export, graphs, [part], tmp_path, tmp_path, 1e-5)


def test_a_language_model_with_a_tied_table(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    few_bits = methods.Quantize(weights="int4", granularity="group-64", components=["attention", "ffn", "embeddings"])
    make_variant(AutoModelForCausalLM.from_config(config), [few_bits]).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    folder = export_model(tmp_path / "model", "onnx", quantization="int8")  # compares the file in fp32, too
    kinds = Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)
    assert (kinds["MatMulNBits"], kinds["GatherBlockQuantized"]) == (8, 1)
    assert (folder / "weights.data").stat().st_size < (TOKENS + 7 * 64) * 64 * (1 / 2 + 4 / 64) + 32 * 64
    prompts = {"input_ids": torch.tensor([[5, 9, 3, 7, 6]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    with torch.no_grad():
        difference = AutoModelForCausalLM.from_pretrained(folder)(**prompts).logits - model(**prompts).logits
    assert difference.abs().max() < 0.02
