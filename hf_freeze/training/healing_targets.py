"""What a student learns: the outputs of the original for each text, on the disk, and the loss by which it learns them.

Shapes: B rows, T tokens, D hidden size, V classes or tokens, K of them that are stored.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from hf_freeze.compat.transformers import mask_of_frames
from hf_freeze.data.batching import TokenBatchSampler
from hf_freeze.io import write_whole
from hf_freeze.model.fidelity import compared_output, real_tokens
from hf_freeze.model.running import in_eval_mode, on_device, without_cache
from hf_freeze.model.samples import Samples

_TOP = 64  # stored of the probabilities of a token; all where there are at most twice as many
_TEMPERATURE = 2.0  # gives a KL at 1 that is lower by 5 % than training at 1 (a translator, after 50 and 250 steps)
_STEP = 1024  # padded tokens of a batch of training
_FORWARD = 4096  # of a forward of the original
_FILE = 16384  # tokens of a file of outputs
_HELD_OUT, _ONE_OF = 4096, 8  # tokens to compare by, about; where none are held out, one text of so many is
_NO_TOKENS = 64  # padded tokens that an image or a sound counts as
_IDS = ("input_ids", "decoder_input_ids")
_NEVER = -1e4  # instead of -inf, of which fp16 and a gradient make nan
_NO_TOKEN = -100  # of labels


class Texts(Dataset):
    """The rows of batches for the original, without padding at their ends, and what the original makes of them.

    Training batches have few rows, of similar length, drawn by (seed, epoch).
    """

    def __init__(self, rows: Sequence[Mapping[str, Tensor]], pad: int) -> None:
        self.rows, self.pad = rows, pad
        self.lengths = np.array([_length(row) for row in rows], dtype=np.int64)
        self.tokens = int(self.lengths.sum())
        self._targets: list[tuple[dict[str, Tensor], int, int]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Mapping[str, Tensor], dict[str, Tensor]]:
        outputs, start, end = self._targets[index]
        return self.rows[index], {name: value[start:end] for name, value in outputs.items()}

    @property
    def digest(self) -> str:
        sha = hashlib.sha256()
        for row in self.rows:
            for name, value in sorted(row.items()):
                sha.update(f"{name}{tuple(value.shape)}".encode() + value.cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()

    @property
    def have_numbers(self) -> bool:
        """Whether the outputs of the original are numbers, which have any scale."""
        return "values" in self._targets[0][0]

    def some(self, count: int, seed: int) -> "Texts":
        chosen = np.sort(np.random.default_rng(seed).permutation(len(self))[:count])
        return Texts([self.rows[index] for index in chosen], self.pad)

    def steps(self, seed: int) -> int:
        """Of an epoch."""
        return len(self._sampler(seed))

    def loader(self, seed: int, shuffle: bool = True) -> DataLoader:
        """Batches for the student, and under "targets" the outputs of the original."""
        return DataLoader(self, batch_sampler=self._sampler(seed, shuffle), collate_fn=self._collate)

    def _sampler(self, seed: int, shuffle: bool = True) -> TokenBatchSampler:
        lengths = self.lengths.tolist()
        return TokenBatchSampler(lengths, lengths, max(_STEP, *lengths), seed=seed, shuffle=shuffle)

    def _collate(self, items: Sequence[tuple[Mapping[str, Tensor], dict[str, Tensor]]]) -> dict[str, Any]:
        batch: dict[str, Any] = self._batch([row for row, _ in items])
        batch["targets"] = {name: _padded([outputs[name] for _, outputs in items], 0) for name in items[0][1]}
        return batch

    def _batch(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        fills = dict.fromkeys(_IDS, self.pad) | {"labels": _NO_TOKEN}
        return {name: _padded([row[name] for row in rows], fills.get(name, 0)) for name in rows[0]}

    def compute_targets(
        self, folder: Path, original: Any, objective: "Objective", report: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Write the outputs of the original to `folder`, except files that are there already. Without an original, the tokens of
        the texts are what is learnt."""
        if original is None:
            self._targets = [({}, 0, 0)] * len(self)
            return
        folder.mkdir(exist_ok=True)
        chunks = _cut(np.argsort(self.lengths, kind="stable"), self.lengths, _FILE)
        targets: dict[int, Any] = {}
        for number, chunk in enumerate(chunks):
            path = folder / f"{number:05}.safetensors"
            if not path.exists():
                report({"stage": "outputs of the original", "step": number, "steps": len(chunks)})
                write_whole(path, save(self._outputs(original, objective, chunk)))
            outputs = load_file(path)  # mapped to memory, so only what is read takes any
            ends = outputs.pop("counts").cumsum(0).tolist()
            for index, start, end in zip(chunk, [0, *ends[:-1]], ends, strict=True):
                targets[index] = (outputs, start, end)
        self._targets = [targets[index] for index in range(len(self))]

    @torch.no_grad()
    def _outputs(self, original: Any, objective: "Objective", chunk: np.ndarray) -> dict[str, Tensor]:
        """The outputs for these rows, one behind the other, and under "counts" how many each has."""
        parts: dict[str, list[Tensor]] = {}
        with in_eval_mode(original), without_cache(original):
            for some in _cut(chunk, self.lengths, _FORWARD):
                batch = on_device(original, self._batch([self.rows[index] for index in some]))
                outputs, ends = objective.targets(original, batch)
                for name, value in outputs.items():
                    rows = [row[:end] for row, end in zip(value.cpu(), ends, strict=True)]
                    parts.setdefault(name, []).append(torch.cat(rows))
                parts.setdefault("counts", []).append(torch.tensor(ends))
        return {name: torch.cat(values) for name, values in parts.items()}

    @torch.no_grad()
    def loss(self, model: Any, objective: "Objective") -> float:
        """The mean over all real tokens, or all texts."""
        with in_eval_mode(model), without_cache(model):
            batches = (on_device(model, batch) for batch in self.loader(0, shuffle=False))
            return float(torch.cat([objective.losses(model, batch).double() for batch in batches]).mean())


def texts_of(model: Any, samples: Samples, seed: int, *, labels: bool = False) -> tuple[Texts, Texts]:
    """What to train on, in random order, and what to compare the losses by. `labels`: with the token that comes next, of texts
    for models that write or predict them."""
    order = np.random.default_rng(seed)
    train, held_out = (
        [row for batch in part for row in _rows(model, batch, labels)] for part in (samples.batches, samples.held_out)
    )
    train, held_out = ([rows[index] for index in order.permutation(len(rows))] for rows in (train, held_out))
    if not held_out:
        count = -(-len(train) // _ONE_OF)
        train, held_out = train[count:], train[:count]
    if not train or not held_out:
        raise ValueError(f"healing needs at least two texts, one to compare by; {len(held_out)} given")
    pad = getattr(model.config, "pad_token_id", None) or 0
    fits = np.cumsum([_length(row) for row in held_out]) <= _HELD_OUT
    return Texts(train, pad), Texts(held_out[: max(int(fits.sum()), 1)], pad)


@dataclass(frozen=True)
class Objective:
    """What is stored of the outputs of the original, and the loss of those of the student, as `heal` says."""

    pooling: str

    def __post_init__(self) -> None:
        if self.pooling not in _POOLING:
            raise ValueError(f"pooling={self.pooling!r}: choose from {', '.join(_POOLING)}")

    def targets(self, original: Any, batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
        """{name: (B, T, ...)}, and how many of the T each row has. T is 1 for outputs of whole texts."""
        values, kind, mask = _outputs_of(original, batch)
        ends = _ends(mask)
        if kind == "states":
            return {"states": values.half()}, ends
        if kind == "other":  # the first and last token of an answer
            return {"spans": _over_tokens(values, mask).half()}, ends
        if not _one_choice(original, values):
            return {"values": values.half()}, ends
        nats = (values.float() / _TEMPERATURE).log_softmax(-1)
        if nats.shape[-1] <= 2 * _TOP:
            return {"nats": nats.half()}, ends
        top, ids = nats.topk(_TOP, dim=-1)
        short = torch.int16 if nats.shape[-1] <= 1 << 15 else torch.int32
        return {"nats": _with_rest(top).half(), "ids": ids.to(short)}, ends

    def losses(self, student: Any, batch: Mapping[str, Any]) -> Tensor:
        """(N,): of the real tokens, or of the texts."""
        batch = dict(batch)
        targets, labels = batch.pop("targets"), batch.pop("labels", None)
        values, _, mask = _outputs_of(student, batch)
        if labels is not None:
            known = labels != _NO_TOKEN
            return functional.cross_entropy(values[known].float(), labels[known], reduction="none")
        ids = targets.get("ids")
        ((name, expected),) = ((name, value.float()) for name, value in targets.items() if name != "ids")
        if values.shape[:2] != expected.shape[:2] or (ids is None and values.shape != expected.shape):
            raise ValueError(
                f"the student gives outputs of the shape {tuple(values.shape)}, the original {tuple(expected.shape)}: heal "
                "models of the same task, hidden size and tokens"
            )
        if name == "states":
            pool = _POOLING[self.pooling]
            vectors = 1 - torch.cosine_similarity(pool(values, mask), pool(expected, mask), dim=-1)
            difference = functional.normalize(values, dim=-1) - functional.normalize(expected, dim=-1)
            return vectors + (difference.square().sum(-1) * mask).sum(1) / mask.sum(1)
        if name == "spans":
            return _kl(_over_tokens(expected, mask), _over_tokens(values, mask)).sum(1)
        if name == "values":
            return (values - expected).square().mean(-1)[mask]
        if ids is not None:
            losses = _TopDivergence.apply(values.float(), ids.long(), expected.log_softmax(-1))
        else:
            losses = _kl(expected.log_softmax(-1), (values.float() / _TEMPERATURE).log_softmax(-1))
        return _TEMPERATURE**2 * losses[mask]  # type: ignore[index]


class _TopDivergence(torch.autograd.Function):
    """(B, T): KL of log-probabilities (B, T, K + 1), of the tokens `ids` (B, T, K) and of all others as one, to those by logits
    (B, T, V). The backward of its own writes the vocabulary once: a step of a translator takes 1.05 plain ones, not 1.2."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, expected: Tensor) -> Tensor:
        q = (logits / _TEMPERATURE).softmax(-1)
        top, p = q.gather(-1, ids), expected.exp()
        nats = _with_rest(top.clamp(min=1e-30).log())
        of_others = 1 - p[..., -1:] / nats[..., -1:].exp()
        ctx.save_for_backward(q, ids, top - p[..., :-1], of_others)
        return (p * (expected - nats)).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        q, ids, of_top, of_others = ctx.saved_tensors
        gradient = gradients[0][..., None] / _TEMPERATURE
        return (q * (gradient * of_others)).scatter_(-1, ids, gradient * of_top), None, None


_POOLING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda states, mask: (states * mask[..., None]).sum(1),  # its length does not matter
    "cls": lambda states, mask: states[:, 0],
    "last": lambda states, mask: states[range(len(states)), [end - 1 for end in _ends(mask)]],
}


def _outputs_of(model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, str, Tensor]:
    """(B, T, ...), their kind, and bool (B, T), the real tokens."""
    values, kind = compared_output(model(**batch))
    mask = real_tokens(batch, values).to(values.device)
    if "input_values" in batch and "attention_mask" in batch and values.dim() == 3:
        mask = mask_of_frames(model, batch["attention_mask"], values.shape[1]).bool()
    return (values, kind, mask) if mask.dim() > 1 else (values[:, None], kind, mask[:, None])


def _kl(expected: Tensor, nats: Tensor) -> Tensor:
    """(B, T): KL of log-probabilities (B, T, K)."""
    return (expected.exp() * (expected - nats)).sum(-1)


def _with_rest(top: Tensor) -> Tensor:
    """(..., K + 1): the log-probabilities (..., K) and that of all others."""
    return torch.cat([top, (1 - top.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()], -1)


def _over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    return values.float().masked_fill(~mask[..., None], _NEVER).log_softmax(1)


def _one_choice(model: Any, values: Tensor) -> bool:
    return values.shape[-1] > 1 and getattr(model.config, "problem_type", None) != "multi_label_classification"


def _rows(model: Any, batch: Mapping[str, Any], with_labels: bool) -> list[dict[str, Tensor]]:
    """The rows of a batch, without the padding at their ends. Labels become what a decoder reads; `with_labels`: they stay, and
    those of a language model are its next tokens."""
    batch = {name: value.cpu() for name, value in batch.items() if torch.is_tensor(value)}
    labels, writes = batch.pop("labels", None), model.config.is_encoder_decoder
    if labels is not None and writes and "decoder_input_ids" not in batch:
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
        batch["decoder_attention_mask"] = (labels != _NO_TOKEN).long()
    if with_labels and not writes:
        known = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, _NO_TOKEN)
        labels = functional.pad(known[:, 1:], (0, 1), value=_NO_TOKEN)
    if with_labels:
        if labels is None:
            raise ValueError(
                "healing without an original needs the text that the decoder should write, as labels of each batch"
            )
        batch["labels"] = labels
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    for mask_name in {"attention_mask", "decoder_attention_mask"} & batch.keys():
        mask, in_decoder = batch[mask_name], mask_name.startswith("decoder")
        of_decoder = [name for name in batch if name.startswith("decoder") or (name == "labels" and writes)]
        alike = [
            name
            for name, value in batch.items()
            if value.shape[:2] == mask.shape and (name in of_decoder) == in_decoder
        ]
        for row, end in zip(rows, _ends(mask) if mask.dim() == 2 else (), strict=mask.dim() == 2):
            row |= {name: row[name][:end] for name in alike}
    return rows


def _ends(mask: Tensor) -> list[int]:
    """The number of the last real token of each row, counted from 1; at least 1."""
    return ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).clamp(min=1).tolist()


def _length(row: Mapping[str, Tensor]) -> int:
    return max((row[name].numel() for name in _IDS if name in row), default=_NO_TOKENS)


def _cut(order: np.ndarray, lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """`order` in pieces of about `most` tokens."""
    return np.split(order, np.flatnonzero(np.diff((np.cumsum(lengths[order]) - 1) // most)) + 1)


def _padded(values: Sequence[Tensor], fill: float) -> Tensor:
    """One tensor of all, where each is filled up at the ends of its axes."""
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    padded = values[0].new_full((len(values), *shape), fill)
    for row, value in zip(padded, values, strict=True):
        row[tuple(map(slice, value.shape))] = value
    return padded
