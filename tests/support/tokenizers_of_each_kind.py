"""A fast tokenizer of each kind, trained in place on the sentences of `support.text`. Each function ignores its argument, the
folder that `support.text.marian_tokenizer` needs."""

import itertools
import json
from collections import Counter

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from hf_freeze.data import train_tokenizer
from support.text import SOURCE, TARGET

TEXTS = SOURCE + TARGET


def character_bpe(_):
    return train_tokenizer(TEXTS, 120)


def unigram(_):
    return train_tokenizer(TEXTS, 90, "unigram")


def byte_level(_):
    """As GPT-2's; the token that ends a text comes last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    return GPT2Tokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]], model_max_length=77)


def wordpiece(_):
    """As BERT's, with special tokens among the others. The pieces are counted here: a WordPieceTrainer breaks ties in an order
    that differs from process to process."""
    specials = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    counts = Counter()
    for text in TEXTS:
        for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text):
            for start, end in itertools.combinations(range(len(word) + 1), 2):
                counts["##" * bool(start) + word[start:end]] += end - start
    ranked = sorted(counts, key=lambda piece: (len(piece.removeprefix("##")) > 1, -counts[piece], piece))
    made = BertTokenizer(
        vocab={token: number for number, token in enumerate([*specials, *ranked][:120])}, strip_accents=False
    )
    made.add_tokens(["<entity>"])
    return made


def word_level(_):
    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted(set(" ".join(TEXTS).split()))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")


def byte_fallback(_):
    """As Llama's first: bytes for what is no character of the vocabulary, and processors in a sequence."""
    trained = json.loads(train_tokenizer(TEXTS, 120).backend_tokenizer.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in trained["vocab"] if token not in ("<pad>", *tokens)]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in trained["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
