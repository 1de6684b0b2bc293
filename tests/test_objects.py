"""Kernels read arrays where they lie: what is no plain array must be found out, and not be touched."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu._kernels import objects


@pytest.fixture(scope="module")
def plan():
    return RotaryEmbedding(16).plan(np.arange(3))


def draw(rng, dtype=np.float32):
    return rng.standard_normal((1, 3, 2, 16)).astype(dtype)


@pytest.mark.parametrize(("name", "wrong"), [("_WRITEABLE", 2**30), ("ITEMS", tuple.__basicsize__ - 8)])
def test_fields_lie_where_kernels_look(monkeypatch, name, wrong):
    objects.look()
    monkeypatch.setattr(objects, name, wrong)
    with pytest.raises(RuntimeError, match="not laid out"):
        objects.look()


def test_subclasses_are_rotated_too(plan, rng, tmp_path):
    x = draw(rng)
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    mapped[:] = x
    q, k = plan(mapped, mapped)
    assert np.array_equal(q, plan.rotate(x))
    assert np.array_equal(k, q)
    plan.rotate(mapped, out=mapped)
    assert np.array_equal(mapped, q)


def test_masks_are_not_ignored(plan, rng):
    x = np.ma.masked_array(draw(rng), mask=False)
    for refused in (plan.rotate, RotaryEmbedding(16).rotate, RotaryEmbedding(16).shift):
        with pytest.raises(TypeError, match="masked"):
            refused(x, 1) if refused.__name__ == "shift" else refused(x)
    with pytest.raises(TypeError, match="masked"):
        plan(draw(rng), draw(rng), (draw(rng), x))


class Pretender(SimpleNamespace):
    """It has the dtype and the size of an array, and nothing else."""


@pytest.mark.parametrize("place", ["q", "k", "out[0]", "out[1]"])
@pytest.mark.parametrize("other", [Pretender(dtype=np.dtype(np.float32), size=96), None, 3, "x", np.float32])
def test_what_is_no_array_is_named(plan, place, other, rng):
    arguments = {name: draw(rng) for name in ("q", "k", "out[0]", "out[1]")} | {place: other}
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(TypeError, match=place.replace("[", r"\[")):
        plan(arguments["q"], arguments["k"], (arguments["out[0]"], arguments["out[1]"]))
    assert all(np.array_equal(arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("shape", [(3, 2, 16), (1, 1, 3, 2, 16), (16,), ()])
def test_another_rank_is_refused(plan, shape, rng):
    with pytest.raises(ValueError, match="`k`"):
        plan(draw(rng), np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="`x`"):
        plan.rotate(np.zeros(shape, np.float32))


def test_read_only_results_are_refused(plan, rng):
    q, k, fixed = draw(rng), draw(rng), draw(rng)
    fixed.flags.writeable = False
    for out in ((fixed, k), (q, fixed)):
        with pytest.raises(ValueError, match=r"read-only|writeable"):
            plan(q, k, out)
    with pytest.raises(ValueError, match=r"read-only|writeable"):
        plan.rotate(fixed, out=fixed)
    assert plan.rotate(fixed) is not fixed  # reading it is fine


def test_one_dtype_for_all(plan, rng):
    with pytest.raises(TypeError, match="`k`"):
        plan(draw(rng), draw(rng, np.float64))
    with pytest.raises(TypeError, match="out"):
        plan.rotate(draw(rng), out=draw(rng, np.float16))


def test_a_dtype_that_is_equal_but_not_the_same(plan, rng):
    x = draw(rng)
    noted = x.astype(np.dtype(np.float32, metadata={"note": 1}))
    assert noted.dtype == x.dtype
    assert noted.dtype is not x.dtype
    q, k = plan(noted, x)
    assert np.array_equal(q, k)
    assert np.array_equal(q, plan.rotate(x))
