"""PowerSGD: each gradient matrix travels as two thin factors."""

import functools
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.hooks.base import Gradient, whole_number
from tfdist.hooks.bucketed import AUTO, BucketedHook
from tfdist.hooks.choice import either
from tfdist.hooks.message import Message
from tfdist.hooks.state import GroupValue, ReplicaState, replica_state

_SMALLER_BY = 2.0


class PowerSGD(BucketedHook):
    """Approximates the sum of each gradient matrix M (m x n) by P Q^T of rank `rank`, by one step of power iteration.

    P = orth(sum of M Q) and Q = sum of M^T P are all that travels: rank (m + n) values instead of m n. Q is kept for
    the next step, so the approximation follows the gradients. Tensors of more dimensions are taken as matrices
    with the last one as columns; vectors, and matrices that would not be at least halved, are summed exactly. Without
    error feedback what is left out is lost: the spec `powersgd` brings it along.

    Use it on slow links: it needs the fewest bytes for what it loses, and all-reduces them, so it serves many workers
    too. Reference: Vogels et al., PowerSGD, NeurIPS 2019.

    Args:
        rank: of the approximation.
        start_step: steps that are summed exactly at first, while gradients change fast.
        bucket_mb: see `BucketedHook`; of the factors, and of what is summed exactly.
    """

    name = "powersgd"
    lossy = True

    def __init__(self, *, rank: int = 4, start_step: int = 0, bucket_mb: "float | str" = AUTO):
        super().__init__(bucket_mb=bucket_mb)
        self.rank = whole_number("rank", rank, least=1, example="powersgd:rank=4")
        self.start_step = whole_number("start_step", start_step, least=0, example="powersgd:rank=4")
        self._factors: dict[int, ReplicaState] = {}
        self._step: GroupValue | None = None

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates a factor Q for each variable that is to be approximated, and the step counter."""
        self._step = GroupValue(variables, tf.constant(0, tf.int64), name="powersgd_step")
        for i, variable in enumerate(variables):
            if self._pays(variable.shape, variable.dtype):
                columns = int(variable.shape[-1])
                start = tf.random.stateless_normal([columns, self.rank], seed=[i, 20191211])
                self._factors[id(variable)] = replica_state(start, shared=True, name=f"powersgd_q_{i}")

    @property
    def state(self) -> list[ReplicaState]:
        """The counter and the factors, equal on all replicas."""
        return [self._step.state, *self._factors.values()]

    def encode(self, buffer: tf.Tensor, variables: Sequence[keras.Variable]) -> Message:
        """Returns what travels where nothing is approximated; see `BucketedHook.encode`."""
        return Message.exact(buffer)

    def exchange_step(
        self, gradients: list[Gradient], variables: Sequence[keras.Variable]
    ) -> tuple[list[Gradient], list[Gradient], int]:
        """Returns the sums over all replicas, what this replica has put into each, and the bytes that it sends."""
        thin = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor) and id(variables[i]) in self._factors]
        rest = [i for i in range(len(gradients)) if i not in set(thin)]
        step = self._step.get(variables)
        approximately = functools.partial(self._approximately, step >= self.start_step)
        totals, own, sent = list(gradients), list(gradients), 0
        for indices, run in ((thin, approximately), (rest, super().exchange_step)):
            if indices:
                found, mine, sent_bytes = run([gradients[i] for i in indices], [variables[i] for i in indices])
                sent += sent_bytes
                for i, total, part in zip(indices, found, mine, strict=True):
                    totals[i], own[i] = total, part
        self._step.set(variables, step + 1)
        return totals, own, sent

    def _approximately(
        self, begun: tf.Tensor, gradients: list[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], int]:
        states = [self._factors[id(v)].variable for v in variables]
        shapes = [v.shape for v in variables]
        matrices = [tf.reshape(g, [-1, shape[-1]]) for g, shape in zip(gradients, shapes, strict=True)]
        kept = [tf.convert_to_tensor(state) for state in states]
        sent = 0

        def thin() -> tuple[list, list, list]:
            nonlocal sent
            rows, sent_rows = self.sum_exactly([m @ q for m, q in zip(matrices, kept, strict=True)])
            basis = [tf.linalg.qr(p, full_matrices=False).q for p in rows]
            mine = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, basis, strict=True)]
            columns, sent_columns = self.sum_exactly(mine)
            sent = sent_rows + sent_columns
            totals = [tf.matmul(p, q, transpose_b=True) for p, q in zip(basis, columns, strict=True)]
            own = [tf.matmul(p, q, transpose_b=True) for p, q in zip(basis, mine, strict=True)]
            sound = tf.reduce_all([tf.reduce_all(tf.math.is_finite(q)) for q in columns])
            return totals, own, [tf.where(sound, new, old) for new, old in zip(columns, kept, strict=True)]

        def exact() -> tuple[list, list, list]:
            return self.sum_exactly(matrices)[0], list(matrices), kept

        totals, own, new = either(begun, thin, exact, self.transport) if self.start_step else thin()
        for state, value in zip(states, new, strict=True):
            state.assign(value)
        return _as_shaped(totals, shapes), _as_shaped(own, shapes), sent

    def _pays(self, shape: Sequence[int], dtype: str) -> bool:
        if len(shape) < 2 or dtype != "float32":
            return False
        *first, columns = (int(d) for d in shape)
        rows = math.prod(first)
        return self.rank * (rows + columns) * _SMALLER_BY <= rows * columns


def _as_shaped(matrices: list[tf.Tensor], shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    return [tf.reshape(m, shape) for m, shape in zip(matrices, shapes, strict=True)]
