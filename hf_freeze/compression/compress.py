"""The story of a compression: measure the model, find out what its parts are worth, choose what stays, cut with calibration,
heal, export, and measure again."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from rich.console import Console

from hf_freeze.analysis.answers import Answers, compare_answers
from hf_freeze.analysis.vocabulary import choose_vocabulary, count_tokens
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.compression.blocks import Block, blocks_of
from hf_freeze.compression.budget import TIME_RESERVE, Budget, in_bytes
from hf_freeze.compression.choose import Options, Program
from hf_freeze.compression.engine import FILES, Engine, Stopwatch, engine_for, files_of, new_tokens_of, serve
from hf_freeze.compression.heal import DEFAULT, Healed, HealLimit, heal, parse_limit
from hf_freeze.compression.inputs import Inputs, batches_of
from hf_freeze.compression.losses import SHARES, Losses, Subject, TokenLoss, bit_losses, factor_of, layer_losses
from hf_freeze.compression.phases import Phases, digest_of
from hf_freeze.compression.prices import Prices, Sizes
from hf_freeze.compression.progress import Callback, Progress
from hf_freeze.compression.shape import Shape, few_bits, in_words, methods_of, whole
from hf_freeze.data.trimming import check_kind, trim_tokenizer
from hf_freeze.io import bytes_of, whole_folder
from hf_freeze.methods import VocabularyTrimming
from hf_freeze.model.calibration import digest_of as digest_of_items
from hf_freeze.model.fidelity import Fidelity
from hf_freeze.model.make import make_variant
from hf_freeze.publish.export.served import Served, answers, opened
from hf_freeze.publish.sentence_files import copy_processors, copy_sentence_files
from hf_freeze.publish.trimming import named_tokens

_WRITTEN = 2048  # inputs whose outputs tell which tokens a model writes
_COVERAGES = (1.0, 0.999, 0.995, 0.98, 0.95)  # of all tokens of the texts
_TIGHTER = 4  # times that a shape is chosen again because its folder is above the budget
_LARGEST, _SMALLEST = 0.9, 1.05  # of a front: times the whole model and the smallest shape
_HALVINGS = 5  # of the range of sizes, when bytes are to be fewest for a loss
_MARGIN = 0.002  # share of a limit of bytes that is left free then
_MUCH_WORSE = 3.0  # times the expected loss of the best, from which a candidate is not measured
_POOLING = {"cls": "cls", "lasttoken": "last"}  # of sentence-transformers -> of `heal`
_NATIVE_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A folder in its engine. `ms`: of one text alone; None where the budget does not limit it. `fidelity`: to the original."""

    folder: Path
    bytes: int
    ms: float | None
    fidelity: Fidelity


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A shape that was cut and compared in PyTorch, before healing. `loss`: the distance from the original; `bytes`, `ms`: as
    estimated."""

    words: str
    loss: float
    expected: float
    bytes: float
    ms: float | None


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """What came of it. `model`: the folder of the variant, None where the whole model in the engine is within the budget.
    `whole`: the model as it is, in the engine. `original_bytes`: of the model's own folder. `healed`: None without healing.
    `kept`: in words."""

    shape: Shape
    kept: str
    model: Path | None
    original_bytes: int
    whole: Measured
    after: Measured
    healed: Healed | None
    seconds: float

    @property
    def loss(self) -> float:
        """Points of fidelity, in %, below the original."""
        return 100 * (1 - (self.after.fidelity.score or 0.0))


class Compression:
    """One compression in the folder `out`; called again with the same settings, it goes on where it was stopped.

    `items`: what the model reads: see `publish.export.served.answers`. Raises ValueError for a budget that cannot be met, too few
    items, and a folder that holds another compression; Stopped where the callback has stopped it.
    """

    def __init__(
        self,
        source: str,
        items: Sequence[Any],
        budget: Budget,
        out: Path,
        *,
        engine: str | None = None,
        samples: int = 512,
        heal: HealLimit = DEFAULT,
        native: bool = False,
        keep_vocabulary: bool = False,
        min_fidelity: float | None = None,
        seed: int = 1,
        console: Console | None = None,
        command: str = "",
        callback: Callback | None = None,
        watch: Callable[["Compression"], Any] = lambda compression: None,
    ) -> None:
        parse_limit(heal)
        self.source, self.budget, self.out, self.command, self.seed = source, budget, out, command, seed
        self.console = console or Console()
        self.min_fidelity, self._heal, self._samples = min_fidelity, heal, samples
        self.inputs = Inputs.of(items, seed)
        self.original = opened(source)
        self.folder = (
            Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=[*FILES, "*/*"]))
        )
        architecture = architecture_for(self.original.model)
        self.engine: Engine = engine_for("torch" if native else engine, self.original.task, architecture.model_type)
        self._native = native
        self.depths = architecture.depths(self.original.model.config)
        may_go = {"layers", "heads", "neurons", "tokens"}
        may_go -= {"tokens"} if keep_vocabulary or not self._can_lose_tokens() else set()
        may_go -= {"heads"} if native or self.engine.uniform else set()  # few native configs have a size of a head
        bits = self.engine.bits
        if budget.limits_time and not budget.limits_bytes:
            bits = bits[:1]  # 4 bits save bytes, not time
        self.options = Options(
            bits=bits,
            uniform=native or self.engine.uniform,
            multiple=_NATIVE_MULTIPLE if native else 8,
            may_go=frozenset(may_go),
        )
        identity: dict[str, Any] = {"model": digest_of(source), "budget": budget.to_dict(), "engine": self.engine.name}
        identity |= {"inputs": [len(items), _digest(items)], "samples": samples, "seed": seed, "heal": str(heal)}
        identity |= {"native": native, "may_go": sorted(may_go)}
        self.phases = Phases(out, identity)
        self.progress = Progress(self.say, callback, lambda: watch(self))
        self._stopwatch: Stopwatch | None = None
        self.tried: list[Tried] = []
        self.chosen: Shape | None = None
        self.blocks: dict[str, Block] = {}
        self.whole_measured: Any = None  # `Measured` from the first measurement on
        self.after: Measured | None = None
        self.original_bytes = 0
        self._subjects: dict[int | None, Subject] = {}

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def run(self) -> Compressed:
        """Within the budget. Raises ValueError for one that is out of reach, and for less than `min_fidelity`."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            result = self._run()
            self._check_fidelity(result.after)
            return result

    def _run(self) -> Compressed:
        self._original()
        self.say(f"the budget: {self.budget.words()}")
        if self.budget.max_loss is not None and not (self.budget.limits_bytes or self.budget.limits_time):
            return self._of_fewest_bytes(self.budget.max_loss)
        if not self.budget.excess(self.whole_measured.bytes, self.whole_measured.ms):
            self.say(f"met by {self.engine.name} alone, in {self.options.bits[0]} bits: nothing is cut")
            return self._nothing_cut()
        self._prepare()
        return self._within(self.budget)

    def front(self, count: int) -> list[Compressed]:
        """The whole model in the engine, and `count` smaller ones down to the smallest, from one set of statistics."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self._original()
            self._prepare()
            least = self.prices.cost(self.program.smallest("bytes"))[0]
            found = [self._nothing_cut()]
            for size in np.geomspace(_LARGEST * self.whole_measured.bytes, _SMALLEST * least, count):
                self.say(f"within {in_bytes(size)}:")
                try:
                    found.append(self._within(Budget(max_bytes=int(size))))
                except ValueError as error:  # the estimate of the smallest ones may be wrong
                    self.say(str(error))
            return found

    def _of_fewest_bytes(self, max_loss: float) -> Compressed:
        """The smallest folder whose fidelity is at most so many points below 1, by halving the range of sizes."""
        best = self._nothing_cut()
        if (loss := best.loss) > max_loss:
            raise ValueError(
                f"max_loss={max_loss:g}: the whole model in {self.engine.name} loses {loss:.2f} points already; ask for less, "
                "or choose another engine"
            )
        self._prepare()
        least, most = self.prices.cost(self.program.smallest("bytes"))[0], float(best.after.bytes)
        for _ in range(_HALVINGS):
            size = math.sqrt(least * most)
            self.say(f"within {in_bytes(size)}:")
            try:
                found = self._within(Budget(max_bytes=int(size)))
            except ValueError as error:
                self.say(str(error))
                least = size
                continue
            self.say(f"{in_bytes(found.after.bytes)} lose {found.loss:.2f} points")
            if found.loss <= max_loss:
                best, most = found, float(found.after.bytes)
            else:
                least = size
        self.after, self.chosen = best.after, best.shape if best.model is not None else None
        return best

    def _original(self) -> None:
        """Measure the model as it is."""
        self.original_bytes = self._bytes_of_source()
        self.whole_measured = self._measure("whole", lambda: self.folder)
        self.budget = self.budget.resolved(self.original_bytes, self.whole_measured.ms)
        figures = self.figures(self.whole_measured)
        self.say(f"the model: {in_bytes(self.original_bytes)}; in {self.engine.name}: {figures}")

    def _prepare(self) -> None:
        """What parts are worth, and what they cost."""
        self.blocks = self._blocks()
        self.losses = self._losses()
        self.prices = self._prices()
        self.program = Program(self.blocks, self.losses, self.prices, self.options)

    def _within(self, budget: Budget) -> Compressed:
        self.budget = budget
        self._check_reach()
        limits, excess = self._limits(), [""]
        for _ in range(_TIGHTER):
            shape = self.chosen = self._chosen(limits)
            folder, healed = self._made(shape)
            after = self.after = self._measure(f"served-{shape.digest}", lambda folder=folder: folder)
            excess = budget.excess(after.bytes, after.ms)
            if not excess:
                kept = in_words(shape, self.blocks, self.depths, self.token_count)
                return self._result(shape, kept, folder, after, healed)
            self.say(f"above the budget: {', '.join(excess)}; choosing again, for less")
            limits = self._tightened(limits, self.prices.cost(shape), after)
        raise ValueError(f"the budget of {budget.words()} was missed {_TIGHTER} times, at last: {', '.join(excess)}")

    def _nothing_cut(self) -> Compressed:
        everything = whole(self.depths, {}, self.options.bits[0])
        return self._result(everything, "everything", None, self.whole_measured, None)

    def _close(self) -> None:
        if self._stopwatch is not None:
            self._stopwatch.close()

    # -- the model as it is ----------------------------------------------------------------------------------------------------

    @cached_property
    def expected(self) -> Answers:
        """What the original answers to the inputs that are held out."""
        return answers(self.original, self.inputs.compared)

    def _bytes_of_source(self) -> int:
        """Of the files of the model and of what reads its inputs."""
        return sum(path.stat().st_size for path in files_of(self.folder))

    @property
    def token_count(self) -> int:
        tables = self.original.model.get_input_embeddings()
        return 0 if self.original.tokenizer is None or tables is None else tables.weight.shape[0]

    def _can_lose_tokens(self) -> bool:
        if self.original.tokenizer is None or not self.inputs.texts:
            return False
        try:
            check_kind(self.original.tokenizer)
        except ValueError:
            return False
        return True

    def subject(self, tokens: int | None = None) -> Subject:
        """The model, with this number of tokens, and what it is calibrated and compared on."""
        tokens = None if tokens == self.token_count else tokens
        if tokens not in self._subjects:
            self._subjects = {
                number: one for number, one in self._subjects.items() if number is None
            }  # at most two models
            served = self.original if tokens is None else self._trimmed(tokens)
            learnt = batches_of(served, self.inputs.learnt[: self._samples])
            compared = batches_of(served, self.inputs.compared).batches
            self._subjects[tokens] = Subject(served, learnt, compared)
        return self._subjects[tokens]

    def _trimmed(self, tokens: int) -> Served:
        keep = self._kept_tokens(size=tokens)
        model = make_variant(self.original.model, [keep])
        tokenizer = trim_tokenizer(self.original.tokenizer, keep.keep)
        model = model if hasattr(self.original.model, "methods") else model.merge()
        return replace(self.original, model=model.eval(), tokenizer=tokenizer)

    def _kept_tokens(self, **limit: Any) -> VocabularyTrimming:
        """`limit`: the `size` or the `coverage` of `choose_vocabulary`."""
        settings = {"characters": "all", "always": named_tokens(self.original.model), "counts": self._counts}
        return choose_vocabulary(self.original.tokenizer, [], **limit, **settings)

    @cached_property
    def _counts(self) -> Any:
        """How often each token occurs in the texts, and in what the model writes for them."""
        counts = count_tokens(self.original.tokenizer, self.inputs.texts)
        if self.original.task == "seq2seq-lm":
            for token, count in enumerate(self.phases.once("written", self._written_counts)[: len(counts)]):
                counts[token] += count
        return counts

    def _written_counts(self) -> list[int]:
        self.say("looking at what the model writes")
        counts = np.zeros(self.token_count, dtype=np.int64)
        for batch in batches_of(self.original, self.inputs.learnt[:_WRITTEN]).batches:
            ids = batch["labels"] if "decoder_input_ids" not in batch else batch["decoder_input_ids"]
            counts += np.bincount(ids[ids >= 0].numpy().ravel(), minlength=len(counts))
        return counts.tolist()

    # -- what parts are worth --------------------------------------------------------------------------------------------------

    def _blocks(self) -> dict[str, Block]:
        def find() -> dict[str, Any]:
            self.say("measuring what each head and neuron is worth")
            found = blocks_of(self.subject().model, self.subject().samples)
            return {name: block.to_dict() for name, block in found.items()}

        return {name: Block.from_dict(values) for name, values in self.phases.once("blocks", find).items()}

    def _losses(self) -> Losses:
        stacks = [stack for stack in self.depths if "layers" in self.options.may_go]
        kinds = [kind for kind in ("heads", "neurons") if kind in self.options.may_go]
        kinds = [kind for kind in kinds if any(block.kind == kind for block in self.blocks.values())]
        self.progress.plan(sum(min(self.depths[stack], 6) for stack in stacks) + len(SHARES) * len(kinds) + 4)
        layers: dict[str, Any] = {stack: {depth: (tuple(range(depth)), 0.0)} for stack, depth in self.depths.items()}
        for stack in stacks:
            found = self.phases.once(
                f"layers-{stack}", lambda stack=stack: layer_losses(self.subject(), stack, self.progress.step)
            )
            layers[stack] = {int(depth): (tuple(kept), loss) for depth, (kept, loss) in found.items()}
        factors = {}
        for kind in kinds:

            def check(kind: str = kind) -> float:
                found = []
                for share in SHARES:
                    self.progress.step(f"{share:.0%} of the {kind}")
                    found.append(factor_of(self.subject(), self.blocks, kind, share))
                return max([one for one in found if one is not None], default=1.0)

            factors[kind] = self.phases.once(f"factor-{kind}", check)
        four_bits = {}
        if 4 in self.options.bits:
            four_bits = self.phases.once(
                "four-bits", lambda: bit_losses(self.subject(), self.blocks, self.progress.step)
            )
        tokens = {self.token_count: 0.0}
        if "tokens" in self.options.may_go:
            found = self.phases.once("tokens", self._token_losses)
            tokens |= {int(count): loss for count, loss in found.items()}
        return Losses(layers=layers, factors=factors, four_bits=four_bits, tokens=tokens)

    def _token_losses(self) -> dict[int, float]:
        found: dict[int, float] = {}
        loss_of = TokenLoss(self.original, self.inputs.compared, self.expected)
        for coverage in _COVERAGES:
            keep = self._kept_tokens(coverage=coverage).keep
            if len(keep) >= self.token_count or len(keep) in found:
                continue
            self.progress.step(f"{len(keep):,} of {self.token_count:,} tokens")
            found[len(keep)] = max([loss_of(self._trimmed(len(keep))), 0.0, *found.values()])
        return found

    # -- what parts cost -------------------------------------------------------------------------------------------------------

    def _prices(self) -> Prices:
        vocabulary = self.token_count
        rows = {
            id(p): p
            for p in self.original.model.parameters()
            if p.ndim == 2 and p.shape[0] == vocabulary and vocabulary
        }
        files = [
            p for p in self.whole_measured.folder.iterdir() if p.is_file() and ("token" in p.name or "vocab" in p.name)
        ]
        sizes = Sizes(
            of_token=sum(p.shape[1] for p in rows.values()),
            tokens=vocabulary,
            token_bytes=sum(path.stat().st_size for path in files) / max(vocabulary, 1),
            bits=self.options.bits[0],
            bytes=self.whole_measured.bytes,
        )
        probes: list[tuple[Shape, float]] = []
        if self.budget.limits_time:
            shapes = self._probes()
            found = self.phases.once("probes", lambda: self._times(shapes))
            probes = [(shapes[name], found[name]) for name in shapes]
        return Prices(self.blocks, self.depths, sizes, probes)

    def _probes(self) -> dict[str, Shape]:
        """The whole, and it with one kind of part halved at a time."""
        full = replace(whole(self.depths, self.blocks, self.options.bits[0]), tokens=self.token_count)
        found = {"whole": full}
        for stack, depth in self.depths.items():
            if depth > 1 and "layers" in self.options.may_go:
                kept = full.layers | {stack: tuple(range((depth + 1) // 2))}
                found[f"half of the layers of the {stack}"] = replace(full, layers=kept)
            half = {
                name: max(block.units // 2, 1)
                for name, block in self.blocks.items()
                if block.place[0] == stack and block.kind in self.options.may_go
            }
            found[f"half of the width of the {stack}"] = replace(full, units=full.units | half)
        return found

    def _times(self, shapes: dict[str, Shape]) -> dict[str, float]:
        folders = {"whole": self.whole_measured.folder}
        for name, shape in shapes.items():
            if name == "whole":
                continue
            self.say(f"exporting {name}, to learn what it costs in {self.engine.name}")
            model = make_variant(self.original.model, methods_of(shape, self.blocks, self.depths))
            with tempfile.TemporaryDirectory(dir=self.out) as temporary:
                saved = self._save(model, self.original.tokenizer, Path(temporary) / "model")
                folders[name] = self._served(f"probe-{shape.digest}", saved)
        return self._milliseconds(folders)

    # -- choosing and cutting --------------------------------------------------------------------------------------------------

    def _limits(self) -> tuple[float, float | None]:
        size = math.inf if self.budget.max_bytes is None else float(self.budget.max_bytes)
        return size, self.budget.max_ms and self.budget.max_ms * (1 - TIME_RESERVE)

    def _check_reach(self) -> None:
        size, ms = self._limits()
        for number, (cost, limit) in enumerate((("bytes", size), ("ms", ms))):
            if limit is None or math.isinf(limit):
                continue
            shape = self.program.smallest(cost)
            least = self.prices.cost(shape)[number]
            if least > limit:
                shown = in_bytes(least) if cost == "bytes" else f"{least:.2f} ms"
                raise ValueError(
                    f"the budget of {self.budget.limit(cost)} is out of reach: the smallest shape "
                    f"({in_words(shape, self.blocks, self.depths, self.token_count)}) needs about {shown}; give it at least that"
                )

    def _chosen(self, limits: tuple[float, float | None]) -> Shape:
        """The best of some shapes, each cut with calibration and compared with the original."""
        candidates: list[tuple[Shape, float]] = []
        without = [frozenset(), frozenset({"layers"}), frozenset({"heads"}), frozenset({"bits"})]
        for gone in without:
            if gone & {"layers", "heads"} and not gone <= self.options.may_go:
                continue
            bits = self.options.bits[:1] if "bits" in gone else self.options.bits
            options = dataclasses.replace(self.options, may_go=self.options.may_go - gone, bits=bits)
            found = Program(self.blocks, self.losses, self.prices, options).solve(*limits)
            if found is not None and found[0] not in [shape for shape, _ in candidates]:
                candidates.append(found)
        if not candidates:
            raise ValueError(f"no shape is within {self.budget.words()}")
        best = min(expected for _, expected in candidates)
        candidates = [one for one in candidates if one[1] <= _MUCH_WORSE * best]
        self.progress.plan(len(candidates))
        results = []
        for shape, expected in candidates:
            loss = self.phases.once(f"tried-{shape.digest}", lambda shape=shape: self._loss_of(shape))
            size, ms = self.prices.cost(shape)
            words = in_words(shape, self.blocks, self.depths, self.token_count)
            tried = Tried(
                words=words, loss=loss, expected=expected, bytes=size, ms=ms if self.prices.knows_time else None
            )
            self.tried += [tried] if tried not in self.tried else []
            self.say(f"candidate: {words}: about {in_bytes(size)}; loss {loss:.4f} (expected {expected:.4f})")
            results.append(loss)
        return candidates[results.index(min(results))][0]

    def _loss_of(self, shape: Shape) -> float:
        """Its distance from the original, that of its tokens included."""
        self.progress.step(in_words(shape, self.blocks, self.depths, self.token_count))
        subject = self.subject(shape.tokens)
        variant = subject.cut(methods_of(shape, self.blocks, self.depths))
        return subject.distance(variant) + self.losses.tokens.get(shape.tokens or 0, 0.0)

    def _made(self, shape: Shape) -> tuple[Path, Healed | None]:
        """The saved variant of a shape, healed; and what came of the healing."""
        name = f"model-{shape.digest}"
        folder = self.out / name

        def make() -> dict[str, Any] | None:
            subject, healed = self.subject(shape.tokens), None
            everything = methods_of(shape, self.blocks, self.depths)
            bits = few_bits(shape, self.blocks)
            self.progress.tell("cut", "cutting the model")
            variant = subject.cut(everything[: len(everything) - len(bits)])
            if parse_limit(self._heal) != (0.0, None):
                variant = variant if variant is not subject.model else make_variant(subject.model, [])
                self.progress.tell("heal", "healing")
                learnt = batches_of(subject.served, self.inputs.learnt)
                healed = heal(
                    variant,
                    subject.model,
                    replace(learnt, held_out=subject.held_out),
                    self.out,
                    limit=self._heal,
                    pooling=_POOLING.get(self.original.sentence.get("mode", "mean"), "mean"),
                    seed=self.seed,
                    callback=self.progress.heard,
                    console=self.console,
                )
            if bits:
                variant = make_variant(variant, bits, calibration=subject.samples)
            if self._native:
                variant = variant.merge()
            self._save(variant, subject.tokenizer, folder)
            return asdict(healed) if healed else None

        found = self.phases.once(name, make)
        return folder, Healed(**found) if found else None

    def _tightened(
        self, limits: tuple[float, float | None], cost: tuple[float, float], after: Measured
    ) -> tuple[float, float | None]:
        """Limits that are lower by what was measured above the estimate."""
        size, ms = self._limits()
        size = min(limits[0], (size - max(after.bytes - cost[0], 0.0)) * (1 - _MARGIN))
        if ms is not None and after.ms is not None and limits[1] is not None:
            ms = min(limits[1] * (1 - TIME_RESERVE), ms * min(cost[1] / after.ms, 1.0))
        return size, ms

    # -- in the engine ---------------------------------------------------------------------------------------------------------

    def _save(self, model: Any, tokenizer: Any, folder: Path) -> Path:
        """With what reads its inputs, unless the folder is there."""
        if not folder.exists():
            with whole_folder(folder) as written:
                model.save_pretrained(written)
                if tokenizer is not None:
                    tokenizer.save_pretrained(written)
                if self.original.extractor is not None:
                    copy_processors(self.source, written)
                if self.original.task == "feature-extraction":
                    copy_sentence_files(self.source, written)
        return folder

    def _served(self, name: str, source: Path) -> Path:
        return serve(source, self.engine.format, self.engine.quantization, self.out / "engine" / name)

    def _measure(self, name: str, source: Callable[[], Path]) -> Measured:
        def measure() -> dict[str, Any]:
            self.progress.tell("engine", f"measuring in {self.engine.name}")
            folder = self._served(name, source())
            found = compare_answers(self.expected, answers(opened(folder), self.inputs.compared, like=self.expected))
            folders = {"whole": self.out / "engine" / "whole", name: folder}
            ms = self._milliseconds(folders)[name] if self.budget.limits_time else None
            return {"bytes": bytes_of(folder), "ms": ms, "fidelity": asdict(found)}

        found = self.phases.once(f"measured-{name}", measure)
        fidelity = Fidelity(**found["fidelity"])
        return Measured(folder=self.out / "engine" / name, bytes=found["bytes"], ms=found["ms"], fidelity=fidelity)

    def _milliseconds(self, folders: dict[str, Path]) -> dict[str, float]:
        if not all(isinstance(item, str) for item in self.inputs.compared):
            raise ValueError("max_ms: times are measured of models that read single texts; give max_bytes")
        if self._stopwatch is None:
            written = [item["text"] for item in self.expected.items if "text" in item]
            count = new_tokens_of(folders["whole"], self.original.task, written)
            self._stopwatch = Stopwatch(self.inputs.compared, count)
        ms = self.phases.kept("measured-whole")
        unit = ("whole", ms["ms"]) if ms is not None and ms["ms"] else None
        return self._stopwatch.milliseconds(folders, unit)

    def figures(self, measured: Measured) -> str:
        ms = f", {measured.ms:.2f} ms a text" if measured.ms is not None else ""
        return f"{in_bytes(measured.bytes)}{ms}, fidelity {measured.fidelity.score:.4f}"

    def _check_fidelity(self, after: Measured) -> None:
        score = after.fidelity.score
        if self.min_fidelity is not None and score is not None and score < self.min_fidelity:
            raise ValueError(
                f"min_fidelity={self.min_fidelity:g}: the compressed model in {after.folder} has {score:.4f} on held-out texts; "
                "give more bytes or time, more texts, or longer healing"
            )

    def _result(
        self, shape: Shape, kept: str, model: Path | None, after: Measured, healed: Healed | None
    ) -> Compressed:
        return Compressed(
            shape=shape,
            kept=kept,
            model=model,
            original_bytes=self.original_bytes,
            whole=self.whole_measured,
            after=after,
            healed=healed,
            seconds=self.phases.seconds,
        )


def _digest(items: Sequence[Any]) -> str:
    """Of texts, batches, images and sound."""
    return digest_of_items(
        [torch.from_numpy(np.array(one)) if hasattr(one, "__array__") else one for one in items], None
    )
