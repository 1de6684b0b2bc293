"""append and attention beside the exported attention, and both beside the oracle of the tests."""

import numpy as np
import pytest
from attention_oracle import attention, half_ulp
from launch.steps import DTYPES

import rope_cpu
from rope_cpu import export
from rope_cpu.export.metadata import read_options
from rope_cpu.export.targets import TARGETS
from rope_cpu.export.validation.attention_validation import AttentionValidation
from rope_cpu.export.validation.cases import Case
from rope_cpu.export.validation.session import open_session

STEPS = (11, 6, 1, 1)  # a prompt, a chunk, decode steps
TOKENS = sum(STEPS)
HEADS = {"num_heads": 6, "num_kv_heads": 2}
OPTIONS = {
    "plain": {},
    "window": {"window": 7},
    "softcap, scale": {"softcap": 2.0, "scale": 0.3},
    "all": {"window": 5, "softcap": 3.0, "scale": 0.2},
}


def by_numpy(rope, tensors, dtype, options):
    """Return the attention of all tokens, through a paged cache of a dtype."""
    q, k, v = (tensors[name][0].astype(np.float32) for name in "qkv")
    memory = [np.zeros((8, 4, *x.shape[1:]), dtype) for x in (k, v)]
    cache = rope_cpu.KVCache(memory[0], memory[1])
    results = []
    for stop, new in zip(np.cumsum(STEPS), STEPS, strict=True):
        batch = rope_cpu.Batch(
            seq_lens=[stop], query_lens=[new], page_table=[[6, 1, 0, 7, 3]], page_size=4
        )
        plan = rope.plan(batch.cache_position, layout="thd")
        tokens = slice(stop - new, stop)
        q_rot = plan.append(q[tokens], k[tokens], v[tokens], cache, batch)
        results.append(rope_cpu.attention(q_rot, cache, batch, **options))
    return np.concatenate(results).astype(dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_numpy_and_onnx_attend_alike(target, dtype, options, rng):
    rope = rope_cpu.RotaryEmbedding(32, rope_theta=500.0)
    try:
        model = export.export_attention(
            rope,
            target=target,
            dtype=DTYPES[dtype],
            layout="bshd",
            max_positions=TOKENS,
            **HEADS,
            **options,
        )
    except ValueError as error:
        pytest.skip(str(error))
    check = AttentionValidation(open_session(model), rope, read_options(model), {})
    case = Case("steps", 1, STEPS)
    inputs = check.draw(case, rng)
    by_onnx = check.run(case, inputs)["attention"]
    result = by_numpy(rope, inputs.tensors, DTYPES[dtype], options)[None]
    vectors = (x.astype(np.float64) for x in inputs.tensors.values())
    exact, error = attention(rope, *vectors, np.arange(TOKENS)[None], dtype, **options)
    for y in (by_onnx, result):
        assert y.dtype == DTYPES[dtype]
        assert (np.abs(y.astype(np.float64) - exact) <= error + half_ulp(exact, dtype)).all()
