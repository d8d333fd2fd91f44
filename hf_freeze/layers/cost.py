"""About how long a sequence of matrix products takes: enough to choose the fastest of several that give the same result.

In multiply-adds of a large fp32 matrix product, per kind of device. Starting an operation, reading a weight and writing a
result cost as much as so many multiply-adds. Measured on one core of an AMD EPYC with AVX-512 (47 billion multiply-adds a
second, 3 µs to start an operation; benchmarks/linear_methods.py shows what the choices come to); for CUDA reckoned from an
H100's data sheet (about 30 trillion a second, 3 TB/s, 5 µs) and not measured. The choice is a function of shapes and the
kind of device alone, so that two processes compute the same bits.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    start: float  # an operation
    read: float  # an element of a weight
    write: float  # an element of a result
    chunk: int | None  # rows worked on at a time, so that what is between two products stays in the cache
    matrix: float  # a product of a batch of them
    lanes: int  # results computed side by side: the last of them are computed in vain where they do not come out even
    narrow: float  # times as long where there are fewer results than lanes


COSTS = {"cpu": Costs(150_000, 2, 10, 64, 4_000, 16, 2.7), "cuda": Costs(1.5e8, 40, 80, None, 0, 1, 1)}


def costs_of(device_type: str) -> Costs:
    """Of any accelerator, those of CUDA."""
    return COSTS["cpu" if device_type in ("cpu", "meta") else "cuda"]


def product(costs: Costs, batch: int, rows: int, inner: int, columns: int) -> float:
    """`batch` products (rows, inner) x (inner, columns), one of the factors being a weight that all share.

    A batch of single columns is computed as one product, with `rows` side by side.
    """
    beside, others = (rows, columns) if columns == 1 else (columns, rows)
    computed = -(-beside // costs.lanes) * costs.lanes * (costs.narrow if beside < costs.lanes else 1)
    return (
        costs.start
        + (costs.matrix * batch if batch > 1 and columns > 1 else 0)
        + costs.read * inner * min(rows, columns)
        + batch * (computed * inner * others + costs.write * rows * columns)
    )
