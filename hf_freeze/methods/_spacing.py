"""Evenly spaced layers."""


def evenly_spaced(depth: int, count: int) -> list[int]:
    """The numbers of the `count` layers to keep out of `depth`, as LayerDrop prunes (Fan et al., 2020,
    https://arxiv.org/abs/1909.11556, "every other"): every ⌊depth / removed⌋-th layer is removed. If that rule would remove
    another number of layers, the kept ones lie at even distances instead, the first and the last layer among them."""
    count_removed = depth - count
    removed = set(range(period := depth // count_removed, depth + 1, period)) if count_removed else set()
    if len(removed) == count_removed:
        return [layer for layer in range(depth) if layer + 1 not in removed]
    return [(2 * position * (depth - 1) + count - 1) // (2 * max(count - 1, 1)) for position in range(count)]  # rounded
