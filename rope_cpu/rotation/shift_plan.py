"""`UniformShiftPlan`: one shift for all tokens of an array, however many there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from rope_cpu.arguments.arrays import check_array
from rope_cpu.arguments.scalars import check_table_size
from rope_cpu.array_types import COMPUTE_DTYPES, LAYOUT_AXES, Array
from rope_cpu.rotation.cos_sin import CosSin, RepeatedCosSin
from rope_cpu.rotation.plan import RotaryPlan
from rope_cpu.serving import launches as serving
from rope_cpu.serving.rms_norm import RMSNorm


class UniformShiftPlan(RotaryPlan):
    """A plan whose cos and sin are those of one token, and which rotates every token by them.

    `RotaryEmbedding.shift_plan` makes it from one delta. The kernel of arrays takes cos and sin of
    every token, so that they are rotated by a plan for as many tokens as they have. The latest such
    plan is kept, because the layers of a model have equally many. The kernel of cached keys takes
    any strides, and so the cos and sin of one token, with stride 0.
    """

    __slots__ = ("_latest", "_one_token")
    _latest: RotaryPlan | None

    def __init__(self, cos_sin: CosSin, *arguments: Any) -> None:
        super().__init__(cos_sin, *arguments)
        self._one_token = cos_sin
        self._latest = None

    def __call__(
        self,
        q: Array,
        k: Array,
        out: tuple[Array, Array] | None = None,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> tuple[Array, Array]:
        """Rotate queries and keys; see `RotaryPlan.__call__`."""
        return self._plan_like("q", q)(q, k, out, q_norm=q_norm, k_norm=k_norm)

    def rotate(self, x: Array, out: Array | None = None, *, norm: RMSNorm | None = None) -> Array:
        """Rotate one array; see `RotaryPlan.rotate`."""
        return self._plan_like("keys", x).rotate(x, out, norm=norm)

    def for_tokens(self, tokens: int, compute_dtype: str = "float32") -> RotaryPlan:
        """Return the plan of this shift for a number of tokens.

        Parameters
        ----------
        tokens : int
            Number of tokens of the arrays that will be rotated.
        compute_dtype : {"float32", "float64"}
            The dtype of the cos and sin that are computed at once.

        Returns
        -------
        plan : RotaryPlan
            The same object if the last call was for as many tokens.

        Examples
        --------
        >>> import rope_cpu
        >>> rope_cpu.RotaryEmbedding(64).shift_plan(-10).for_tokens(3)
        RotaryPlan(batch=1, seq=3, layout='bshd', shift, head_dim=64, rotary_dim=64, \
interleaved=False)
        """
        plan = self._latest
        if plan is None or plan._table_shape()[1] != tokens:
            plan = RotaryPlan(
                RepeatedCosSin(self._one_token, tokens),
                self._pairing,
                self._positions,
                self._layout,
                self._operation,
                compute_dtype,
            )
            self._latest = plan
        return plan

    def _plan_like(self, name: str, x: object) -> RotaryPlan:
        """Return the plan for as many tokens as an array has."""
        x = check_array(name, x, self._layout)
        tokens = x.shape[LAYOUT_AXES[self._layout][1]]
        rows, _, heads, pairs = self._table_shape()
        check_table_size(f"number of tokens of {name}", tokens, rows, tokens, heads, pairs)
        return self.for_tokens(tokens, COMPUTE_DTYPES[x.dtype])

    def _rotation_for(self, tokens: int) -> serving.Rotation:
        rotation = self._append_rotation()
        table = rotation.cos_sin
        repeated = np.broadcast_to(table, (*table.shape[:2], tokens, *table.shape[3:]))
        return serving.Rotation(repeated, *self._pairing, self._layout, self._subjects())

    def __repr__(self) -> str:
        return super().__repr__().replace("seq=1,", "seq=any,", 1)

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return UniformShiftPlan, arguments
