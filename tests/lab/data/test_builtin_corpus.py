from collections import Counter, defaultdict
from hashlib import sha256
from itertools import pairwise, product

import pytest

from hf_freeze.lab.data import builtin
from hf_freeze.lab.data.builtin import Clause, Draw, Lexicon, NounPhrase, Sentence, builtin_corpus

SIZES = {"train": 2000, "dev": 200, "test": 200}
# Published numbers hold for this text only.
SHA256_OF_SEED_0 = "3de9d1d03102a63d07e670495f0ef6ae0325e270a5515ffd15ceed87f1e4f91a"


@pytest.fixture(scope="module")
def corpus():
    return builtin_corpus(**SIZES)


@pytest.fixture(scope="module")
def lexicon():
    return Lexicon(Draw(0))  # the lexicon is what a seed draws first


@pytest.fixture(scope="module")
def pairs(corpus):
    return [(row["source"], row["target"]) for split in corpus.values() for row in split]


def as_text(corpus):
    return "".join(f"{name}\t{row['source']}\t{row['target']}\n" for name, split in corpus.items() for row in split)


def words_of(sentence):
    return sentence.rstrip(".?").split()


def test_splits_have_the_asked_sizes_and_columns(corpus):
    assert {name: len(split) for name, split in corpus.items()} == SIZES
    assert all(split.column_names == ["source", "target"] for split in corpus.values())


def test_a_seed_gives_the_same_text_everywhere(corpus):
    assert as_text(corpus) == as_text(builtin_corpus(0, **SIZES))
    assert sha256(as_text(corpus).encode()).hexdigest() == SHA256_OF_SEED_0


def test_another_seed_gives_other_languages(corpus):
    words, others = ({*words_of(" ".join(c["train"]["source"][:]))} for c in (corpus, builtin_corpus(1, **SIZES)))
    assert len(words & others) < 0.1 * len(words)


def test_a_longer_train_split_begins_with_a_shorter_one(corpus):
    shorter = builtin_corpus(**{**SIZES, "train": 100})
    assert shorter["train"]["source"][:] == corpus["train"]["source"][:100]
    assert shorter["test"]["source"][:] == corpus["test"]["source"][:]


def test_no_source_sentence_occurs_twice(pairs):
    assert len({source for source, _ in pairs}) == len(pairs) == sum(SIZES.values())


def test_the_example_of_the_docstring_is_in_the_corpus(pairs):
    lines = [line.strip() for line in builtin.__doc__.splitlines()]
    assert sum(source in lines and target in lines for source, target in pairs) == 1


def test_lengths_and_punctuation(pairs):
    lengths = [len(text.split()) for pair in pairs for text in pair]
    assert min(lengths) == builtin.MIN_WORDS
    assert 18 <= max(lengths) <= builtin.MAX_WORDS
    for source, target in pairs:
        assert source[-1] == target[-1] == ("?" if target.startswith("ka ") else ".")
        assert all(text[:-1] == " ".join(words_of(text)) for text in (source, target))


def test_nouns_have_zipf_frequencies(pairs, lexicon):
    rank = {form: i for i, noun in enumerate(lexicon.nouns) for form in (noun.target, noun.target_plural)}
    counts = Counter(rank[word] for _, target in pairs for word in words_of(target) if word in rank)
    total = sum(counts.values())
    assert 0.35 < sum(counts[i] for i in range(10)) / total < 0.50  # 0.43 by the weights 1 / (k + 3), k = 0..99
    assert 0.10 < sum(counts[i] for i in range(50, 100)) / total < 0.25  # 0.18


def test_suffixes_harmonise(pairs):
    closed = {*builtin.DETERMINERS, *builtin.NUMERALS, *builtin.TIMES, *builtin.POSTPOSITIONS, "ve", "mu"}
    for word in {word for source, _ in pairs for word in words_of(source)} - closed:
        assert not (set(word) & set(builtin.FRONT) and set(word) & set(builtin.BACK)), word


def test_articles_and_verbs_agree_with_the_noun_in_the_text(pairs, lexicon):
    column = {article: i for forms in builtin.DETERMINERS.values() for i, article in enumerate(forms)}
    stems = {stem for verb in lexicon.intransitives + lexicon.transitives for sense in verb.senses for stem in sense}
    columns_of_noun, verbs_checked = defaultdict(set), 0
    for _, target in pairs:
        words = words_of(target.removeprefix("ka "))
        for article, noun in pairwise(words):
            if article in column:
                columns_of_noun[noun].add(column[article])
        if words[0] in column and words[2] in ("non", "vil"):
            verb = next(word for word in words[2:] if word not in ("non", "vil"))
            assert verb.removesuffix(builtin.VERB_ENDINGS[column[words[0]]]) in stems, target
            verbs_checked += 1
    assert len(columns_of_noun) > 100
    assert verbs_checked > 100
    assert all(len(columns) == 1 for columns in columns_of_noun.values())


def test_the_sense_of_a_verb_depends_on_the_class_of_its_object(lexicon):
    nouns = [next(noun for noun in lexicon.nouns if noun.cls == cls) for cls in (0, 1, 2)]
    subject, senses = NounPhrase(nouns[0], False, ""), []
    for verb in lexicon.transitives:
        clauses = [Clause(subject, verb, "present", False, object=NounPhrase(noun, False, "")) for noun in nouns]
        senses.append(len({builtin.write_target(Sentence((clause,), False)).split()[2] for clause in clauses}))
    assert set(senses) == {1, 2}


def test_the_target_is_a_function_of_the_source(pairs, lexicon):
    readings = all_readings(lexicon)
    for source, target in pairs:
        sentence = read(source, readings)
        assert builtin.write_source(sentence) == source
        assert builtin.write_target(sentence) == target


def all_readings(lexicon):
    """Source word -> the one thing that it can mean."""
    nouns, verbs = lexicon.nouns, lexicon.intransitives + lexicon.transitives
    readings = [
        (builtin.inflect(noun.source_plural if plural else noun.source, suffix), (noun, plural, case))
        for noun, plural, (case, suffix) in product(nouns, (False, True), builtin.CASES.items())
    ]
    readings += [
        (builtin.inflect(verb.source, builtin.NEGATION * negated, suffix), (verb, tense, negated))
        for verb, negated, (tense, suffix) in product(verbs, (False, True), builtin.TENSES.items())
    ]
    readings += [(builtin.inflect(verb.source, builtin.PARTICIPLE), verb) for verb in lexicon.transitives]
    readings += [(adjective[0], adjective) for adjective in lexicon.adjectives]
    words = [word for word, _ in readings]
    words += [*builtin.DETERMINERS, *builtin.NUMERALS, *builtin.TIMES, *builtin.POSTPOSITIONS, "ve", "mu"]
    assert len(set(words)) == len(words)
    return dict(readings)


def read(source, readings):
    """Parse a source sentence, word by word and without backtracking, into what it was written from."""
    question = source.endswith(" mu?")
    text = source.removesuffix(" mu?" if question else ".")
    return Sentence(tuple(read_clause(clause.split(), readings) for clause in text.split(" ve ")), question)


def read_clause(words, readings):
    time = words.pop(0) if words[0] in builtin.TIMES else None
    subject, case = read_phrase(words, readings)
    assert case == "subject"
    object_ = place = None
    while len(words) > 1:
        phrase, case = read_phrase(words, readings)
        if case == "object":
            object_ = phrase
        else:
            place = words.pop(0), phrase
    verb, tense, negated = readings[words.pop()]
    return Clause(subject, verb, tense, negated, object_, place, time)


def read_phrase(words, readings):
    phrase, case = read_simple_phrase(words, readings)
    if case == "owner":
        outer, case = read_simple_phrase(words, readings)
        return outer._replace(owner=phrase), case
    if isinstance(readings.get(words[0]), builtin.Verb):  # a participle
        verb = readings[words.pop(0)]
        outer, case = read_simple_phrase(words, readings)
        return outer._replace(relative=(verb, phrase)), case
    return phrase, case


def read_simple_phrase(words, readings):
    determiner = words.pop(0) if words[0] in builtin.DETERMINERS or words[0] in builtin.NUMERALS else ""
    adjective = readings[words.pop(0)] if len(readings[words[0]]) == 2 else None  # a noun has three parts
    noun, plural, case = readings[words.pop(0)]
    return NounPhrase(noun, plural or determiner in builtin.NUMERALS, determiner, adjective), case


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"seed=-1 must be a whole number from 0 to 9223372036854775807"),
        ({"seed": 0.5}, r"seed=0\.5 must be"),
        ({"train": 0}, r"train=0 must be a whole number from 1 to 1000000"),
        ({"dev": -3}, r"dev=-3 must be"),
        ({"test": 1_000_001}, r"test=1000001 must be"),
        ({"test": True}, r"test=True must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        builtin_corpus(**arguments)
