# SPDX-License-Identifier: Apache-2.0
"""Launching Triton kernels at little cost to the host.

What ``kernel[grid](...)`` does anew for each launch (binding arguments by name, describing each of
them, looking the description up as a string) costs several times the launch itself, and small
modules are as fast as their host. `launched` keeps the call as it is written and remembers the
compiled kernel under a key of its own: the same facts that Triton compiles for.

A tensor descriptor (``TensorDescriptor`` of Gluon) is encoded for the copy engine by Triton's
launcher at each launch, so a plan repeats such a launch by calling the leaf op again.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from ..recording import Launch, Opaque, note

# Options of a launch that are no arguments of the kernel.
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
_INT32 = range(-(1 << 31), 1 << 31)
# Releases whose compiled kernels were seen to take ``run(grid x, y, z, stream, function, metadata,
# launch metadata, two hooks, *arguments)``, with addresses for tensors.
_KNOWN = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)


class LaunchedKernel:
    """A kernel with Triton's calling syntax; all arguments but the options must be given."""

    def __init__(self, jit) -> None:
        self.jit = jit
        # Triton's interpreter has no compiled kernels.
        self.remembers = _KNOWN and isinstance(jit, JITFunction)
        self.names = tuple(jit.arg_names)
        self.remembered: dict = {}
        if self.remembers:
            self.constants = tuple(param.is_constexpr for param in jit.params)
            self.specialized = tuple(not param.do_not_specialize for param in jit.params)

    def __getitem__(self, grid: tuple):
        if not self.remembers:
            note(Opaque())
            return self.jit[grid]
        return lambda *args, **kwargs: self._launch(grid, args, kwargs)

    def _launch(self, grid: tuple, args: tuple, kwargs: dict) -> None:
        values = [*args, *[kwargs[name] for name in self.names[len(args) :]]]
        device = torch._C._cuda_getDevice()
        key = [device, *[kwargs.get(option) for option in _OPTIONS]]
        # What Triton specializes on: constants, dtypes and 16-byte alignment of tensors; of
        # integers their width, and where it may whether they are 1 or multiples of 16.
        arguments = list(values)
        described = False
        for i, value in enumerate(values):
            if self.constants[i] or value is None:
                key.append(value)
            elif isinstance(value, Tensor):
                address = value.data_ptr()
                arguments[i] = address
                key.append((value.dtype, value.is_cuda, address % 16 == 0))
            elif isinstance(value, int):
                wide = value not in _INT32
                if self.specialized[i]:
                    key.append((wide, value == 1, value % 16 == 0))
                else:
                    key.append(wide)
            elif hasattr(value, "block_shape"):
                described = True
                key.append((value.base.dtype, *value.block_shape, value.layout, value.padding))
            else:
                key.append(type(value))
        key = tuple(key)
        compiled = self.remembered.get(key)
        if compiled is None or watched():
            compiled = self.remembered[key] = self.jit[grid](*args, **kwargs)
        else:
            compiled.run(
                *whole_grid(grid),
                torch._C._cuda_getCurrentRawStream(device),
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *arguments,
            )
        note(Opaque() if described else Launch(compiled, whole_grid(grid), values))


def whole_grid(grid: tuple) -> tuple:
    """``grid`` with all three dimensions."""
    return (grid[0], grid[1] if len(grid) > 1 else 1, 1)


def watched() -> bool:
    """Whether something, a profiler, wants to be told of launches by Triton itself."""
    hook = knobs.runtime.launch_enter_hook
    return bool(hook if hook is None else getattr(hook, "calls", True))


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (and 1)."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def launched(jit) -> LaunchedKernel:
    """Decorator of a ``triton.jit`` kernel that host code launches."""
    return LaunchedKernel(jit)
