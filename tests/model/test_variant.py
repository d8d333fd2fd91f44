"""What a variant is: of models, configs and variants, frozen part by part, resized, and opened by other classes and tools."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from support.processes import printed_by
from support.tiny_variants import (
    FC1,
    MARIAN,
    QUERY,
    TABLE,
    bert_config,
    fresh_marian,
    logits,
    marian_config,
    shake,
    tensors,
    trainable,
)
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    MarianMTModel,
)

from hf_freeze import count_parameters, make_variant
from hf_freeze.methods import Freeze
from hf_freeze.seeded.tensor import SeededTensor

# -- backbones and variants of variants ------------------------------------------------------------------------------------------


def test_the_backbone_is_never_modified():
    native = MarianMTModel(marian_config()).eval()
    native.generation_config.num_beams = 7
    before, config, grads = tensors(native), native.config.to_dict(), trainable(native)
    batch = MARIAN.tiny_inputs("seq2seq-lm")
    expected = native(**batch).logits
    variant = make_variant(native, [Freeze(embeddings="random", attention="diagonal", ffn="frozen", norm="frozen")])
    variant.resize_token_embeddings(44)
    shake(variant)
    assert type(native) is MarianMTModel
    assert native.config.to_dict() == config
    assert trainable(native) == grads
    assert all(torch.equal(p, before[name]) for name, p in tensors(native).items())
    assert torch.equal(native(**batch).logits, expected)
    assert variant.generation_config.num_beams == 7
    config = marian_config()
    before = config.to_dict()
    make_variant(config, [Freeze(ffn="random")], task="seq2seq-lm", init="marian")
    assert config.to_dict() == before


def test_a_variant_of_a_variant_appends():
    first = shake(fresh_marian(Freeze(ffn="random", seed=13)))
    old_methods, old = list(first.config.methods), tensors(first)
    second = make_variant(first, [Freeze(attention="frozen"), Freeze(norm="frozen")])
    assert type(second) is type(first)
    assert second.config.methods[:1] == old_methods == first.config.methods
    assert [m.get("attention") for m in second.config.methods] == ["trainable", "frozen", "trainable"]
    assert second.config.init == "marian"
    assert all(torch.equal(p, old[name]) for name, p in tensors(second).items())
    assert trainable(second) == {n for n in trainable(first) if "attn" not in n and "layer_norm" not in n}
    assert torch.equal(logits(first), logits(second))
    randomised = make_variant(second, [Freeze(attention="random", seed=2)])
    assert len(randomised.config.methods) == 4
    assert torch.equal(randomised.get_parameter(QUERY), SeededTensor(2, QUERY[6:], (16, 16), "glorot").generate())
    assert set(randomised.config.digests) == {d.name for d in randomised.seeded_tensors.values()}


def test_a_saved_variant_is_a_backbone(saved, tmp_path):
    variant = make_variant(str(saved), [Freeze(attention="frozen")], task="seq2seq-lm")
    assert [m["ffn"] for m in variant.config.methods] == ["random", "trainable"]
    variant.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert trainable(again) == trainable(variant)
    assert torch.equal(logits(again), logits(AutoModelForSeq2SeqLM.from_pretrained(saved)))


def test_a_variant_config_is_a_backbone():
    base = fresh_marian(Freeze(ffn="random", seed=13))
    model = make_variant(base.config, [Freeze(attention="frozen")], task="seq2seq-lm")
    assert len(model.config.methods) == 2
    assert model.config.init == "marian"
    assert len(base.config.methods) == 1


def test_a_backbone_on_meta():
    with torch.device("meta"):
        native = MarianMTModel(marian_config())
    variant = make_variant(native, [Freeze(ffn="random")])
    assert all(p.is_meta for p in variant.parameters())
    assert not variant.get_parameter(FC1).requires_grad
    assert variant.get_parameter(QUERY).requires_grad


# -- Freeze ----------------------------------------------------------------------------------------------------------------------


def test_each_mode_does_what_it_says():
    native = shake(MarianMTModel(marian_config()))
    old = tensors(native)
    model = make_variant(native, [Freeze(attention="zero_diagonal", ffn="diagonal", norm="frozen", seed=3)])
    eye = torch.eye(24, 16)
    for name, value in tensors(model).items():
        if ".fc1.weight" in name or ".fc2.weight" in name:
            assert torch.equal(value, eye if ".fc1." in name else eye.T), name
        elif "_attn." in name and name.endswith("weight"):
            random = SeededTensor(3, name.removeprefix("model."), (16, 16), "glorot").generate()
            assert torch.equal(value, random.fill_diagonal_(0)), name
        elif name.endswith("bias") and ("_attn." in name or ".fc" in name):
            assert not value.any(), name
        else:
            assert torch.equal(value, old[name]), name
    expected = {n for n in old if n == "final_logits_bias" or "shared" in n or "embed_tokens" in n or "lm_head" in n}
    assert trainable(model) == expected


def test_trainable_is_the_default_and_changes_nothing():
    native = shake(MarianMTModel(marian_config()))
    model = make_variant(native, [Freeze()])
    assert trainable(model) == trainable(native) - {n for n in trainable(native) if "embed_positions" in n}
    assert not model.seeded_tensors
    assert torch.equal(logits(model), logits(native))


def test_several_freezes_act_in_order():
    native = shake(MarianMTModel(marian_config()))

    def fc1(*methods):
        model = make_variant(native, list(methods))
        assert not model.get_parameter(FC1).requires_grad
        return model.get_parameter(FC1), model.seeded_tensors

    random, other = (SeededTensor(seed, FC1[6:], (24, 16), "glorot").generate() for seed in (1, 2))
    value, _ = fc1(Freeze(ffn="random", seed=1), Freeze(ffn="random", seed=2))
    assert torch.equal(value, other)
    value, _ = fc1(Freeze(ffn="diagonal"), Freeze(ffn="random", seed=1))
    assert torch.equal(value, random)
    value, _ = fc1(Freeze(ffn="frozen"), Freeze(ffn="random", seed=1))
    assert torch.equal(value, random)
    # "frozen" keeps the weights there are, which are the random ones; "trainable" names nothing.
    value, seeded = fc1(Freeze(ffn="random", seed=1), Freeze(ffn="frozen"))
    assert torch.equal(value, random)
    assert FC1 in seeded
    value, _ = fc1(Freeze(ffn="random", seed=1), Freeze(ffn="trainable", attention="frozen"))
    assert torch.equal(value, random)
    model = make_variant(
        native, [Freeze(ffn="random", layers={"encoder": [0]}), Freeze(ffn="diagonal", layers={"decoder": [0]})]
    )
    assert {d.scheme for n, d in model.seeded_tensors.items() if n.endswith("fc1.weight")} == {"glorot", "diagonal"}


def test_layers_limit_attention_ffn_and_norm_but_not_embeddings():
    layers = {"encoder": [1], "decoder": []}
    model = fresh_marian(Freeze(embeddings="frozen", attention="frozen", ffn="random", norm="frozen", layers=layers))
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad and "embed_positions" not in n}
    layer = {n for n, _ in model.named_parameters() if n.startswith("model.encoder.layers.1.")}
    assert frozen == layer | {TABLE}
    assert set(model.seeded_tensors) == {n for n in layer if ".fc" in n}
    assert not make_variant(marian_config(), [Freeze(ffn="random", layers={})], task="seq2seq-lm").seeded_tensors


def test_all_layers_by_number_are_all_layers():
    listed = fresh_marian(Freeze(ffn="random", attention="frozen", layers={"encoder": [0, 1], "decoder": [1, 0]}))
    plain = fresh_marian(Freeze(ffn="random", attention="frozen"))
    assert trainable(listed) == trainable(plain)
    assert listed.seeded_tensors == plain.seeded_tensors


def test_a_tied_table_freezes_with_its_output_matrix():
    model = fresh_marian(Freeze(embeddings="random", seed=4))
    table = model.model.shared.weight
    assert (
        table
        is model.lm_head.weight
        is model.model.encoder.embed_tokens.weight
        is model.model.decoder.embed_tokens.weight
    )
    assert not table.requires_grad
    assert list(model.seeded_tensors) == [TABLE]
    assert torch.equal(table, SeededTensor(4, "shared.weight", (40, 16), "embedding").generate())
    bert = make_variant(bert_config(), [Freeze(embeddings="frozen")], task="masked-lm")
    assert not bert.cls.predictions.decoder.weight.requires_grad
    assert bert.cls.predictions.bias.requires_grad


UNTIED = {
    "two tables": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30},
    "two tables, untied output": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 30,
        "tie_word_embeddings": False,
    },
    "untied output": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("init", ["backbone", "marian"])
@pytest.mark.parametrize("untied", UNTIED)
def test_untied_marian(untied, init, tmp_path):
    config = marian_config(**UNTIED[untied])
    model = make_variant(config, [Freeze(embeddings="random", seed=4)], task="seq2seq-lm", init=init)
    native = MarianMTModel(config)
    separate = "output" in untied
    assert model.lm_head.weight.requires_grad is separate
    sizes = {d.name: d.shape for d in model.seeded_tensors.values()}
    # Without any tie `shared` and both `embed_tokens` are tables of their own.
    assert sum(shape[0] for shape in sizes.values()) == (40 + 30 if "tables" in untied else 3 * 40), sizes
    assert not any(
        p.requires_grad for p in (model.get_input_embeddings().weight, model.model.decoder.embed_tokens.weight)
    )
    if init == "marian" and separate:
        assert model.lm_head.weight.abs().max() <= math.sqrt(6 / sum(model.lm_head.weight.shape))
    # What is tied natively is tied here, and as many parameters are counted.
    assert count_parameters(model).total == count_parameters(native).total + (
        model.final_logits_bias.numel() if init == "marian" else 0
    )
    shake(model).save_pretrained(tmp_path)
    torch.manual_seed(99)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert trainable(again) == trainable(model)
    merged = model.merge()
    assert type(merged) is MarianMTModel
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-5)


def test_bert_freezes_words_positions_and_types(tmp_path):
    model = make_variant(bert_config(), [Freeze(embeddings="random", seed=6)], task="masked-lm", init="marian")
    assert set(model.seeded_tensors) == {
        f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    }
    for name, definition in model.seeded_tensors.items():
        assert torch.equal(model.get_parameter(name), definition.generate())
        assert definition.scheme == "embedding"
    assert model.bert.embeddings.LayerNorm.weight.requires_grad
    shake(model).save_pretrained(tmp_path)
    assert not any("_embeddings.weight" in key for key in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(AutoModelForMaskedLM.from_pretrained(tmp_path), "masked-lm"), logits(model, "masked-lm"))


def test_the_head_and_the_output_bias_can_be_frozen():
    model = fresh_marian(Freeze(head="frozen"))
    assert not model.final_logits_bias.requires_grad
    bert = make_variant(bert_config(), [Freeze(head="frozen")], task="sequence-classification")
    assert trainable(bert) == {n for n, _ in bert.named_parameters() if not n.startswith(("classifier", "bert.pooler"))}


# -- one set of weights, several classes -----------------------------------------------------------------------------------------


def test_the_base_model_holds_the_same_random_weights(saved_bert):
    folder, model = saved_bert
    torch.manual_seed(77)
    base = AutoModel.from_pretrained(folder)
    whole = tensors(model)
    for name, value in tensors(base).items():
        if not name.startswith("pooler"):  # a masked-lm model has none
            assert torch.equal(value, whole[f"bert.{name}"]), name
    assert {f"bert.{name}" for name in base.seeded_tensors} == set(model.seeded_tensors)
    assert not any(base.get_parameter(name).requires_grad for name in base.seeded_tensors)


def test_another_task_gets_a_fresh_head(saved_bert):
    folder, model = saved_bert
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        heads.append(classifier.classifier.weight.detach())
        assert isinstance(classifier, type(make_variant(bert_config(), [], task="sequence-classification")))
        whole = tensors(model)
        assert all(torch.equal(p, whole[n]) for n, p in tensors(classifier).items() if n in whole)
        assert {n for n in trainable(classifier) if n not in whole} == {
            "classifier.weight",
            "classifier.bias",
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
        }
    assert heads[0].shape == (3, 16)
    assert torch.isfinite(heads[0]).all()
    assert 0.005 < heads[0].std() < 0.05  # N(0, 0.02)
    assert not torch.equal(*heads)


# -- resizing --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [55, 31])
def test_resizing_a_seeded_tied_table(size, tmp_path):
    model = shake(fresh_marian(Freeze(embeddings="random", seed=4)))
    table, bias = model.get_parameter(TABLE).clone(), model.final_logits_bias.clone()
    kept = min(size, 40)
    returned = model.resize_token_embeddings(size)
    assert returned is model.get_input_embeddings()
    assert torch.equal(model.get_parameter(TABLE), SeededTensor(4, "shared.weight", (size, 16), "embedding").generate())
    assert torch.equal(model.get_parameter(TABLE)[:kept], table[:kept])
    assert model.lm_head.weight is model.get_parameter(TABLE)
    assert not model.lm_head.weight.requires_grad
    assert isinstance(model.final_logits_bias, torch.nn.Parameter)
    assert model.final_logits_bias.requires_grad
    assert torch.equal(model.final_logits_bias[:, :kept], bias[:, :kept])
    assert not model.final_logits_bias[:, kept:].any()
    assert model.config.vocab_size == size
    found = logits(model)
    assert found.shape[-1] == size
    model.save_pretrained(tmp_path)
    assert not {TABLE, "lm_head.weight"} & set(load_file(tmp_path / "model.safetensors"))
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), found)
    assert trainable(again) == trainable(model)
    # Back again: what was cut off returns, for it is a function of the seed.
    model.resize_token_embeddings(40)
    assert torch.equal(model.get_parameter(TABLE), table)


@pytest.mark.parametrize("mode", ["trainable", "frozen"])
def test_resizing_a_table_with_weights_of_its_own(mode, tmp_path):
    model = shake(make_variant(MarianMTModel(marian_config()), [Freeze(embeddings=mode, ffn="random")]))
    table = model.get_parameter(TABLE).clone()
    model.resize_token_embeddings(50, mean_resizing=False)
    assert torch.equal(model.get_parameter(TABLE)[:40], table)
    assert model.get_parameter(TABLE).requires_grad is (mode == "trainable")
    assert model.lm_head.weight.requires_grad is (mode == "trainable")
    assert not isinstance(model.final_logits_bias, torch.nn.Parameter)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path)), logits(model))


def test_resizing_bert(tmp_path):
    model = shake(make_variant(bert_config(), [Freeze(embeddings="random", seed=4)], task="masked-lm"))
    positions = model.bert.embeddings.position_embeddings.weight.clone()
    model.resize_token_embeddings(41, pad_to_multiple_of=8)
    definition = SeededTensor(4, "embeddings.word_embeddings.weight", (48, 16), "embedding")
    assert torch.equal(model.get_input_embeddings().weight, definition.generate())
    assert torch.equal(model.bert.embeddings.position_embeddings.weight, positions)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert logits(again, "masked-lm").shape[-1] == 48
    assert torch.equal(logits(again, "masked-lm"), logits(model, "masked-lm"))


# -- other processes -------------------------------------------------------------------------------------------------------------


def test_importing_costs_little():
    classes = "pipeline, MarianMTModel, BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM"
    # Time of this process, not of the clock: the machine may be busy.
    code = f"import time; from transformers import {classes}; started = time.process_time(); import hf_freeze; "
    code += "print(time.process_time() - started)"
    seconds = sorted(float(printed_by(code)) for _ in range(3))
    assert seconds[1] < 0.3, f"import hf_freeze took {seconds} s"


# The server that starts processes has imported PEFT with transformers.
PEFT = """
import json, sys
for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
    del sys.modules[name]
{imports}
import torch
if True:
    from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM
    for auto_class, folder, targets in (
        (AutoModelForMaskedLM, {bert!r}, None),
        (AutoModelForSeq2SeqLM, {marian!r}, ["q_proj", "v_proj"]),  # PEFT has no default for the native Marian either
    ):
        model = auto_class.from_pretrained(folder).eval()
        batch = model.architecture.tiny_inputs(model.architecture.tasks[0])
        frozen = {{name: model.get_parameter(name).clone() for name in model.seeded_tensors}}
        expected = model(**batch).logits
        wrapped = get_peft_model(model, LoraConfig(target_modules=targets))
        trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
        start = torch.equal(wrapped(**batch).logits, expected)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.3)
        tuned = wrapped(**batch).logits
        merged = wrapped.merge_and_unload()
        print(json.dumps({{
            "class": type(merged).__name__,
            "starts equal": start,
            "only lora": all("lora" in name for name in trained),
            "targets": sorted({{name.split(".lora")[0].split(".")[-1] for name in trained}}),
            "changed": (tuned - expected).abs().max().item(),
            "merged": (merged(**batch).logits - tuned).abs().max().item(),
            "seeded": all(torch.equal(merged.get_parameter(name), value) for name, value in frozen.items()),
            "lora left": any("lora" in name for name, _ in merged.named_modules()),
        }}))
        merged.save_pretrained({out!r})
        assert torch.equal(auto_class.from_pretrained({out!r})(**batch).logits, merged(**batch).logits)
"""


def test_peft_wraps_and_merges_a_variant(saved, saved_bert, tmp_path):
    """Its default targets are those of the native model type, whichever package is imported first."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    imports = ("from peft import LoraConfig, get_peft_model", "import hf_freeze")
    folders = {"bert": str(saved_bert[0]), "marian": str(saved), "out": str(tmp_path / "merged")}
    printed = [printed_by(PEFT.format(imports="\n".join(order), **folders)) for order in (imports, imports[::-1])]
    results = [json.loads(line) for lines in printed for line in lines.splitlines()]
    assert len(results) == 4
    for number, result in enumerate(results):
        assert result.pop("changed") > 1e-2
        assert result.pop("merged") < 1e-4
        assert result == {
            "class": ("VariantBertForMaskedLM", "VariantMarianMTModel")[number % 2],
            "starts equal": True,
            "only lora": True,
            "targets": (["query", "value"], ["q_proj", "v_proj"])[number % 2],
            "seeded": True,
            "lora left": False,
        }
