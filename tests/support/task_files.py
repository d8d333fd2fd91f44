"""Small files in the formats of GLUE's nine tasks, CoNLL-2003, SQuAD and RACE: the same columns, headers and kinds of labels."""

import csv
import json

FOLDERS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP"}
FOLDERS |= {"mnli": "MNLI", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI"}

_STSB = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
_MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
_HEADERS = {
    "cola": None,
    "sst2": ["sentence", "label"],
    "mrpc": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "stsb": _STSB.split(),
    "qqp": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "mnli": [*_MNLI.split(), "sentence1", "sentence2", "label1", "gold_label"],
    "qnli": ["index", "question", "sentence", "label"],
    "rte": ["index", "sentence1", "sentence2", "label"],
    "wnli": ["index", "sentence1", "sentence2", "label"],
}
CLASSES = {"mnli": ["contradiction", "entailment", "neutral"]}
CLASSES |= {name: ["entailment", "not_entailment"] for name in ("qnli", "rte")}


def write_glue(folder, name, counts=(("train", 24), ("dev", 9))):
    """The files of the task `name` in `folder`; returns the folder of the task."""
    root = folder / FOLDERS[name]
    root.mkdir(parents=True)
    if name == "mnli":
        counts = [*counts[:1], ("dev_matched", 9), ("dev_mismatched", 6)]
    for split, count in counts:
        with open(root / f"{split}.tsv", "w", encoding="utf-8-sig" if name == "mrpc" else "utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n")
            if _HEADERS[name]:
                writer.writerow(_HEADERS[name])
            for number in range(count):
                writer.writerow(_row(name, number))
    return root


def _row(name, number):
    one, two = f'the "cat {"sat" if number % 3 else "ran"} on mat {number % 5}', f"a dog barked {number % 4} times"
    label = CLASSES.get(name, ["0", "1"])[number % len(CLASSES.get(name, "01"))]
    return {
        "cola": ["gj04", label, "" if label == "1" else "*", one],
        "sst2": [one + " ", label],
        "mrpc": [label, 702876, 702977, one, two],
        "stsb": [
            number,
            "main-captions",
            "MSRvid",
            "2012test",
            f"{number:04}",
            "none",
            "none",
            one,
            two,
            number % 11 / 2,
        ],
        "qqp": [number, 2 * number, 2 * number + 1, one + "?", two + "?", label],
        "mnli": [number, 31193, "31193n", "government", *["( x )"] * 4, one, two, label, label],
        "qnli": [number, one + "?", two, label],
    }.get(name, [number, one, two, label])


SENTENCES = [
    [("EU", "I-ORG"), ("rejects", "O"), ("German", "I-MISC"), ("call", "O"), (".", "O")],
    [("Peter", "B-PER"), ("Blackburn", "I-PER")],
    [("in", "O"), ("New", "B-LOC"), ("York", "I-LOC"), ("Boston", "B-LOC")],
]


def write_conll(path, sentences):
    lines = ["-DOCSTART- -X- -X- O\n"]
    lines += ["".join(f"{word} NN B-NP {tag}\n" for word, tag in sentence) for sentence in sentences]
    path.write_text("\n".join(lines), encoding="utf-8")


PLACES = ["Paris", "Rome", "Oslo", "New York"]


def write_squad(path, count, *, unanswerable=False):
    """As train-v1.1.json, or with `unanswerable` as train-v2.0.json, whose every second question has no answer."""
    paragraphs = []
    for number in range(count):
        place = PLACES[number % 4]
        context = f"In May, Ann moved to {place}. She sings there every day, and all of her friends listen."
        answer = {"text": place, "answer_start": context.index(place)}
        question = {"id": f"q{number}", "question": " Where did Ann move?", "answers": [answer, answer]}
        if unanswerable:
            none = {"answers": [], "is_impossible": True, "plausible_answers": [answer]} if number % 2 else {}
            question |= {"is_impossible": False} | none
        paragraphs.append({"context": context, "qas": [question]})
    text = {"version": "v", "data": [{"title": "Ann", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(text), encoding="utf-8")


ANIMALS = ["cat", "dog", "cow", "hen"]


def write_race(folder, count):
    """`count` files of two questions each, in folders for two kinds of schools."""
    for number in range(count):
        kind = folder / ("middle", "high")[number % 2]
        kind.mkdir(parents=True, exist_ok=True)
        animal = ANIMALS[number % 4]
        text = {
            "article": f"Once a {animal} lived here. It was happy.",
            "questions": ["Which animal lived here?", "The _ was happy."],
            "options": [ANIMALS, ANIMALS[::-1]],
            "answers": ["ABCD"[number % 4], "DCBA"[number % 4]],
            "id": f"{kind.name}{number}.txt",
        }
        (kind / f"{number}.txt").write_text(json.dumps(text), encoding="utf-8")
