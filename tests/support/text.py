"""Tokenizers of the tests, trained in place on a few sentences: no network, a second at most.

Each function but `words` takes a directory, saves there what `AutoTokenizer.from_pretrained` needs, and returns the tokenizer.
"""

import json
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MarianTokenizer, PreTrainedTokenizerFast

SOURCE = [
    "der hund schläft im garten",
    "die katze trinkt kalte milch",
    "ein kleines haus am see",
    "wir gehen morgen in die stadt",
    "das wetter ist heute schön",
    "guten morgen , wie geht es dir ?",
]
TARGET = [
    "the dog sleeps in the garden",
    "the cat drinks cold milk",
    "a small house by the lake",
    "we go to town tomorrow",
    "the weather is fine today",
    "good morning , how are you ?",
]


def marian_tokenizer(directory: str | Path, codes: tuple[str, ...] = ()) -> MarianTokenizer:
    """A MarianTokenizer with the files of a Helsinki-NLP checkpoint: source.spm, target.spm and one vocab.json that
    both share (</s> first, <pad> last). `codes`, such as (">>fr<<",), make it one with several target languages."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    pieces = {"</s>": 0, "<unk>": 1}
    for side, sentences in (("source", SOURCE), ("target", TARGET)):
        for piece in spm_pieces(train_spm(sentences, directory / f"{side}.spm")):
            pieces.setdefault(piece, len(pieces))
    for token in (*codes, "<pad>"):
        pieces[token] = len(pieces)
    (directory / "vocab.json").write_text(json.dumps(pieces), encoding="utf-8")
    tokenizer = MarianTokenizer(
        str(directory / "source.spm"),
        str(directory / "target.spm"),
        str(directory / "vocab.json"),
        source_lang="de",
        target_lang="en",
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def fast_tokenizer(directory: str | Path, end_of_text: bool = True) -> PreTrainedTokenizerFast:
    """A PreTrainedTokenizerFast: Unigram, Metaspace and, with `end_of_text`, the template `$A </s>`."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SOURCE + TARGET, trainer)
    if end_of_text:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    fast.save_pretrained(directory)
    return fast


def train_spm(sentences: list[str], path: Path) -> Path:
    """A sentencepiece model, at `path`; one thread, so that it is the same each time."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=file,
            vocab_size=60,
            hard_vocab_limit=False,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    return path


def spm_pieces(path: Path) -> list[str]:
    """The pieces of a sentencepiece model, without <unk> and </s>."""
    spm = sentencepiece.SentencePieceProcessor(model_file=str(path))
    special = {spm.unk_id(), spm.eos_id()}
    return [spm.id_to_piece(index) for index in range(spm.get_piece_size()) if index not in special]


def words(count: int, pad: int = 0) -> PreTrainedTokenizerFast:
    """A word for each id, `w5`; 1 ends, as in the tiny models."""
    names = {pad: "<pad>", 1: "</s>"}
    vocabulary = {names.get(i, f"w{i}"): i for i in range(count)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="w2")
