"""A delay on a CUDA stream that costs the device what a collective's kernel does."""

from __future__ import annotations

import torch

_DELAY = """
extern "C" __global__ void delay(int ticks) {
  if (threadIdx.x == 0) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < 100ull * ticks);
  }
  __syncthreads();
}
"""
_TICK_S = 1e-7


class Delay:
    """A kernel that takes a given time, whatever the clocks of the multiprocessors.

    It occupies as many of them as NCCL's kernels do: 16 blocks of 512 threads, of which one each
    reads the global timer.
    """

    def __init__(self) -> None:
        self._kernel = torch.cuda._compile_kernel(_DELAY, "delay")

    def enqueue(self, seconds: float) -> None:
        """Hold back the current stream."""
        ticks = round(seconds / _TICK_S)
        if ticks:
            self._kernel(grid=(16, 1, 1), block=(512, 1, 1), args=[ticks])
