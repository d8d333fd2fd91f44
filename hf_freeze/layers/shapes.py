"""Factorises dimensions into modes, for tensor train and Tucker."""

import math
from collections.abc import Sequence


def prime_factors(number: int) -> list[int]:
    """The prime factors of `number` with repetition, ascending."""
    primes, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return primes + [number] * (number > 1)


def balanced_modes(number: int, count: int) -> list[int]:
    """`count` factors of about equal size with the product `number`, ascending. Each prime, from the largest, multiplies the
    factor that is smallest so far."""
    modes = [1] * count
    for prime in reversed(prime_factors(number)):
        smallest = modes.index(min(modes))
        modes[smallest] *= prime
    return sorted(modes)


def mode_count(inputs: int, outputs: int) -> int:
    """The number of modes of both dimensions: such that modes of the smaller dimension are about 4, but no more than both have
    primes.

    Raises ValueError for a prime dimension and suggests the nearest good sizes.
    """
    for size in (inputs, outputs):
        if len(prime_factors(size)) < 2:
            below, above = _nearest_smooth(size)
            raise ValueError(
                f"{size} is prime: it cannot be written as a product; the nearest good sizes are {below} and {above}"
            )
    count = max(2, round(math.log(min(inputs, outputs), 4)))
    return min(count, len(prime_factors(inputs)), len(prime_factors(outputs)))


def _nearest_smooth(number: int) -> tuple[int, int]:
    """The nearest numbers below and above with at least two prime factors, none of them above 7."""

    def good(candidate: int) -> bool:
        primes = prime_factors(candidate)
        return len(primes) > 1 and primes[-1] <= 7

    below = next((n for n in range(number - 1, 3, -1) if good(n)), 4)
    return below, next(n for n in range(number + 1, 2 * number + 9) if good(n))


def modes_of(
    inputs: int, outputs: int, shape: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The modes of inputs and outputs. Each dimension takes the list of `shape` with the matching product, in either order;
    without `shape`, modes are balanced.

    Raises ValueError if no list has the right product, or for a prime dimension.
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
    # If both lists have the same product, the first is for the inputs.
    return tuple(shape[products.index(inputs)]), tuple(shape[len(products) - 1 - products[::-1].index(outputs)])
