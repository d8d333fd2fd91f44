"""CSV files as spreadsheets write them, and the other tables: what is read, and what is wrong, with file and row."""

import csv
import gzip
import io
import json
import random

import datasets
import pyarrow as pa
import pytest

from hf_freeze.lab.data import (
    csv_files,
    load_hub_labelled,
    read_conll,
    read_labelled,
    read_pairs,
    read_race,
    read_squad,
    read_table,
    read_text,
)
from hf_freeze.lab.data.tables import CLASS, OPTIONAL, TEXT, WORDS, columns_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    yield tmp_path / "cache"
    left = {path.name.partition("-")[0] for path in (tmp_path / "cache" / "hf_freeze").glob("*")}
    assert left <= {"text"}, "what was in use while it was read is gone"


def write(path, content):
    path.write_bytes(content)
    return path


# As a spreadsheet exports it: a byte-order mark, CRLF, a quoted comma, quotation marks and line breaks in cells, an empty row.
EXPORTED = (
    b'\xef\xbb\xbfid,Review,Sentiment\r\n007,"Good, really: ""very"" good.\r\n\r\nBuy it.",pos\r\n008,null,neg\r\n\r\n,,\r\n'
    b'009,NA,neg\r\n010, 5" screen ,pos\r\n1.50,None,neg\r\n011,"nan",pos\r\n'
)
REVIEWS = ['Good, really: "very" good.\r\n\r\nBuy it.', "null", "NA", '5" screen', "None", "nan"]


def examples(path, **how):
    data = read_labelled([path], ["Review"], "Sentiment", **how)
    assert data.cache_files, "memory-mapped"
    return list(zip(data["Review"], data["Sentiment"], strict=True))


def test_an_exported_file(tmp_path):
    path = write(tmp_path / "reviews [1].csv", EXPORTED)
    assert columns_of(path) == ["id", "Review", "Sentiment"]
    assert examples(path) == list(zip(REVIEWS, ["pos", "neg", "neg", "pos", "neg", "pos"], strict=True))
    assert read_text([path], column="Review")["text"][:] == REVIEWS
    assert read_table([path], {"id": TEXT})["id"][:] == ["007", "008", "009", "010", "1.50", "011"]
    for name, content in (
        ("semicolons.csv", EXPORTED.replace(b",", b";")),
        ("lf.csv", EXPORTED.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")),
        ("cut.csv", EXPORTED.removesuffix(b"\r\n")),
        ("trailing.csv", EXPORTED.replace(b"\r\n007", b",,\r\n007").replace(b"pos\r\n", b"pos,,\r\n")),
        ("packed.csv.gz", gzip.compress(EXPORTED)),
    ):
        found = [text.replace("\r\n", "\n").replace(";", ",") for text, _ in examples(write(tmp_path / name, content))]
        assert found == [text.replace("\r\n", "\n") for text in REVIEWS], name


@pytest.mark.parametrize("delimiter", ",;\t|")
def test_any_table_that_python_writes(tmp_path, delimiter, monkeypatch):
    draw = random.Random(1)
    pieces = ["a", "ü", '"', ",", ";", "\t", "|", "\n", "\r\n", "null", "1.0", "TRUE", " ", "😀"]
    rows = [["".join(draw.choices(pieces, k=draw.randint(1, 6))) + "." for _ in range(3)] for _ in range(300)]
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([["one", "two, 2", "three"], *rows])
    path = write(tmp_path / "a.csv", out.getvalue().encode())
    monkeypatch.setattr(csv_files, "_ROWS", 70)
    data = read_table([path], dict.fromkeys(["three", "one"], TEXT))
    assert data["one"][:] == [row[0].strip() for row in rows]
    assert data["three"][:] == [row[2].strip() for row in rows]
    read_again = read_table([path], dict.fromkeys(["x", "z"], TEXT), ["x", "y", "z"])
    assert read_again["z"][:] == ["three", *data["three"]], "without a row of names"


TYPED = [
    {"text": "a", "label": 1, "tags": ["A", "O"]},
    {"text": "b", "label": 1.0, "tags": ["O"]},
    {"text": "c", "label": True, "tags": ["O"]},
    {"text": "d", "label": "x ", "tags": ["O"]},
]


def test_other_tables_hold_the_same(tmp_path):
    lines = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, TYPED)).encode())
    listed = write(tmp_path / "a.json", b"\xef\xbb\xbf" + json.dumps(TYPED, indent=1).encode())
    tsv = write(tmp_path / "a.TSV", b"tags\tlabel\ttext\nA O\t1\ta\nO\t1\tb\nO\ttrue\tc\nO\tx\td\n")
    for path in (lines, listed, tsv):
        assert read_labelled([path], ["text"])["label"][:] == ["1", "1", "true", "x"]
        assert read_table([path], {"tags": WORDS})["tags"][:] == [row["tags"] for row in TYPED]
    expected = {"text": ["a", "b"], "label": ["0", "3"]}
    for kind in ("parquet", "arrow"):
        data = datasets.Dataset.from_dict({"label": [0.0, 3.0], "text": ["a", "b"], "other": [{"a": 1}] * 2})
        if kind == "parquet":
            data.to_parquet(tmp_path / "a.parquet")
        else:
            with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, data.data.schema) as out:
                out.write_table(data.data.table)
        assert read_labelled([tmp_path / f"a.{kind}"], ["text"])[:] == expected
    assert read_labelled([tmp_path / "a.parquet", tmp_path / "a.arrow"], ["text"])["label"][:] == ["0", "3"] * 2


def test_folders_and_patterns(tmp_path):
    (tmp_path / "parts").mkdir()
    for number in range(3):
        write(tmp_path / "parts" / f"{number}.csv", b"text\n%d a\n" % number)
    for named in (tmp_path / "parts", tmp_path / "parts" / "*.csv", tmp_path / "**" / "?.csv"):
        assert read_text([named])["text"][:] == ["0 a", "1 a", "2 a"]
    with pytest.raises(FileNotFoundError, match=r"parts/\*\.tsv: no files"):
        read_text([tmp_path / "parts" / "*.tsv"])


def test_pairs_in_a_csv_file(tmp_path):
    path = write(tmp_path / "a.csv", "de;en\nHund;dog\nKatze, groß;cat\n".encode())
    pairs = [{"source": "Hund", "target": "dog"}, {"source": "Katze, groß", "target": "cat"}]
    assert read_pairs([path], source="de", target="en").to_list() == pairs


def test_a_file_that_was_once_read_as_lines(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", b"text\na\n")
    with monkeypatch.context() as before:
        before.setattr("hf_freeze.data.files._KINDS", {})
        assert read_text([path])["text"][:] == ["text", "a"]
    assert read_text([path])["text"][:] == ["a"]


def test_texts_of_a_folder_stay_texts(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", b"text,label\nNA,1\nnull,0\n")
    data = load_hub_labelled(str(tmp_path / "data"), "train", ["text"])
    assert data[:] == {"text": ["NA", "null"], "label": [1, 0]}


def test_words_with_tags(tmp_path):
    rows = [{"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, {"tokens": ["Peter"], "tags": ["B-PER"]}]
    path = write(tmp_path / "a.csv", b'words,tags\n"EU  rejects",B-ORG O\n"Peter",B-PER\n')
    assert read_conll([path], "words", "tags").to_list() == rows
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in rows).encode())
    assert read_conll([path], tags="tags").to_list() == rows
    with pytest.raises(ValueError, match=r"a\.csv, row 3: 2 words, but 1 tags$"):
        read_conll([write(tmp_path / "a.csv", b"tokens,ner_tags\na,O\na b,O\n")])
    with pytest.raises(ValueError, match=r"a\.csv, row 3: tag 'ORG' is none of O, B-TYPE, "):
        read_conll([write(tmp_path / "a.csv", b"tokens,ner_tags\na,O\na b,ORG O\n")])


def test_questions_in_a_csv_file(tmp_path):
    path = write(tmp_path / "a.csv", b'question,context,answer\nWho?,"Ann, they\nsay. Ann!",Ann\nWhen?,Ann,\n')
    assert read_squad([path]).to_list() == [
        {"id": "1", "question": "Who?", "context": "Ann, they\nsay. Ann!", "answers": ["Ann"], "starts": [0]},
        {"id": "2", "question": "When?", "context": "Ann", "answers": [], "starts": []},
    ]
    with pytest.raises(ValueError, match=r"a\.csv, row 4 \(line 5\): answer 'Bob' is not in the context$"):
        read_squad([write(path, path.read_bytes() + b"Who?,Ann,Bob\n")])


def test_choices_in_a_table(tmp_path):
    row = {"article": "Tea, hot.", "question": "What?", "options": ["tea", "cold milk"], "answer": "B"}
    path = write(tmp_path / "a.csv", b'answer,article,question,A,B\nB,"Tea, hot.",What?,tea,cold milk\n')
    lines = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    assert read_race([path, lines]).to_list() == [row, row]
    with pytest.raises(ValueError, match=r"a\.csv, row 3: answer 'C'; choose from 'AB'$"):
        read_race([write(path, path.read_bytes() + b"C,a,b,c,d\n")])
    with pytest.raises(ValueError, match=r"a\.csv has no column 'options'; choose from \['article'"):
        read_race([write(path, b"article,question,answer\na,b,A\n")])


# -- what is wrong ---------------------------------------------------------------------------------------------------------------

LONG = b'text,label\n"one\ntwo",1\n' + b"x,1\n" * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LONG + b",1\n", r"a\.csv, row 6 \(line 7\): text is empty$"),
        (LONG + b"\n\n \t,1\n", r"a\.csv, row 8 \(line 9\): text is empty$"),
        (LONG + b"x,\n", r"a\.csv, row 6 \(line 7\): label is empty$"),
        (LONG + b"x\n", r"a\.csv, row 6 \(line 7\): label is empty$"),
        (b"text,label\nx,\n", r"a\.csv, row 2: label is empty$"),
        (
            LONG + b"one, two,1\nx,1\n",
            r"a\.csv, row 6 \(line 7\): 3 cells for 2 columns; put a cell that holds ',' in quotation marks$",
        ),
        (b"text,label\none, two,1\n", r"a\.csv, row 2: 3 cells for 2 columns"),
        (b"text,label\none,1,\none, two,1\n", r"a\.csv, row 3: 3 cells for 2 columns"),
        (b"text\none, two\n", r"a\.csv has no column 'label'; choose from \['text'\]$"),
        (LONG + b'"x,1\nx,1\nx,1\n', r"a\.csv, row 6 \(line 7\): a quotation mark is opened and never closed$"),
        (b"Text,class\na,b\n", r"a\.csv has no column 'text'; choose from \['Text', 'class'\]; did you mean 'Text'\?$"),
        (b"text,labels\na,b\n", r"no column 'label'; choose from \['text', 'labels'\]; did you mean 'labels'\?$"),
        (b"text,label,text\na,b,c\n", r"a\.csv has 2 columns 'text'; give them different names$"),
        (
            "text,label\nx,1\nschön,1\n".encode("latin-1"),
            r"a\.csv, line 3: not UTF-8 .*; save the file as UTF-8 \(in a spreadsheet: CSV UTF-8\)$",
        ),
        ("text,label\nx,1\n".encode("utf-16"), r"a\.csv, line 1: .*; save the file as UTF-8 "),
        (b'text,label\n"' + b"x,1\n" * 50_000, r"a\.csv, row 2: a quotation mark is opened and never closed$"),
        (b"text,label\nx\x00,1\n", r"a\.csv, line 2: binary data \(a NUL byte\), not text; save"),
        (b"", r"a\.csv: the file is empty$"),
        (b"text,label\n", r"a\.csv: no text$"),
        (b"\n\n", r"a\.csv has no column 'text'"),
        (gzip.compress(LONG, mtime=0)[:-9], r"a\.csv: damaged gzip file: "),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, content, message, capfd):
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(ValueError, match=message) as raised:
        read_labelled([path], ["text"])
    assert "\n" not in str(raised.value)
    printed = capfd.readouterr()
    assert not printed.out
    assert "Failed" not in printed.err


def test_an_unquoted_comma_in_the_only_column(tmp_path):
    with pytest.raises(ValueError, match=r"a\.csv, row 3: 2 cells for 1 column; put a cell that holds ','"):
        read_text([write(tmp_path / "a.csv", b"text\none\ntwo, three\n")])


def test_a_wrong_byte_far_below_names_its_line(tmp_path):
    rows = b"".join(b'"%d\nx",1\n' % number for number in range(30_000))
    path = write(tmp_path / "a.csv", b"text,label\n" + rows + b"\xff,1\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 60002: not UTF-8"):
        read_labelled([path], ["text"])


def test_a_file_that_was_read_less_strictly_before(tmp_path):
    path = write(tmp_path / "a.csv", b"text,other\n,a\n")
    assert read_table([path], {"text": OPTIONAL, "other": TEXT})["text"][:] == [""]
    with pytest.raises(ValueError, match=r"a\.csv, row 2: text is empty$"):
        read_table([path], {"text": TEXT, "other": TEXT})


def test_wrong_rows_of_other_tables(tmp_path):
    path = write(tmp_path / "a.json", b'[{"text": "a"}, {"text": 3}]')
    with pytest.raises(ValueError, match=r"a\.json, row 2: text must be text, not 3$"):
        read_text([path])
    with pytest.raises(ValueError, match=r"a\.json: not JSON"):
        read_text([write(path, b'[{"text": "a"}')])
    with pytest.raises(ValueError, match=r"a\.tsv, row 3: label is empty$"):
        read_labelled([write(tmp_path / "a.tsv", b"text\tlabel\n\n \t\n".replace(b" ", b"x"))], ["text"])
    with pytest.raises(ValueError, match=r"a\.xml: a file with columns ends in \.csv, \.tsv, .* or \.arrow$"):
        read_table([write(tmp_path / "a.xml", b"x")], {"text": CLASS})
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        read_text([tmp_path / "none.csv"])
    with pytest.raises(ValueError, match=r"a\.arrow: damaged Arrow file: "):
        read_text([write(tmp_path / "a.arrow", b"ARROW1 and no more")])
