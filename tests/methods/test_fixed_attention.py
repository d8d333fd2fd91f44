"""FixedAttention: patterns against matrices by their formulas, padding, sizes, and what it refuses."""

import copy
import pickle

import pytest
import torch
from support.cases import BASELINES
from support.models import differences, native, outputs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, MarianConfig, PreTrainedTokenizerFast

from hf_freeze import count_parameters, make_variant, multiply_adds
from hf_freeze.analysis import attention_weights, head_importance, word_continuations
from hf_freeze.data import train_tokenizer
from hf_freeze.layers.fixed_heads import Positions, Words, context, padding_mask
from hf_freeze.methods import FixedAttention, HeadMask, HeadPruning, TensorTrain, VocabularyTrimming

SUPPORTED = [case for case in BASELINES if FixedAttention.refusal(case.architecture) is None]
every_backbone = pytest.mark.parametrize("case", SUPPORTED, ids=[case.architecture.model_type for case in SUPPORTED])
MARIAN = next(case for case in SUPPORTED if case.architecture.model_type == "marian")


def weights(pattern, n, empty_rows="zero"):
    """(n, n), rows are queries: the formulas, number by number."""
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        raw = {
            1: {i: 1},
            2: {i - 1: 1},
            3: {i + 1: 1},
            4: {j: (j + 1) ** 3 for j in range(i - 1)},
            5: {j: (n - j) ** 3 for j in range(i + 2, n)},
            6: {j: (j + 1) ** 3 for j in range(n)},
            7: {j: (n - j) ** 3 for j in range(n)},
            8: {n - 1: 1},
        }[pattern]
        defined = {j: w for j, w in raw.items() if 0 <= j < n}
        if not defined and empty_rows == "boundary":
            defined = {0 if pattern in (2, 4) else n - 1: 1}
        total = sum(defined.values())
        matrix[i, list(defined)] = torch.tensor([w / total for w in defined.values()], dtype=torch.float64)
    return matrix


@pytest.mark.parametrize("empty_rows", ["zero", "boundary"])
@pytest.mark.parametrize("pattern", range(1, 9))
def test_a_context_is_the_product_with_the_matrix(pattern, empty_rows):
    """Sentences of 1 to 9 tokens, padded to the left, to the right, or on both sides."""
    lengths, total = [9, 1, 2, 3, 5, 8], 9
    values = torch.randn(len(lengths), total, 4, generator=torch.Generator().manual_seed(0))
    for where in ("left", "right", "both"):
        mask = torch.zeros(len(lengths), total, dtype=torch.bool)
        for row, n in enumerate(lengths):
            start = {"left": total - n, "right": 0, "both": (total - n) // 2}[where]
            mask[row, start : start + n] = True
        found = context(values, pattern, Positions(mask), empty_rows)
        for row, n in enumerate(lengths):
            expected = weights(pattern, n, empty_rows) @ values[row][mask[row]].double()
            torch.testing.assert_close(found[row][mask[row]].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("empty_rows", ["zero", "boundary"])
@pytest.mark.parametrize("pattern", range(1, 9))
def test_words_share_weights_and_contexts(pattern, empty_rows):
    """Against the matrix of words, whose columns are spread over their tokens; ids of 10 and more go on with a word."""
    ids = torch.tensor([[1, 10, 2, 3, 11, 12, 4], [0, 0, 10, 5, 11, 6, 0], [7, 0, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0]]).bool()
    of_words = [[[0, 1], [2], [3, 4, 5], [6]], [[2], [3, 4], [5]], [[0]]]
    values = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))
    words = Words([10, 11, 12])
    words.read(torch.nn.Identity(), (), {"input_ids": ids})
    found = words.context(values, pattern, mask, empty_rows)
    for row, tokens_of in enumerate(of_words):
        by_words, spread = weights(pattern, len(tokens_of), empty_rows), torch.zeros(7, 7, dtype=torch.float64)
        for i, queries in enumerate(tokens_of):
            for j, keys in enumerate(tokens_of):
                for query in queries:
                    spread[query, keys] = by_words[i, j] / len(keys)
        expected = spread @ values[row].double()
        torch.testing.assert_close(found[row][mask[row]].double(), expected[mask[row]], rtol=1e-5, atol=1e-6)


WORDS = FixedAttention(patterns=[2], unit="word", continuations=[3, 7, 9])


@every_backbone
def test_a_model_reads_its_words(case, tmp_path):
    """Copied, saved and opened; with a cache; and which words there are matters."""
    model = make_variant(native(case), [WORDS]).eval()
    expected = outputs(model, case.batch())
    model.save_pretrained(tmp_path)
    for other in (copy.deepcopy(model), case.auto_class.from_pretrained(tmp_path), pickle.loads(pickle.dumps(model))):
        assert differences(outputs(other, case.batch()), expected) == []
    by_tokens = make_variant(native(case), [FixedAttention(patterns=[2], unit="word", continuations=[])])
    plain = make_variant(native(case), [FixedAttention(patterns=[2])])
    first = {name: value[:1] for name, value in case.batch().items()}  # has no padding, whose outputs mean nothing
    assert differences(outputs(by_tokens, first), outputs(plain, first), 1e-5) == []
    assert differences(outputs(model, first), outputs(plain, first), 1e-3) != []
    assert multiply_adds(model, length=4).forward == multiply_adds(plain, length=4).forward
    if model.can_generate():
        inputs = {name: case.batch()[name] for name in ("input_ids", "attention_mask")}
        length = {"max_new_tokens": 6, "do_sample": False}
        beams = [model.generate(**inputs, **length, num_beams=3, use_cache=cache).tolist() for cache in (True, False)]
        assert beams[0] == beams[1]


@every_backbone
def test_padding_and_other_sentences_do_not_move_words(case):
    model, batch = make_variant(native(case), [WORDS]).eval(), case.batch()
    of_source = [name for name, value in batch.items() if value.shape == batch["input_ids"].shape]
    alone = {name: value[1:, :3] if name in of_source else value[1:] for name, value in batch.items()}
    with torch.no_grad():
        both, one = model(**batch), model(**alone)
    found = "logits" if "logits" in one else "last_hidden_state"
    length = 2 if model.config.is_encoder_decoder else 3
    torch.testing.assert_close(both[found][1:, :length], one[found][:, :length], rtol=1e-4, atol=1e-5)


def test_words_need_ids():
    model = make_variant(native(MARIAN), [WORDS])
    batch = MARIAN.batch()
    embedded = {"inputs_embeds": torch.zeros(2, 5, 16), "labels": batch["labels"]}
    with pytest.raises(ValueError, match="fixed heads by words need input_ids"):
        model(**embedded)
    layer = model.model.encoder.layers[0]
    with pytest.raises(ValueError, match="have not seen the input_ids: call the whole model, not a part of it"):
        layer(torch.zeros(1, 4, 16), None)
    with pytest.raises(
        ValueError, match=r"after 'fixed_attention', which names tokens by number.*put VocabularyTrimming first"
    ):
        make_variant(native(MARIAN), [WORDS, VocabularyTrimming(keep=list(range(20)))])


def test_words_of_tokenizers():
    texts = ["lower lowest newer newest wider", "new low"]
    kinds = {"bpe": "\u2581", "unigram": "\u2581", "wordpiece": "##"}
    for kind, mark in kinds.items():
        tokenizer = train_tokenizer(texts, 40, kind=kind)
        continuing = word_continuations(tokenizer)
        ids = tokenizer("lowest newer").input_ids
        words = sum(number not in continuing and number not in tokenizer.all_special_ids for number in ids)
        assert words == 2, kind
        tokens = tokenizer.convert_ids_to_tokens(continuing)
        assert tokens
        assert all(token.startswith(mark) == (kind == "wordpiece") for token in tokens)
        assert not set(continuing) & set(tokenizer.all_special_ids)
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(ValueError, match="marks neither the start of a word"):
        word_continuations(plain)


@pytest.mark.parametrize("pattern", range(1, 9))
def test_long_sentences_keep_their_precision(pattern):
    values = torch.randn(1, 512, 2, generator=torch.Generator().manual_seed(0))
    found = context(values, pattern, Positions(torch.ones(1, 512, dtype=torch.bool)), "zero")
    torch.testing.assert_close(found[0].double(), weights(pattern, 512) @ values[0].double(), rtol=1e-4, atol=1e-5)


def attention_by_hand(case, model, layer, hidden, mask, patterns):
    """The output of the projection, from the weights: softmax for the heads after the fixed ones."""
    attention = (
        case.architecture.stacks["encoder"]
        .attentions["self"]
        .within(case.architecture.stacks["encoder"].layers.format(layer))
    )
    modules = {role: model.base_model.get_submodule(getattr(attention, role)) for role in "vo"}
    size = attention.head_size(model.config)
    rows = []
    for sentence, kept in zip(hidden.double(), mask, strict=True):
        x = sentence[kept]
        value = (x @ modules["v"].weight.double().T + modules["v"].bias.double()).unflatten(-1, (-1, size))
        contexts = [weights(pattern, len(x)) @ value[:, head] for head, pattern in enumerate(patterns)]
        for number in range(value.shape[1] - len(patterns)):
            q, k = (
                (x @ linear.weight.double().T + linear.bias.double())[:, number * size : (number + 1) * size]
                for linear in (model.base_model.get_submodule(name) for name in (attention.q, attention.k))
            )
            contexts.append((q @ k.T / size**0.5).softmax(-1) @ value[:, len(patterns) + number])
        rows.append(torch.cat(contexts, -1) @ modules["o"].weight.double().T + modules["o"].bias.double())
    return attention, rows


@every_backbone
@pytest.mark.parametrize("patterns", [[4], [7, 2]], ids=["one fixed, one learnt", "both fixed"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_heads_of_a_model(case, patterns, implementation):
    model = make_variant(native(case), [FixedAttention(patterns=patterns)]).eval()
    model.set_attn_implementation(implementation)
    seen = {}
    attention = (
        case.architecture.stacks["encoder"]
        .attentions["self"]
        .within(case.architecture.stacks["encoder"].layers.format(1))
    )
    heads, output = (model.base_model.get_submodule(name) for name in (attention.module, attention.o))
    heads.register_forward_pre_hook(lambda _, a, k: seen.update(x=a[0] if a else k["hidden_states"]), with_kwargs=True)
    output.register_forward_hook(lambda _, a, result: seen.update(y=result))
    batch = case.batch()
    with torch.no_grad():
        model(**batch)
    mask = batch["attention_mask"].bool()
    _, expected = attention_by_hand(case, model, 1, seen["x"], mask, patterns)
    for row, wanted in enumerate(expected):
        torch.testing.assert_close(seen["y"][row][mask[row]].double(), wanted, rtol=1e-4, atol=1e-5)


@every_backbone
@pytest.mark.parametrize("patterns", [[4], [7, 2]], ids=["one fixed, one learnt", "both fixed"])
def test_pictures_show_fixed_heads_before_those_that_learn(case, patterns):
    model, batch = make_variant(native(case), [FixedAttention(patterns=patterns)]), case.batch()
    for item, mask in enumerate(batch["attention_mask"].bool()):
        shown = attention_weights(model, batch, item=item)["encoder.1.self"]
        assert len(shown) == 2
        for found, pattern in zip(shown, patterns, strict=False):
            torch.testing.assert_close(found.double(), weights(pattern, int(mask.sum())), rtol=1e-5, atol=1e-6)
        if len(patterns) == 1:
            torch.testing.assert_close(shown[1].sum(-1), torch.ones(int(mask.sum())))
    words = FixedAttention(patterns=[2], unit="word", continuations=batch["input_ids"].unique().tolist())
    (found, _) = attention_weights(make_variant(native(case), [words]), batch)["encoder.1.self"]
    assert not found.any()  # one word has none before it


@every_backbone
def test_trained_heads_that_learn_keep_their_weights(case):
    backbone = native(case)
    model = make_variant(backbone, [FixedAttention(patterns=[1])])
    for attention in case.architecture.attentions(backbone.config).values():
        if not attention.bidirectional:
            continue
        for name in (attention.q, attention.k):
            old, new = backbone.base_model.get_submodule(name), model.base_model.get_submodule(name)
            assert torch.equal(new.weight, old.weight[8:])
            assert torch.equal(new.bias, old.bias[8:])
        for name in (attention.v, attention.o):
            old, new = backbone.base_model.get_submodule(name), model.base_model.get_submodule(name)
            assert torch.equal(new.weight, old.weight)


@pytest.mark.parametrize(("patterns", "saved"), [(7, 2_757_888), (8, 3_151_872)])
def test_sizes_of_the_paper(patterns, saved):
    """6 layers of width 512: 2.76M and 3.15M fewer, 91.7M -> 88.9M and 88.5M (METHODS, 4.2)."""
    config = MarianConfig(
        vocab_size=100, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, pad_token_id=0
    )
    with torch.device("meta"):
        dense, fixed = (make_variant(config, m, task="seq2seq-lm") for m in ([], [FixedAttention(patterns=patterns)]))
    assert count_parameters(dense).total - count_parameters(fixed).total == saved


def test_heads_that_are_fixed_are_scored_too():
    model = make_variant(native(MARIAN), [FixedAttention(patterns=[6, 3])])
    assert head_importance(model, [MARIAN.batch()])["encoder.0.self"].shape == (2,)


def test_masks_of_all_forms_say_the_same():
    hidden, mask = torch.zeros(2, 3, 4), torch.tensor([[True, True, False], [True, True, True]])
    lowest = torch.finfo(torch.float32).min
    numbers = torch.where(mask, 0.0, lowest)[:, None, None]
    for one in (mask, mask.long(), mask[:, None, None], mask[:, None, None].expand(2, 1, 3, 3), numbers):
        assert torch.equal(padding_mask(one, hidden), mask)
    assert padding_mask(None, hidden).all()
    with pytest.raises(ValueError, match="fixed heads cannot read a mask of str"):
        padding_mask("block", hidden)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patterns": 6}, r"FixedAttention\(patterns=6\): must be 7, 8 or a list such as \[1, 2, 3\]"),
        ({"patterns": []}, "must be 7, 8 or a list"),
        ({"patterns": True}, "must be 7, 8 or a list"),
        ({"patterns": [1, 9]}, r"9 is outside 1\.\.8"),
        ({"patterns": [0]}, r"0 is outside 1\.\.8"),
        (
            {"unit": "word"},
            r"unit='word'\): unit='word' and continuations=analysis\.word_continuations\(tokenizer\) go together",
        ),
        ({"continuations": [1]}, "go together"),
        ({"unit": "letter"}, r"unit='letter'\): choose from \['token', 'word'\]"),
        ({"unit": "word", "continuations": [2, 1]}, "must be a list of different token ids, in ascending order"),
        ({"unit": "word", "continuations": [-1]}, "must be a list of different token ids"),
        ({"empty_rows": "one"}, r"empty_rows='one'\): choose from \['zero', 'boundary'\]"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FixedAttention(**arguments)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([FixedAttention(patterns=[1, 2, 3])], r"3 patterns for the 2 heads of 'encoder\.0\.self'"),
        (
            [FixedAttention(patterns=[1], layers={"decoder": [0]})],
            r"stack 'decoder' are causal; choose from \['encoder'\]",
        ),
        ([FixedAttention(patterns=[1], layers={"encoder": [2]})], "no layer 2 in stack 'encoder'"),
        ([FixedAttention(patterns=[1], layers={"encoder": []})], "names no layer"),
        (
            [TensorTrain(rank=2, components=["attention"]), FixedAttention(patterns=[1])],
            "is a TensorTrainLinear already",
        ),
        ([FixedAttention(patterns=[1]), HeadPruning(share=0.5)], "has fixed heads, without queries and keys"),
        ([FixedAttention(patterns=[1, 2]), HeadMask()], "an earlier method has removed"),
    ],
)
def test_what_does_not_fit_is_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        make_variant(native(MARIAN), methods)


def test_decoders_are_refused():
    config = BertConfig(
        **next(c for c in SUPPORTED if c.architecture.model_type == "bert").architecture.tiny, is_decoder=True
    )
    with pytest.raises(ValueError, match="this bert is a decoder, whose attentions are causal"):
        make_variant(config, [FixedAttention(patterns=[1])], task="masked-lm")
    llama = next(case for case in BASELINES if case.architecture.model_type == "llama")
    with pytest.raises(ValueError, match="llama"):
        make_variant(native(llama), [FixedAttention(patterns=[1])])


def test_merging_is_refused_by_name():
    model = make_variant(native(MARIAN), [FixedAttention(patterns=[1])])
    with pytest.raises(ValueError, match="fixed_attention: no native model has heads without queries and keys"):
        model.merge()


def test_heads_and_pruning_go_together():
    pruned = [HeadPruning(heads={"encoder.1.self": [0]}), FixedAttention(patterns=[2], layers={"encoder": [0]})]
    model = make_variant(native(MARIAN), pruned)
    assert (
        differences(outputs(model, MARIAN.batch()), outputs(make_variant(native(MARIAN), pruned[::-1]), MARIAN.batch()))
        == []
    )
