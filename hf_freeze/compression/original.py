"""The model to compress, as it is: its files, its tokens, and what it answers to the inputs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import snapshot_download

from hf_freeze.analysis.answers import Answers
from hf_freeze.analysis.vocabulary import choose_vocabulary, count_tokens
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.blocks import Block, blocks_of
from hf_freeze.compression.engine import FILES, files_of
from hf_freeze.compression.inputs import Inputs, batches_of
from hf_freeze.compression.shape import Shape, in_words, methods_of
from hf_freeze.data.trimming import check_kind, trim_tokenizer
from hf_freeze.io import whole_folder
from hf_freeze.methods import VocabularyTrimming
from hf_freeze.methods.base import Method
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.make import make_variant
from hf_freeze.model.samples import Samples
from hf_freeze.publish.export.served import Served, answers, texts_written
from hf_freeze.publish.sentence_files import copy_processors, copy_sentence_files
from hf_freeze.publish.trimming import named_tokens

PREDICT = ("causal-lm", "seq2seq-lm")  # tasks of models whose outputs are the tokens of a text, one after the other
_SPLIT_ANEW = (
    0.05  # nats a token that fewer tokens lose; where they lose more, texts teach, not the model with fewer tokens
)
_WRITTEN = 2048  # inputs whose outputs tell which tokens a model writes


@dataclass(frozen=True)
class Subject:
    """A model with what it is calibrated and compared on. Its variants are compared with it on `held_out`, batches for it."""

    served: Served
    samples: Samples
    held_out: list[dict[str, Any]]

    @property
    def model(self) -> Any:
        return self.served.model

    @property
    def tokenizer(self) -> Any:
        return self.served.tokenizer

    def cut(self, found: Sequence[Method]) -> Any:
        """The variant that these methods make with the calibration; the model itself for none."""
        return make_variant(self.model, list(found), calibration=self.samples) if found else self.model

    def distance(self, variant: Any, batches: int | None = None) -> float:
        return fidelity_on(self.model, variant, self.held_out[:batches]).distance


def with_written(items: Sequence[Any], writer: Served, beams: int = 1) -> list[tuple[str, str]]:
    """(text, what a translator writes for it), of those for which it writes something. Of pairs, the first is the text."""
    texts = _sources(items)
    return _paired(texts, texts_written(writer, texts, beams))


def _sources(items: Sequence[Any]) -> list[str]:
    return [item if isinstance(item, str) else item[0] for item in items]


def _paired(texts: Sequence[str], written: Sequence[str]) -> list[tuple[str, str]]:
    return [both for both in zip(texts, written, strict=True) if both[1]]


class Original:
    """`served`: the model of `source`. `samples`: inputs that tell what parts are worth. `once`: of `Phases`."""

    def __init__(
        self, source: str, served: Served, inputs: Inputs, samples: int, once: Callable[[str, Callable[[], Any]], Any]
    ) -> None:
        self.source, self.served, self.model, self.inputs = source, served, served.model, inputs
        self._samples, self._once = samples, once
        is_folder = Path(source).is_dir()
        self.folder = Path(source if is_folder else snapshot_download(source, allow_patterns=[*FILES, "*/*"]))
        self.depths = architecture_for(self.model).depths(self.model.config)
        self._answers: dict[str, Answers] = {}
        self._subjects: dict[int | None, Subject] = {}

    @property
    def bytes(self) -> int:
        """Of the files of the model and of what reads its inputs."""
        return sum(path.stat().st_size for path in files_of(self.folder))

    def expected(self, split: str) -> Answers:
        """What the original answers to the inputs "dev_subset", "dev" or "test"."""
        if split not in self._answers:
            self._answers[split] = answers(self.served, getattr(self.inputs, split))
        return self._answers[split]

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """Its attentions and FFNs by name, with what each loses with fewer heads or neurons: measured at the first use."""

        def measure() -> dict[str, Any]:
            subject = self.subject()
            return {name: asdict(block) for name, block in blocks_of(subject.model, subject.samples).items()}

        return {name: Block(**values) for name, values in self._once("blocks", measure).items()}

    def methods_of(self, shape: Shape) -> list[Method]:
        """Those that cut the model, which has the tokens of the shape already, to `shape`."""
        return methods_of(shape, self.blocks, self.depths)

    def words(self, shape: Shape) -> str:
        return in_words(shape, self.blocks, self.depths, self.tokens)

    @property
    def tokens(self) -> int:
        """Their number, 0 for a model that reads none."""
        tables = self.model.get_input_embeddings()
        return 0 if self.served.tokenizer is None or tables is None else tables.weight.shape[0]

    def can_lose_tokens(self) -> bool:
        if self.served.tokenizer is None or not self.inputs.texts:
            return False
        try:
            check_kind(self.served.tokenizer)
        except ValueError:
            return False
        return True

    def subject(self, tokens: int | None = None) -> Subject:
        """The model, with this number of tokens, and what it is calibrated and compared on."""
        tokens = None if tokens == self.tokens else tokens
        if tokens not in self._subjects:
            self._subjects = {size: one for size, one in self._subjects.items() if size is None}  # at most two models
            served = self.served if tokens is None else self.trimmed(tokens)
            learnt, compared = self.inputs.learnt[: self._samples], self.inputs.dev_subset
            if tokens is not None and served.task == "seq2seq-lm":  # it would not write what it wrote with all tokens
                learnt, compared = self._written_samples, self.written
            self._subjects[tokens] = Subject(served, batches_of(served, learnt), batches_of(served, compared).batches)
        return self._subjects[tokens]

    def teacher(self, subject: Subject, token_loss: float) -> Any:
        """The model whose outputs a variant of `subject` learns. None where tokens are gone and texts are split as the model has
        never learnt, by the loss of its tokens: the variant then learns the texts."""
        return None if self.served.task in PREDICT and token_loss > _SPLIT_ANEW else subject.model

    @cached_property
    def written(self) -> list[tuple[str, str]]:
        """Of a translator: the inputs "dev_subset", each with what it writes."""
        items = self.expected("dev_subset").items
        return _paired(_sources(self.inputs.dev_subset), [answer["text"] for answer in items])

    @cached_property
    def _written_samples(self) -> list[tuple[str, str]]:
        return with_written(self.inputs.learnt[: self._samples], self.served)

    def trimmed(self, tokens: int) -> Served:
        keep, tokenizer = self._kept(size=tokens), self.served.tokenizer
        if tokenizer.is_fast:
            tokenizer.backend_tokenizer.no_truncation()  # else how it was called last is among the settings of the new one
        model = make_variant(self.model, [keep])
        model = model if hasattr(self.model, "methods") else model.merge()
        return replace(self.served, model=model.eval(), tokenizer=trim_tokenizer(tokenizer, keep.keep))

    def sizes(self, coverages: Sequence[float]) -> list[int]:
        """Numbers of tokens that cover these shares of the texts, the largest first."""
        found = {len(self._kept(coverage=one).keep) for one in coverages}
        return sorted((size for size in found if size < self.tokens), reverse=True)

    def _kept(self, **limit: Any) -> VocabularyTrimming:
        """`limit`: the `size` or the `coverage` of `choose_vocabulary`."""
        settings = {"characters": "all", "always": named_tokens(self.model), "counts": self.counts}
        return choose_vocabulary(self.served.tokenizer, [], **limit, **settings)

    @cached_property
    def counts(self) -> Any:
        """How often each token occurs in the texts, and in what the model writes for them."""
        counts = count_tokens(self.served.tokenizer, self.inputs.texts)
        if self.served.task == "seq2seq-lm":
            for token, count in enumerate(self._once("written", self._written)[: len(counts)]):
                counts[token] += count
        return counts

    def _written(self) -> list[int]:
        counts = np.zeros(self.tokens, dtype=np.int64)
        for batch in batches_of(self.served, self.inputs.learnt[:_WRITTEN]).batches:
            ids = batch["labels"] if "decoder_input_ids" not in batch else batch["decoder_input_ids"]
            counts += np.bincount(ids[ids >= 0].numpy().ravel(), minlength=len(counts))
        return counts.tolist()

    def save(self, model: Any, tokenizer: Any, folder: Path) -> Path:
        """A variant with what reads its inputs, unless the folder is there."""
        if not folder.exists():
            with whole_folder(folder) as written:
                model.save_pretrained(written)
                if tokenizer is not None:
                    tokenizer.save_pretrained(written)
                if self.served.extractor is not None:
                    copy_processors(self.source, written)
                if self.served.task == "feature-extraction":
                    copy_sentence_files(self.source, written)
        return folder
