"""Trains a joint subword tokenizer that `AutoTokenizer` loads for any backbone."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # ids 0, 1, 2
BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}  # ids 0 to 4
KINDS = ("bpe", "unigram", "wordpiece")
_TEMPLATES = {"after": ("$A </s>", "$A </s> $B </s>"), "before": ("</s> $A", "</s> $A </s> $B")}


def check_ids(sentences: Iterable[Iterable[int]], vocab_size: int) -> None:
    """Raise ValueError for a token id outside the vocabulary; -100, the label of ignored tokens, is allowed."""
    for number, ids in enumerate(sentences):
        wrong = [i for i in ids if not (0 <= i < vocab_size or i == -100)]
        if wrong:
            known = f"the model's vocabulary 0..{vocab_size - 1}"
            raise ValueError(f"sentence {number} holds token id {wrong[0]}, outside {known}")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, kind: str = "bpe", *, eos: str = "after"
) -> PreTrainedTokenizerFast:
    """A joint BPE, Unigram or WordPiece tokenizer.

    BPE and Unigram: NFKC normalisation, word boundaries marked by `▁`, punctuation in separate pieces. WordPiece follows uncased
    BERT (Devlin et al., 2019): lower case, no accents, `[CLS] text [SEP]` or `[CLS] text [SEP] other text [SEP]`.

    `eos`: the position of `</s>`. `"after"` every text is for translation models; `"before"` is for language models, so that
    they continue a prompt instead of ending it. WordPiece has no `</s>`.

    Raises ValueError for an unknown kind or position of `</s>`, and for a vocabulary too small for the characters of the text.
    """
    texts = list(texts) if isinstance(texts, Iterator) else texts  # they are read twice
    if kind == "wordpiece":
        return _train_wordpiece(texts, vocab_size)
    if eos not in _TEMPLATES:
        raise ValueError(f"unknown position of </s> {eos!r}; choose from {list(_TEMPLATES)}")
    settings: Any = {"vocab_size": vocab_size, "special_tokens": list(SPECIAL_TOKENS), "show_progress": False}
    if kind == "bpe":
        tokenizer, trainer = Tokenizer(models.BPE(unk_token="<unk>")), trainers.BpeTrainer(**settings)
    elif kind == "unigram":
        tokenizer, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **settings)
    else:
        raise ValueError(f"unknown tokenizer kind {kind!r}; choose from {list(KINDS)}")
    tokenizer.normalizer = normalizers.NFKC()
    # Without the punctuation split, `street.` at the end of a sentence would become a piece unrelated to `street`.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    smallest = len(SPECIAL_TOKENS) + len(set(chain.from_iterable(texts)))
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small: {smallest} special tokens and characters must fit")
    tokenizer.train_from_iterator(iter(texts), trainer)
    if kind == "unigram":
        tokenizer.model = _in_one_order(tokenizer)
    single, pair = _TEMPLATES[eos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _in_one_order(tokenizer: Any) -> Any:
    """Unigram's pieces with the same numbers and scores in each process. Its trainer follows the order of a hash map: the last
    digits of scores, and which of two equally likely pieces comes first, depend on it."""
    trained = json.loads(tokenizer.to_str())["model"]
    special = [tuple(pair) for pair in trained["vocab"][: len(SPECIAL_TOKENS)]]
    learned = [(piece, round(score, 6)) for piece, score in trained["vocab"][len(SPECIAL_TOKENS) :]]
    learned.sort(key=lambda pair: (-pair[1], pair[0]))
    # Characters that training had dropped are put back as the last ones, each 0.0001 below another one.
    pieces, scores = [piece for piece, _ in learned], [score for _, score in learned]
    first = len(scores) - 1
    while first > 0 and round(scores[first - 1] - scores[first], 5) == 0.0001:
        first -= 1
    pieces[first:] = sorted(pieces[first:])
    return models.Unigram([*special, *zip(pieces, scores, strict=True)], trained["unk_id"], trained["byte_fallback"])


def _train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = _bert_tokenizer({})
    normalize, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    characters = sorted(set(chain.from_iterable(map(normalize, texts))))
    # The trainer numbers these pieces in an order that differs between processes, and breaks ties by number. Passing them as
    # special tokens fixes the order; the returned tokenizer does not treat them as special.
    continuations = [f"##{c}" for c in characters if len(split(normalize(f"a{c}"))) == 1 and not c.isspace()]
    pieces = [*BERT_TOKENS.values(), *continuations]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(iter(texts), trainer)
    smallest = tokenizer.get_vocab_size()
    if smallest > vocab_size:  # a character takes two pieces: at the start of a word and inside it
        raise ValueError(f"vocab_size={vocab_size} is too small: {smallest} special tokens and characters must fit")
    tokenizer = _bert_tokenizer(tokenizer.get_vocab())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in BERT_TOKENS.items()},
    )


def _bert_tokenizer(vocabulary: dict[str, int]) -> Any:
    tokenizer: Any = Tokenizer(models.WordPiece(vocabulary, unk_token=BERT_TOKENS["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
