"""How faithful models are as they are served: a model to itself in each engine, planted losses, other vocabularies."""

import copy
import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import sacrebleu
import torch
from safetensors.torch import save_file
from support.cases import native_config, plain
from support.models import add_noise, native
from support.text import SOURCE, TARGET, marian_tokenizer, words
from support.tokenizers_of_each_kind import byte_fallback, wordpiece
from test_export import marian, save
from test_trimming import model_of
from transformers import BertForMaskedLM, BertModel, LlamaForCausalLM

from hf_freeze.analysis.answers import Answers, compare_answers
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.publish.export import export_model
from hf_freeze.publish.export.served import answers, opened, served_fidelity
from hf_freeze.publish.trimming import trim_model

DRAW = random.Random(0)
TEXTS = [" ".join(f"w{DRAW.randrange(3, 40)}" for _ in range(DRAW.randrange(3, 9))) for _ in range(24)]
TASKS = {
    "feature-extraction": TEXTS,
    "sequence-classification": TEXTS,
    "masked-lm": TEXTS,
    "token-classification": TEXTS,
    "question-answering": [(text, " ".join(reversed(text.split()))) for text in TEXTS],
    "multiple-choice": [(text, [other, text]) for text, other in pairwise(TEXTS)],
}


def bert_for(task):
    torch.manual_seed(1)
    architecture = ARCHITECTURES["bert"]
    return add_noise(AUTO_CLASSES[task].from_config(native_config(architecture)), architecture).eval()


@pytest.mark.parametrize("task", TASKS)
def test_a_model_is_itself_and_a_planted_loss_is_found(task, tmp_path):
    model, items = bert_for(task), TASKS[task]
    original = opened(save(tmp_path / "model", model, words(40)))
    expected = answers(original, items)
    assert compare_answers(expected, answers(original, items, like=expected)).distance == pytest.approx(0, abs=1e-9)
    model.base_model.encoder.layer[0].output.dense.weight.data *= 1.5
    found = compare_answers(expected, answers(replace(original, model=model), items, like=expected))
    assert found.distance > 1e-3
    assert (found.compared, found.left_out) == (len(items), 0)
    assert all(low <= getattr(found, name) <= high for name, (low, high) in found.intervals.items())


def test_one_loss_is_not_hidden_by_others(tmp_path):
    """A dropped layer, and a table whose rows are permuted."""
    model = bert_for("feature-extraction")
    original = opened(save(tmp_path / "model", model, words(40)))
    expected = answers(original, TEXTS)
    shallow, mixed = copy.deepcopy(model), copy.deepcopy(model)
    del shallow.encoder.layer[1]
    table = mixed.get_input_embeddings().weight.data
    table[3:] = table[3:].flip(0)
    for broken in (shallow, mixed):
        found = compare_answers(expected, answers(replace(original, model=broken), TEXTS, like=expected))
        assert found.score < 0.98
        assert found.intervals["score"][1] < 0.98


def test_vectors_are_those_of_the_files_of_sentence_transformers(tmp_path):
    """Pooling, prompt, small letters, length and a linear after it, against the same by hand."""
    model, tokenizer = bert_for("feature-extraction"), words(40)
    source = save(tmp_path / "model", model, tokenizer)
    weight, bias = torch.randn(5, 2 * model.config.hidden_size), torch.randn(5)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
    prompts = {"prompts": {"query": "w5 "}, "default_prompt_name": "query"}
    written = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 6, "do_lower_case": True},
        "config_sentence_transformers.json": prompts,
        "1_Pooling/config.json": pooling,
        "2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
    }
    for name, content in written.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(json.dumps(content))
    save_file({"linear.weight": weight, "linear.bias": bias}, source / "2_Dense" / "model.safetensors")
    found = answers(opened(source), ["W3 w4 w5 w6 w7 w8 w9", "w4"]).items
    for answer, text in zip(found, ["w5 w3 w4 w5 w6", "w5 w4"], strict=True):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector = torch.cat([states[0], states.max(0).values])
        expected = torch.tanh(weight @ vector + bias)
        np.testing.assert_allclose(answer["vector"], expected.numpy(), atol=1e-5)


def test_a_trimmed_encoder_is_the_same_where_no_token_is_missing(tmp_path):
    tokenizer = wordpiece(tmp_path / "tokenizer")
    for kind in (BertModel, BertForMaskedLM):
        source = save(tmp_path / kind.__name__, model_of(kind, tokenizer), tokenizer)
        trim_model(source, SOURCE[:3], out=tmp_path / f"{kind.__name__}-small", coverage=1.0, characters="occurring")
        same = served_fidelity(source, tmp_path / f"{kind.__name__}-small", SOURCE[:3])
        assert same.distance == pytest.approx(0, abs=1e-6)
        other = served_fidelity(source, tmp_path / f"{kind.__name__}-small", TARGET)
        assert other.distance > 1e-3


def test_a_trimmed_language_model(tmp_path):
    """Texts that are split otherwise are compared after the tokens that are the same, and lose there."""
    tokenizer = byte_fallback(tmp_path / "tokenizer")
    source = save(tmp_path / "model", model_of(LlamaForCausalLM, tokenizer), tokenizer)
    trim_model(source, SOURCE[:3], out=tmp_path / "small", coverage=1.0)
    original, small = opened(source), opened(tmp_path / "small")
    assert len(small.tokenizer) < len(original.tokenizer)
    expected = answers(original, [*SOURCE, *TARGET])
    found = answers(small, [*SOURCE, *TARGET], like=expected)
    covered, others = (
        compare_answers(
            Answers("causal-lm", expected.items[part], expected.vocabulary), replace(found, items=found.items[part])
        )
        for part in (slice(3), slice(6, 12))
    )
    assert (covered.score, covered.compared) == (1, 3)
    assert covered.kl == pytest.approx(0, abs=1e-6)
    assert covered.perplexity < covered.original_perplexity  # which shares among fewer tokens
    assert others.compared + others.left_out == 6
    assert others.kl > 1e-3


def test_translators_in_each_engine(tmp_path):
    tokenizer = marian_tokenizer(tmp_path / "tokenizer")
    source = save(tmp_path / "model", marian(tokenizer), tokenizer)
    original = opened(source)
    expected = answers(original, [*SOURCE, ""])
    export_model(source, "ctranslate2")
    same = compare_answers(expected, answers(original, [*SOURCE, ""], like=expected))
    assert (same.score, same.kl, same.agreement) == (1, 0, 1)
    served = served_fidelity(source, tmp_path / "model-ctranslate2", SOURCE)
    assert (served.score, served.kl) == (1, None)  # of which the engine tells nothing
    assert served.perplexity == pytest.approx(served.original_perplexity, rel=1e-4)
    original.model.model.encoder.layers[0].fc2.weight.data *= 2
    broken = compare_answers(expected, answers(original, [*SOURCE, ""], like=expected))
    assert broken.score < 0.9
    assert broken.kl > 0.01
    assert broken.intervals["score"][0] <= broken.score <= broken.intervals["score"][1]


def test_batches_answer_as_their_texts(tmp_path):
    tokenizer = words(40)
    for task in ("causal-lm", "masked-lm"):
        kind = ARCHITECTURES["gpt2" if task == "causal-lm" else "bert"]
        original = opened(save(tmp_path / task, native(plain(kind)), tokenizer))
        batch = dict(tokenizer(TEXTS[:5], return_tensors="pt", padding=True))
        found, expected = answers(original, [batch]), answers(original, TEXTS[:5])
        assert compare_answers(expected, replace(found, items=found.items)).kl == pytest.approx(0, abs=1e-6)


def test_the_gate_of_an_export(tmp_path):
    """It keeps what is faithful, leaves nothing behind of what is not, and names the value and the limit."""
    source = save(tmp_path / "model", native(plain(ARCHITECTURES["gpt2"])), words(40))
    said = []
    folder = export_model(source, "ctranslate2", texts=[*TEXTS, " "], min_fidelity=0.99, say=said.append)
    assert said[-1] == "fidelity 1.0000 (95 % interval 1.0000 to 1.0000) on 24 texts"
    assert served_fidelity(source, folder, TEXTS).kl == pytest.approx(0, abs=1e-6)
    options = {"quantization": "int8", "min_fidelity": 1, "out": tmp_path / "bad"}
    with pytest.raises(ValueError, match=r"fidelity 0\.\d{4} .* on 24 texts, below min_fidelity=1: choose another"):
        export_model(source, "ctranslate2", texts=TEXTS, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model-ctranslate2"}
    with pytest.raises(ValueError, match="min_fidelity needs texts to compare with the original on: --texts FILE"):
        export_model(source, "ctranslate2", min_fidelity=0.9, texts=[" "])
    with pytest.raises(ValueError, match="original on, beyond the 64 to calibrate with: --texts FILE"):
        export_model(source, "onnx", quantization="int8-static", min_fidelity=0.9, texts=TEXTS)
    with pytest.raises(ValueError, match=r"export_model\(min_fidelity=98\): must be a share in 0..1"):
        export_model(source, "ctranslate2", min_fidelity=98, texts=TEXTS)


def test_answers_that_cannot_be_compared(tmp_path):
    original = opened(save(tmp_path / "model", bert_for("token-classification"), words(40)))
    with pytest.raises(ValueError, match="no texts to compare the models on"):
        answers(original, [])
    with pytest.raises(ValueError, match="a token-classification model reads texts, not a int"):
        answers(original, [3])
    found = answers(original, TEXTS[:2])
    with pytest.raises(ValueError, match="3 items for 2 answers of the original: give it the same ones"):
        answers(original, TEXTS[:3], like=found)
    with pytest.raises(ValueError, match="2 of token-classification and 2 of causal-lm"):
        compare_answers(found, replace(found, task="causal-lm"))
    with pytest.raises(ValueError, match=r"none of the 2 inputs can be compared: they are empty, or the tokenizers"):
        compare_answers(found, replace(found, items=[{}, {}]))


# -- sums by hand ------------------------------------------------------------------------------------------------------------


def test_kl_of_the_most_probable_tokens_and_all_others():
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.2, 0.3, 0.1])
    item = {"top": np.array([[0, 1]]), "best": np.array([0]), "at": np.array([0])}
    names = ["a", "b", "c", "d"]
    original = Answers("causal-lm", [item | {"log_probs": np.log(p[None, :2])}], names)
    served = Answers("causal-lm", [item | {"log_probs": np.log(q[None, :2])}], names)
    expected = 0.5 * np.log(0.5 / 0.4) + 0.3 * np.log(0.3 / 0.2) + 0.2 * np.log(0.2 / 0.4)
    assert compare_answers(original, served).kl == pytest.approx(expected)
    # Without "b" in the served model: among those that both have.
    fewer = Answers("causal-lm", [item | {"log_probs": np.log(np.array([[0.7, 0.3]]))}], ["a", "c", "d"])
    found = compare_answers(original, fewer)
    assert (found.kl, found.agreement) == (pytest.approx(0), 1)


def test_transcripts_regressions_and_translations():
    def of(task, *items):
        return Answers(task, list(items))

    heard = [{"text": text} for text in ("a dog barks", "the cat", "")]
    found = compare_answers(of("ctc", *heard), of("ctc", {"text": "a dog parks"}, {"text": "the"}, {"text": ""}))
    assert found.score == pytest.approx(1 - 5 / 19)
    values = [{"values": np.array([value])} for value in (1.0, 2.0, 3.0)]
    moved = [{"values": np.array([value])} for value in (1.5, 2.0, 2.5)]
    task = "sequence-classification"
    assert compare_answers(of(task, *values), of(task, *moved)).score == pytest.approx(1 - 0.5 / 2)
    short = of("seq2seq-lm", {"text": "yes"})
    assert compare_answers(short, short).score == 1
    texts = ["the dog sleeps in the garden today", "we go to town tomorrow morning"]
    pairs = (
        [{"text": text} for text in texts],
        [{"text": text} for text in (texts[0], "we go to the city tomorrow morning")],
    )
    expected = sacrebleu.corpus_bleu([each["text"] for each in pairs[1]], [texts]).score / 100
    assert compare_answers(of("seq2seq-lm", *pairs[0]), of("seq2seq-lm", *pairs[1])).score == pytest.approx(expected)


def test_questions_are_compared_where_the_tokens_are_the_same():
    def of(tokens, start, end):
        log_probs = np.log(np.array([start, end]))
        return Answers("question-answering", [{"tokens": tokens, "log_probs": log_probs, "choices": True}])

    original = of(["a", "b", "cd"], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8])
    split = of(["a", "b", "c", "d"], [0.1, 0.3, 0.3, 0.3], [0.1, 0.1, 0.4, 0.4])
    found = compare_answers(original, split)
    assert (found.kl, found.agreement) == (pytest.approx(0), 1)
