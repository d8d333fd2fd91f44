"""Translators in ONNX that were exported with a shortlist, against `generate` of PyTorch with a mask over all logits."""

import numpy as np
import pytest
import torch
from support.text import words
from transformers import AutoModelForSeq2SeqLM, BertConfig, BertModel, MarianConfig, MarianMTModel

from hf_freeze import analysis, make_variant, methods, runtime
from hf_freeze.publish.export import export_model
from hf_freeze.runtime.sessions import OnnxSession

SIZE = 40
TEXTS = [[5, 6, 7, 8, 1], [9, 10, 1], [11, 5, 5, 1]]
PADDED = [*range(5, 12), 1, 0]  # the tokens of a batch of them
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SIZES |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32}
SETTINGS = {"max_new_tokens": 12, "bad_words_ids": [[30], [15, 16]], "forced_eos_token_id": 1}


def translator(method=None):
    config = MarianConfig(
        vocab_size=SIZE, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1, **SIZES
    )
    model = MarianMTModel(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in [*model.parameters(), model.final_logits_bias]:
            tensor.add_(torch.randn_like(tensor) * 0.5)
    return make_variant(model, [method]).eval() if method else model.eval()


def listed(**changes):
    targets = [[i + 10, i + 11] if i in (5, 6, 7, 9) else [i % SIZE] for i in range(SIZE)]
    arrays = {"always": np.array([0, 3, 30]), "starts": np.cumsum([0, *map(len, targets)])}
    return analysis.Shortlist(**{**arrays, "targets": np.concatenate(targets), **changes})


def saved(model, folder):
    model.save_pretrained(folder)
    words(SIZE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(the model, folders by the type of their weights)"""
    folder = tmp_path_factory.mktemp("translator")
    model = MarianMTModel.from_pretrained(saved(translator(), folder / "model")).eval()  # with its table of positions
    listed().save(folder / "shortlist.npz")
    given = {None: listed(), "int8": folder / "shortlist.npz"}
    return model, {
        kind: export_model(folder / "model", "onnx", out=folder / str(kind), quantization=kind, shortlist=one)
        for kind, one in given.items()
    }


def generated(model, rows, tokens=None, **settings):
    """The new ids of `generate`, where the logits of all but `tokens` are set to -inf."""
    banned = torch.zeros(SIZE, dtype=torch.bool)
    if tokens is not None:
        banned[:] = True
        banned[torch.as_tensor(tokens)] = False
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    hook = model.get_output_embeddings().register_forward_hook(lambda *a: a[2].masked_fill(banned, -torch.inf))
    found = model.generate(input_ids=ids, attention_mask=(ids != 0).long(), **settings)[:, 1:].tolist()
    hook.remove()
    return [row[: row.index(1) + 1] for row in found]


@pytest.mark.parametrize("beams", [1, 4])
def test_translations_are_those_of_generate_with_a_mask(exported, beams):
    model, folders = exported
    settings = SETTINGS | {"num_beams": beams}
    tokens = listed().tokens(PADDED)
    expected = generated(model, TEXTS, tokens, **settings)
    assert [ids for (ids,) in runtime.open(folders[None]).ids(TEXTS, **settings)] == expected
    plain = generated(model, TEXTS, **settings)
    assert expected != plain
    assert [ids for (ids,) in runtime.open(folders[None], use_shortlist=False).ids(TEXTS, **settings)] == plain


def test_each_batch_has_the_tokens_of_its_texts(exported):
    model, folders = exported
    alone = [generated(model, [row], listed().tokens(row, [0, 1]), **SETTINGS)[0] for row in TEXTS]
    assert [ids for (ids,) in runtime.open(folders[None]).ids(TEXTS, batch_size=1, **SETTINGS)] == alone


def test_a_language_that_is_forced_is_in(exported):
    translate = runtime.open(exported[1][None])
    assert all(ids[0] == 37 for (ids,) in translate.ids(TEXTS, forced_bos_token_id=37, num_beams=2, max_new_tokens=5))


def test_transformers_opens_the_folder_without_the_shortlist(exported):
    model, folders = exported
    opened = AutoModelForSeq2SeqLM.from_pretrained(folders[None])
    assert set(opened.runners) == {"encoder", "decoder"}
    ids = torch.tensor([TEXTS[0]])
    assert torch.equal(opened.generate(ids, **SETTINGS), model.generate(ids, **SETTINGS))


@pytest.mark.parametrize(("kind", "difference"), [(None, 1e-4), ("int8", 0.3)])
def test_the_logits_of_the_list_are_those_of_the_whole_decoder(exported, kind, difference):
    folder, random, tokens = exported[1][kind], np.random.default_rng(0), np.array([2, 3, 17, 31, 39])
    whole, part = (OnnxSession(folder / f"{name}.onnx") for name in ("decoder", "decoder_shortlist"))
    feed = {"input_ids": random.integers(SIZE, size=(3, 2)), "encoder_attention_mask": np.ones((3, 4), np.int64)}
    for name, shape in whole.shapes.items():
        if name.startswith("past"):
            feed[name] = random.standard_normal((3, shape[1], 4, shape[3]), np.float32)
    expected = whole(feed)["logits"][..., tokens]
    np.testing.assert_allclose(part(feed | {"tokens": tokens})["logits"], expected, rtol=0, atol=difference)
    assert np.ptp(expected) > 10 * difference


def test_a_factorised_output_takes_a_shortlist(tmp_path):
    source = saved(translator(methods.FactorizedEmbedding(rank=8)), tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(source).eval()
    folder = export_model(source, "onnx", out=tmp_path / "onnx", shortlist=listed())
    tokens = listed().tokens(PADDED)
    found = [ids for (ids,) in runtime.open(folder).ids(TEXTS, **SETTINGS)]
    assert found == generated(model, TEXTS, tokens, **SETTINGS)


def test_exports_that_cannot_take_a_shortlist_are_refused(tmp_path):
    folder = saved(translator(), tmp_path / "model")
    with pytest.raises(ValueError, match="openvino in fp32 takes no shortlist; choose onnx, in fp32 or int8"):
        export_model(folder, "openvino", shortlist=listed())
    with pytest.raises(ValueError, match="onnx in int8-static takes no shortlist"):
        export_model(folder, "onnx", quantization="int8-static", texts=["w5"], shortlist=listed())
    with pytest.raises(ValueError, match=r"missing.npz is no shortlist"):
        export_model(folder, "onnx", shortlist=tmp_path / "missing.npz")
    with pytest.raises(ValueError, match=r"has the token 40, and MarianMTModel has 0\.\.39"):
        export_model(folder, "onnx", shortlist=listed(always=np.array([40])))
    encoder = BertModel(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"a shortlist is for translators, and .* is a feature-extraction model"):
        export_model(saved(encoder, tmp_path / "bert"), "onnx", shortlist=listed())
    rounded = translator(methods.Quantize(scheme="int8", components=["embeddings"]))
    with pytest.raises(ValueError, match="needs an output matrix of numbers or of low rank, not QuantizedLinear"):
        export_model(saved(rounded, tmp_path / "rounded"), "onnx", shortlist=listed())


def test_a_folder_without_its_second_decoder_is_refused(exported, tmp_path):
    for path in exported[1][None].iterdir():
        if path.stem != "decoder_shortlist":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="lacks the part decoder_shortlist; export it again"):
        runtime.open(tmp_path)
