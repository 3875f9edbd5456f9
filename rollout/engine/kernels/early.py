"""Triton: kernels that are launched before their predecessor has ended (programmatic dependent launch, compute 9.0).

A decode step of few rows is a chain of short kernels. What costs time is the way from one to the next: a launch, the
first loads, the last stores, with the memory idle meanwhile. In a chain of early kernels each one calls `launch_next`,
may fetch what none before it in the chain writes (weights, keys and values of earlier steps, where rows stand), and
only then calls `wait`. So a kernel's programs are in place, and some of its data on their way, while its input is still
being computed. An ordinary kernel in the midst of a chain ends it, and another begins.

What is fetched before the wait is in the way of what is to be fetched behind one. Memory answers in turn: when a
kernel's programs, all at once, ask for weights that take memory four microseconds, then the few results that the kernel
before them waits for, in the L2 cache though they are, take two to four as well. So programs that share a
multiprocessor had better ask one after the other, as fast as memory gives: each but the first begins with a `pause`.

NOTE: a chain is only right if in each of its kernels some program waits: then what ran before a kernel's predecessor
has ended, too, when its own `wait` returns. And before the wait a kernel may read only what was there when the last
ordinary kernel before it started. What that one writes may be on its way yet: the chain's first kernel is launched when
its programs have ended, and only a wait makes sure that their stores are to be seen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.engine.kernels.constants import INTERPRETED


@triton.jit
def launch_next():
    """Lets the next kernel's programs start as soon as every program of this one has come here, or has ended."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """Returns when the kernel before has ended, and what it wrote is to be seen."""
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pause(nanoseconds):
    """Returns after so long, by the GPU's timer, which on an H200 ticks every 32 ns."""
    if not INTERPRETED:
        start = tl.extra.cuda.globaltimer()
        while tl.extra.cuda.globaltimer() - start < nanoseconds:
            pass
