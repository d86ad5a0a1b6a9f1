"""Lossy hooks against NumPy: what they sum, what they leave out, and what is not finite."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist import hooks

SHAPES = ((40, 12), (12,), (6, 5, 8))
ALL = ("bf16", "fp16", "int8", "topk:ratio=0.1", "powersgd:rank=2", "bf16:error_feedback=1", "fp16:error_feedback=1")


def drawn(replicas=2, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=(replicas, *shape)).astype("float32") for shape in SHAPES]


def joined(arrays):
    return np.concatenate([np.ravel(a) for a in arrays]).astype("float64")


def relative(found, exact):
    return np.linalg.norm(joined(found) - joined(exact)) / np.linalg.norm(joined(exact))


@pytest.mark.parametrize("on", ["mirrored2", "mirrored3"])
@pytest.mark.parametrize(("hook", "bound"), [("allreduce", 1e-6), ("bf16", 6e-3), ("fp16", 1e-3), ("int8", 2e-2)])
def test_rounded_sums_are_close(bench, on, hook, bound):
    replicas = int(on[-1])
    gradients = drawn(replicas)
    made = bench(hook, SHAPES, on)
    for _ in range(3):
        assert relative(made.sums(gradients), [g.sum(0) for g in gradients]) < bound


def test_bf16_is_the_sum_of_the_rounded_values(bench):
    import tensorflow as tf

    gradients = drawn()
    rounded = [tf.cast(tf.cast(g, tf.bfloat16), tf.float32).numpy() for g in gradients]
    for found, parts in zip(bench("bf16", SHAPES).sums(gradients), rounded, strict=True):
        np.testing.assert_allclose(found, parts.sum(0), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e30])
def test_fp16_neither_overflows_nor_loses_small_gradients(bench, scale):
    made = bench("fp16", SHAPES)
    gradients = drawn(scale=scale)
    exact = [g.sum(0) for g in gradients]
    for _ in range(2):
        found = made.sums(gradients)
        assert all(np.isfinite(part).all() for part in found)
    errors = []
    for _ in range(40):  # the scale follows the gradients; it cannot jump further than one step tells
        errors.append(relative(made.sums(gradients), exact))
    assert errors[-1] < 1e-3, errors


def test_fp16_recovers_when_gradients_jump(bench):
    made = bench("fp16", SHAPES)
    for _ in range(5):
        made.sums(drawn(scale=1e-6))
    jumped = drawn(scale=1e4)
    assert all(np.isfinite(part).all() for part in made.sums(jumped))
    for _ in range(10):
        found = made.sums(jumped)
    assert relative(found, [g.sum(0) for g in jumped]) < 1e-3


def test_int8_is_right_on_average_and_within_a_step_of_its_scale(bench):
    gradients = drawn()
    exact = joined([g.sum(0) for g in gradients])
    made = bench("int8:error_feedback=0,block=64", SHAPES)
    draws = np.stack([joined(made.sums(gradients)) for _ in range(400)])
    largest = max(np.abs(g).max() for g in gradients)
    assert np.abs(draws - exact).max() <= 2 * largest / 127 * 1.001
    assert np.abs(draws.mean(0) - exact).max() < 6 * 2 * largest / 127 / np.sqrt(400)
    assert (draws.std(0) > 0).any(), "the rounding is not drawn anew"


def test_int8_repeats(bench):
    runs = [[joined(made.sums(drawn(seed=s))) for s in range(3)] for made in (bench("int8", SHAPES) for _ in range(2))]
    np.testing.assert_array_equal(*runs)


def top_k(flat, ratio):
    kept = np.zeros_like(flat)
    places = np.argsort(-np.abs(flat), kind="stable")[: max(1, int(np.ceil(ratio * flat.size)))]
    kept[places] = flat[places]
    return kept


def test_topk_sums_the_largest_values_and_remembers_the_rest(bench):
    """One variable, so that the bucket is the variable; three steps by hand."""
    made = bench("topk:ratio=0.05", [(300,)])
    memory = np.zeros((2, 300), "float32")
    for step in range(3):
        gradient = np.random.default_rng(step).normal(size=(2, 300)).astype("float32")
        complete = gradient + memory
        sent = np.stack([top_k(row, 0.05) for row in complete])
        memory = complete - sent
        (found,) = made.sums([gradient])
        np.testing.assert_allclose(found, sent.sum(0), rtol=1e-6)
        np.testing.assert_allclose(made.states()[-1], memory, rtol=1e-6, atol=1e-7)


def test_powersgd_follows_the_paper(bench):
    """Four steps of algorithm 1 with error feedback (algorithm 2) in NumPy, from the same first factor."""
    made = bench("powersgd:rank=2", [(30, 20)])
    factor = made.states()[1][0]
    memory = np.zeros((2, 30, 20), "float32")
    for step in range(4):
        gradient = np.random.default_rng(step).normal(size=(2, 30, 20)).astype("float32")
        complete = gradient + memory
        basis, _ = np.linalg.qr(sum(m @ factor for m in complete))
        columns = np.stack([m.T @ basis for m in complete])
        factor = columns.sum(0)
        memory = complete - np.stack([basis @ q.T for q in columns])
        (found,) = made.sums([gradient])
        np.testing.assert_allclose(found, basis @ factor.T, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(made.states()[-1], memory, rtol=1e-3, atol=1e-4)


def test_powersgd_is_exact_where_the_rank_suffices(bench):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(40, 3)), rng.normal(size=(3, 30))
    gradient = np.stack([left @ right, 2 * left @ right]).astype("float32")
    made = bench("powersgd:rank=3", [(40, 30)])
    np.testing.assert_allclose(made.sums([gradient])[0], gradient.sum(0), rtol=1e-4, atol=1e-4)


def test_powersgd_sums_exactly_before_its_start_and_what_is_small(bench):
    made = bench("powersgd:rank=1,start_step=2", SHAPES)
    for step in range(4):
        gradients = drawn(seed=step)
        error = relative(made.sums(gradients), [g.sum(0) for g in gradients])
        assert (error < 1e-6) == (step < 2)
    only_small = bench("powersgd:rank=4", [(12,), (3, 3)])
    small = [np.ones((2, 12)), np.ones((2, 3, 3))]
    np.testing.assert_array_equal(joined(only_small.sums(small)), np.full(21, 2.0))


@pytest.mark.parametrize(
    ("hook", "bound"),
    [
        ("int8", 1e-4),
        ("topk:ratio=0.1", 1e-4),
        ("powersgd:rank=2", 1e-4),
        ("bf16:error_feedback=1", 0.05),  # the sums themselves are rounded to 16 bits
        ("fp16:error_feedback=1", 0.01),
    ],
)
@pytest.mark.parametrize("on", ["mirrored2", "mirrored3"])
def test_error_feedback_loses_nothing(bench, hook, bound, on):
    """All sums so far, and what the replicas have left out, are the gradients so far."""
    made = bench(hook, SHAPES, on)
    given, summed = 0.0, 0.0
    for step in range(5):
        gradients = drawn(int(on[-1]), seed=step)
        given = given + joined([g.sum(0) for g in gradients])
        summed = summed + joined(made.sums(gradients))
        left = joined([m.sum(0) for m in made.states()[-len(SHAPES) :]])
        np.testing.assert_allclose(summed + left, given, rtol=bound, atol=bound)


@pytest.mark.parametrize("hook", ["allreduce", *ALL])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", range(len(SHAPES)))
def test_a_value_that_is_not_finite_reaches_all_replicas_and_poisons_nothing(bench, hook, bad, where):
    moves = "powersgd" in hook and where == 1  # a vector is summed apart: the factors of the matrices may go on
    made, twin = bench(hook, SHAPES), bench(hook, SHAPES)
    for one in (made, twin):
        one.sums(drawn(seed=1))
    before = made.states()
    broken = drawn(seed=2)
    broken[where][1].flat[3] = bad
    assert not np.isfinite(joined(made.sums(broken))).all()
    after = made.states()
    for old, new in zip(before, after, strict=True):
        assert np.isfinite(new).all()
        if new.dtype == np.float32 and not moves:
            np.testing.assert_array_equal(new, old)
    found = made.sums(drawn(seed=3))
    assert np.isfinite(joined(found)).all()
    if hook != "int8" and not moves:  # whose random numbers count steps
        np.testing.assert_array_equal(joined(found), joined(twin.sums(drawn(seed=3))))


def test_reports_count_bytes(bench):
    """Between two replicas a ring sends as much as the buffer; a gather sends one's own once."""
    values = sum(int(np.prod(shape)) for shape in SHAPES)
    blocks = -(-values // 256)
    vector = 12
    factors = 2 * (40 + 12) + 2 * (30 + 8)
    expected = {
        "allreduce": 4 * values,
        "bf16": 2 * values,
        "fp16": 2 * values,
        "int8": 256 * blocks + 4 * blocks,
        "topk:ratio=0.1": 8 * -(-values // 10),
        "powersgd:rank=2": 4 * (factors + vector),
    }
    for hook, sent in expected.items():
        made = bench(hook, SHAPES)
        assert made.hook.report is None
        made.sums(drawn())
        assert (made.hook.report.bytes_per_step, made.hook.report.dense_bytes_per_step) == (sent, 4 * values), hook
        assert made.hook.report.compression_ratio == pytest.approx(4 * values / sent)


def test_fidelity_compares_with_the_exact_sum(bench):
    made = bench("topk:ratio=0.2,sample_every=2,error_feedback=0", SHAPES)
    for step in range(3):
        gradients = drawn(seed=step)
        found, exact = joined(made.sums(gradients)), joined([g.sum(0) for g in gradients])
        if step % 2 == 0:
            expected = found @ exact / np.linalg.norm(found) / np.linalg.norm(exact)
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        report = made.hook.report
        assert report.cosine == pytest.approx(expected, rel=1e-5)
        assert report.relative_error == pytest.approx(error, rel=1e-5)
    assert bench("allreduce:sample_every=1", SHAPES).hook.report is None


def test_one_replica_sends_nothing(bench):
    for hook in ALL:
        made = bench(hook, SHAPES, on="one_device")
        gradients = drawn(1)
        np.testing.assert_array_equal(joined(made.sums(gradients)), joined(gradients))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("powersdg:rank=4", "unknown hook 'powersdg'; choose one of allreduce, bf16.*did you mean 'powersgd'"),
        ("powersgd:rnk=4", "unknown parameter 'rnk=4'; powersgd takes rank=NUMBER.*did you mean 'rank'"),
        ("powersgd:rank=0", "rank=0.0: an integer of at least 1"),
        ("powersgd:rank=1.5", "rank=1.5"),
        ("powersgd:rank=nan", "rank=nan: an integer of at least 1"),
        ("local_sgd:period=inf", "period=inf: an integer of at least 1"),
        ("powersgd:rank=many", "rank='many' is no number"),
        ("powersgd:start_step=-1", "start_step=-1.0"),
        ("topk:ratio=0", r"ratio=0.0: a part in \(0, 1\]"),
        ("topk:ratio=1.01", "ratio=1.01"),
        ("topk:ratio=nan", "ratio=nan"),
        ("int8:block=nan", "block=nan: a multiple of 4"),
        ("int8:block=6", "block=6.0: a multiple of 4"),
        ("local_sgd:period=0", "period=0.0"),
        ("allreduce:bucket_mb=0", "bucket_mb=0.0: a size in MiB above 0"),
        ("allreduce:error_feedback=1", "unknown parameter 'error_feedback=1'"),
        ("bf16:error_feedback=2", "error_feedback=2.0: 0 or 1"),
        ("bf16:sample_every=0", "every=0.0"),
        ("noop:sample_every=3", "noop takes none"),
        ("noop:hierarchical=1", "noop takes none"),
        ("bf16:hierarchical=2", "hierarchical=2.0: 0 or 1"),
        ("local_sgd:hierarchical=1", "unknown parameter 'hierarchical=1'"),
        (3, "hook=3 is no hook"),
        (hooks.TopK, "is no hook"),
    ],
)
def test_wrong_specs(spec, words):
    with pytest.raises(tfdist.UsageError, match=words):
        hooks.parse(spec)


def test_error_feedback_needs_a_lossy_hook():
    for hook in (hooks.AllReduce(), hooks.NoOp(), hooks.LocalSGD(), "bf16"):
        with pytest.raises(tfdist.UsageError, match="no lossy hook"):
            hooks.ErrorFeedback(hook)


def test_wrong_wrappings():
    with pytest.raises(tfdist.UsageError, match="'local_sgd' gives no sum that all replicas agree on"):
        hooks.Hierarchical(hooks.LocalSGD())
    with pytest.raises(tfdist.UsageError, match="wrap the hook within"):
        hooks.Fidelity(hooks.Hierarchical(hooks.BFloat16()))
    with pytest.raises(tfdist.UsageError, match="'bf16' is no hook"):
        hooks.Fidelity("bf16")


@pytest.mark.parametrize(("tokens", "is_sparse"), [(8, True), (400, False)])
def test_sparse_gradients_become_dense_where_that_is_smaller(strategies, tokens, is_sparse):
    """Of 50 rows of an embedding, 8 are fewer than the table and 400 are more."""
    found = {}
    for spec in ("allreduce", "bf16", "powersgd:rank=1"):
        hook = hooks.parse(spec)
        with strategies["mirrored2"].scope():
            keras.utils.set_random_seed(3)
            ids = keras.Input((tokens,), dtype="int32")
            x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(50, 8)(ids))
            model = keras.Model(ids, keras.layers.Dense(1)(x))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        tfdist.prepare(model, hook=hook)
        x = np.random.default_rng(0).integers(0, 50, size=(8, tokens))
        model.fit(x, x.mean(axis=1, keepdims=True) / 50.0, batch_size=2, shuffle=False, verbose=0)
        found[spec] = hook.report.bytes_per_step, model.get_weights()
    sent = {spec: value[0] for spec, value in found.items()}
    if is_sparse:
        assert sent["bf16"] > 0.9 * sent["allreduce"]
    else:
        assert sent["bf16"] < 0.1 * sent["allreduce"] and sent["powersgd:rank=1"] < sent["bf16"]
    for a, b in zip(found["bf16"][1], found["allreduce"][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.01)
