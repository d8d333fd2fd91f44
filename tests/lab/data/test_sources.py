"""Text from tables, compressed files and folders of them, memory-mapped; and what is wrong with them, in one line."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_freeze.lab.data import (
    builtin_corpus,
    load_hub_parallel,
    load_hub_text,
    read_lines,
    read_pairs,
    read_parallel,
    read_text,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def zstd(content):
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as packed:
        packed.write(content)
    return stream.getvalue().to_pybytes()


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
CORPUS = builtin_corpus(train=300, dev=1, test=1)["train"]
PAIRS = CORPUS.to_list()
LINES = CORPUS["target"][:]


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path, content):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    return path


def parquet(path, rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    return path


# -- what is read ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACK)
def test_compressed_lines(tmp_path, packing):
    path = write(tmp_path / f"a.txt.{packing}", PACK[packing]("\n".join(LINES).encode()))
    assert read_lines(path) == LINES
    data = read_text([path, path])
    assert data.cache_files
    assert data["text"][:] == LINES * 2


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("share", [0.2, 0.9, 0.999])
def test_a_truncated_shard_is_one_line(tmp_path, packing, share):
    whole = PACK[packing]("\n".join(LINES).encode())
    shards = [write(tmp_path / f"{i}.txt.{packing}", whole) for i in range(3)]
    shards[1].write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=rf"^\S+1\.txt\.{packing}: damaged \w+ file: [^\n]+$"):
        read_text(shards)
    shards[1].write_bytes(whole)
    assert len(read_text(shards)) == 3 * len(LINES)


def test_text_that_begins_like_a_compressed_file(tmp_path):
    assert read_lines(write(tmp_path / "a", b"BZhang\nsecond")) == ["BZhang", "second"]


def test_pairs_of_every_kind_of_file(tmp_path):
    extra = [{"id": i, "target": row["target"], "source": row["source"]} for i, row in enumerate(PAIRS)]
    paths = [
        write(tmp_path / "a.jsonl", jsonl(extra)),
        write(tmp_path / "b.jsonl.gz", gzip.compress(jsonl(extra).removesuffix(b"\n"))),
        write(tmp_path / "bom.jsonl", b"\xef\xbb\xbf" + jsonl(extra)),
        parquet(tmp_path / "c.parquet", extra),
    ]
    for path in paths:
        data = read_pairs([path])
        assert data.cache_files
        assert data.to_list() == PAIRS
    assert read_pairs(paths).to_list() == PAIRS * 4
    sides = [write(tmp_path / side, "\n".join(CORPUS[side]).encode()) for side in ("source", "target")]
    assert read_pairs(sides).to_list() == read_parallel(*sides).to_list() == PAIRS
    assert read_pairs(paths[:1], source="target", target="source")[0]["source"] == PAIRS[0]["target"]
    with pytest.raises(
        ValueError, match=r"two files of lines, or files that end in \.csv, .* or \.arrow, not .*source"
    ):
        read_pairs([*sides, paths[0]])


def test_text_of_tables_is_stripped_and_never_empty(tmp_path):
    rows = [{"body": " one "}, {"body": " "}, {"body": "two\nthree"}, {"body": ""}]
    for path in (write(tmp_path / "a.jsonl", jsonl(rows)), parquet(tmp_path / "a.parquet", rows)):
        assert read_text([path], column="body")["text"][:] == ["one", "two\nthree"]
    with pytest.raises(ValueError, match=r"empty\.jsonl: no text"):
        read_text([write(tmp_path / "empty.jsonl", jsonl(rows[1:2]))], column="body")


def test_documents_and_lines(tmp_path):
    path = write(tmp_path / "a.gz", gzip.compress(b"one\ntwo\n\nthree\n"))
    assert read_text([path], unit="documents")["text"][:] == ["one\ntwo", "three"]
    with pytest.raises(ValueError, match="line 3: empty line"):
        read_text([path])


# -- what is wrong ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 3}', "text must be text, not 3"),
        ('{"text": null}', "text must be text, not None"),
        ('{"txt": "a"}', r"no field 'text'; choose from \['txt'\]"),
        ('{"text": "a"', "not JSON"),
        ('{"text": "a"} {"text": "b"}', "not JSON"),
        ('["a"]', r"an example is a JSON object, not '\[\"a\"\]'"),
        ("", "empty line"),
        (b'{"text": "\xff"}', "not UTF-8 .*byte 10"),
    ],
)
def test_a_line_that_is_not_as_the_first_ones(tmp_path, line, message):
    content = jsonl({"text": text} for text in LINES)
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", content + line + b"\n" + content)
    with pytest.raises(ValueError, match=rf"^\S+a\.jsonl, line 301: {message}[^\n]*$"):
        read_text([path])


def test_only_a_newline_ends_a_line_of_json(tmp_path):
    rows = [{"n": i, "text": text, "nested": {"text": [1]}} for i, text in enumerate(['ü \\ " \u2028 😀', *LINES])]
    assert read_text([write(tmp_path / "a.jsonl", jsonl(rows))])["text"][:] == [row["text"] for row in rows]


def test_a_missing_column(tmp_path):
    path = parquet(tmp_path / "a.parquet", PAIRS)
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text'; choose from \['source', 'target'\]"):
        read_text([path])
    path = parquet(tmp_path / "n.parquet", [{"text": 1}])
    with pytest.raises(ValueError, match=r"n\.parquet: column 'text' holds int64, not text"):
        read_text([path])
    path = parquet(tmp_path / "e.parquet", [{"text": "a"}] * 100 + [{"text": None}])
    with pytest.raises(ValueError, match=r"e\.parquet, row 101: text must be text, not None"):
        read_text([path])


def test_a_truncated_parquet_file(tmp_path):
    path = parquet(tmp_path / "a.parquet", [{"text": text} for text in LINES])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"^\S+a\.parquet: damaged Parquet file: [^\n]+$"):
        read_text([path])
    path.write_bytes(whole[:100] + bytes(300) + whole[400:])
    with pytest.raises(ValueError, match=r"^\S+a\.parquet: damaged Parquet file: [^\n]+$"):
        read_text([path])


def test_a_file_that_is_not_there(tmp_path):
    for name in ("a.jsonl", "a.parquet", "a.txt"):
        with pytest.raises(FileNotFoundError, match=name):
            read_text([tmp_path / name])


# -- folders ---------------------------------------------------------------------------------------------------------------------


def test_a_folder_of_parquet(tmp_path):
    folder = tmp_path / "data"
    for i in range(3):
        parquet(folder / f"train-{i:05d}-of-00003.parquet", PAIRS[100 * i : 100 * (i + 1)])
    parquet(folder / "test-00000-of-00001.parquet", PAIRS[:10])
    assert load_hub_parallel(str(folder), "train", "source", "target").to_list() == PAIRS
    data = load_hub_text(str(folder), "train", "target")
    assert data.cache_files
    assert data["text"][:] == LINES
    assert len(load_hub_text(str(folder), "test", "target")) == 10
    assert load_hub_text(str(folder), "train[:5]", "target")["text"][:] == LINES[:5], "a part of a split, by `datasets`"
    with pytest.raises(ValueError, match=r"\(train\) has no column 'text'; choose from \['source', 'target'\]"):
        load_hub_text(str(folder), "train")


def test_a_folder_that_changes_between_two_starts(tmp_path):
    folder = tmp_path / "data"
    for i in range(3):
        parquet(folder / f"train-{i}.parquet", PAIRS[100 * i : 100 * (i + 1)])
    first = load_hub_text(str(folder), "train", "target")
    again = load_hub_text(str(folder), "train", "target")
    assert again.cache_files == first.cache_files
    parquet(folder / "train-3.parquet", PAIRS[:50])
    assert load_hub_text(str(folder), "train", "target")["text"][:] == LINES + LINES[:50]
    parquet(folder / "train-3.parquet", PAIRS[:20])
    assert load_hub_text(str(folder), "train", "target")["text"][:] == LINES + LINES[:20]
    (folder / "train-3.parquet").unlink()
    assert load_hub_text(str(folder), "train", "target").cache_files == first.cache_files


def test_a_folder_of_jsonl_names_the_line(tmp_path):
    folder = tmp_path / "data"
    write(folder / "train-0.jsonl", jsonl({"text": text} for text in LINES))
    write(folder / "train-1.jsonl", jsonl({"text": text} for text in LINES) + b'{"text": 3}\n')
    with pytest.raises(ValueError, match=r"^\S+train-1\.jsonl, line 301: text must be text, not 3$"):
        load_hub_text(str(folder), "train")


def test_data_that_datasets_cannot_read_is_one_line(tmp_path):
    folder = tmp_path / "data"
    whole = gzip.compress("\n".join(LINES).encode())
    write(folder / "train-0.txt.gz", whole)
    assert load_hub_text(str(folder), "train")["text"][:] == LINES
    write(folder / "train-1.txt.gz", whole[:-50])
    with pytest.raises(ValueError, match=r"^\S+data \(train\) cannot be read: \w+: [^\n]+$"):
        load_hub_text(str(folder), "train")


def test_a_column_that_is_not_text(tmp_path):
    parquet(tmp_path / "data" / "train.parquet", [{"text": "a", "n": 1}])
    with pytest.raises(ValueError, match=r"train\.parquet: column 'n' holds int64, not text"):
        load_hub_text(str(tmp_path / "data"), "train", "n")
