"""BLEU (Post, 2018, https://arxiv.org/abs/1804.08771) and chrF (Popović, 2015), computed by sacrebleu.

Each result contains sacrebleu's signature: only scores with equal signatures are comparable.
"""

from typing import Any, ClassVar

from datasets import Features, Sequence, Value
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ._base import OfflineMetric


class TranslationMetric(OfflineMetric):
    """Compares texts with one or several references each; the number of references may vary between texts."""

    inputs = Features({"predictions": Value("string"), "references": Sequence(Value("string"))})

    def check_inputs(self, *, predictions: list, references: list) -> dict[str, list]:  # type: ignore[override]
        for index, prediction in enumerate(predictions):
            if not isinstance(prediction, str):
                raise ValueError(f"predictions[{index}] must be a str, not {type(prediction).__name__}: {prediction!r}")
        lists = []
        for index, texts in enumerate(references):
            texts = [texts] if isinstance(texts, str) else texts
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"references[{index}] must be a str or a list of str: {texts!r}")
            if not texts:
                raise ValueError(f"references[{index}] is empty: each prediction needs at least one reference")
            lists.append(list(texts))
        return {"predictions": predictions, "references": lists}


class SacreBLEU(TranslationMetric):
    """Corpus BLEU: score, counts, totals, precisions, bp, sys_len, ref_len and sacrebleu's signature."""

    name = "sacrebleu"
    options: ClassVar[dict[str, Any]] = {
        "lowercase": False,
        "force": False,
        "tokenize": None,
        "smooth_method": "exp",
        "smooth_value": None,
        "max_ngram_order": 4,
        "use_effective_order": False,
        "trg_lang": "",
    }

    def check_options(self, *, tokenize: str | None, smooth_method: str, **options: Any) -> None:  # type: ignore[override]
        if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"unknown tokenize {tokenize!r}; choose from {sorted(BLEU.TOKENIZERS)}")
        if smooth_method not in BLEU.SMOOTH_DEFAULTS:
            raise ValueError(f"unknown smooth_method {smooth_method!r}; choose from {sorted(BLEU.SMOOTH_DEFAULTS)}")

    def _compute(  # type: ignore[override]
        self, *, predictions: list[str], references: list[list[str]], use_effective_order: bool, **options: Any
    ) -> dict[str, Any]:
        bleu = BLEU(effective_order=use_effective_order, **options)
        result = bleu.corpus_score(predictions, _transposed(references))
        fields = ("score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len")
        return {**{field: getattr(result, field) for field in fields}, "signature": str(bleu.get_signature())}


class ChrF(TranslationMetric):
    """Corpus chrF (chrF++ with word_order=2): score, char_order, word_order, beta and sacrebleu's signature."""

    name = "chrf"
    options: ClassVar[dict[str, Any]] = {
        "char_order": CHRF.CHAR_ORDER,
        "word_order": CHRF.WORD_ORDER,
        "beta": CHRF.BETA,
        "lowercase": False,
        "whitespace": False,
        "eps_smoothing": False,
    }

    def check_options(self, *, char_order: int, word_order: int, beta: float, **options: Any) -> None:  # type: ignore[override]
        if char_order < 1 or word_order < 0 or beta <= 0:
            raise ValueError(
                "chrf needs char_order >= 1, word_order >= 0 and beta > 0, "
                f"not char_order={char_order}, word_order={word_order}, beta={beta}"
            )

    def _compute(  # type: ignore[override]
        self, *, predictions: list[str], references: list[list[str]], **options: Any
    ) -> dict[str, Any]:
        chrf = CHRF(**options)
        result = chrf.corpus_score(predictions, _transposed(references))
        fields = ("score", "char_order", "word_order", "beta")
        return {**{field: getattr(result, field) for field in fields}, "signature": str(chrf.get_signature())}


def _transposed(references: list[list[str]]) -> list[list[Any]]:
    """References by sentence -> references by document, sacrebleu's format; None fills up sentences with fewer references."""
    documents = range(max(len(texts) for texts in references))
    return [[texts[i] if i < len(texts) else None for texts in references] for i in documents]
