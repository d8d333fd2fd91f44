"""Readers, tokenizer training and batches by tokens."""

import gzip
import itertools
import json
import os
from pathlib import Path

import pytest
from support import ROOT
from support.processes import printed_by
from transformers import AutoTokenizer

from hf_freeze.data.tokenization import KINDS, check_ids
from hf_freeze.lab.data import (
    TokenBatchSampler,
    builtin_corpus,
    load_hub_labelled,
    load_hub_parallel,
    load_hub_text,
    read_documents,
    read_labelled,
    read_lines,
    read_parallel,
    text_blocks,
    train_tokenizer,
)

LINES = ["Ein Hund läuft.", "Zwei Männer", "日本語 テキスト"]
TEXT = "\n".join(LINES) + "\n"


def packed(content: bytes) -> bytes:
    """gzip without the time of day: these bytes name test cases, and the workers of a test run must agree on the names."""
    return gzip.compress(content, mtime=0)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


# -- lines -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        TEXT.removesuffix("\n").encode(),
        TEXT.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode(),
        TEXT.replace("\n", "  \t\n").encode(),
        packed(TEXT.encode()),
        packed(TEXT[:20].encode()) + packed(TEXT[20:].encode()),
    ],
    ids=["plain", "no last newline", "CRLF", "BOM", "BOM and CRLF", "trailing space", "gzip", "gzip in two members"],
)
@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
def test_lines_are_read(tmp_path, content, name):
    assert read_lines(write(tmp_path / name, content)) == LINES


def test_only_newlines_end_a_line(tmp_path):
    # str.splitlines would also split at these, and two files would then no longer correspond.
    lines = ["one\u2028still one", "two\x0bstill\x0ctwo", "three\x85still three"]
    assert read_lines(write(tmp_path / "a", "\n".join(lines))) == lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a: the file is empty"),
        (packed(b""), "a: the file is empty"),
        (b"one\n\nthree\n", "a, line 2: empty line"),
        (b"one\n \t\r\nthree\n", "a, line 2: empty line"),
        (b"one\ntwo\n\n", "a, line 3: empty line"),
        (b"\n", "a, line 1: empty line"),
        (b"\xef\xbb\xbf\none\n", "a, line 1: empty line"),
        (b"\xef\xbb\xbf", r"a, line 1: empty line|the file is empty"),
        (b"one\ntwo\xff\xfe\n", "a, line 2: not UTF-8 .*byte 3"),
        ("ä\n".encode("latin-1"), "a, line 1: not UTF-8"),
        ("hi\nyou\n".encode("utf-16-le"), "a, line 1: binary data"),
        (b"one\nt\x00wo\n", "a, line 2: binary data"),
        (packed(TEXT.encode())[:-9], "a: damaged gzip file"),
        (packed(TEXT.encode())[:15] + b"garbage garbage garbage", "a: damaged gzip file"),
        (b"\x1f\x8b", "a: damaged gzip file"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_lines(write(tmp_path / "a", content))


def test_a_damaged_checksum_is_refused(tmp_path):
    content = bytearray(packed(TEXT.encode()))
    content[-6] ^= 1
    with pytest.raises(ValueError, match="damaged gzip file"):
        read_lines(write(tmp_path / "a.gz", bytes(content)))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        read_lines(tmp_path / "nothing.txt")


# -- documents -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [str.encode, lambda text: packed(text.encode())], ids=["plain", "gzip"])
def test_documents_are_separated_by_empty_lines(tmp_path, pack):
    text = "\n \n = Title = \n\nfirst line\nsecond line \n\n\n \t\nlast"
    path = write(tmp_path / "a", pack(text))
    assert read_documents(path) == ["= Title =", "first line\nsecond line", "last"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "a: the file is empty"), (b"\n \n", "a: all lines are empty"), (b"x\n\n\x00", "a, line 3: binary data")],
)
def test_files_without_documents_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_documents(write(tmp_path / "a", content))


def test_text_of_a_data_set(tmp_path):
    write(tmp_path / "train.jsonl", '{"text": "one ", "n": "1"}\n{"text": " ", "n": "2"}\n{"text": "two", "n": "3"}\n')
    assert load_hub_text(str(tmp_path), "train")["text"][:] == ["one", "two"]
    assert load_hub_text(str(tmp_path), "train", "n")["text"][:] == ["1", "2", "3"]
    with pytest.raises(ValueError, match=r"\(train\) has no column 'body'; choose from \['text', 'n'\]"):
        load_hub_text(str(tmp_path), "train", "body")


# -- labelled examples -----------------------------------------------------------------------------------------------------------


def test_jsonl_gives_text_and_labels(tmp_path, own_cache):
    lines = [{"sentence": "good", "label": 1, "extra": None}, {"label": 0, "sentence": "ünlü"}]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    for name, written in (("a.jsonl", content.encode()), ("a.jsonl.gz", packed(content.encode()))):
        data = read_labelled([write(tmp_path / name, written)])
        assert data.to_list() == [{"sentence": "good", "label": "1"}, {"sentence": "ünlü", "label": "0"}]
    pairs = write(tmp_path / "pairs.jsonl", '{"a": "x", "b": "y", "c": "entailment"}\n')
    assert read_labelled([pairs], ("a", "b"), "c").to_list() == [{"a": "x", "b": "y", "c": "entailment"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl, line 2: not JSON"),
        ("[1]", r"a\.jsonl, line 2: an example is a JSON object, not '\[1\]'"),
        ('{"sentence": "x"}', r"a\.jsonl, line 2: no field 'label'; choose from \['sentence'\]"),
        ('{"sentence": 3, "label": 0}', r"a\.jsonl, line 2: sentence must be text, not 3"),
        (
            '{"sentence": "x", "label": -1}',
            r"line 2: label must be a word, an integer from 0, or true or false, not -1",
        ),
        (
            '{"sentence": "x", "label": 1.5}',
            r"line 2: label must be a word, an integer from 0, or true or false, not 1\.5",
        ),
        ('{"sentence": "x", "label": null}', r"line 2: label must be a word, an integer from 0, .* not None"),
        ('{"sentence": "x", "label": " "}', r"line 2: label is empty"),
    ],
)
def test_bad_examples_are_refused_with_file_and_line(tmp_path, own_cache, line, message):
    path = write(tmp_path / "a.jsonl", '{"sentence": "good", "label": 1}\n' + line)
    with pytest.raises(ValueError, match=message):
        read_labelled([path])


# -- blocks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_blocks_predict_every_token_once(block_size):
    tokenizer = train_tokenizer(LINES * 3, 60, eos="before")
    whole = [i for line in LINES for i in tokenizer(line)["input_ids"]] + [tokenizer.eos_token_id]
    assert [i == tokenizer.eos_token_id for i in whole].count(True) == len(LINES) + 1
    blocks = text_blocks(LINES, tokenizer, block_size)
    predicted, joined = [], []
    for block in blocks:
        assert len(block["input_ids"]) == len(block["labels"]) <= block_size + 1
        assert block["labels"][0] == -100
        assert block["labels"][1:] == block["input_ids"][1:]
        predicted += block["labels"][1:]
        assert not joined or joined[-1] == block["input_ids"][0]
        joined += block["input_ids"][bool(joined) :]
    assert joined == whole
    assert predicted == whole[1:]


def test_texts_shorter_than_a_block_are_refused():
    tokenizer = train_tokenizer(LINES * 3, 60, eos="before")
    with pytest.raises(
        ValueError, match=r"the text has \d+ tokens, fewer than one block of 512 and the token before it"
    ):
        text_blocks(LINES, tokenizer, 512)
    with pytest.raises(ValueError, match="block_size=0: a block predicts at least 1 token"):
        text_blocks(LINES, tokenizer, 0)


def test_the_end_of_text_may_stand_before_it():
    after, before = (train_tokenizer(LINES * 3, 60, eos=eos) for eos in ("after", "before"))
    assert after("two men")["input_ids"][-1] == before("two men")["input_ids"][0] == after.eos_token_id
    assert after("two men")["input_ids"][:-1] == before("two men")["input_ids"][1:]
    with pytest.raises(ValueError, match=r"unknown position of </s> 'nowhere'; choose from \['after', 'before'\]"):
        train_tokenizer(LINES, 60, eos="nowhere")


# -- parallel text ---------------------------------------------------------------------------------------------------------------


def test_parallel_lines_correspond(tmp_path):
    source = write(tmp_path / "train.de.gz", packed(TEXT.encode()))
    target = write(tmp_path / "train.en", "a dog runs.\r\ntwo men\r\njapanese text")
    data = read_parallel(source, str(target))
    assert data.column_names == ["source", "target"]
    assert data.to_list() == [
        {"source": s, "target": t} for s, t in zip(LINES, ["a dog runs.", "two men", "japanese text"], strict=True)
    ]


def test_files_of_unequal_length_are_refused(tmp_path):
    source, target = write(tmp_path / "a.de", TEXT), write(tmp_path / "a.en", "one\ntwo\n")
    with pytest.raises(ValueError, match=r"differ in length: .*a\.de has 3 lines, .*a\.en has 2"):
        read_parallel(source, target)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


PAIRS = [{"de": "Hund", "en": "dog"}, {"de": "Katze", "en": "cat"}]
WANTED = [{"source": "Hund", "target": "dog"}, {"source": "Katze", "target": "cat"}]


@pytest.mark.parametrize(
    "rows",
    [
        [{"id": str(i), "translation": pair} for i, pair in enumerate(PAIRS)],
        [{"id": str(i)} | pair for i, pair in enumerate(PAIRS)],
    ],
    ids=["translation column", "plain columns"],
)
def test_a_data_set_of_the_hub(tmp_path, own_cache, rows):
    folder = tmp_path / "repo"
    folder.mkdir()
    write(folder / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(folder / "test.jsonl", json.dumps(rows[0]) + "\n")
    data = load_hub_parallel(str(folder), "train", "de", "en")
    assert data.column_names == ["source", "target"]
    assert data.to_list() == WANTED
    assert load_hub_parallel(str(folder), "test", "en", "de").to_list() == [{"source": "dog", "target": "Hund"}]
    with pytest.raises(ValueError, match=r"repo \(train\) has no column 'tr'; choose from \['id', 'de', 'en'\]"):
        load_hub_parallel(str(folder), "train", "tr", "en")


@pytest.mark.parametrize(
    ("load", "column"),
    [
        (lambda *of, **name: load_hub_parallel(*of, "a", "b", **name), "source"),
        (lambda *of, **name: load_hub_text(*of, "a", **name), "text"),
        (lambda *of, **name: load_hub_labelled(*of, ["a"], "b", **name), "a"),
    ],
    ids=["parallel", "text", "labelled"],
)
def test_a_named_part_of_a_data_set_of_the_hub(load, column, tmp_path, own_cache):
    parts = {"one": "first", "two": "second"}
    for name, text in parts.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", json.dumps({"a": text, "b": "c"}) + "\n")
    configs = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in parts]
    write(tmp_path / "README.md", f"---\nconfigs: {json.dumps(configs)}\n---\n")
    for name, text in parts.items():
        assert load(str(tmp_path), "train", name=name)[column][:] == [text]
    with pytest.raises(ValueError, match="one"):
        load(str(tmp_path), "train")


def test_multi30k_has_its_published_sizes():
    """The real data, where it is: 29000, 1014 and 1000 pairs."""
    from hf_freeze.lab.recipes.load import load_recipe
    from hf_freeze.lab.tasks.translation import load_data

    root = ROOT
    data = Path(os.environ.get("HF_FREEZE_DATA", root.parent / "shared" / "data")) / "multi30k"
    if not (data / "train.de.gz").exists():
        pytest.skip(f"no Multi30k in {data}; set HF_FREEZE_DATA to the folder that holds multi30k/")
    recipe = load_recipe(root / "recipes" / "freeze_ablation" / "multi30k.yaml", [f"data.root={data}"])
    splits = load_data(recipe.data)
    assert {name: len(split) for name, split in splits.items()} == {"train": 29_000, "dev": 1014, "test": 1000}
    first = splits["train"][0]
    assert first["source"] == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
    assert first["target"] == "Two young, White males are outside near many bushes."


# -- tokenizers ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts():
    corpus = builtin_corpus(train=400, dev=1, test=1)["train"]
    return [*corpus["source"], *corpus["target"]]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_trained_tokenizer(texts, kind, tmp_path):
    tokenizer = train_tokenizer(texts, 200, kind)
    assert 100 < len(tokenizer) <= 200
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
    for text in texts[::37]:
        ids = tokenizer(text)["input_ids"]
        assert ids[-1] == 1
        assert ids.count(1) == 1
        assert 2 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # It has learned: fewer tokens than characters.
    assert sum(len(tokenizer(t)["input_ids"]) for t in texts) < 0.6 * sum(map(len, texts))
    assert 2 in tokenizer("☃")["input_ids"]
    assert tokenizer("ﬁ①")["input_ids"] == tokenizer("fi1")["input_ids"], "NFKC"
    pair = tokenizer(texts[0], texts[1])["input_ids"]
    assert pair == tokenizer(texts[0])["input_ids"] + tokenizer(texts[1])["input_ids"]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again(t)["input_ids"] for t in texts[:50]] == [tokenizer(t)["input_ids"] for t in texts[:50]]
    assert (again.pad_token_id, again.eos_token_id) == (0, 1)


def test_a_wordpiece_tokenizer(texts, tmp_path):
    tokenizer = train_tokenizer(texts, 200, "wordpiece")
    assert 100 < len(tokenizer) <= 200
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)
    for text in texts[::37]:
        ids = tokenizer(text)["input_ids"]
        assert (ids[0], ids[-1]) == (2, 3)
        assert not {0, 1, 2, 3, 4} & set(ids[1:-1])
        words = tokenizer.decode(ids[1:-1], clean_up_tokenization_spaces=False)
        assert words.replace(" ", "") == text.replace(" ", "")
    assert tokenizer.tokenize("## [MASK]")[-1] == "[MASK]"
    assert "##a" in tokenizer.get_vocab()
    assert "##a" not in tokenizer.get_added_vocab()
    pair = tokenizer(texts[0], texts[1])
    first, second = (tokenizer(text)["input_ids"] for text in texts[:2])
    assert pair["input_ids"] == first + second[1:]
    assert pair["token_type_ids"] == len(first) * [0] + (len(second) - 1) * [1]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(texts[0], texts[1]).data == pair.data
    assert again.mask_token_id == 4


def test_wordpiece_is_the_longest_match_first(texts):
    """As the paper says it: of each word the longest known beginning, and so on with what is left of it."""
    tokenizer = train_tokenizer(texts, 200, "wordpiece")
    vocabulary = tokenizer.get_vocab()
    for word in {word.rstrip(".?") for text in texts[:40] for word in text.split()}:
        pieces, at = [], 0
        while at < len(word):
            mark = "##" if at else ""
            end = next(end for end in range(len(word), at, -1) if mark + word[at:end] in vocabulary)
            pieces.append(mark + word[at:end])
            at = end
        assert tokenizer.tokenize(word) == pieces


@pytest.mark.parametrize("kind", KINDS)
def test_training_a_tokenizer_is_deterministic(texts, kind):
    one, two = (train_tokenizer(iter(texts), 150, kind) for _ in range(2))
    assert one.get_vocab() == two.get_vocab()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_the_same_in_another_process(kind, texts, tmp_path):
    """The trainers of WordPiece and Unigram number pieces as they come out of a hash map, whose order each process draws."""
    (tmp_path / "texts").write_text("\n".join(texts), encoding="utf-8")
    code = (
        "import sys; from hf_freeze.data import read_lines, train_tokenizer; "
        "print(train_tokenizer(read_lines(sys.argv[1]), 150, sys.argv[2]).backend_tokenizer.to_str())"
    )
    trained = train_tokenizer(texts, 150, kind).backend_tokenizer.to_str()
    assert printed_by(code, tmp_path / "texts", kind).strip() == trained


def test_a_wordpiece_vocabulary_too_small_is_refused():
    with pytest.raises(ValueError, match="vocab_size=10 is too small: 11 special tokens and characters must fit"):
        train_tokenizer(["abc", "cab"], 10, "wordpiece")
    assert len(train_tokenizer(["abc", "cab"], 11, "wordpiece")) == 11


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_too_small_is_refused(kind):
    with pytest.raises(ValueError, match="vocab_size=5 is too small: 6 special tokens and characters must fit"):
        train_tokenizer(["abc", "cab"], 5, kind)


def test_the_smallest_vocabulary_that_is_let_through_knows_every_character():
    texts = ["Zwei Männer", "ab cd", "ﬁ"]
    # Normalised, and with the mark of a word's start, these are other characters than the text's own.
    for size in range(3, 40):
        try:
            tokenizer = train_tokenizer(texts, size)
        except ValueError:
            continue
        assert 2 not in [i for ids in tokenizer(texts)["input_ids"] for i in ids], f"vocab_size={size} loses characters"
        assert len(tokenizer) <= size
        return
    pytest.fail("no size was accepted")


def test_an_unknown_kind_is_refused():
    with pytest.raises(
        ValueError, match=r"unknown tokenizer kind 'words'; choose from \['bpe', 'unigram', 'wordpiece'\]"
    ):
        train_tokenizer(["abc"], 50, "words")


def test_ids_outside_the_vocabulary_are_refused():
    check_ids([[0, 9], [-100, 3]], 10)
    for bad in (10, -1):
        with pytest.raises(
            ValueError, match=rf"sentence 1 holds token id {bad}, outside the model's vocabulary 0\.\.9"
        ):
            check_ids([[0], [3, bad]], 10)


# -- batches ---------------------------------------------------------------------------------------------------------------------

# Deterministic, skewed lengths between 1 and 40; the source about as long as the target.
TARGETS = [1 + (i * i * 7919) % 40 for i in range(500)]
SOURCES = [max(1, t + (i * 31) % 7 - 3) for i, t in enumerate(TARGETS)]


def batches(epoch=0, **arguments):
    sampler = TokenBatchSampler(SOURCES, TARGETS, **({"max_tokens": 100} | arguments))
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("max_tokens", [40, 41, 100, 1000, 10**6])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_hold_their_budget_and_every_sentence_once(max_tokens, shuffle):
    sampler = TokenBatchSampler(SOURCES, TARGETS, max_tokens, shuffle=shuffle)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found = list(sampler)
        assert len(found) == len(sampler)
        assert sorted(i for batch in found for i in batch) == list(range(500))
        assert all(type(i) is int for batch in found for i in batch)
        sizes = [len(batch) * max(TARGETS[i] for i in batch) for batch in found]
        assert max(sizes) <= max_tokens
        assert min(map(len, found)) > 0


def test_batches_are_full():
    found = batches(shuffle=False)
    for batch, following in itertools.pairwise(found):
        assert (len(batch) + 1) * TARGETS[following[0]] > 100, "the next sentence would have fitted"


def test_batches_waste_little():
    padded = sum(len(batch) * max(TARGETS[i] for i in batch) for batch in batches(max_tokens=200))
    assert sum(TARGETS) / padded > 0.9
    # Within equal targets the sources are sorted too, or their padding would be that of a random order.
    spread = [max(SOURCES[i] for i in b) - min(SOURCES[i] for i in b) for b in batches(max_tokens=40)]
    assert sum(spread) / len(spread) < 3


def test_the_order_is_a_function_of_seed_and_epoch():
    assert batches(epoch=3, seed=1) == batches(epoch=3, seed=1)
    drawn = [batches(epoch=epoch, seed=seed) for seed in (1, 2) for epoch in (0, 1, 2)]
    assert len({json.dumps(b) for b in drawn}) == 6
    # Not only the order of batches changes, but who meets whom.
    assert len({json.dumps(sorted(sorted(batch) for batch in b)) for b in drawn}) > 1
    assert len({len(b) for b in drawn}) == 1
    one = TokenBatchSampler(SOURCES, TARGETS, 100, seed=1)
    assert list(one) == list(one) == batches(seed=1), "iterating must not move the epoch"


def test_unshuffled_is_the_same_every_epoch():
    assert batches(epoch=0, shuffle=False) == batches(epoch=5, shuffle=False, seed=9)
    longest = [max(TARGETS[i] for i in batch) for batch in batches(shuffle=False)]
    assert longest == sorted(longest)


@pytest.mark.parametrize("multiple_of", [2, 3, 8, 1000])
def test_every_process_gets_equally_many_batches(multiple_of):
    plain, found = batches(), batches(multiple_of=multiple_of)
    assert len(found) % multiple_of == 0
    assert len(plain) <= len(found) < len(plain) + multiple_of
    assert found[: len(plain)] == plain
    assert {json.dumps(b) for b in found} == {json.dumps(b) for b in plain}  # what is added are repetitions


def test_a_budget_below_the_longest_target_is_refused():
    with pytest.raises(ValueError, match="max_tokens=39 is below the longest target, 40 tokens"):
        batches(max_tokens=39)


def test_nothing_to_batch_is_refused():
    with pytest.raises(ValueError, match="no sentences to batch"):
        TokenBatchSampler([], [], 10)


def test_unequal_numbers_of_lengths_are_refused():
    with pytest.raises(ValueError, match=r"same shape|lengths"):
        list(TokenBatchSampler([1, 2, 3], [1, 2], 10))


def test_two_processes_see_another_order_each_epoch():
    """accelerate's shard of a batch sampler must reach `set_epoch`."""
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    lengths = [5] * 60
    loaders = [
        prepare_data_loader(
            DataLoader(list(range(60)), batch_sampler=TokenBatchSampler(lengths, lengths, 20, multiple_of=2)),
            num_processes=2,
            process_index=rank,
            even_batches=False,
            put_on_device=False,
        )
        for rank in range(2)
    ]
    epochs = []
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        epochs.append([batch.tolist() for loader in loaders for batch in loader])
        assert {i for batch in epochs[-1] for i in batch} == set(range(60))
    assert epochs[0] != epochs[1]
