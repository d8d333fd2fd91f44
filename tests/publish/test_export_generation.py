"""Translators and language models that are exported with their structure: folders that open as models of transformers and
generate what the variant generates."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from families.contract import tiny_config
from support.cases import ALL
from support.text import fast_tokenizer
from test_export import TEXTS, marian, save, words
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    TextStreamer,
    pipeline,
)

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.publish.export import OnnxTranslator, export_model
from hf_freeze.publish.export.engine_parts import engine_parts
from hf_freeze.publish.export.exported import CLASSES
from hf_freeze.publish.export.folders import MARK
from hf_freeze.publish.export.runners import open_parts
from hf_freeze.publish.export.served import served_fidelity

ENGINE = {"intra_op_num_threads": 1}


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
    with pytest.raises(ValueError, match="holds a model for seq2seq-lm in onnx, and this opens causal-lm"):
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


def test_tokens_that_see_padding_alone_make_no_nan_and_change_no_other(generator, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(generator[0])
    folder = export_model(generator[0], "onnx", out=tmp_path / "onnx")
    kinds = Counter(node.op_type for node in onnx.load(folder / "model.onnx").graph.node)
    assert (kinds["Softmax"], kinds["IsNaN"]) == (model.config.num_hidden_layers, 0)
    runner = open_parts(folder, "onnx", {})["model"]
    ids, present = torch.tensor([[0, 0, 0, 5, 9, 3], [7, 8, 4, 4, 7, 30]]), torch.ones(2, 6, dtype=torch.long)
    present[0, :3] = 0
    positions = (present.cumsum(1) - 1).clamp_min(0)
    inputs = {"input_ids": ids, "attention_mask": present, "position_ids": positions}
    with torch.no_grad():
        expected = model(**inputs).logits
    past = {
        name: torch.zeros([{"batch": 2, "past_length": 0}.get(size, size) for size in shape])
        for name, shape in runner.shapes.items()
        if name not in inputs
    }
    found = runner({name: (inputs | past)[name] for name in runner.shapes})["logits"]
    assert found.isfinite().all()
    torch.testing.assert_close(found[present.bool()], expected[present.bool()], rtol=1e-4, atol=1e-4)


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
