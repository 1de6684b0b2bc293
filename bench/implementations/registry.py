"""The table of implementations of a rotation, rope_cpu's and those of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from rope_cpu.array_types import Array

from ..workload import DTYPES, Pair, Workload
from . import frameworks, numpy_forms, onnxruntime
from .base import Binding, UnavailableError

Bind = Callable[[Workload], Binding]


@dataclass(frozen=True)
class Implementation:
    """One way to rotate q and k, used as its users use it.

    role: "ours" or "peer". arithmetic: see Workload.error. whole: it rotates whole head vectors only. one_axis: it
    looks cos and sin up by one position. needs: modules it imports. new: it returns new arrays.
    """

    name: str
    bind: Bind
    role: str = "peer"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    pairings: tuple[bool, ...] = (False, True)
    arithmetic: str = "float32"
    whole: bool = True
    one_axis: bool = False
    needs: tuple[str, ...] = ()
    new: bool = False

    def missing(self, workload: Workload) -> str | None:
        """Return why it cannot be timed on this workload, or None."""
        rope = workload.rope
        for module in self.needs:
            if find_spec(module) is None:
                return f"{module} is not installed"
        if workload.dtype not in self.dtypes:
            return f"has no {workload.dtype}"
        if rope.interleaved not in self.pairings:
            return "rotates the other pairing only"
        if self.whole and (rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1):
            return "rotates whole head vectors only"
        if self.one_axis and rope.axes > 1:
            return "takes one position per token"
        return None

    def bound(self, workload: Workload) -> Binding:
        """Return the call, ready to be made; raise UnavailableError where this workload cannot be timed."""
        reason = self.missing(workload)
        if reason:
            raise UnavailableError(reason)
        return self.bind(workload)


def _plan(workload: Workload) -> Binding:
    plan, sets = workload.rope.plan(workload.ids, layout=workload.layout), workload.arguments()
    # By keyword, as programs do, and through a function, as the call below.
    return Binding(lambda q, k, out: plan(q, k, out=out), list(sets), sets[0][:2], workload.bshd)


def _new_arrays(workload: Workload) -> Binding:
    plan, pairs = workload.rope.plan(workload.ids, layout=workload.layout), workload.arrays()
    return Binding(plan, list(pairs), pairs[0], workload.bshd)


def _call(workload: Workload) -> Binding:
    rope, ids, layout, sets = workload.rope, workload.ids, workload.layout, workload.arguments()
    rows = np.atleast_2d(ids)
    if (
        rope.axes == 1
        and layout != "thd"
        and np.array_equal(rows, rows[:, :1] + np.arange(rows.shape[1]))
    ):
        offset = int(rows[0, 0]) if len(rows) == 1 else rows[:, 0]

        def call(q: Array, k: Array, out: Pair) -> Pair:
            return rope(q, k, offset=offset, layout=layout, out=out)
    else:

        def call(q: Array, k: Array, out: Pair) -> Pair:
            return rope(q, k, ids, layout=layout, out=out)

    return Binding(call, list(sets), sets[0][:2], workload.bshd)


_NOT_DOUBLE = ("float32", "float16", "bfloat16")

# Ours come first: others are compared with the first row of a case.
TABLE: tuple[Implementation, ...] = (
    Implementation("plan", _plan, role="ours", whole=False),
    Implementation("plan, new arrays", _new_arrays, role="ours", whole=False, new=True),
    Implementation("call", _call, role="ours", whole=False),
    Implementation("NumPy rotate_half", numpy_forms.rotate_half, pairings=(False,)),
    Implementation("NumPy complex", numpy_forms.as_complex, pairings=(True,)),
    *(
        # In float64 transformers rotates interleaved pairs in float32.
        Implementation(
            name, bind, dtypes=_NOT_DOUBLE, arithmetic="own", needs=("torch", "transformers")
        )
        for name, bind in (
            ("torch eager", frameworks.torch_eager),
            ("torch.compile", frameworks.torch_compiled),
        )
    ),
    Implementation("JAX jit", frameworks.jax_jit, dtypes=_NOT_DOUBLE, needs=("jax",)),
    *(
        Implementation(
            f"{title} {way}",
            onnxruntime.binder(target, way),
            dtypes=("float32", "float16"),
            arithmetic="own",
            one_axis=True,
            needs=("onnx", "onnxruntime"),
        )
        for target, title in onnxruntime.TITLES.items()
        for way in onnxruntime.WAYS
    ),
)

BY_NAME = {implementation.name: implementation for implementation in TABLE}
PEERS = tuple(row.name for row in TABLE if row.role == "peer")
