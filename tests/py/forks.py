"""Processes forked from one that has imported what they need: else each takes two seconds of a core to import PyTorch.

A process has one such server, whose imports are those that were named when it started; so they are named here alone.
"""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed", "ml_dtypes", "tokenway"])  # what is not there is left out
