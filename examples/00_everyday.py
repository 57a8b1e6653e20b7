import numpy as np
from ml_dtypes import bfloat16

import tokenway as tw
from tokenway import gating


def experts(recv):
    """Stands for a grouped GEMM: expert e of a rank multiplies by e + 1. [N, b, H] -> [N, b, H]"""
    here = np.where(recv.ids >= 0, recv.weights * (recv.ids + 1), 0).sum(axis=-1, keepdims=True)
    return (recv.tokens.astype(np.float32) * here).astype(bfloat16)


def rank_main():
    rng = np.random.default_rng()
    tokens = rng.standard_normal((100, 7168)).astype(bfloat16)
    topk_ids, topk_weights = gating.softmax_topk(rng.standard_normal((100, 256)), 8)

    comm = tw.connect()  # finds the other ranks
    with tw.Group(comm, experts=256, top_k=8, hidden=7168, max_tokens=128) as group:
        handle = group.route(topk_ids, topk_weights)
        recv = group.dispatch(handle, tokens)  # recv.tokens, .ids, .weights, .counts, .offsets
        out = group.combine(handle, experts(recv))  # [T, hidden]
    comm.close()
    return comm.rank, recv.counts.sum(), out.shape


if __name__ == "__main__":
    for rank, rows, shape in tw.run(rank_main, 4):
        print(f"rank {rank}: {rows} rows received, {shape} returned")
