# SPDX-License-Identifier: Apache-2.0
"""State of delayed scaling, in place: recording amaxes, rolling histories, renewing scales."""

# pylint: disable=comparison-with-itself

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import FLOAT32_MAX, runs_on_its_device
from .launch import launched, next_power_of_2

_PER_LAUNCH = 8


@triton.jit
def fold_amax(history, amax, slot):
    """history[slot] = max(history[slot], amax[0]); a NaN on either side loses to a number."""
    old = tl.load(history + slot)
    new = tl.load(amax)
    # Written out because the interpreter's maximum propagates NaN.
    tl.store(history + slot, tl.where((new > old) | (old != old), new, old))


@launched
@triton.jit(do_not_specialize=["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"])
def record_amax_kernel(
    history, a0, a1, a2, a3, a4, a5, a6, a7, s0, s1, s2, s3, s4, s5, s6, s7, N: tl.constexpr
):
    """Fold N amaxes into row 0 of the history, one after the other, so slots may repeat.

    One warp: every load is then ordered after the stores before it.
    """
    fold_amax(history, a0, s0)
    if N > 1:
        fold_amax(history, a1, s1)
    if N > 2:
        fold_amax(history, a2, s2)
    if N > 3:
        fold_amax(history, a3, s3)
    if N > 4:
        fold_amax(history, a4, s4)
    if N > 5:
        fold_amax(history, a5, s5)
    if N > 6:
        fold_amax(history, a6, s6)
    if N > 7:
        fold_amax(history, a7, s7)


@launched
@triton.jit(do_not_specialize=["L", "n"])
def delayed_scaling_update_kernel(
    history, scale, scaled_max, L, n, MOST_RECENT: tl.constexpr, BL: tl.constexpr
):
    """One program per slot (column of ``history [L, n]``)."""
    slot = tl.program_id(0)
    i = tl.arange(0, BL)
    column = history + i * n + slot
    last = tl.load(history + slot)
    older = tl.load(column, mask=(i > 0) & (i < L), other=0.0)
    rolled = tl.load(column + n, mask=i + 1 < L, other=0.0)
    rolled = tl.where(i == L - 1, last, rolled)
    rolled = tl.where(i == 0, 0.0, rolled)
    # All of the column is read before any of it is overwritten.
    tl.debug_barrier()
    tl.store(column, rolled, mask=i < tl.where(last != 0.0, L, 0))

    amax = last
    if not MOST_RECENT:
        amax = tl.max(tl.where(i == 0, last, older), 0)
        amax = tl.where(last == 0.0, 0.0, amax)
    usable = (amax > 0.0) & (amax < float("inf"))
    s = tl.div_rn(tl.cast(scaled_max, tl.float32), tl.where(usable, amax, 1.0))
    s = tl.where(s == float("inf"), FLOAT32_MAX, s)
    tl.store(scale + slot, tl.where(usable, s, tl.load(scale + slot)))


@runs_on_its_device
def record_amax_(history: Tensor, amaxes: list[Tensor], slots: list[int]) -> None:
    """``history[0, slot] = max(history[0, slot], amax)`` for each amax (fp32 [1]) and its slot.

    In place on ``history`` fp32 [L, n]; a NaN amax changes nothing. One launch for eight amaxes.
    """
    for start in range(0, len(amaxes), _PER_LAUNCH):
        some = amaxes[start : start + _PER_LAUNCH]
        absent = _PER_LAUNCH - len(some)
        record_amax_kernel[(1,)](
            history,
            *some,
            *[None] * absent,
            *slots[start : start + len(some)],
            *[0] * absent,
            N=len(some),
            num_warps=1,
        )


@runs_on_its_device
def delayed_scaling_update_(
    history: Tensor, scale: Tensor, fp8_max: float, margin: float, algo: str
) -> None:
    """Roll ``history`` fp32 [L, n] and renew ``scale`` fp32 [n], in place; one launch.

    Per slot, with ``last = history[0]``: if it is not 0 the column moves up by one, ``last``
    becomes its last row and row 0 becomes 0 (with L = 1 just 0). Then ``scale = fp8_max *
    2^-margin / amax`` where the amax is finite and positive: ``last`` for ``algo``
    ``"most_recent"``, else the largest of ``last`` and the old rows from 1 on.
    """
    if algo not in ("max", "most_recent"):
        raise ValueError(
            f"The amax compute algorithm is {algo!r}. Use 'max' or 'most_recent', or give the "
            "recipe a function."
        )
    length, slots = history.shape
    if slots == 0:
        return
    delayed_scaling_update_kernel[(slots,)](
        history,
        scale,
        fp8_max * 2.0**-margin,
        length,
        slots,
        MOST_RECENT=algo == "most_recent",
        BL=next_power_of_2(length),
        num_warps=1 if length <= 128 else 4,
    )
