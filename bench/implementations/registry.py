"""The table of implementations of a rotation, ours and others': what is timed, and what the tests compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from rope_cpu import rotation
from rope_cpu.kernels import threads

from ..workload import Array, Workload
from . import frameworks, numpy_forms, onnxruntime
from .base import Binding, UnavailableError

Bind = Callable[[Workload], Binding]


@dataclass(frozen=True)
class Implementation:
    """One way to rotate q and k, used as its users use it.

    role: "ours", "kernel" (part of ours, timed by itself) or "peer". arithmetic: see Workload.error.
    whole: it rotates whole head vectors only. one_axis: it looks cos and sin up by one position. needs: modules it
    imports. new: it returns new arrays.
    """

    name: str
    bind: Bind
    role: str = "peer"
    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
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
            return "is for the other pairing"
        if self.whole and (rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1):
            return "rotates whole head vectors only"
        if self.one_axis and rope.axes > 1:
            return "takes one position a token"
        return None

    def bound(self, workload: Workload) -> Binding:
        """Return the call, ready to be made; raise UnavailableError where it cannot be made."""
        reason = self.missing(workload)
        if reason:
            raise UnavailableError(reason)
        return self.bind(workload)


def _targets(workload: Workload, pairs: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    return pairs if workload.in_place else workload.outs()


def _plan(workload: Workload) -> Binding:
    pairs = workload.arrays()
    plan = workload.rope.plan(workload.ids, layout=workload.layout)
    sets = [(q, k, out) for (q, k), out in zip(pairs, _targets(workload, pairs), strict=True)]
    return Binding(plan, sets, pairs[0], workload.bshd)


def _new_arrays(workload: Workload) -> Binding:
    pairs = workload.arrays()
    plan = workload.rope.plan(workload.ids, layout=workload.layout)
    return Binding(plan, list(pairs), pairs[0], workload.bshd)


def _call(workload: Workload) -> Binding:
    pairs, rope, ids, layout = workload.arrays(), workload.rope, workload.ids, workload.layout
    rows = np.atleast_2d(ids)
    if rope.axes == 1 and layout != "thd" and np.array_equal(rows, rows[:, :1] + np.arange(rows.shape[1])):
        offset = int(rows[0, 0]) if len(rows) == 1 else rows[:, 0]

        def call(q: Array, k: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            return rope(q, k, offset=offset, layout=layout, out=out)
    else:

        def call(q: Array, k: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            return rope(q, k, ids, layout=layout, out=out)

    sets = [(q, k, out) for (q, k), out in zip(pairs, _targets(workload, pairs), strict=True)]
    return Binding(call, sets, pairs[0], workload.bshd)


def _bare_kernel(workload: Workload) -> Binding:
    """Bind the compiled kernel with what a plan gives it, q and k in the order and the elements that it knows."""
    pairs, rope = workload.arrays(), workload.rope
    plan, dtype = rope.plan(workload.ids, layout=workload.layout), pairs[0][0].dtype
    found, arranged = rotation.kernel_of(dtype, rope.interleaved), rotation.ARRANGED[workload.layout]
    if found is None:
        raise UnavailableError(f"this processor has no instructions for {dtype}")
    (kernel, bits), tables, targets = found, plan._cos_sin(rotation.REAL_OF[dtype]), _targets(workload, pairs)

    def seen(*arrays: Array) -> list[Array]:
        as_bits = [x if bits is None else x.view(bits) for x in arrays]
        return [x if arranged is None else arranged(x) for x in as_bits]

    more = (*tables, plan._pairing.sizes, 2, threads.usable())
    sets = [(*seen(*pair, *out), *more) for pair, out in zip(pairs, targets, strict=True)]
    return Binding(kernel, sets, pairs[0], workload.bshd, lambda _: targets[0])


_NOT_DOUBLE = ("float32", "float16", "bfloat16")

# Ours come first: the first row that a case names is what the others are compared with.
TABLE: tuple[Implementation, ...] = (
    Implementation("plan", _plan, role="ours", whole=False),
    Implementation("plan, new arrays", _new_arrays, role="ours", whole=False, new=True),
    Implementation("call", _call, role="ours", whole=False),
    Implementation("bare kernel", _bare_kernel, role="kernel", whole=False),
    Implementation("NumPy rotate_half", numpy_forms.rotate_half, pairings=(False,)),
    Implementation("NumPy complex", numpy_forms.as_complex, pairings=(True,)),
    *(
        # In float64 transformers rotates interleaved pairs in float32.
        Implementation(name, bind, dtypes=_NOT_DOUBLE, arithmetic="own", needs=("torch", "transformers"))
        for name, bind in (("torch eager", frameworks.torch_eager), ("torch.compile", frameworks.torch_compiled))
    ),
    Implementation("JAX jit", frameworks.jax_jit, dtypes=_NOT_DOUBLE, needs=("jax",)),
    *(
        Implementation(
            f"{onnxruntime.TITLES[form]} {way}",
            onnxruntime.binder(form, way),
            dtypes=("float32", "float16"),
            arithmetic="own",
            one_axis=True,
            needs=("onnx", "onnxruntime"),
        )
        for form in onnxruntime.TITLES
        for way in onnxruntime.WAYS
    ),
)

BY_NAME = {implementation.name: implementation for implementation in TABLE}
PEERS = tuple(row.name for row in TABLE if row.role == "peer")
