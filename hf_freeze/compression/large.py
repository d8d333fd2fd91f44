"""`compress` for models larger than the memory: statistics layer by layer, one integer program, one conversion layer by layer."""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_freeze.architectures.base import hidden_size
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.tasks import task_of
from hf_freeze.compression.blocks import Block, blocks_in
from hf_freeze.compression.budget import Budget, in_bytes
from hf_freeze.compression.choose import Options, Program
from hf_freeze.compression.distances import Distances
from hf_freeze.compression.engine import files_of
from hf_freeze.compression.inputs import Inputs, digest_of_items
from hf_freeze.compression.large_report import sentences, write_report
from hf_freeze.compression.layer_costs import LayerCosts, layer_costs
from hf_freeze.compression.phases import FILE as PHASES
from hf_freeze.compression.phases import Phases
from hf_freeze.compression.prices import Prices, Sizes
from hf_freeze.compression.progress import duration
from hf_freeze.compression.results import LargeCompressed
from hf_freeze.compression.shape import Shape, few_bits, in_words, methods_of
from hf_freeze.install import require
from hf_freeze.io import bytes_of, whole_folder
from hf_freeze.methods.base import Method
from hf_freeze.model.convert import check_shards, convert
from hf_freeze.model.fidelity import Fidelity, fidelity_on
from hf_freeze.model.loading import load_model, load_tokenizer
from hf_freeze.model.paging import Paged
from hf_freeze.model.samples import samples_of
from hf_freeze.publish.export.convert import export_model
from hf_freeze.training.healing import HealLimit, check_one_process, heal, parse_limit

_LIMIT = 10**9  # bytes of tensors in memory at a time
_COMPARED = 16  # texts by which the result is compared with the original
_TIGHTER = 6  # times that a shape is chosen again because its folder is above the budget
_MARGIN = 0.005  # share of the budget that is left free: sizes are estimates
_PAUSE = 60.0  # seconds between two lines of healing


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a large model is served by: `format` of `export_model`, None for the variant itself. `bits`: of weights, besides those
    of the model. `uniform`: see `choose.Options`."""

    format: str | None
    quantization: str | None = None
    bits: tuple[int, ...] = (8, 4)
    uniform: bool = False


TARGETS = {
    "compressed-tensors": Target(format="compressed-tensors", uniform=True),
    "torch": Target(format=None),
    "gguf": Target(format="gguf", quantization="q8_0", bits=()),
}


@dataclass(frozen=True, kw_only=True)
class _Costs(Distances):
    """`bits`: number of bits -> block -> distance."""

    bits: Mapping[int, Mapping[str, float]]

    def of_bits(self, name: str, bits: int, share: float) -> float:
        return self.bits.get(bits, {}).get(name, 0.0) * share


def compress_large(
    model: Path,
    *,
    texts: Sequence[Any],
    max_bytes: int | str,
    out: Path,
    engine: str = "compressed-tensors",
    samples: int = 128,
    heal: HealLimit = 0,
    heal_int8: bool = False,
    seed: int = 1,
    command: str = "",
    say: Callable[[str], Any] = lambda text: None,
) -> LargeCompressed:
    """Make the causal language model in a folder of safetensors small enough for `max_bytes`, a number, such as "4GB", or a share
    of its own bytes, with a layer or two of it in memory at a time; returns what came of it.

    1. One pass tells what each layer, head and neuron, and 16, 8 or 4 bits for the weights of each attention and FFN are worth:
       by how much the states behind it change (`layer_costs`). Nothing is cut for that, and no copy is made.
    2. An integer program chooses what stays, so that the sum of these is least.
    3. `convert` cuts with calibration, layer by layer. With `heal`, adapters of low rank then learn the predictions of the
       original and are merged. Weights are rounded, and the result is exported.
    4. The next-token predictions of both are compared on texts that nothing was chosen by.

    `engine`: "compressed-tensors" (equal widths, opened by transformers without hf_freeze), "torch" (the variant, in which layers
    may differ) or "gguf". `samples`: texts for the statistics. `heal`: a time or epochs, as for `training.healing.heal`; nothing
    is healed where only bits go. `heal_int8`: adapters train on weights that are rounded to 8 bits, so that healing takes a byte
    for each, and are merged into those that were not. A killed call resumes after the last layer that was finished.

    Raises FileNotFoundError and ValueError as `convert`; ValueError for another task, another engine, a budget that is out of
    reach, too few texts, a folder `out` that holds other files, `heal_int8` without `heal`, and several processes of a launcher;
    MissingExtra without PEFT, which heals, or gguf.
    """
    check_one_process()
    if engine not in TARGETS:
        raise ValueError(f"engine={engine!r}: for models larger than the memory choose from {list(TARGETS)}")
    began, target = time.monotonic(), TARGETS[engine]
    check_shards(model)
    original = _opened(model)
    if task_of(original) != "causal-lm":
        raise ValueError(
            f"{model} holds a {type(original).__name__}: layer by layer, only causal language models are compressed"
        )
    inputs, size = Inputs.of(texts, seed), sum(path.stat().st_size for path in files_of(model))
    budget = Budget(max_bytes=max_bytes).resolved(size, None)
    if parse_limit(heal) != (0.0, None):
        require("other-tools", "healing layer by layer", "peft")  # before the pass, which takes hours
    elif heal_int8:
        raise ValueError(f"heal_int8=True with heal={heal!r}: nothing is healed; give heal= a time or epochs")
    if target.format == "gguf":
        require("gguf", "engine='gguf'", "gguf")
    identity = {
        "heal": f"{heal} on int8" if heal_int8 else str(heal),
        "model": str(model),
        "bytes": size,
        "budget": budget.max_bytes,
        "engine": engine,
        "samples": samples,
        "seed": seed,
    }
    work = _Work(model, original, inputs, samples, out, target, heal, heal_int8, seed, say)
    limit = float(budget.max_bytes or math.inf)
    work.check(limit, size)
    _check_out(out)
    phases = Phases(out, identity | {"texts": [len(texts), digest_of_items(list(texts))]})
    phases.once("begun", lambda: True)  # from now on, the folder is of this compression
    say(f"the model: {in_bytes(size)}; the budget: {budget.words()}")
    costs = work.costs()
    shape, expected, variant, folder = work.within(limit, costs, size)
    fidelity = Fidelity(**phases.once(f"compared-{shape.digest}", lambda: asdict(work.compared(variant))))
    result = LargeCompressed(
        folder=folder,
        model=variant,
        shape=shape,
        kept=work.words(shape, costs.blocks),
        original_bytes=size,
        bytes=bytes_of(folder),
        expected=expected,
        fidelity=fidelity,
        seconds=time.monotonic() - began,
    )
    write_report(result, costs, work.depths, out, command)
    for path in out.iterdir():  # of shapes that were above the budget, and on the way to this one
        if path.name.startswith(("cut-", "healed-", "model-", "served-")) and path not in (folder, variant):
            shutil.rmtree(path)
    for line in sentences(result):
        say(line)
    return result


class _Work:
    """One compression in the folder `out`."""

    def __init__(
        self,
        source: Path,
        model: Any,
        inputs: Inputs,
        samples: int,
        out: Path,
        target: Target,
        heal: HealLimit,
        heal_int8: bool,
        seed: int,
        say: Callable[[str], Any],
    ) -> None:
        self._heal, self._heal_int8, self._seed = heal, heal_int8, seed
        self._said_of_healing = ("", 0.0)  # the stage and the time of the last line
        self._source, self._model, self._inputs, self._target, self._say = source, model, inputs, target, say
        self._out, self._tokenizer = out, load_tokenizer(source)
        if self._tokenizer is None:
            raise ValueError(f"{source} has no tokenizer, which texts need")
        self._learnt = inputs.learnt[:samples]
        self._architecture = architecture_for(model)
        self.depths = self._architecture.depths(model.config)

    def check(self, limit: float, size: int) -> None:
        """Raise ValueError for a budget below what no choice changes: known before the pass, which takes hours."""
        blocks = {
            name: Block(name, weights, weights, [0], [0.0, 0.0]) for name, weights in blocks_in(self._model)[1].items()
        }
        if (least := self._prices(blocks, size).fixed_bytes) > limit:
            raise ValueError(
                f"the budget of {in_bytes(limit)} is out of reach: embeddings and other parts outside of the layers alone take "
                f"about {in_bytes(least)}"
            )

    def costs(self) -> LayerCosts:
        """What parts are worth, from one pass."""
        folder = self._out / "statistics"
        folder.mkdir(parents=True, exist_ok=True)
        samples = samples_of(self._model, self._learnt, self._tokenizer).undivided()
        self._say(f"what each part is worth, on {samples.texts:,} texts, {samples.tokens:,} tokens")
        with Paged(folder, _LIMIT, self._say) as paged:
            costs = layer_costs(self._model, samples, paged)
        for path in folder.glob("*.tensor"):  # states, which nothing needs any more
            path.unlink()
        return costs

    def within(self, limit: float, costs: LayerCosts, size: int) -> tuple[Shape, float, Path, Path]:
        """(the nearest shape whose folder is within the limit, its expected distance, the variant, the folder)"""
        program, prices, wanted = self._program(costs, size), self._prices(costs.blocks, size), limit * (1 - _MARGIN)
        for _ in range(_TIGHTER):
            if (found := program.solve(wanted, None)) is None:
                break
            shape, expected = found
            shape = replace(shape, bits=shape.bits | {"tables": self._bits[0]})
            self._say(f"chosen: {self.words(shape, costs.blocks)}")
            variant, folder = self._made(shape, costs.blocks)
            if (made := bytes_of(folder)) <= limit:
                return shape, expected, variant, folder
            self._say(f"above the budget: {in_bytes(made)}; choosing again, for less")
            wanted = min(wanted, prices.cost(shape)[0]) - (made - limit) * (1 + _MARGIN)  # so that it is another one
        else:
            raise ValueError(
                f"the budget of {in_bytes(limit)}: the folders of {_TIGHTER} shapes in turn were above it, the last one with "
                f"{in_bytes(made)}; give more"
            )
        least = program.smallest("bytes")
        about = in_bytes(prices.cost(least)[0])
        raise ValueError(
            f"the budget of {in_bytes(limit)} is out of reach: the smallest shape "
            f"({self.words(least, costs.blocks)}) needs about {about}; give it at least that"
        )

    def words(self, shape: Shape, blocks: Mapping[str, Block]) -> str:
        """What a shape keeps."""
        kept = [in_words(replace(shape, bits=dict.fromkeys(shape.bits, 16)), blocks, self.depths, None)]
        stay = [block for block in blocks.values() if shape.has(block)]
        for bits in self._target.bits:
            if count := sum(shape.bits[block.name] == bits for block in stay):
                kept.append(f"{bits} bits in {count} of {len(stay)} attentions and FFNs")
        return "; ".join(kept)

    def _program(self, costs: LayerCosts, size: int) -> Program:
        layers: dict[str, Any] = {}
        for stack, depth in self.depths.items():
            order = sorted(range(depth), key=lambda layer, stack=stack: costs.layers.get((stack, layer), math.inf))
            layers[stack] = {depth: (tuple(range(depth)), 0.0)}
            total = 0.0
            for count, layer in enumerate(order[:-1], 1):
                total += costs.layers.get((stack, layer), math.inf)
                if math.isfinite(total):
                    layers[stack][depth - count] = tuple(sorted(order[count:])), total
        distances = _Costs(layers=layers, tokens={0: 0.0}, bits=costs.bits)
        may_go = {"layers", "neurons"} | (set() if self._target.uniform else {"heads"})
        multiple = 64 if self._target.uniform else 32 if self._target.format == "gguf" else 8  # a block of q8_0 has 32
        options = Options(
            bits=self._bits,
            uniform=self._target.uniform,
            mixed=True,
            by_layer=True,
            multiple=multiple,
            may_go=frozenset(may_go),
        )
        return Program(costs.blocks, distances, self._prices(costs.blocks, size), options)

    def _prices(self, blocks: Mapping[str, Block], size: int) -> Prices:
        """In bytes; of what no choice changes, as the files of the original have it, except for the tables of GGUF."""
        weights, itemsize = sum(block.weights for block in blocks.values()), self._model.dtype.itemsize
        others = size - weights * itemsize
        bits = self._bits[0]
        scale_bytes = 2 / 32 if self._target.format == "gguf" else None
        if scale_bytes is not None:
            tables = sum(p.numel() for p in self._model.parameters() if p.dim() == 2) - weights
            others -= tables * (itemsize - bits / 8 - scale_bytes)
        of_layer = dict.fromkeys(self.depths, 0.0)  # norms, and experts, which go only with their layer
        for name, parameter in self._model.base_model.named_parameters():
            if (place := self._architecture.layer_of(name)) is not None:
                of_layer[place[0]] += parameter.nbytes / self.depths[place[0]]
        for block in blocks.values():
            of_layer[block.place[0]] -= block.weights * itemsize / self.depths[block.place[0]]
        sizes = Sizes(
            of_token=0,
            tokens=0,
            token_bytes=0.0,
            bits=bits,
            bytes=others + weights * bits / 8,
            hidden=hidden_size(self._model.config),
            of_layer=of_layer,
            lists=self._target.format is None,
            scale_bytes=scale_bytes,
        )
        return Prices(blocks, self.depths, sizes)

    def _made(self, shape: Shape, blocks: Mapping[str, Block]) -> tuple[Path, Path]:
        """(the variant of a shape, the folder that is served)"""
        variant = self._out / f"model-{shape.digest}"
        if not variant.exists():
            parts, bits = self._methods(shape, blocks)
            options: Any = {"calibration": list(self._learnt), "tokenizer": self._tokenizer, "say": self._say}
            source = self._source
            if parts and parse_limit(self._heal) != (0.0, None):
                source = self._healed(_converted(source, self._out / f"cut-{shape.digest}", parts, **options))
                parts = []
            _converted(source, variant, [*parts, *bits], **options)
        if self._target.format is None:
            return variant, variant
        folder = self._out / f"served-{shape.digest}"
        if not folder.exists():
            self._say(f"exporting to {self._target.format}")
            export_model(variant, self._target.format, quantization=self._target.quantization, out=folder)
        return variant, folder

    def _healed(self, cut: Path) -> Path:
        """The folder with the model of `cut` after healing."""
        healed = cut.with_name(cut.name.replace("cut-", "healed-"))
        if not healed.exists():
            student = load_model(cut)
            samples = samples_of(self._model, self._inputs.learnt, self._tokenizer).undivided()
            self._say("healing")
            with Paged(self._out, _LIMIT) as paged, whole_folder(healed) as written:
                options: Any = {"limit": self._heal, "seed": self._seed, "int8": self._heal_int8}
                options |= {"paged": paged, "callback": self._heard}
                found = heal(student, self._model, samples, self._out, **options)
                student.save_pretrained(written, max_shard_size="1GB")
                self._tokenizer.save_pretrained(written)
            self._say(f"healed in {found.steps} steps: held-out loss {found.loss_before:.3g} to {found.loss_after:.3g}")
        return healed

    def _heard(self, message: Mapping[str, Any]) -> None:
        """Say how far healing is: where a stage begins, and then once in a minute at most."""
        stage, before = message["stage"], self._said_of_healing
        if "step" in message and (stage != before[0] or time.monotonic() >= before[1] + _PAUSE):
            self._said_of_healing = stage, time.monotonic()
            left = f", {duration(seconds)} left" if (seconds := message.get("seconds_left")) else ""  # 0: not known yet
            self._say(f"{stage}: step {message['step']} of {message['steps']}{left}")

    def _methods(self, shape: Shape, blocks: Mapping[str, Block]) -> tuple[list[Method], list[Method]]:
        """Those that cut the model to `shape`, and those that round what is left."""
        parts = methods_of(replace(shape, bits=dict.fromkeys(shape.bits, 16)), blocks, self.depths)
        return parts, [method for bits in self._target.bits for method in few_bits(shape, blocks, bits)]

    @property
    def _bits(self) -> tuple[int, ...]:
        """Of a weight, the most first: those of the model, or what the export rounds to, and fewer."""
        return (8 if self._target.format == "gguf" else 8 * self._model.dtype.itemsize, *self._target.bits)

    def compared(self, variant: Path) -> Fidelity:
        """On texts that nothing was chosen by, one at a time."""
        self._say("comparing with the original")
        batches = [
            {name: value[row : row + 1, : int(batch["attention_mask"][row].sum())] for name, value in batch.items()}
            for batch in samples_of(self._model, self._inputs.test[:_COMPARED], self._tokenizer).undivided().batches
            for row in range(len(batch["input_ids"]))
        ]
        with Paged(self._out, _LIMIT):
            return replace(fidelity_on(self._model, _opened(variant), batches), compared=len(batches))


def _check_out(out: Path) -> None:
    """Raise ValueError where `out` holds files of others: what a compression needs no more, it removes."""
    others = [path.name for path in out.iterdir() if path.suffix != ".part"] if out.exists() else []
    if others and PHASES not in others:
        raise ValueError(f"{out} holds other files, such as {min(others)!r}: choose a new or an empty folder for --out")


def _converted(source: Path, out: Path, methods: Sequence[Method], **options: Any) -> Path:
    """`convert`, unless `out` is there."""
    return out if out.exists() else convert(source, out, methods, **options)


def _opened(folder: Path) -> Any:
    """The model, whose tensors stay in its files."""
    return load_model(folder).eval()
