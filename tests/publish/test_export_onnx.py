"""Exports that keep the structure of a variant, to ONNX, torch.export and AOTInductor: folders that open as models of
transformers, compute what the variant computes, and hold what its checkpoint holds."""

import copy
import json
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
from support.text import fast_tokenizer
from support.tracing import trace_once
from test_export import TEXTS, marian, save, words
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5ForConditionalGeneration,
    TextStreamer,
    ViTConfig,
    ViTForImageClassification,
    pipeline,
)

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.publish.export import OnnxTranslator, export_model
from hf_freeze.publish.export import onnx as onnx_format
from hf_freeze.publish.export.comparison import largest_difference, tolerance
from hf_freeze.publish.export.convert import FORMATS
from hf_freeze.publish.export.engine_parts import Part, engine_parts
from hf_freeze.publish.export.exported import CLASSES
from hf_freeze.publish.export.folders import MARK
from hf_freeze.publish.export.served import served_fidelity
from hf_freeze.publish.export.torch_export import traced

ENGINE = {"intra_op_num_threads": 1}
KEEPING = [name for name, kind in FORMATS.items() if kind.keeps_structure]


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


# -- translation -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """(folder of a variant with factors, shared layers and random FFNs, the folder in ONNX)"""
    folder = tmp_path_factory.mktemp("marian")
    tokenizer = fast_tokenizer(folder)
    parts = [
        methods.LayerSharing(stacks=["decoder"]),
        methods.LowRank(rank=3, components=["attention"]),
        methods.Freeze(ffn="random"),
    ]
    model = make_variant(marian(tokenizer, encoder_layers=1, decoder_layers=2), parts)
    return save(folder, model, tokenizer), export_model(folder, "onnx")


def test_translations_are_those_of_the_variant(translator):
    source, folder = translator
    expected, found = (pipeline("translation", model=str(path)) for path in translator)
    assert type(found.model).__name__ == "ExportedModelForSeq2SeqLM"
    for settings in (
        {},
        {"batch_size": 3},
        {"num_beams": 3},
        {"use_cache": False},
        {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 5},
    ):
        assert found(TEXTS, **settings) == expected(TEXTS, **settings), settings
    sampled = []
    for pipe in (expected, found):
        torch.manual_seed(1)
        sampled.append(pipe(TEXTS, do_sample=True, top_k=5))
    assert sampled[0] == sampled[1]
    assert OnnxTranslator(folder, **ENGINE)(TEXTS, batch_size=3) == expected(TEXTS)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()


def test_shared_layers_are_stored_once(translator):
    _, folder = translator
    stored = [
        list(onnx.load(folder / f"{part}.onnx", load_external_data=False).graph.initializer)
        for part in ("encoder", "decoder")
    ]
    places = [
        {next(int(entry.value) for entry in tensor.external_data if entry.key == "offset") for tensor in tensors
         if tensor.external_data}
        for tensors in stored
    ]  # fmt: skip
    assert places[0] & places[1]  # the token table
    names = {value.name for value in onnx.load(folder / "decoder.onnx", load_external_data=False).graph.input}
    assert {f"past_key_values.{layer}.decoder.key" for layer in range(2)} <= names  # two layers run


def test_translator_settings(translator):
    found, expected = OnnxTranslator(translator[1], **ENGINE), pipeline("translation", model=str(translator[1]))
    assert found([]) == []
    for settings in ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        assert found(TEXTS, **settings) == expected(TEXTS, **settings)
    assert found(TEXTS[0]) == expected(TEXTS[0])
    with pytest.raises(ValueError, match=r"unknown setting 'beams'; choose from max_new_tokens, max_length"):
        found("katze", beams=4)


def test_the_folder_is_a_model_of_transformers(translator, tmp_path):
    _, folder = translator
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, engine=ENGINE)
    assert isinstance(model, CLASSES["seq2seq-lm"])
    assert AutoConfig.from_pretrained(folder).d_model == model.config.native.d_model == 16
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        model.config.nothing  # noqa: B018
    with pytest.raises(ValueError, match="needs decoder_input_ids; to translate, use generate"):
        model(input_ids=torch.tensor([[3, 1]]))
    with pytest.raises(ValueError, match="an exported model cannot be saved again: copy its folder"):
        model.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match="holds a seq2seq-lm model for onnx, not causal-lm"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_damaged_folders_are_named(translator, tmp_path, monkeypatch):
    _, folder = translator

    def damaged(name: str, content: bytes | None) -> Path:
        copy = shutil.copytree(folder, tmp_path / "damaged", dirs_exist_ok=True)
        (copy / name).write_bytes(content) if content is not None else (copy / name).unlink()
        return copy

    weights = (folder / "weights.data").read_bytes()
    changed = weights[:-5] + bytes([weights[-5] ^ 1]) + weights[-4:]  # one bit of a weight
    for name, content, message in (
        (MARK, None, "is no exported folder: it has no hf_freeze_export.json; create one"),
        ("decoder.onnx", None, "lacks the part decoder; export it again"),
        (
            "decoder.onnx",
            b"none",
            "decoder.onnx has changed since the export: copy it again, or export the model again",
        ),
        ("weights.data", None, "coder.onnx cannot be opened .*; export it again"),
        ("weights.data", changed, "weights.data has changed since the export"),
        (MARK, b"{", "hf_freeze_export.json cannot be read; export the model again"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            AutoModelForSeq2SeqLM.from_pretrained(damaged(name, content))
        assert "\n" not in str(error.value)
        if message.startswith("weights.data"):
            with pytest.raises(ValueError, match=message):
                OnnxTranslator(tmp_path / "damaged")
        shutil.rmtree(tmp_path / "damaged")
    mark = json.loads((folder / MARK).read_text())
    del mark["files"]  # as written by 0.1
    AutoModelForSeq2SeqLM.from_pretrained(damaged(MARK, json.dumps(mark).encode()), engine=ENGINE)
    with pytest.raises(ValueError, match=r"onnxruntime has no setting 'threads'; choose from .*intra_op_num_threads"):
        AutoModelForSeq2SeqLM.from_pretrained(folder, engine={"threads": 1})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match="onnx needs onnxruntime, which is missing"):
        AutoModelForSeq2SeqLM.from_pretrained(folder)


# -- text generation ---------------------------------------------------------------------------------------------------------


# For a small model with a past, what torch remembers of operations in tracing takes longer than it saves.
forgetful = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)


@pytest.fixture(scope="module")
@forgetful
def generator(tmp_path_factory):
    """A Llama with grouped heads of which some are pruned, of unequal layers: (its folder, the folder of torch.export)"""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**ARCHITECTURES["llama"].tiny | {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1})
    model = make_variant(config, [methods.HeadPruning(share=0.5, layers={"decoder": [0]})], task="causal-lm").eval()
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    return save(folder, model, words(40)), export_model(folder, "torch")


@pytest.fixture(scope="module")
def pipelines(generator):
    """Of both folders."""
    return [pipeline("text-generation", model=str(path)) for path in generator]


def test_generated_text_is_that_of_the_variant(pipelines):
    expected, found = pipelines
    prompts = ["w5 w9 w3", "w8 w4 w4 w7 w30", "w3"]
    for settings in ({}, {"batch_size": 3}, {"num_beams": 3}, {"use_cache": False}):
        options = {"max_new_tokens": 8, "do_sample": False} | settings
        assert found(prompts, **options) == expected(prompts, **options), settings


def test_what_engines_answer_is_compared(translator, generator):
    for folders, texts in ((translator, TEXTS), (generator, ["w5 w9 w3", "w8 w4 w4 w7 w30"])):
        found = served_fidelity(*folders, texts)
        assert (found.score, found.agreement, found.compared) == (1, 1, len(texts))
        assert found.kl == pytest.approx(0, abs=1e-6)


def test_text_is_streamed(pipelines, capsys):
    texts = []
    for pipe in pipelines:
        ids = torch.tensor([[5, 9, 3]])
        streamer = TextStreamer(pipe.tokenizer, skip_prompt=True)
        pipe.model.generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_program_of_torch_has_operations_of_torch_alone(generator):
    program = torch.export.load(generator[1] / "model.pt2")
    called = {str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert {"aten"} <= called <= {"aten", "<built-in function ge>", "<built-in function add>", "<built-in function le>"}
    assert all(node.users for node in program.graph.find_nodes(op="placeholder"))  # it holds only what it reads
    names = json.loads(json.dumps([*program.state_dict]))
    assert len(names) == len(set(names))


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


# -- further designs -----------------------------------------------------------------------------------------------------------


def small_language_model(model_type: str):
    """Convolutions and attention in LFM2, ALiBi in MPT, experts in LFM2's mixture and in Mixtral, whose neurons are pruned."""
    config = tiny_config(model_type)
    lfm2 = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    experts = {"num_dense_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
    shape = {"lfm2": lfm2, "lfm2_moe": lfm2 | experts, "mpt": {"n_layers": 1}}
    for name, value in shape.get(model_type, {"num_hidden_layers": 1, "num_local_experts": 2}).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    native = AutoModelForCausalLM.from_config(config).eval()
    for parameter in native.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    pruning = {"expert_width": 8} if model_type in ("mixtral", "lfm2_moe") else {"width": 8}
    factors = methods.LowRank(rank=3, components=["attention"])
    return make_variant(native, [factors, methods.FFNPruning(**pruning)]).eval()


PROMPTS = {
    "input_ids": torch.tensor([[5, 9, 3, 7, 6], [0, 0, 8, 4, 6]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
}


@pytest.mark.parametrize("model_type", ["lfm2_moe", *["mpt", "lfm2", "mixtral"] * ALL])
@forgetful
def test_designs_of_language_models(model_type, tmp_path):
    model = small_language_model(model_type)
    model.save_pretrained(tmp_path / "model")
    opened = AutoModelForCausalLM.from_pretrained(export_model(tmp_path / "model", "onnx"))
    for settings in ({"use_cache": True}, {"use_cache": False}, {"use_cache": True, "num_beams": 3}):
        options = settings | {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        assert torch.equal(opened.generate(**PROMPTS, **options), model.generate(**PROMPTS, **options)), settings


def test_recurrent_states_have_no_place():
    config = tiny_config("mamba")
    with pytest.raises(ValueError, match=r"MambaForCausalLM .*; choose --format dense") as error:
        engine_parts(AutoModelForCausalLM.from_config(config).eval(), "causal-lm")
    assert "\n" not in str(error.value)


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
