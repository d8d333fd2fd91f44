"""Vectors, classes, tags, answers and words for masks without PyTorch are those of transformers with the same folder."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.text import SOURCE
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoTokenizer, pipeline

from hf_freeze import runtime
from hf_freeze.runtime.sentences import read_sentence_files

TEXTS = [*SOURCE, "Katze", "wir xq"]


def same(found, expected):
    """Equal, scores to rounding."""
    assert type(found) is type(expected) or isinstance(found, float)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, dict):
        assert {**found, "score": 0} == {**expected, "score": 0}
        assert float(found["score"]) == pytest.approx(float(expected["score"]), abs=1e-6)


def test_classes_are_those_of_the_pipeline(encoders, tmp_path):
    folder = encoders["sequence-classification"]
    expected, found = pipeline("text-classification", model=str(folder)), runtime.open(folder, threads=1)
    same(found(TEXTS, batch_size=3), expected(TEXTS))
    same(found(TEXTS, top_k=None), expected(TEXTS, top_k=None))
    same(found(TEXTS[0], top_k=2), expected(TEXTS[0], top_k=2))
    pair = {"text": TEXTS[0], "text_pair": TEXTS[1]}
    same(found(pair), expected(pair))
    assert len({one["label"] for one in found(TEXTS)}) > 1
    for kind in ("regression", "multi_label_classification"):
        copy = shutil.copytree(folder, tmp_path / kind)
        config = json.loads((copy / "config.json").read_text())
        config["exported"]["problem_type"] = config["problem_type"] = kind
        (copy / "config.json").write_text(json.dumps(config))
        same(
            runtime.open(copy, threads=1)(TEXTS, top_k=None),
            pipeline("text-classification", model=str(copy))(TEXTS, top_k=None),
        )


def test_tags_are_those_of_the_pipeline(encoders):
    folder = encoders["token-classification"]
    expected, found = pipeline("token-classification", model=str(folder)), runtime.open(folder, threads=1)
    for strategy in ("none", "simple"):
        theirs = [expected(text, aggregation_strategy=strategy) for text in TEXTS]
        same(found(TEXTS, aggregation_strategy=strategy), theirs)
        same(found(TEXTS[0], aggregation_strategy=strategy), theirs[0])
        assert sum(map(len, theirs)) > 5
    with pytest.raises(ValueError, match="aggregation_strategy='max': choose from 'none', 'simple'"):
        found(TEXTS, aggregation_strategy="max")


def test_words_for_masks_are_those_of_the_pipeline(encoders):
    folder = encoders["masked-lm"]
    expected, found = pipeline("fill-mask", model=str(folder)), runtime.open(folder, threads=1)
    texts = ["der [MASK] schläft", "[MASK] morgen , wie [MASK] es dir ?"]
    same(found(texts, top_k=3), expected(texts, top_k=3))
    same(found(texts[0]), expected(texts[0]))
    with pytest.raises(ValueError, match=r"'der hund' has no \[MASK\]"):
        found("der hund")


def brute_force(model, tokenizer, question: str, context: str, longest: int) -> tuple[float, int, int]:
    """(score, start, end) of the best of all spans, for a context that is read in one piece."""
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets, sides = encoded.pop("offset_mapping")[0].tolist(), encoded.sequence_ids(0)
    with torch.no_grad():
        outputs = model(**encoded)
    places = [i for i, side in enumerate(sides) if side == 1]
    first, last = (logits[0][places].softmax(0) for logits in (outputs.start_logits, outputs.end_logits))
    spans = [(i, j) for i in range(len(places)) for j in range(i, min(i + longest, len(places)))]
    i, j = max(spans, key=lambda span: float(first[span[0]] * last[span[1]]))
    return float(first[i] * last[j]), offsets[places[i]][0], offsets[places[j]][1]


def test_answers_are_the_best_spans(encoders):
    folder = encoders["question-answering"]
    model, tokenizer = AutoModelForQuestionAnswering.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found, questions = runtime.open(folder, threads=1), []
    for context in (" ".join(SOURCE[:3]), SOURCE[4], "Haus"):
        for longest in (1, 3, 15):
            score, start, end = brute_force(model, tokenizer, "wie geht es ?", context, longest)
            answer = found("wie geht es ?", context, max_answer_len=longest)
            assert answer == {
                "score": pytest.approx(score, rel=1e-4),
                "start": start,
                "end": end,
                "answer": context[start:end],
            }
        questions.append({"question": "wie geht es ?", "context": context})
    same(found(questions), [found(**one) for one in questions])


def test_a_long_context_is_read_in_pieces(encoders):
    """The best answer of all pieces, each of which is a context of its own."""
    folder = encoders["question-answering"]
    found = runtime.open(folder, threads=1)
    context = " ".join(SOURCE * 2)
    pieces = found._pieces("wer ?", context, 6)
    assert len(pieces) > 2
    assert max(len(piece.ids) for piece in pieces) <= 40
    places = {place for piece in pieces for place, side in zip(piece.offsets, piece.sides, strict=True) if side == 1}
    assert places == {
        tuple(place) for place in found._tokenizer.tokenizer.encode(context, add_special_tokens=False).offsets
    }
    answer = found("wer ?", context, doc_stride=6)
    texts = [context[min(s for (s, _), k in zip(p.offsets, p.sides, strict=True) if k == 1) :] for p in pieces]
    assert answer["answer"] == context[answer["start"] : answer["end"]]
    assert any(answer["answer"] in text for text in texts)
    with pytest.raises(ValueError, match=r"a question of .* tokens with its context: the model reads 40; shorten it"):
        found(" ".join(SOURCE * 2), context)
    with pytest.raises(ValueError, match="input 0 has an empty context"):
        found("wer ?", " ")


POOLING = {
    "cls": "cls_token",
    "mean": "mean_tokens",
    "max": "max_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
POOLING |= {"weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}


@pytest.mark.parametrize("mode", POOLING)
def test_vectors_are_those_of_sentence_transformers(encoders, tmp_path, mode):
    """Pooled, through a linear with tanh, and normalised; also without the normalisation."""
    folder, size = encoders["feature-extraction"], 16
    source = folder.parent / "feature-extraction"  # with the weights in PyTorch
    width = AutoModel.from_pretrained(source).config.hidden_size
    modules = ["Transformer", "Pooling", "Dense", "Normalize"][: 4 if mode in ("mean", "cls") else 3]
    for place in (shutil.copytree(folder, tmp_path / "onnx"), shutil.copytree(source, tmp_path / "torch")):
        listed = [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{name}" if i else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for i, name in enumerate(modules)
        ]
        (place / "modules.json").write_text(json.dumps(listed))
        (place / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))
        for name in ("1_Pooling", "2_Dense", "3_Normalize"):
            (place / name).mkdir()
        pooling = {f"pooling_mode_{name}": name == POOLING[mode] for name in POOLING.values()}
        (place / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width} | pooling))
        dense = {"in_features": width, "out_features": size, "bias": True}
        dense |= {"activation_function": "torch.nn.modules.activation.Tanh"}
        (place / "2_Dense" / "config.json").write_text(json.dumps(dense))
        weights = torch.Generator().manual_seed(0)
        tensors = {"linear.weight": torch.randn(size, width, generator=weights), "linear.bias": torch.ones(size)}
        save_file(tensors, place / "2_Dense" / "model.safetensors")
        (place / "3_Normalize" / "config.json").write_text("{}")
    tools = pytest.importorskip("sentence_transformers", reason="sentence-transformers is installed by hand")
    expected = tools.SentenceTransformer(str(tmp_path / "torch"), device="cpu").encode(TEXTS)
    found = runtime.open(tmp_path / "onnx", threads=1)
    np.testing.assert_allclose(found(TEXTS, batch_size=3), expected, atol=2e-5)
    np.testing.assert_allclose(found(TEXTS[0]), expected[0], atol=2e-5)
    assert found(TEXTS).dtype == np.float32


def test_without_sentence_files_a_vector_is_the_mean_over_the_tokens(encoders):
    folder = encoders["feature-extraction"]
    assert read_sentence_files(folder) == {}
    found, expected = runtime.open(folder, threads=1), pipeline("feature-extraction", model=str(folder))
    states = [np.array(expected(text)[0]) for text in TEXTS]
    np.testing.assert_allclose(found(TEXTS), [one.mean(0) for one in states], atol=2e-5)
    for one, other in zip(found.outputs(TEXTS), states, strict=True):
        np.testing.assert_allclose(one["last_hidden_state"], other, atol=2e-5)
