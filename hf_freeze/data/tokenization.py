"""Train a joint subword tokenizer that `AutoTokenizer` loads beside any backbone."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")  # ids 0, 1, 2
BERT_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}  # ids 0 to 4
KINDS = ("bpe", "unigram", "wordpiece")
_TEMPLATES = {"after": ("$A </s>", "$A </s> $B </s>"), "before": ("</s> $A", "</s> $A </s> $B")}


def check_ids(sentences: Iterable[Iterable[int]], vocab_size: int) -> None:
    """Raise ValueError for a token id that the model has no row for (-100, which marks labels that do not count, may be)."""
    sentences = list(sentences)
    flat = np.fromiter(chain.from_iterable(sentences), dtype=np.int64)
    if not ((flat >= vocab_size) | ((flat < 0) & (flat != -100))).any():
        return
    for number, ids in enumerate(sentences):
        for i in ids:
            if not (0 <= i < vocab_size or i == -100):
                raise ValueError(
                    f"sentence {number} holds token id {i}, outside the model's vocabulary 0..{vocab_size - 1}"
                )


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, kind: str = "bpe", *, eos: str = "after"
) -> PreTrainedTokenizerFast:
    """A joint BPE or Unigram tokenizer: NFKC, word boundaries kept as `▁`, punctuation in pieces of its own. Or WordPiece as
    uncased BERT has it (Devlin et al., 2019): `[CLS] text [SEP]` or `[CLS] text [SEP] other text [SEP]`, lower case, no accents.

    `eos`: where `</s>` stands, `"after"` every text, as translation models need it, or `"before"`, so that a language model
    goes on with a prompt and does not end it. WordPiece has none.

    Raises ValueError for an unknown kind or place of `</s>`, or a vocabulary too small for the characters of the text.
    """
    if kind == "wordpiece":
        return _train_wordpiece(texts, vocab_size)
    if eos not in _TEMPLATES:
        raise ValueError(f"unknown place of </s> {eos!r}; choose from {list(_TEMPLATES)}")
    specials = list(SPECIAL_TOKENS)
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=specials, unk_token="<unk>", show_progress=False
        )
    else:
        raise ValueError(f"unknown tokenizer kind {kind!r}; choose from {list(KINDS)}")
    tokenizer.normalizer = normalizers.NFKC()
    # Without the split, `street.` at the end of a sentence becomes a piece of its own, unrelated to `street`.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    texts = list(texts)
    smallest = len(specials) + len(set("".join(texts)))
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small: {smallest} special tokens and characters must fit")
    tokenizer.train_from_iterator(texts, trainer)
    single, pair = _TEMPLATES[eos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    texts, specials = list(texts), list(BERT_TOKENS.values())
    tokenizer = _bert_tokenizer({})
    normalize, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    characters = sorted({character for text in texts for character in set(normalize(text))})
    # The trainer numbers these as it finds them, which is another order in each process, and settles ties by number. Named as
    # special tokens they have an order; the tokenizer that is returned has none of them.
    within = [f"##{c}" for c in characters if len(split(normalize(f"a{c}"))) == 1 and not c.isspace()]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=specials + within, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    smallest = tokenizer.get_vocab_size()
    if smallest > vocab_size:  # a character is two pieces, where a word begins and within it
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
