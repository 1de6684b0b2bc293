"""The attention of `rope-cpu verify`: a decode step through a cache in NumPy, and by ONNX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rope_cpu.array_types import DTYPES, Array
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import KVCache
from rope_cpu.launch.attention import attention
from rope_cpu.rotation.embedding import RotaryEmbedding

if TYPE_CHECKING:
    from rope_cpu.export.validation.attention_check import AttentionCheck
    from rope_cpu.export.validation.check import CaseInputs

CACHED = 63  # tokens before the decode step
ATTENTION_DTYPES = ("float32", "bfloat16")
# The target whose reference the NumPy results are compared with: its angles are exact.
_REFERENCE = "primitive"

# Returns the attention of all tokens, (1, tokens, heads, head_dim).
AttentionOperation = Callable[["AttentionCheck", "CaseInputs"], Array]


@dataclass(frozen=True)
class AttentionRow:
    """The errors of a decode step, or the reason why an operation is not offered.

    max_error: largest |result − exact|. of_tolerance: the largest share of an element's tolerance
    that its error takes. from_numpy: largest difference from the NumPy kernels.
    """

    dtype: str
    operation: str
    max_error: float = 0.0
    of_tolerance: float = 0.0
    from_numpy: float = 0.0
    refused: str = ""

    @property
    def verdict(self) -> str:
        """One of "ok", "FAIL" and "not offered"."""
        if self.refused:
            return "not offered"
        return "ok" if self.of_tolerance <= 1 else "FAIL"


def numpy_attention(check: AttentionCheck, inputs: CaseInputs) -> Array:
    """Attend through a cache of the model's dtype: a prompt, and then one token.

    Queries, keys and values are float32, so that each is rounded where the exported models do.
    """
    q, k, v = (inputs.tensors[name][0].astype(np.float32) for name in "qkv")
    tokens = len(q)
    memory = [np.zeros((1, tokens, *x.shape[1:]), check.dtype) for x in (k, v)]
    cache = KVCache(memory[0], memory[1])
    results = []
    for start, stop in ((0, tokens - 1), (tokens - 1, tokens)):
        new = slice(start, stop)
        batch = Batch(
            seq_lens=[stop], query_lens=[stop - start], page_table=[[0]], page_size=tokens
        )
        plan = check.rope.plan(inputs.ids[0, new], layout="thd")
        q_rot = plan.append(q[new], k[new], v[new], cache, batch)
        results.append(attention(q_rot, cache, batch))
    return np.concatenate(results)[None].astype(check.dtype)


def onnx_attention(check: AttentionCheck, inputs: CaseInputs) -> Array:
    """Attend by an exported model."""
    return check.run(_case(), inputs)["attention"]


def attention_operations(
    targets: tuple[str, ...],
) -> dict[str, tuple[str, AttentionOperation]]:
    """Return each operation with the target of its model; that of NumPy gives the reference."""
    operations: dict[str, tuple[str, AttentionOperation]] = {"numpy": (_REFERENCE, numpy_attention)}
    return operations | {target: (target, onnx_attention) for target in targets}


def attention_rows(
    rope: RotaryEmbedding,
    heads: tuple[int, int],
    operations: Mapping[str, tuple[str, AttentionOperation]],
) -> Iterator[AttentionRow]:
    """Yield a row for each dtype and operation; the others are compared with the first one."""
    for dtype in ATTENTION_DTYPES:
        baseline: list[Array] = []
        for name, (target, operation) in operations.items():
            row = partial(AttentionRow, dtype, name)
            try:
                check = _check(rope, heads, target, DTYPES[dtype])
                inputs = check.draw(_case(), np.random.default_rng(0))
                result = operation(check, inputs)[:, -1:].astype(np.float64)
            except ValueError as error:
                yield row(refused=str(error))
                continue
            baseline.append(result)
            expected = check.expected(inputs)["attention"]
            error_of = np.abs(result - expected.exact.high[:, -1:])
            yield row(
                max_error=float(np.max(error_of)),
                of_tolerance=float(np.max(error_of / expected.bound[:, -1:])),
                from_numpy=float(np.max(np.abs(result - baseline[0]))),
            )


def _case() -> Any:
    from rope_cpu.export.validation.cases import Case

    return Case("decode step", 1, (CACHED, 1))


def _check(
    rope: RotaryEmbedding, heads: tuple[int, int], target: str, dtype: np.dtype[Any]
) -> AttentionCheck:
    """Return the check of an exported model; raise ValueError if the target does not offer it."""
    from rope_cpu.export import export_attention
    from rope_cpu.export.metadata import read_options
    from rope_cpu.export.validation.attention_check import AttentionCheck
    from rope_cpu.export.validation.session import open_session

    num_heads, num_kv_heads = heads
    model = export_attention(
        rope,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        target=target,
        dtype=dtype,
        layout="bshd",
        max_positions=CACHED + 1,
    )
    options: Any = read_options(model)
    return AttentionCheck(open_session(model), rope, options, {})
