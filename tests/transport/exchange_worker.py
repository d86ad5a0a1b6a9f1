"""One process of an MPI job: exchange_worker.py CASES SEED. Random exchanges, each compared with NumPy's result.

All processes draw the same cases from the seed, so each knows what the others send; half of them begin the exchanges of
a case in another order than the rest, as the backward pass of another machine might.
"""

import sys

import ml_dtypes
import numpy as np

from tfdist.cluster.mpi import mpi
from tfdist.transport.engine import Engine

DTYPES = (np.float32, np.float64, np.int32, np.int64, np.float16, ml_dtypes.bfloat16)


def main(cases: int, seed: int) -> None:
    world = mpi().COMM_WORLD
    engine = Engine(world.Dup(), [f"host:{i}" for i in range(world.Get_size())], timeout_s=60)
    rng = np.random.default_rng(seed)
    for _ in range(cases):
        exchanges = [draw(rng, world.Get_size()) for _ in range(rng.integers(1, 6))]
        order = list(range(len(exchanges)))
        if world.Get_rank() % 2:
            order.reverse()
        tickets = {}
        for key in order:
            kind, buffers, _ = exchanges[key]
            tickets[key] = getattr(engine, kind)(buffers[world.Get_rank()], key)
        for key, (kind, buffers, expected) in enumerate(exchanges):
            found = engine.wait(tickets[key])
            assert found.dtype == expected.dtype and found.shape == expected.shape, (kind, found, expected)
            np.testing.assert_array_equal(found, expected, err_msg=f"{kind} of {buffers[0].dtype} {found.shape}")
            assert found.ctypes.data % 64 == 0 or found.size == 0
    print("equal", cases)


def draw(rng: np.random.Generator, workers: int) -> tuple[str, list[np.ndarray], np.ndarray]:
    """Returns a kind of exchange, what each worker gives, and what has to come out."""
    kind = str(rng.choice(["sum", "gather", "rows"]))
    dtype = np.dtype(DTYPES[rng.integers(len(DTYPES))])
    shape = tuple(int(n) for n in rng.integers(1, [70_000, 4, 3][: rng.integers(1, 4)], endpoint=True))
    if rng.random() < 0.5:
        shape = (int(rng.integers(0, 6)), *shape[1:])
    lengths = [int(rng.integers(0, shape[0] + 1)) if kind == "rows" else shape[0] for _ in range(workers)]
    # Small whole numbers, whose sums every dtype here holds exactly, so that the order does not matter.
    buffers = [rng.integers(-8, 9, size=(n, *shape[1:])).astype(dtype) for n in lengths]
    if kind == "sum":
        return kind, buffers, np.sum(np.stack(buffers).astype(np.float64), axis=0).astype(dtype)
    return kind, buffers, np.stack(buffers) if kind == "gather" else np.concatenate(buffers)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
