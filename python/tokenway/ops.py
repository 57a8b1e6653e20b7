"""Dispatch and combine as registered PyTorch ops, for `torch.compile` and other graph capture. Needs PyTorch.

    group_id = tokenway.ops.register(group)
    order = tokenway.ops.start()
    recv, ids, weights, counts, order = torch.ops.tokenway.dispatch(
        tokens, topk_ids, topk_weights, order, group_id, bound, "rank_major"
    )
    out, order = torch.ops.tokenway.combine(experts(recv), order, group_id, tokens.shape[0], "none")

A bias, from which the sums of a combine start (`Group.combine`), is its last argument, optional and differentiable.
The backward pass of a combine is a step whichever of rows and bias it is for, so ranks must be alike in whether there
is one.

Every rank must issue its steps in the same order, which a compiler cannot know: so each op takes and returns an order
token, and a chain of tokens is a chain of steps. The token also says which dispatch a combine answers. Use each token
once: compilers merge calls whose inputs are the same. Return the last one from a compiled function: the ops are
registered as having side effects, so that FX keeps one whose outputs are unused, but not every compiler asks.

A handle, and the lane that it leases, is kept from a dispatch to its combine, and at the longest until the group is
closed: a dispatch that is never combined (a forward pass that stops there) takes a lane of the group for good.

Gradients, of tokens, weights and rows, are those of `tokenway.autograd`: in the layout rank_major, with the weighting
"none", in a group of `tokenway.autograd.make_group`. There rows may have H elements in both ops, those that no token
came to are 0, and a handle holds no lane: the token of its dispatch keeps it while the backward pass needs it. The
gradient of an order token is the order token of the backward pass, whose steps so are a chain too, that of the forward
pass reversed. Begin each training step with a new token, or the chain would go on into the graph of the one before.
Where no backward pass is to come, call the ops under `torch.no_grad`.

The order token is a CPU tensor, on CUDA devices too: it says in which order the host makes calls, and a token on the
device would have to be waited for. `torch.cuda.graph` captures the ops as it captures the calls of a group: each replay
repeats the steps of the capture. Inductor's own graphs (mode="reduce-overhead") leave out what has inputs on the CPU,
and so compiled functions that take a token.

Gathers and reduce-scatters of sizes that the host knows are ops too, with the same tokens, in any group:

    rows, order = torch.ops.tokenway.all_gatherv(tokens, order, group_id, [3, 0, 5])
    out, order = torch.ops.tokenway.reduce_scatterv(partials, order, group_id, [3, 0, 5])

Outputs are fresh tensors, never views of the window, so that a compiler may keep or move them. Ops go through
`torch.library.Library.impl`, which costs a third of what `torch.library.custom_op` costs per call.
"""

from tokenway.pytorch.ops import register, start

__all__ = ["register", "start"]
