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


COSTS = {"cpu": Costs(150_000, 2, 10, 64), "cuda": Costs(1.5e8, 40, 80, None)}


def costs_of(device_type: str) -> Costs:
    """Of any accelerator, those of CUDA."""
    return COSTS["cpu" if device_type in ("cpu", "meta") else "cuda"]


def product(costs: Costs, batch: int, rows: int, inner: int, columns: int) -> float:
    """`batch` products (rows, inner) x (inner, columns), one of the factors being a weight that all share."""
    return (
        costs.start
        + costs.read * inner * min(rows, columns)
        + batch * (rows * inner * columns + costs.write * rows * columns)
    )
