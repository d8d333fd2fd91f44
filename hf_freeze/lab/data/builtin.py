"""A small translation corpus generated from a seed: two invented languages, no download.

Each seed draws its own lexicon and sentences; the grammar is fixed. The target is a function of the source. Word frequencies
are Zipf-like in every part of speech.

============ ============================================== ====================================================
             source                                         target
============ ============================================== ====================================================
sentence     clause [``ve`` clause] [``mu``] (question)     [``ka``] (question) clause [``und`` clause]
clause       [time] subject [object] [place] verb           subject [``non``] [``vil``] verb [object] [place] [time]
noun phrase  [relative | owner] [determiner] [adj] noun     determiner noun [adj] [``de`` owner | ``kwe`` relative]
relative     object participle                              verb object
place        noun phrase, postposition                      preposition, noun phrase
noun         stem, plural, case; some odd plurals           class 0-2 (to be memorised) and number; some odd plurals
determiner   none = definite; numeral + singular noun       agrees with class and number; numeral + plural noun
adjective    stem                                           agrees with class and number
verb         stem, negation, tense; or stem, participle     agrees with subject's class and number; some odd pasts
sense        one                                            some verbs have two, chosen by the class of the object
============ ============================================== ====================================================

Example (seed 0). N, V and A are words of the lexicon; the digit after a point is the class of the noun that the word agrees
with::

    shu holaz buluszu lipysken bir bot sygynzi girmeti.
    kesha voper non nekivash una lamad rabrosa kwe godash el muk.

    this N1 N2-object V1-participle a A N3-object V2-not-past
    this.1 N1 not V2-past.1 a.1 N3 A.1 that V1.1 the.0 N2
"""

from bisect import bisect
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple, TypeVar

from datasets import Dataset, DatasetDict

T = TypeVar("T")

MAX_SEED, MAX_SENTENCES = 2**63 - 1, 1_000_000
MIN_WORDS, MAX_WORDS = 3, 20  # shorter and longer sentences are drawn again, so that no batch is mostly padding
NOUNS, INTRANSITIVES, TRANSITIVES, ADJECTIVES = 100, 15, 40, 25  # sizes of the lexicon
ODD, TWO_SENSES = 0.15, 0.3  # shares of irregular words, and of transitive verbs with two senses

# Vowel harmony: in source suffixes, A stands for e or a, and I for i or u, after a stem with front or back vowels. Every suffix
# begins with a consonant and no stem contains two in a row, so that a word can be split in one way only.
FRONT, BACK = "eiy", "aou"
PLURAL, NEGATION, PARTICIPLE = "lAr", "mA", "kAn"
CASES = {"subject": "", "object": "zI", "place": "dA", "owner": "nIn"}
TENSES = {"present": "rI", "past": "tI", "future": "cAk"}

# Forms that agree are listed for the classes 0, 1, 2 in the singular, then in the plural.
DETERMINERS = {
    "": ("el", "sha", "om", "eli", "shai", "omi"),
    "bir": ("un", "una", "uno"),
    "shu": ("ket", "kesha", "kemo", "keti", "keshai", "kemi"),
}
ADJECTIVE_ENDINGS = ("", "a", "o", "i", "ai", "omi")
VERB_ENDINGS = ("et", "ash", "om", "in", "ain", "omin")
NOUN_PLURALS = ("os", "ai", "en")
PAST = "iv"

NUMERALS = {"iki": "dos", "uch": "trin", "besh": "pent", "onna": "dek"}
TIMES = {"hep": "semper", "dun": "gister", "yarin": "morgo", "simdi": "agora"}
POSTPOSITIONS = {"uzre": "sur", "icin": "por", "alti": "sub", "yani": "apud", "arka": "retro"}
RESERVED = {*DETERMINERS, *NUMERALS, *TIMES, *POSTPOSITIONS, *NUMERALS.values(), *TIMES.values()}
RESERVED |= {*POSTPOSITIONS.values(), "ket", "non", "vil"}  # no word of the lexicon may look like these


class Noun(NamedTuple):
    source: str
    source_plural: str
    target: str
    target_plural: str
    cls: int


class Verb(NamedTuple):
    source: str
    senses: tuple[tuple[str, str], ...]  # target stem and past stem, for each class of the object


class NounPhrase(NamedTuple):
    noun: Noun
    plural: bool
    determiner: str  # key of DETERMINERS or of NUMERALS
    adjective: tuple[str, str] | None = None
    owner: "NounPhrase | None" = None
    relative: "tuple[Verb, NounPhrase] | None" = None  # verb and object; the noun is the subject

    @property
    def agreement(self) -> int:
        return self.noun.cls + 3 * self.plural


class Clause(NamedTuple):
    subject: NounPhrase
    verb: Verb
    tense: str
    negated: bool
    object: NounPhrase | None = None
    place: tuple[str, NounPhrase] | None = None
    time: str | None = None


class Sentence(NamedTuple):
    clauses: tuple[Clause, ...]
    question: bool


def builtin_corpus(seed: int = 0, train: int = 12_000, dev: int = 300, test: int = 300) -> DatasetDict:
    """Splits of distinct sentences with the columns ``source`` and ``target``, the same on every platform.

    The sizes do not change the language. A larger ``train`` split begins with the sentences of a smaller one. Raises ValueError
    for a seed or size out of range.
    """
    return _splits(seed, train, dev, test).select_columns(["source", "target"])


def builtin_tenses(seed: int = 0, train: int = 12_000, dev: int = 300, test: int = 300) -> DatasetDict:
    """The target side of ``builtin_corpus`` with the same arguments, with the columns ``sentence`` and ``label``.

    The label is the tense of the first clause: 0 present, 1 past (a suffix of the verb, or an irregular stem), 2 future (``vil``
    before the verb), one third of the sentences each. Relative clauses (``kwe``) and second clauses have tenses of their own, so
    that single words can mislead a classifier.
    """
    return _splits(seed, train, dev, test).select_columns(["target", "label"]).rename_column("target", "sentence")


def _splits(seed: int, train: int, dev: int, test: int) -> DatasetDict:
    sizes = {"test": test, "dev": dev, "train": train}  # in the order in which they are drawn
    _check("seed", seed, 0, MAX_SEED)
    for name, size in sizes.items():
        _check(name, size, 1, MAX_SENTENCES)
    draw = Draw(seed)
    lexicon = Lexicon(draw)
    seen: set[str] = set()
    splits = {name: Dataset.from_list(_examples(draw, lexicon, size, seen)) for name, size in sizes.items()}
    return DatasetDict({name: splits[name] for name in ("train", "dev", "test")})


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be a whole number from {low} to {high}")


def _examples(draw: "Draw", lexicon: "Lexicon", size: int, seen: set[str]) -> list[dict[str, Any]]:
    examples, tenses = [], list(TENSES)
    while len(examples) < size:
        sentence = draw_sentence(draw, lexicon)
        source, target = write_source(sentence), write_target(sentence)
        lengths = len(source.split()), len(target.split())
        if source not in seen and min(lengths) >= MIN_WORDS and max(lengths) <= MAX_WORDS:
            seen.add(source)
            examples.append({"source": source, "target": target, "label": tenses.index(sentence.clauses[0].tense)})
    return examples


class Draw:
    """Random draws by ``Random.random`` alone: Python guarantees its sequence for a seed, but not that of ``choice``."""

    def __init__(self, seed: int) -> None:
        self._uniform = Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._uniform() < probability

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self._uniform() * len(items))]

    def zipf(self, items: Sequence[T]) -> T:
        """One item; the k-th, counted from 0, has a weight of 1 / (k + 3)."""
        weights = _cumulative_zipf(len(items))
        return items[bisect(weights, self._uniform() * weights[-1])]


@cache
def _cumulative_zipf(size: int) -> list[float]:
    # Sums and divisions give the same bits on every platform, powers do not. The offset 3 limits the share of the first noun.
    return list(accumulate(1 / (rank + 3) for rank in range(size)))


class Lexicon:
    """The words of the open classes, frequent ones first."""

    def __init__(self, draw: Draw) -> None:
        self._draw, self._used = draw, set(RESERVED)
        self.nouns = [self._noun() for _ in range(NOUNS)]
        self.intransitives = [self._verb(two_senses=False) for _ in range(INTRANSITIVES)]
        self.transitives = [self._verb(two_senses=draw.chance(TWO_SENSES)) for _ in range(TRANSITIVES)]
        self.adjectives = [(self._source(), self._target()) for _ in range(ADJECTIVES)]

    def _noun(self) -> Noun:
        cls, source, target = self._draw.pick((0, 1, 2)), self._source(), self._target()
        source_plural = self._source() if self._draw.chance(ODD) else inflect(source, PLURAL)
        target_plural = self._target() if self._draw.chance(ODD) else target + NOUN_PLURALS[cls]
        return Noun(source, source_plural, target, target_plural, cls)

    def _verb(self, two_senses: bool) -> Verb:
        senses = [self._sense()] * 3
        if two_senses:
            senses[self._draw.pick((0, 1, 2))] = self._sense()
        return Verb(self._source(), tuple(senses))

    def _sense(self) -> tuple[str, str]:
        stem = self._target()
        return stem, self._target() if self._draw.chance(ODD) else stem + PAST

    def _source(self) -> str:
        return self._word("b d g h k l m n p r s t v z", self._draw.pick((FRONT, BACK)), "klmnrstz")

    def _target(self) -> str:
        return self._word("b br d f g k l m n p r s st t tr v", "aeiou", "dklmnrst")

    def _word(self, onsets: str, vowels: str, finals: str) -> str:
        pick = self._draw.pick
        while True:
            syllables = [pick(onsets.split()) + pick(vowels) for _ in range(pick((1, 2, 2)))]
            word = "".join(syllables) + pick(finals)
            if word not in self._used:
                self._used.add(word)
                return word


def draw_sentence(draw: Draw, lexicon: Lexicon) -> Sentence:
    clauses = [_draw_clause(draw, lexicon) for _ in range(2 if draw.chance(0.1) else 1)]
    return Sentence(tuple(clauses), question=draw.chance(0.1))


def _draw_clause(draw: Draw, lexicon: Lexicon) -> Clause:
    transitive = draw.chance(0.7)
    return Clause(
        subject=_draw_phrase(draw, lexicon),
        verb=draw.zipf(lexicon.transitives if transitive else lexicon.intransitives),
        tense=draw.pick(tuple(TENSES)),
        negated=draw.chance(0.2),
        object=_draw_phrase(draw, lexicon) if transitive else None,
        place=(draw.zipf(tuple(POSTPOSITIONS)), _draw_phrase(draw, lexicon)) if draw.chance(0.3) else None,
        time=draw.zipf(tuple(TIMES)) if draw.chance(0.3) else None,
    )


def _draw_phrase(draw: Draw, lexicon: Lexicon, nested: bool = False) -> NounPhrase:
    determiner = draw.pick(("", "", "", "bir", "bir", "shu", draw.zipf(tuple(NUMERALS))))
    plural = determiner in NUMERALS or (determiner != "bir" and draw.chance(0.4))
    adjective = draw.zipf(lexicon.adjectives) if draw.chance(0.35) else None
    phrase = NounPhrase(draw.zipf(lexicon.nouns), plural, determiner, adjective)
    if nested or draw.chance(0.75):
        return phrase
    inner = _draw_phrase(draw, lexicon, nested=True)
    if draw.chance(0.5):
        return phrase._replace(owner=inner)
    return phrase._replace(relative=(draw.zipf(lexicon.transitives), inner))


def inflect(stem: str, *suffixes: str) -> str:
    """A source word: the stem with its suffixes in vowel harmony."""
    front = any(vowel in stem for vowel in FRONT)
    return stem + "".join(suffixes).replace("A", "e" if front else "a").replace("I", "i" if front else "u")


def write_source(sentence: Sentence) -> str:
    clauses = " ve ".join(" ".join(_source_clause(clause)) for clause in sentence.clauses)
    return clauses + (" mu?" if sentence.question else ".")


def _source_clause(clause: Clause) -> list[str]:
    words = [clause.time] if clause.time else []
    words += _source_phrase(clause.subject, "subject")
    if clause.object:
        words += _source_phrase(clause.object, "object")
    if clause.place:
        words += [*_source_phrase(clause.place[1], "place"), clause.place[0]]
    return [*words, inflect(clause.verb.source, NEGATION if clause.negated else "", TENSES[clause.tense])]


def _source_phrase(phrase: NounPhrase, case: str) -> list[str]:
    words = _source_phrase(phrase.owner, "owner") if phrase.owner else []
    if phrase.relative:
        verb, object_ = phrase.relative
        words += [*_source_phrase(object_, "object"), inflect(verb.source, PARTICIPLE)]
    words += [phrase.determiner] if phrase.determiner else []
    words += [phrase.adjective[0]] if phrase.adjective else []
    marked = phrase.plural and phrase.determiner not in NUMERALS
    return [*words, inflect(phrase.noun.source_plural if marked else phrase.noun.source, CASES[case])]


def write_target(sentence: Sentence) -> str:
    clauses = " und ".join(" ".join(_target_clause(clause)) for clause in sentence.clauses)
    return f"ka {clauses}?" if sentence.question else f"{clauses}."


def _target_clause(clause: Clause) -> list[str]:
    words = _target_phrase(clause.subject) + ["non"] * clause.negated + ["vil"] * (clause.tense == "future")
    words.append(_target_verb(clause.verb, clause.tense, clause.subject, clause.object))
    words += _target_phrase(clause.object) if clause.object else []
    if clause.place:
        words += [POSTPOSITIONS[clause.place[0]], *_target_phrase(clause.place[1])]
    return [*words, TIMES[clause.time]] if clause.time else words


def _target_phrase(phrase: NounPhrase) -> list[str]:
    numeral = NUMERALS.get(phrase.determiner)
    words = [numeral or DETERMINERS[phrase.determiner][phrase.agreement]]
    words.append(phrase.noun.target_plural if phrase.plural else phrase.noun.target)
    words += [phrase.adjective[1] + ADJECTIVE_ENDINGS[phrase.agreement]] if phrase.adjective else []
    words += ["de", *_target_phrase(phrase.owner)] if phrase.owner else []
    if phrase.relative:
        verb, object_ = phrase.relative
        words += ["kwe", _target_verb(verb, "present", phrase, object_), *_target_phrase(object_)]
    return words


def _target_verb(verb: Verb, tense: str, subject: NounPhrase, object_: NounPhrase | None) -> str:
    stem, past = verb.senses[object_.noun.cls if object_ else 0]
    return (past if tense == "past" else stem) + VERB_ENDINGS[subject.agreement]
