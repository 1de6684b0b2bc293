"""`rope-cpu verify`: check the NumPy kernels and the ONNX exports of a config's rotations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rope_cpu import Batch, KVCache, RotaryEmbedding, attention, export
from rope_cpu.accuracy import attention as exact_attention
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare
from rope_cpu.array_types import DTYPES, Array
from rope_cpu.bench.results import environment
from rope_cpu.cli import command_line, groups
from rope_cpu.cli.command_line import UsageError, print_lines
from rope_cpu.cli.groups import Group
from rope_cpu.export.targets import TARGETS
from rope_cpu.export.validation.cases import ids_by_axis
from rope_cpu.export.validation.report import Outcome, Report

TOKENS = 512  # of the prefill
CACHED = 63  # tokens before the decode step of attention
MAX_POSITIONS = 1024  # rows of the tables of ONNX models
OTHER_PAIRING_DTYPE = "float32"  # of the pairing that is not the config's
ATTENTION_DTYPES = ("float32", "bfloat16")  # NumPy's is verified in the last alone

# The numbers of query heads and of key/value heads.
Heads = tuple[int, int]

# Elements of q: eight times those of the largest models, and some 10 GB of references.
LARGEST = 2**26
LEGEND = (
    "max error: largest difference from the exact rotation, or from attention in float64.",
    "tolerance: largest share of the error allowed to an element; above 100 % a row fails.",
    "worst case: the case of that element. Inputs of ONNX are those of `export.validate`.",
)
_ROW = "{:9} {:8} {:11} {:9} {:>9} {:>9} {:4} {}"
_HEADER = _ROW.format("", "dtype", "pairing", "by", "max error", "tolerance", "", "worst case")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu verify`."""
    command_line.add_config_arguments(parser)
    command_line.add_pairing_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the reports to a JSON file"
    )


def run(args: argparse.Namespace) -> int:
    """Verify each layer type of a config and print its table.

    Returns 1 if a row is out of tolerance, else 0.
    """
    if args.json is not None:
        command_line.check_file(args.json)
    config = command_line.config_from_arguments(args)
    model = command_line.config_name(args)
    found = groups.from_arguments(config, args)
    with command_line.usage_errors():
        sizes = [
            group.config.heads(group.layer_type)[0] * rope.head_dim
            for group in found
            for rope in group.ropes.values()
        ]
    if not sizes:
        listed = ", ".join(group.layer_type or "all layers" for group in found)
        raise UsageError(f"nothing to verify: {listed} are not rotated")
    if max(sizes) * TOKENS > LARGEST:
        text = f"the queries of a token have {max(sizes)} elements"
        raise UsageError(f"{text}; a prefill of {TOKENS} tokens is too large to verify")
    verified = {group.layer_type: _verified(model, group) for group in found}
    print_lines(LEGEND)
    if args.json is not None:
        layers = [
            {"layer_type": name, "rows": [row.as_dict() for row in rows]}
            for name, rows in verified.items()
        ]
        content = {"model": model, "versions": environment()["versions"], "layers": layers}
        command_line.write_json(args.json, content)
    failed = any(row.verdict == "FAIL" for rows in verified.values() for row in rows)
    return 1 if failed else 0


def _verified(model: str, group: Group) -> list[Row]:
    """Print what layers rotate, and each row as soon as it is known; return the rows."""
    name = model if group.layer_type is None else f"{model}, {group.layer_type}"
    rope = next(iter(group.ropes.values()), None)
    if rope is None:
        print_lines([f"{name}: not rotated", ""])
        return []
    heads = group.config.heads(group.layer_type)
    facts = f"rope type {rope.rope_type}, {rope.rotary_dim} of {rope.head_dim} elements rotated"
    counts = f"q ({heads[0]} heads) and k ({heads[1]})"
    print_lines([f"{name}: {facts} in {pairing(rope)} pairs; {counts}", "", _HEADER])
    found = []
    for row in rows(rope, heads):
        found.append(row)
        if row.report is not None:
            print_lines([_line(row, row.report)])
    refusals = {f"not offered by {row.by}: {row.refused}": None for row in found if row.refused}
    print_lines(["", *refusals])
    return found


def _line(row: Row, report: Report) -> str:
    """Return the line of a row that is offered."""
    worst = report.worst
    share = "> 1000%" if worst.ratio > 10 else f"{worst.ratio:.1%}"
    figures = (f"{report.max_abs_error:.2e}", share, row.verdict)
    return _ROW.format(row.part, row.dtype, row.pairing, row.by, *figures, worst.case)


class Row(NamedTuple):
    """The report on the NumPy kernels or on a target, or the reason why it is not offered."""

    part: str
    dtype: str
    pairing: str
    by: str
    report: Report | None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """One of "ok", "FAIL" and "not offered"."""
        if self.report is None:
            return "not offered"
        return "ok" if self.report.passed else "FAIL"

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, with the outcomes of its report."""
        outcomes = () if self.report is None else self.report.outcomes
        report = [asdict(outcome) for outcome in outcomes]
        return self._asdict() | {"verdict": self.verdict, "report": report}


def pairing(rope: RotaryEmbedding) -> str:
    """Return the name of a rotation's pairing."""
    return "interleaved" if rope.interleaved else "half-split"


def rows(rope: RotaryEmbedding, heads: Heads) -> Iterator[Row]:
    """Yield the rows of the rotation in every dtype, and of attention.

    The kernels of a pairing in a dtype, and of a cache dtype, take seconds to compile. Therefore
    the pairing that is not the config's is verified in one dtype, and so is NumPy's attention:
    that of bfloat16 is that of float32 with a rounding of keys and values.
    """
    spec = replace(rope.spec, interleaved=not rope.interleaved, blocks=(rope.rotary_dim,))
    other = RotaryEmbedding.from_spec(spec)
    for paired, dtypes in ((rope, DTYPES), (other, (OTHER_PAIRING_DTYPE,))):
        for dtype in dtypes:
            labels = ("rotation", dtype, pairing(paired))
            yield Row(*labels, "numpy", numpy_rotation(paired, heads, DTYPES[dtype]))
            yield from _exported_rows(labels, paired, heads)
    for dtype in ATTENTION_DTYPES:
        labels = ("attention", dtype, pairing(rope))
        if dtype == ATTENTION_DTYPES[-1]:
            yield Row(*labels, "numpy", numpy_attention(rope, heads, DTYPES[dtype]))
        yield from _exported_rows(labels, rope, heads)


def _exported_rows(
    labels: tuple[str, str, str], rope: RotaryEmbedding, heads: Heads
) -> Iterator[Row]:
    """Yield the row of each target; labels: part, dtype and pairing."""
    part, dtype, _ = labels
    write: Any = export.export_rope if part == "rotation" else export.export_attention
    counts = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    for target in TARGETS:
        try:
            model = write(rope, target=target, dtype=dtype, max_positions=MAX_POSITIONS, **counts)
        except ValueError as error:
            yield Row(*labels, target, None, str(error))
        else:
            yield Row(*labels, target, export.validate(model, rope))


def numpy_rotation(rope: RotaryEmbedding, heads: Heads, dtype: np.dtype[Any]) -> Report:
    """Rotate the queries and keys of a prefill, and of a decode step after it."""
    outcomes = []
    for case, start, stop in (("prefill", 0, TOKENS), ("decode step", TOKENS, TOKENS + 1)):
        ids = ids_by_axis(np.arange(start, stop)[None], rope.axes)
        q, k = (_vectors(count, ids, rope).astype(dtype) for count in heads)
        q_rot, k_rot = rope(q, k, ids)
        outcomes.append(_rotated(f"{case}, q", rope, q, ids, q_rot))
        outcomes.append(_rotated(f"{case}, k", rope, k, ids, k_rot))
    return Report(f"rotation by NumPy, {dtype}", tuple(outcomes))


def numpy_attention(rope: RotaryEmbedding, heads: Heads, dtype: np.dtype[Any]) -> Report:
    """Write a prompt and one more token to a cache of a dtype, and attend to it.

    The attention is compared with that of the rotated queries and the cache, which are compared
    with the exact rotation.
    """
    tokens = CACHED + 1
    ids = ids_by_axis(np.arange(tokens)[None], rope.axes)
    q, k, v = (_vectors(count, ids, rope) for count in (*heads, heads[1]))
    cache = KVCache.zeros(1, *k.shape[1:], dtype=dtype)
    results = []
    for start, stop in ((0, CACHED), (CACHED, tokens)):
        new = slice(start, stop)
        batch = Batch(
            seq_lens=[stop], query_lens=[stop - start], page_table=[[0]], page_size=tokens
        )
        plan = rope.plan(ids[0, new], layout="thd")
        q_rot = plan.append(q[0, new], k[0, new], v[0, new], cache, batch)
        results.append((q_rot, attention(q_rot, cache, batch)))
    q_rot, y = (np.concatenate(parts)[None] for parts in zip(*results, strict=True))
    outcomes = (
        _rotated("queries of append", rope, q, ids, q_rot),
        _rotated("keys of append", rope, k, ids, cache.key),
        _attended(q_rot, cache, y),
    )
    return Report(f"attention by NumPy, {dtype}", outcomes)


def _vectors(heads: int, ids: Array, rope: RotaryEmbedding) -> Array:
    """Return random vectors (batch, tokens, heads, head_dim) in float32, the same at each call."""
    rng = np.random.default_rng(heads)
    return rng.standard_normal((*ids.shape[:2], heads, rope.head_dim), np.float32)


def _rotated(case: str, rope: RotaryEmbedding, x: Array, ids: Array, result: Array) -> Outcome:
    """Compare a rotation of x with the exact one."""
    exact, bound = reference.rotation(rope.spec, x, ids, dtype=result.dtype)
    return Outcome(case, 0, x.shape, *compare(exact.error(result), bound))


def _attended(q: Array, cache: KVCache, result: Array) -> Outcome:
    """Compare the attention of queries to a cache with that in float64."""
    q_exact, k, v = (exact_attention.exactly(x).by_head() for x in (q, cache.key, cache.value))
    mask = exact_attention.causal_mask(q.shape[1], q.shape[1])
    exact = exact_attention.attention(q_exact, k, v, scale=q.shape[-1] ** -0.5, mask=mask)
    return Outcome("attention", 0, q.shape, *exact.result.by_head().compare(result))
