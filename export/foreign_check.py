"""The check of models of any origin: their rotations, how far they are off, and their repair."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy.tolerance import half_ulp, table_bound
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64

from .checks import check_rope
from .foreign import ForeignGraph, GraphRotation, inlined
from .validation.report import Outcome, Report

# Errors are measured below a near and a far position, besides the end of tables; more positions
# would take minutes. Positions that are compared at once.
NEAR = 4096
FAR = 131072
FARTHEST = 2**24
CHUNK = 4096

# The relative difference below which two numbers are the same.
SAME = 1e-3

Ropes = RotaryEmbedding | Mapping[str, RotaryEmbedding] | None


def check(
    model: onnx.ModelProto | str | os.PathLike[str], rope: Ropes = None, *, positions: int = FAR
) -> Report:
    """Measure how far the rotations of an ONNX model of any origin are off.

    They are read from the tables of operators that rotate, and from Cos and Sin of positions times
    frequencies. Each is compared with the nearest one of `rope`. Nothing is run, and the model is
    not changed.

    Parameters
    ----------
    model : onnx.ModelProto, str or os.PathLike
        A model, or the path of one.
    rope : RotaryEmbedding or mapping of str to RotaryEmbedding, optional
        The rotation that the model should have, or several by name, such as those of layer types;
        each of one sequence length. None: that by the model's own frequencies.
    positions : int
        Errors are measured below this position, in tables up to their end, at most 2^24.

    Returns
    -------
    Report
        An outcome for each rotation. Its `problem` says where it differs from `rope`, its `error`
        and `ratio` are those of cos and sin, and its `facts` hold what was read.

    Raises
    ------
    TypeError
        If an argument has another type.
    OSError
        If there is no file at the path.
    ValueError
        If the model cannot be read, or no rotation is found in it; if a rotary embedding is for no
        or for several lengths; if `positions` is out of range.

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> rope = RotaryEmbedding(16)
    >>> model = export.export_rope(rope, max_positions=32)
    >>> export.check(model, rope).passed
    True
    >>> export.check(model, RotaryEmbedding(16, rope_theta=5e5)).worst.problem
    'frequencies off by up to 0.122; base 10000.0, not 500000.0'
    """
    if not isinstance(model, onnx.ModelProto | str | os.PathLike):
        rule = "be an onnx.ModelProto or a path"
        raise ArgumentTypeError("model", Finding.type_of(model), rule)
    expected = _expected(rope)
    whole_number("positions", positions, 1, FARTHEST)
    title = "model"
    folder = ""
    with _read_errors():
        if not isinstance(model, onnx.ModelProto):
            title = os.fspath(model)
            folder = os.path.dirname(title)
            model = onnx.load(title, format="protobuf", load_external_data=False)
        rotations = ForeignGraph(inlined(model), folder).rotations()
        compared = [_compared(rotation, expected, positions) for rotation in rotations]
        return Report(title, tuple(outcome for _, outcome in compared))


def repaired(path: str, rope: Ropes, positions: int) -> tuple[onnx.ModelProto, Report]:
    """Return a model that is exact where only its cos and sin are wrong, and the report before."""
    expected = _expected(rope)
    outcomes = []
    with _read_errors():
        model = inlined(onnx.load(path, format="protobuf"))
        for rotation in ForeignGraph(model, "").rotations():
            exact, outcome = _compared(rotation, expected, positions)
            outcomes.append(outcome)
            if outcome.ratio > 1 and not outcome.problem:
                rotation.replace(exact)
    return model, Report(path, tuple(outcomes))


@contextmanager
def _read_errors() -> Iterator[None]:
    """Raise ArgumentError for the errors of onnx and protobuf, which have no common class."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        finding = Finding(f"cannot be read: {cut(str(error))}")
        raise ArgumentError("model", finding, "be an ONNX model with rotations") from error


def _expected(rope: Ropes) -> dict[str, RotaryEmbedding]:
    """Return rotary embeddings of one axis by name; raise if they are for no or several lengths."""
    named = rope if isinstance(rope, Mapping) else {} if rope is None else {"": rope}
    return {name: _with_one_axis(each) for name, each in named.items()}


def _with_one_axis(rope: RotaryEmbedding) -> RotaryEmbedding:
    """Return the rotation by one frequency for each pair, on whichever axis it rotates.

    Raises TypeError or ValueError unless `rope` is for one length.
    """
    check_rope(rope)
    inv_freq = np.abs(rope.spec.inv_freq[0, :, 0]).max(axis=0)
    return _rope(inv_freq, rope.attention_factor, rope.interleaved)


def _rope(inv_freq: Float64, factor: float, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding.from_inv_freq(inv_freq, attention_factor=factor, interleaved=interleaved)


def _compared(
    rotation: GraphRotation, expected: Mapping[str, RotaryEmbedding], positions: int
) -> tuple[RotaryEmbedding, Outcome]:
    """Return the exact rotation, the nearest expected one, and how far a rotation is off it."""
    cos, _ = rotation.values(np.arange(1))
    factor = float(cos.mean(dtype=np.float64))
    own = _rope(rotation.inv_freq.astype(np.float64), factor, rotation.interleaved)
    name = min(expected, key=lambda name: _distance(own, expected[name]), default="")
    wanted = expected.get(name, own)
    exact = wanted if _distance(own, wanted) < np.inf else own
    ends = {min(end, rotation.rows or end) for end in (NEAR, positions, rotation.rows or NEAR)}
    errors = _largest_errors(rotation, exact, max(ends))
    rounding = 2 * float(half_ulp(1.0, cos.dtype))
    # Frequencies of tables are only known as well as these are rounded. Files round an attention
    # factor and its product in float32, and large angles in float64 at best.
    of_factor = min(rounding, 2.0**-23) if exact.attention_factor != 1 else 0.0
    slack = max(ends) * 2.0**-52 + (rounding if exact is own else of_factor)
    tolerance = exact.attention_factor * float(table_bound(1.0, 1.0, cos.dtype) + slack)
    ratio = float(errors.max()) / tolerance
    problem = "; ".join(_differences(own, wanted, SAME + rounding, 2 * rounding / max(ends)))
    facts = {
        "read from": f"{rotation.source}, {cos.dtype.name}",
        "rows": rotation.rows or "none: computed",
        **_facts(own),
        "config": name or None,
        **{f"largest error below {n}": float(f"{errors[:n].max():.2g}") for n in sorted(ends)},
    }
    names = ", ".join(rotation.names)
    shape = (max(ends), cos.shape[-1])
    outcome = Outcome(names, 0, shape, float(errors.max()), ratio, problem, facts=facts)
    return exact, outcome


def _distance(own: RotaryEmbedding, other: RotaryEmbedding) -> float:
    """Return the largest difference between frequencies, infinite for another number of pairs."""
    if own.rotary_dim != other.rotary_dim:
        return np.inf
    return float(np.abs(own.inv_freq - other.inv_freq).max())


def _facts(rope: RotaryEmbedding) -> dict[str, Any]:
    """Return the facts of a rotation that a config determines.

    The base is that of the first two frequencies, which most rope types do not scale, and None
    where the third is not of the same series. The scaling is that of the last wavelength.
    """
    inv_freq = np.maximum(rope.inv_freq, 1e-12)  # some types do not rotate the last pairs
    pairs = len(inv_freq)
    ratios = inv_freq[:2] / inv_freq[1:3]
    is_series = pairs > 2 and np.isclose(ratios[0], ratios[1], SAME)
    return {
        "pairs": pairs,
        "interleaved": rope.interleaved,
        "base": float(f"{ratios[0] ** pairs:.5g}") if is_series else None,
        "scaling": float(f"{ratios[0] ** (1 - pairs) / inv_freq[-1]:.5g}") if is_series else None,
        "attention factor": float(f"{rope.attention_factor:.6g}"),
    }


def _differences(
    own: RotaryEmbedding, wanted: RotaryEmbedding, relative: float, absolute: float
) -> Iterator[str]:
    """Yield the differences of a rotation from the expected one, in words.

    relative, absolute: tolerances of numbers and of frequencies, as tables fix low ones badly.
    """
    if _distance(own, wanted) < np.inf:
        if np.allclose(own.inv_freq, wanted.inv_freq, relative, absolute):
            own = _rope(wanted.inv_freq, own.attention_factor, own.interleaved)
        else:
            yield f"frequencies off by up to {_distance(own, wanted):.3g}"
    given = _facts(own)
    for name, value in _facts(wanted).items():
        if None not in (given[name], value) and not np.isclose(given[name], value, relative):
            yield f"{name} {given[name]}, not {value}"


def _largest_errors(rotation: GraphRotation, exact: RotaryEmbedding, end: int) -> Float64:
    """Return the largest error of cos and sin at each position below an end."""
    errors = []
    for ids in np.array_split(np.arange(end), end // CHUNK + 1):
        values = rotation.values(ids).astype(np.float64)
        error = np.abs(values - np.stack(exact.cos_sin(ids, np.float64)))
        errors.append(error.max(axis=(0, 2)))
    return np.concatenate(errors)
