"""Exported attention, run step by step, and the targets that tests run."""

import numpy as np
import onnxruntime
import pytest
from attention_oracle import half_ulp
from conftest import DTYPES

from rope_cpu.export.targets import TARGETS
from rope_cpu.export.validation import session as runtime

# Targets whose attention takes queries and keys that are rotated already.
SEPARATE = [name for name, target in TARGETS.items() if not target.attention_rotates]

# Opset 25's Attention has windows in onnxruntime 1.32 and onnx 1.23.
WINDOW_ATTRIBUTE = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 32),
    reason="Attention of this onnxruntime has no window",
)


def targets_of(kind):
    """Return the targets that take a dtype."""
    return [name for name, target in TARGETS.items() if DTYPES[kind] in target.dtypes]


def agrees(result, known):
    """Return True if a result lies within the error of the arithmetic and of one rounding."""
    exact, bound = known
    difference = np.abs(result.astype(np.float64) - exact)
    return bool((difference <= bound + half_ulp(exact, result.dtype)).all())


def count_on(batch, seq):
    """Return consecutive positions."""
    return np.broadcast_to(np.arange(seq), (batch, seq))


def draw_tensors(rng, dtype=np.float32, batch=2, seq=13, width=32, v_width=None):
    """Return q, k, v (batch, seq, heads, width) of 4 query heads and 2 key heads."""
    sizes = (4, width), (2, width), (2, v_width or width)
    return [rng.standard_normal((batch, seq, *size)).astype(dtype) for size in sizes]


def run_steps(model, tensors, steps, masks=None, ids=None, arrays=None):
    """Run a model of layout bshd in steps; return the result and the cache.

    tensors: q, k, v (batch, seq, heads, width). steps: number of tokens in each run. arrays:
    further inputs, the same in each step.
    """
    session = runtime.open_session(model, 1)
    q, k, v = tensors
    done = 0
    results = []
    has_past = "past_key" in {value.name for value in session.get_inputs()}
    cache = [np.zeros((x.shape[0], x.shape[2], 0, x.shape[3]), q.dtype) for x in (k, v)]
    for count in steps:
        span = np.s_[:, done : done + count]
        done += count
        feeds = dict(zip("qkv", (np.ascontiguousarray(x[span]) for x in tensors), strict=True))
        feeds |= arrays or {}
        feeds |= dict(zip(("past_key", "past_value"), cache, strict=True)) if has_past else {}
        if ids is not None:
            feeds["position_ids"] = np.ascontiguousarray(ids[span])
        if masks is not None:
            part = masks[:, :done] if masks.ndim == 2 else masks[:, :, span[1], :done]
            feeds["attention_mask"] = np.ascontiguousarray(part)
        shapes = [(*q[span].shape[:3], v.shape[3])]
        if has_past:
            shapes += [(x.shape[0], x.shape[2], done, x.shape[3]) for x in (k, v)]
        result, *cache = runtime.run(session, feeds, shapes)
        results.append(result)
    return np.concatenate(results, axis=1), cache
