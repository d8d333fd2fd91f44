"""Exported models compute what PyTorch computes, whatever the method, tokenizer or place of the pad token."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
import pytest
import torch
from ctranslate2.converters import transformers as converters
from families.contract import tiny_config
from support.cases import MODEL, PLAIN, Case
from support.models import build, merge_or_none, native
from support.text import SOURCE, fast_tokenizer, marian_tokenizer, words
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    Qwen3ForCausalLM,
    RobertaForMaskedLM,
    T5ForConditionalGeneration,
    pipeline,
)
from typer.testing import CliRunner

from hf_freeze import make_variant, methods
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.cli import app
from hf_freeze.publish.export import CTranslate2Translator, export_model
from hf_freeze.publish.export import ctranslate2 as ctranslate2_format
from hf_freeze.publish.export.folders import MARK

converters.gc = SimpleNamespace(collect=lambda: 0)  # as in conftest.py: it collects garbage after each layer of a Llama

TEXTS = [SOURCE[0], "katze", "das haus am see ist heute schön und der hund trinkt milch", "wir"]
ENGINE = {"intra_threads": 1, "inter_threads": 1}
MARIAN = ARCHITECTURES["marian"]


def save(folder: Path, model, tokenizer=None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or words(model.config.vocab_size)).save_pretrained(folder)
    return folder


def marian(tokenizer, **settings):
    """A model as if trained: every value is moved, the row of the pad token too, and each text has its own translation."""
    torch.manual_seed(5)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids |= {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": len(tokenizer), "max_position_embeddings": 64}
    model = MarianMTModel(MarianConfig(**MARIAN.tiny | sizes | ids | settings)).eval()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.6 * torch.randn_like(parameter)
    model.final_logits_bias.normal_()
    model.generation_config.max_new_tokens = 12
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A variant with its tokenizer, whose pad token is the first of the vocabulary."""
    folder = tmp_path_factory.mktemp("trained")
    return save(folder, make_variant(marian(fast_tokenizer(folder)), []), AutoTokenizer.from_pretrained(folder))


def generated(model, tokenizer, texts, **settings) -> list[str]:
    encoded = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    found = model.generate(**encoded, do_sample=False, **settings)
    return tokenizer.batch_decode(found, skip_special_tokens=True)


# -- CTranslate2 -------------------------------------------------------------------------------------------------------------

# Every method on Marian. Of language models, whose converters are the library's own, the baselines: what merges is native.
GENERATING = [
    case
    for case in PLAIN
    if case.task in ctranslate2_format.SUPPORTED_TASKS.get(case.architecture.model_type, ())
    and (case.architecture is MARIAN or not case.methods)
]
assert {case.architecture.model_type for case in GENERATING} == set(ctranslate2_format.SUPPORTED_TASKS)


@pytest.mark.parametrize("case", GENERATING, ids=lambda case: case.id)
def test_every_method_generates_the_same_or_is_refused_by_name(case: Case, tmp_path):
    model = build(case)
    tokenizer = words(model.config.vocab_size)
    source = save(tmp_path / "model", model, tokenizer)
    if merge_or_none(model) is None:
        with pytest.raises(ValueError, match="ctranslate2 cannot hold this model: ") as refused:
            export_model(source, "ctranslate2")
        assert any(method.name in str(refused.value) for method in case.methods)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing half written
        return
    folder = export_model(source, "ctranslate2")
    texts = ["w5 w3 w7 w4", "w8 w4", "w3"]
    if case.architecture.model_type == "marian":
        found = CTranslate2Translator(folder, **ENGINE)(texts, max_new_tokens=8)
        assert [each["translation_text"] for each in found] == generated(model, tokenizer, texts, max_new_tokens=8)
        return
    engine = ctranslate2.Generator(str(folder), **ENGINE)
    for text in texts:  # without an end, which the model would go on from
        prompt = text.split()
        results = engine.generate_batch([prompt], max_length=6, sampling_topk=1, include_prompt_in_result=False)
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(prompt)])
        model.generation_config.eos_token_id = 1
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        tokens = tokens[: (tokens == 1).nonzero()[0]] if (tokens == 1).any() else tokens
        assert results[0].sequences[0] == tokenizer.convert_ids_to_tokens(tokens.tolist())


@pytest.mark.parametrize(("groups", "removed"), [(1, [0, 3, 5]), (2, [1, 6])], ids=["one group of heads", "two groups"])
def test_thinned_groups_and_heads_of_another_size_than_hidden_by_heads(groups, removed, tmp_path):
    """The export compares the probabilities."""
    sizes = ARCHITECTURES["llama"].tiny | {"num_attention_heads": 8, "num_key_value_heads": groups, "head_dim": 6}
    assert sizes["hidden_size"] != 8 * 6
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(LlamaConfig(**sizes))
    for parameter in backbone.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model = make_variant(backbone, [methods.HeadPruning(heads={"decoder.0.self": removed})])
    assert (export_model(save(tmp_path / "model", model), "ctranslate2") / "model.bin").stat().st_size


@pytest.mark.parametrize("make_tokenizer", [fast_tokenizer, marian_tokenizer])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3, "early_stopping": True}, {"num_beams": 4, "length_penalty": 0.6}], ids=str
)
def test_translations_are_those_of_the_pipeline(make_tokenizer, settings, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = marian(tokenizer)
    assert model.model.shared.weight[tokenizer.pad_token_id].abs().min() > 0
    model.generation_config.bad_words_ids = [[tokenizer.pad_token_id]]
    model.generation_config.update(**settings)
    translator = CTranslate2Translator(export_model(save(tmp_path / "m", model, tokenizer), "ctranslate2"), **ENGINE)
    expected = pipeline("translation", model=model, tokenizer=tokenizer)
    assert translator(TEXTS) == expected(TEXTS)
    assert translator(TEXTS[0]) == expected(TEXTS[0])
    assert translator([]) == []
    if settings:
        several = translator(TEXTS, num_return_sequences=2)
        assert several == expected(TEXTS, num_return_sequences=2)
        assert translator(TEXTS[1], num_return_sequences=2) == several[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_vocab_size": 33, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
        {"encoder_attention_heads": 4, "decoder_attention_heads": 2},
        {"encoder_layers": 1, "decoder_layers": 3, "activation_function": "gelu", "scale_embedding": False},
        {"decoder_start_token_id": 1},
        {},
    ],
    ids=lambda settings: "-".join(settings) or "pad",
)
def test_configs_that_the_converter_of_the_library_overlooks(settings, tmp_path):
    tokenizer = words(40, pad=5)
    model = marian(tokenizer, **settings)
    folder = export_model(save(tmp_path / "model", model, tokenizer), "ctranslate2")
    found = CTranslate2Translator(folder, **ENGINE)(["w5 w3 w7 w4", "w8"])
    expected = [generated(model, tokenizer, [text])[0] for text in ("w5 w3 w7 w4", "w8")]
    assert [each["translation_text"] for each in found] == expected


def test_int8_is_smaller_and_translates(trained):
    sizes = {}
    for quantization in (None, "int8"):
        folder = export_model(trained, "ctranslate2", quantization=quantization)
        assert folder.name == f"{trained.name}-ctranslate2" + f"-{quantization}" * bool(quantization)
        sizes[quantization] = (folder / "model.bin").stat().st_size
        assert len(CTranslate2Translator(folder, **ENGINE)(TEXTS)) == len(TEXTS)
    assert sizes["int8"] < 0.6 * sizes[None]


def test_16_bits_make_the_file_smaller_and_cpus_compute_in_32(trained, capfd):
    folders = {name: export_model(trained, "ctranslate2", quantization=name) for name in ("int8", "int8_float16")}
    sizes = {name: (folder / "model.bin").stat().st_size for name, folder in folders.items()}
    assert sizes["int8_float16"] < 0.95 * sizes["int8"]
    capfd.readouterr()
    assert CTranslate2Translator(folders["int8_float16"], **ENGINE)._engine.compute_type == "int8_float32"
    assert "warning" not in capfd.readouterr().err


def test_the_folder_serves_without_hf_freeze(trained, tmp_path):
    folder = export_model(trained, "ctranslate2", out=tmp_path / "out")
    tokenizer, engine = AutoTokenizer.from_pretrained(folder), ctranslate2.Translator(str(folder), **ENGINE)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(TEXTS[0]).input_ids)
    (result,) = engine.translate_batch([tokens], beam_size=1, max_decoding_length=11)
    found = tokenizer.decode(tokenizer.convert_tokens_to_ids(result.hypotheses[0]), skip_special_tokens=True)
    assert [{"translation_text": found}] == CTranslate2Translator(folder, **ENGINE)(TEXTS[0])


def test_what_the_converter_does_not_know_is_found_by_comparing(tmp_path):
    config = GPT2Config(**ARCHITECTURES["gpt2"].tiny, scale_attn_by_inverse_layer_idx=True)
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    with pytest.raises(ValueError, match="ctranslate2 does not compute the same as GPT2LMHeadModel"):
        export_model(save(tmp_path / "model", model), "ctranslate2")


def test_an_unknown_activation_is_an_error(tmp_path):
    source = save(tmp_path / "model", marian(words(40), activation_function="tanh"))
    with pytest.raises(ValueError, match=r"ctranslate2 has no activation 'tanh'; choose from \['gelu'"):
        export_model(source, "ctranslate2")


def test_the_translator_refuses_what_it_cannot_do(trained, tmp_path):
    translator = CTranslate2Translator(export_model(trained, "ctranslate2", out=tmp_path / "out"), **ENGINE)
    with pytest.raises(ValueError, match=r"ctranslate2 has no setting 'do_sample'; choose from \['max_new_tokens'"):
        translator("katze", do_sample=True)
    with pytest.raises(ValueError, match="needs text"):
        translator([3])
    with pytest.raises(ValueError, match="num_return_sequences"):
        translator("katze", num_return_sequences=2)
    long = " ".join(["katze"] * 70)
    with pytest.raises(ValueError, match=r"longer than the 64 positions of the model; pass truncation=True"):
        translator(long)
    assert translator(long, truncation=True, max_new_tokens=500)  # as many as there are positions
    with pytest.raises(ValueError, match="is no exported folder"):
        CTranslate2Translator(trained)


def test_settings_that_are_not_followed_are_named(trained, tmp_path, caplog):
    model = MarianMTModel.from_pretrained(export_model(trained, "dense", out=tmp_path / "dense"))
    model.generation_config.update(repetition_penalty=1.5, num_beams=2, use_cache=True)
    source = save(tmp_path / "model", model, AutoTokenizer.from_pretrained(trained))
    CTranslate2Translator(export_model(source, "ctranslate2"), **ENGINE)
    assert "does not follow these generation settings" in caplog.text
    assert caplog.text.strip().endswith("['repetition_penalty']")


# -- folders -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["roberta", "t5", "qwen3"])
@torch.no_grad()
def test_dense_takes_families_that_are_derived(model_type, tmp_path):
    torch.manual_seed(0)
    native = {"roberta": RobertaForMaskedLM, "t5": T5ForConditionalGeneration, "qwen3": Qwen3ForCausalLM}[model_type]
    model = make_variant(native(tiny_config(model_type)), [methods.LowRank(rank=3), methods.Freeze(attention="random")])
    model.eval().save_pretrained(tmp_path / "model")
    folder = export_model(tmp_path / "model", "dense")
    ids = torch.tensor([[3, 4, 5, 6]])
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    torch.testing.assert_close(
        native.from_pretrained(folder).eval()(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=1e-5
    )


def test_dense_names_no_hf_freeze(trained, tmp_path):
    folder = export_model(trained, "dense", out=tmp_path / "deep" / "dense")
    for path in folder.glob("*.json"):
        assert path.name == MARK or "hf_freeze" not in path.read_text(encoding="utf-8"), path
    tokenizer, model = (auto.from_pretrained(folder) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    assert type(model) is MarianMTModel
    assert generated(model, tokenizer, TEXTS) == generated(
        AutoModelForSeq2SeqLM.from_pretrained(trained), tokenizer, TEXTS
    )
    half = export_model(trained, "dense", quantization="bfloat16", out=tmp_path / "half")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_files_of_sentence_transformers_go_along(tmp_path):
    torch.manual_seed(0)
    BertModel(BertConfig(**ARCHITECTURES["bert"].tiny)).save_pretrained(tmp_path / "encoder")
    files = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
    for name in files:
        (tmp_path / "encoder" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "encoder" / name).write_text(f'{{"of": "{name}"}}', encoding="utf-8")
    folder = export_model(tmp_path / "encoder", "dense", out=tmp_path / "out")
    for name in files:
        assert (folder / name).read_bytes() == (tmp_path / "encoder" / name).read_bytes()


def test_vocabularies_are_written_without_white_space(trained, tmp_path):
    folder = export_model(trained, "ctranslate2", out=tmp_path / "out")
    for name in ("tokenizer.json", "shared_vocabulary.json"):
        assert "\n" not in (folder / name).read_text(encoding="utf-8")
    saved, exported = (AutoTokenizer.from_pretrained(path).backend_tokenizer.to_str() for path in (trained, folder))
    assert saved == exported


def test_a_folder_in_the_way_is_left_alone(trained, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export_model(trained, "dense", out=out)  # an empty one is none
    (out / "stale").touch()
    export_model(trained, "ctranslate2", out=out)
    assert (out / "model.bin").is_file()
    assert not (out / "stale").exists()  # an earlier export is replaced as a whole
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    with pytest.raises(
        ValueError, match="is neither empty nor an earlier export; choose another --out, or use --force"
    ):
        export_model(trained, "dense", out=other)
    with pytest.raises(ValueError, match="is a file"):
        export_model(trained, "dense", out=other / "thesis.txt")
    assert (other / "thesis.txt").is_file()
    export_model(trained, "dense", out=other, force=True)
    assert not (other / "thesis.txt").exists()
    with pytest.raises(ValueError, match="holds the model that is read"):
        export_model(trained, "dense", out=trained.parent, force=True)
    assert (trained / "config.json").is_file()
    assert not list(tmp_path.glob(".hf_freeze*"))


def test_wrong_input_is_one_line(trained, tmp_path, monkeypatch):
    for arguments, message in (
        (
            (trained, "tflite"),
            r"unknown format 'tflite'; choose from \['onnx', 'openvino', 'torch', ",
        ),
        ((trained, "ctranslate2", "int3"), r"unknown quantization 'int3' for ctranslate2; choose from \['int8', "),
        (
            (trained, "onnx", "float16"),
            r"unknown quantization 'float16' for onnx; choose from \['int8', 'int8-static'\]",
        ),
        ((tmp_path, "dense"), "holds no model: it has no config.json"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            export_model(*arguments[:2], quantization=(*arguments, None)[2], out=tmp_path / "out")
        assert "\n" not in str(error.value)
    bert = Case(ARCHITECTURES["bert"], "masked-lm", MODEL, ())
    native(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(
        ValueError, match=r"ctranslate2 does not support BertForMaskedLM \(masked-lm\); choose from marian: seq2seq"
    ):
        export_model(tmp_path / "bert", "ctranslate2")
    marian(words(40)).save_pretrained(tmp_path / "alone")
    with pytest.raises(ValueError, match="holds no tokenizer, but ctranslate2 needs one"):
        export_model(tmp_path / "alone", "ctranslate2")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(
        ValueError, match=r'ctranslate2 needs ctranslate2, .*; from a clone: pip install .* "\.\[export\]"'
    ):
        export_model(trained, "ctranslate2", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_line(trained, tmp_path):
    def call(*arguments):
        environment = {"COLUMNS": "300", "NO_COLOR": "1"}
        return CliRunner().invoke(app, ["export", *map(str, arguments)], env=environment)

    done = call(trained, "--format", "ctranslate2", "--quantization", "int8", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "comparing with PyTorch" in done.output
    assert f"Written: {tmp_path / 'out'}" in done.output
    wrong = call(trained, "--format", "tflite")
    assert wrong.exit_code == 2
    assert "Error: unknown format 'tflite'" in wrong.output
    light = methods.LiteTransformer.example
    model = make_variant(MarianConfig(**MARIAN.tiny), [light], task="seq2seq-lm")
    refused = call(save(tmp_path / "light", model), "--format", "ctranslate2")
    assert refused.exit_code == 2
    assert "ctranslate2 cannot hold this model: lite_transformer: no native model has convolutions" in refused.output
