"""ZipLM (Kurtic et al., 2023, https://arxiv.org/abs/2302.04089), written anew from the paper for this comparison.

Of each sublayer, units (neurons, heads) are removed one at a time: the one whose removal, after the others are refitted, costs
least, on the second moments G of the inputs of its output matrix. Which count of units each sublayer keeps is then searched as in
SPDY: a table gives the cost of each count, the error relative to that of the empty sublayer its sensitivity, a dynamic programme
the least weighted sum within the budget, and the factors of sublayers are drawn anew, a tenth at a time, and kept where the loss
on calibration data falls. Differences: counts fall in steps of 1/32 instead of 10 %, so that the cut of the comparison is one of
them, and the search has 100 steps instead of 1,000.

`ZipLM`: the table is the count of weights, so that the cut is that of the other methods. `ZipLM, timed table`: microseconds on
this machine, and the budget those of the sublayers with equal shares, whatever share of the weights that keeps.
"""

import math
import time
from typing import Any

import blocks
import numpy as np
import torch

PACKAGES: list[str] = []
REQUIREMENTS: list[str] = []
METHODS = {"ZipLM": {"neurons", "heads"}, "ZipLM, timed table": {"neurons", "heads"}}
_SMALL = "its matrices are so small that calls cost more than products: a table of times says nothing about the cut"
CANNOT = {("ZipLM, timed table", model): _SMALL for model in ("stories260k", "translator")}
_RIDGE, _STEPS, _SEARCH_TOKENS, _LEVELS = 1e-3, 100, 2000, 32

Level = tuple[list[int], torch.Tensor]  # units that stay, their columns (O, units · size)


def compress(model: Any, batches: list[blocks.Batch], job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    cut = job["cut"]
    chosen = [block for block in blocks.blocks(model) if ("heads" if block.attention else "neurons") in cut]
    shares = [cut["heads" if block.attention else "neurons"] for block in chosen]
    grams = blocks.grams(model, [block.out for block in chosen], batches)
    levels, errors = zip(*(eliminate(model, block, grams.pop(block.out)) for block in chosen), strict=True)
    cost = microseconds_of if job["method"] == "ZipLM, timed table" else weights_of
    tokens = batches[0]["input_ids"].numel()
    costs = [{count: cost(model, block, count, tokens) for count in levels[i]} for i, block in enumerate(chosen)]
    budget = sum(
        costs[i][round(share * block.units)] for i, (block, share) in enumerate(zip(chosen, shares, strict=True))
    )
    counts = search(model, chosen, levels, errors, costs, budget, few(batches), job["seed"])
    stitch(model, chosen, levels, counts)
    return model.state_dict(), {"counts": counts}


def eliminate(model: Any, block: blocks.Block, gram: torch.Tensor) -> tuple[dict[int, Level], dict[int, float]]:
    """Remove units one at a time. Returns for each count of the grid what stays, and its relative error of the outputs."""
    weight = blocks.weight(model, block.out).double().clone()
    total = float(((weight @ gram) * weight).sum())
    gram = gram + _RIDGE * gram.diag().mean() * torch.eye(len(gram), dtype=gram.dtype)
    inverse = torch.linalg.inv(gram)
    alive, error = (
        torch.arange(block.units),
        0.0,
    )  # the units whose columns are in `weight` and `inverse`, in this order
    gone = torch.zeros(block.units, dtype=torch.bool)
    grid = {block.units * i // _LEVELS for i in range(_LEVELS)} if block.size == 1 else set(range(block.units))
    levels: dict[int, Level] = {block.units: (alive.tolist(), weight.float())}
    errors = {block.units: 0.0}
    while len(alive):
        places, cost = _cheapest(weight, inverse, gone[alive], block)
        error += cost
        gone[alive[places]] = True
        columns = _columns(places, block.size)
        part = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])
        weight.addmm_(weight[:, columns], part, alpha=-1)
        inverse.addmm_(inverse[:, columns], part, alpha=-1)
        left = int((~gone).sum())
        if left in grid:
            stay = (~gone[alive]).nonzero()[:, 0]
            columns = _columns(stay, block.size)
            alive, weight, inverse = alive[stay], weight[:, columns], inverse[columns][:, columns]
            levels[left] = (alive.tolist(), weight.float())
            errors[left] = (error / total) ** 0.5
    return levels, errors


def _cheapest(
    weight: torch.Tensor, inverse: torch.Tensor, gone: torch.Tensor, block: blocks.Block
) -> tuple[torch.Tensor, float]:
    """The places of the units (one, or those that share keys and values) whose removal costs least, and that cost."""
    if block.size == 1:
        costs = (weight**2).sum(0) / inverse.diag()
        costs[gone] = float("inf")
        best = int(costs.argmin())
        return torch.tensor([best]), float(costs[best])
    found = []
    for first in range(0, len(gone), block.shared):
        if gone[first]:
            continue
        places = torch.arange(first, first + block.shared)
        columns = _columns(places, block.size)
        part = weight[:, columns]
        cost = float((torch.linalg.solve(inverse[columns][:, columns], part.T) * part.T).sum())
        found.append((cost, first, places))
    cost, _, places = min(found)
    return places, cost


def _columns(units: torch.Tensor, size: int) -> torch.Tensor:
    return (units[:, None] * size + torch.arange(size)).flatten()


def weights_of(model: Any, block: blocks.Block, count: int, tokens: int) -> int:
    return count * block.size * sum(blocks.weight(model, block.out).shape[0] for _ in block.linears)


def microseconds_of(model: Any, block: blocks.Block, count: int, tokens: int) -> int:
    """Of the fastest of five products of the matrices with `count` units, in steps of 10."""
    hidden, width = blocks.weight(model, block.out).shape[0], count * block.size
    if not width:
        return 0
    into, out, states = torch.randn(width, hidden), torch.randn(hidden, width), torch.randn(tokens, hidden)
    fastest = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in block.ins:
            inner = states @ into.T
        _ = inner @ out.T
        fastest = min(fastest, time.process_time() - start)
    return 10 * round(fastest * 1e5)


def few(batches: list[blocks.Batch]) -> list[blocks.Batch]:
    """The first texts, with at least `_SEARCH_TOKENS` tokens (with padding) if there are as many."""
    chosen, tokens = [], 0
    for batch in batches:
        if tokens >= _SEARCH_TOKENS:
            break
        rows = min(len(batch["input_ids"]), -(-(_SEARCH_TOKENS - tokens) // batch["input_ids"].shape[1]))
        chosen.append({key: value[:rows] for key, value in batch.items()})
        tokens += chosen[-1]["input_ids"].numel()
    return chosen


def stitch(model: Any, chosen: list[blocks.Block], levels: Any, counts: list[int]) -> None:
    """Give each sublayer its weights of that count."""
    for block, of_block, count in zip(chosen, levels, counts, strict=True):
        alive, columns = of_block[count]
        full = torch.zeros_like(blocks.weight(model, block.out))
        full[:, _columns(torch.tensor(alive, dtype=torch.long), block.size)] = columns
        blocks.weight(model, block.out).copy_(full)


def search(
    model: Any, chosen: Any, levels: Any, errors: Any, costs: Any, budget: int, batches: list[blocks.Batch], seed: int
) -> list[int]:
    """The counts of all sublayers with the least loss that were found."""
    draws = np.random.default_rng(seed)
    factors = np.ones(len(chosen))
    best = allocate(errors, costs, factors, budget)
    seen = {tuple(best): _loss(model, chosen, levels, best, batches)}
    least = seen[tuple(best)]
    for _ in range(_STEPS):
        new = factors.copy()
        changed = draws.permutation(len(new))[: max(1, len(new) // 10)]
        new[changed] = draws.uniform(0, 2, len(changed))
        counts = allocate(errors, costs, new, budget)
        if tuple(counts) not in seen:
            seen[tuple(counts)] = _loss(model, chosen, levels, counts, batches)
        if seen[tuple(counts)] < least:
            least, factors, best = seen[tuple(counts)], new, counts
    return best


@torch.no_grad()
def _loss(model: Any, chosen: Any, levels: Any, counts: list[int], batches: list[blocks.Batch]) -> float:
    """Of an encoder, the distance to the whole model's vectors; of others, the mean loss of tokens."""
    stitch(model, chosen, levels, counts)
    losses = []
    for batch in batches:
        if "vectors" in batch:
            losses.append(float(1 - (blocks.sentence_vectors(model, batch) * batch["vectors"]).sum(-1).mean()))
        else:
            losses.append(float(blocks.loss_of(model, batch)))
    return float(np.mean(losses))


def allocate(errors: Any, costs: Any, factors: np.ndarray, budget: int) -> list[int]:
    """For each sublayer the count that makes the weighted sum of squared errors least within the budget, by dynamic programming.
    Costs and budget are integers."""
    unit = math.gcd(budget, *(cost for prices in costs for cost in prices.values()))
    size = budget // unit
    best, choices = np.zeros(size + 1), []
    for of_block, prices, factor in zip(errors, costs, factors, strict=True):
        counts = sorted(of_block)
        table = np.full((len(counts), size + 1), np.inf)
        for i, count in enumerate(counts):
            price = prices[count] // unit
            if price <= size:
                table[i, price:] = best[: size + 1 - price] + factor * of_block[count] ** 2
        choices.append((counts, table.argmin(0), prices))
        best = table.min(0)
    left, found = size, []
    for counts, picked, prices in reversed(choices):
        found.append(counts[picked[left]])
        left -= prices[found[-1]] // unit
    return found[::-1]
