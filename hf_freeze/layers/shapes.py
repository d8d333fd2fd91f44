"""How a dimension is written as a product, for tensor train and Tucker."""

import math
from collections.abc import Sequence


def prime_factors(number: int) -> list[int]:
    """In ascending order."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found + [number] * (number > 1)


def balanced_modes(number: int, count: int) -> list[int]:
    """`number` as a product of `count` factors of about equal size, ascending: each prime joins the smallest so far."""
    modes = [1] * count
    for prime in reversed(prime_factors(number)):
        smallest = modes.index(min(modes))
        modes[smallest] *= prime
    return sorted(modes)


def mode_count(inputs: int, outputs: int) -> int:
    """Factors of each of two dimensions: as many as make the smaller one's about 4, if both have so many primes.

    Raises ValueError for a prime, with the nearest good sizes.
    """
    for size in (inputs, outputs):
        if len(prime_factors(size)) < 2:
            below, above = _nearest_smooth(size)
            raise ValueError(
                f"{size} is prime: it cannot be written as a product; the nearest good sizes are {below} and {above}"
            )
    wanted = max(2, round(math.log(min(inputs, outputs), 4)))
    return min(wanted, len(prime_factors(inputs)), len(prime_factors(outputs)))


def _nearest_smooth(number: int) -> tuple[int, int]:
    """The nearest numbers below and above with at least two primes, none above 7."""

    def good(candidate: int) -> bool:
        primes = prime_factors(candidate)
        return len(primes) > 1 and primes[-1] <= 7

    below = next((n for n in range(number - 1, 3, -1) if good(n)), 4)
    return below, next(n for n in range(number + 1, 2 * number + 9) if good(n))


def modes_of(
    inputs: int, outputs: int, shape: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of both dimensions: of `shape`, the list whose product it is, in either direction; else balanced.

    Raises ValueError where no list has that product, or for a prime.
    """
    if shape is None:
        count = mode_count(inputs, outputs)
        return tuple(balanced_modes(inputs, count)), tuple(balanced_modes(outputs, count))
    products = [math.prod(modes) for modes in shape]
    for size, name in ((inputs, "inputs"), (outputs, "outputs")):
        if size not in products:
            raise ValueError(
                f"shape={[list(m) for m in shape]} has the products {products}, but the linear has {size} {name}"
            )
    # Where both lists have the same product, the first is that of the inputs.
    return tuple(shape[products.index(inputs)]), tuple(shape[len(products) - 1 - products[::-1].index(outputs)])
