"""The norms of plan(q, k, q_norm=…, k_norm=…) and plan.rotate(x, norm=…)."""

import numpy as np
import pytest
from launch import cases, steps
from launch.steps import DTYPES, INPUT_DTYPES, Norm

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.launch import append


class Case:
    """Queries and keys with their norms in a layout, and the rotation after the norms in steps."""

    def __init__(self, rng, dtype, layout, interleaved):
        self.layout = layout
        width = int(rng.choice(cases.WIDTHS))
        kind = cases.ROTARIES[rng.integers(len(cases.ROTARIES))]
        self.rope = kind(rng, width, interleaved)
        batch = 1 if layout == "thd" else 2
        tokens = int(rng.integers(1, 6))
        axes = () if self.rope.axes == 1 else (self.rope.axes,)
        self.ids = rng.integers(0, 5000, (batch, tokens, *axes))
        self.values = [
            cases.noise(rng, (batch, tokens, heads, width), DTYPES[dtype]) for heads in (8, 2)
        ]
        self.norms = [cases.draw_norm(rng, width) for _ in "qk"]
        ids = self.ids[0] if layout == "thd" else self.ids
        self.plan = self.rope.plan(ids, layout=layout)
        self.text = f"{kind.__name__} {width} {layout} {self.norms}"

    def expected(self):
        """Return q and k in the layout, normalised, rotated in float32 and rounded once."""
        results = []
        for x, norm in zip(self.values, self.norms, strict=True):
            normalised = steps.normalised(x.astype(np.float32), norm)
            rotated = self.rope.plan(self.ids).rotate(normalised)
            results.append(cases.in_layout(steps.stored(rotated, x.dtype), self.layout))
        return results

    def check(self, results):
        for result, right in zip(results, self.expected(), strict=True):
            steps.assert_same_bits(result, right, self.text)


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_bits_are_those_of_a_norm_before_the_rotation(dtype, layout, interleaved, rng):
    for _ in range(4):
        case = Case(rng, dtype, layout, interleaved)
        q_norm, k_norm = map(cases.to_norm, case.norms)
        norms = {"q_norm": q_norm, "k_norm": k_norm}
        for place in cases.INPUT_PLACES:
            q, k = (cases.in_layout(x, layout) for x in place(case.values))
            case.check(case.plan(q, k, **norms))
            assert q.tobytes() == cases.in_layout(case.values[0], layout).tobytes()
            own = [np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)[..., 1:-2] for x in (q, k)]
            results = case.plan(q, k, own, **norms)
            assert [x is y for x, y in zip(results, own, strict=True)] == [True, True]
            case.check(own)
            assert case.plan.rotate(q, norm=q_norm).tobytes() == results[0].tobytes()
            assert case.plan.rotate(k, own[1], norm=k_norm) is own[1]
            in_place = case.plan(q, k, out=(q, k), **norms)
            assert in_place[0] is q
            assert in_place[1] is k
            case.check((q, k))


def test_one_of_two_has_a_norm(rng):
    plan = RotaryEmbedding(64, interleaved=True).plan(np.arange(3))
    q = cases.noise(rng, (2, 3, 4, 64), np.float32)
    k = cases.noise(rng, (2, 3, 2, 64), np.float32)
    norm = rope_cpu.RMSNorm(rng.standard_normal(64))
    bare = plan(q, k)
    with_norms = plan(q, k, q_norm=norm, k_norm=norm)
    for names in (["q_norm"], ["k_norm"]):
        results = plan(q, k, **dict.fromkeys(names, norm))
        for index, name in enumerate(("q_norm", "k_norm")):
            right = with_norms if name in names else bare
            assert np.array_equal(results[index], right[index])


def test_one_array_is_queries_and_keys(rng):
    """Two norms of one array, as of a latent that serves as both."""
    plan = RotaryEmbedding(16).plan(np.arange(3))
    x = cases.noise(rng, (1, 3, 2, 16), np.float32)
    norms = [rope_cpu.RMSNorm(rng.standard_normal(16)) for _ in "qk"]
    results = plan(x, x, q_norm=norms[0], k_norm=norms[1])
    for result, norm in zip(results, norms, strict=True):
        assert np.array_equal(result, plan.rotate(x, norm=norm))


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 2), (2, 0), (0, 0)])
def test_queries_or_keys_without_heads(heads, kv_heads, rng):
    plan = RotaryEmbedding(16).plan(np.arange(3))
    q = cases.noise(rng, (1, 3, heads, 16), np.float32)
    k = cases.noise(rng, (1, 3, kv_heads, 16), np.float32)
    norm = rope_cpu.RMSNorm(None)
    q_rot, k_rot = plan(q, k, k_norm=norm)
    assert np.array_equal(q_rot, plan.rotate(q))
    assert np.array_equal(k_rot, plan.rotate(k, norm=norm))
    if kv_heads:
        assert (k_rot != 0).all()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_no_tokens(layout):
    plan = RotaryEmbedding(16).plan([], layout=layout)
    x = cases.in_layout(np.zeros((1, 0, 2, 16), np.float32), layout)
    norm = rope_cpu.RMSNorm(None)
    assert plan.rotate(x, norm=norm).shape == x.shape
    assert [y.shape for y in plan(x, x, q_norm=norm)] == [x.shape] * 2


def test_plans_of_other_operations_normalise_too(interleaved, rng):
    """A norm comes before every kind of rotation."""
    rope = RotaryEmbedding(16, interleaved=interleaved)
    q = cases.noise(rng, (2, 3, 4, 16), np.float32)
    k = cases.noise(rng, (2, 3, 2, 16), np.float32)
    norm = Norm(rng.standard_normal(16).astype(np.float32))
    for plan in (
        rope.plan([3, 4, 5], inverse=True),
        rope.shift_plan(-7),
        rope.shift_plan([[1, 2, 3], [4, 5, 6]]),
        rope.rerotate_plan(RotaryEmbedding(16, interleaved=interleaved), [3, 4, 5]),
    ):
        expected = [plan.rotate(steps.normalised(x, norm)) for x in (q, k)]
        results = plan(q, k, q_norm=cases.to_norm(norm), k_norm=cases.to_norm(norm))
        for result, right in zip(results, expected, strict=True):
            assert np.array_equal(result, right)
        assert np.array_equal(plan.rotate(q, norm=cases.to_norm(norm)), expected[0])


def test_what_fits_the_kernel_is_not_copied(monkeypatch, rng):
    """Decoding calls this for every layer."""
    monkeypatch.setattr(append, "launch_copies", None)  # of the copies alone
    norm = rope_cpu.RMSNorm(None)
    for layout in cases.LAYOUTS:
        plan = RotaryEmbedding(16).plan(np.arange(5), layout=layout)
        values = [cases.noise(rng, (1, 5, heads, 16), np.float32) for heads in (4, 2, 2)]
        q, k, _ = (cases.in_layout(x, layout) for x in cases._projection(values))
        plan(q, k, q_norm=norm, k_norm=norm)
        plan(q, k, (q, k), k_norm=norm)
        plan.rotate(q, q, norm=norm)
