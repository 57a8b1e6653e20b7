"""Dispatch and combine that gradients flow through, for training. Needs PyTorch; on the CPU and on CUDA devices.

    group = tokenway.autograd.make_group(comm, experts=64, top_k=2, hidden=1024, max_tokens=512)
    routed = tokenway.autograd.dispatch(group, tokens, topk_ids, topk_weights)
    grouped = tokenway.autograd.by_expert(routed)  # rows in the order of this rank's experts
    results = experts(grouped.rows, grouped.sizes)
    out = tokenway.autograd.combine(routed, grouped.sum(results * grouped.weights[:, None]))

The backward of dispatch is a combine of the same handle, that of combine a dispatch of it: the routing that the forward
pass has cached serves both. Each is one step, so a layer takes two steps forward and two backward.

Weights are applied where the experts are, in PyTorch: `Routed.weights` are differentiable, and their gradients go back
to the owner beside those of the tokens, in the same combine (`Group.combine`, choice_values). Exactly one rank has a
gradient for a (token, k), and the owner takes it from there, a float32, bit for bit. `make_group` makes a group whose
window has room for that.

In a group of high throughput layouts are "flat" and "grouped", as large as what comes. A dispatch then begins with the
exchange of counts, a third step of the forward pass. The routing is cached with its counts, so the backward pass has
two as ever.

What a step brings is copied out of the window at once and the lane given back: autograd never keeps a view of the
window, and any number of layers may have passed forward before the first backward, with one lane. What a layer keeps
until then is a `Handle`: ids, weights and slots, no rows. Rows that no token came to are 0, not arbitrary.

Every rank must make the same steps in the same order, in the backward pass too. Autograd makes them in the reverse
order of the forward pass, so it is enough that all ranks run the same model: the same layers, the same choice of what
requires gradients, a backward on every rank, with zero tokens too. No part of the graph may be left out on a rank
because no rows came (`if rows.shape[0]: ...`): a gradient of None is a step all the same, a node that is not there is
not. `torch.utils.checkpoint` repeats a layer's forward steps in the backward pass, on all ranks alike.

Gathers and reduce-scatters are each other's backward: `all_gatherv` and `reduce_scatterv` are those of `Group`, a step
forward and one backward.

On CUDA devices all work is enqueued on the current stream; backward runs on the stream of its forward, as PyTorch has
it. Only `by_expert` waits for the device, to learn how many rows there are, and in high throughput `dispatch`, unless
the group has max_recv_tokens: then a graph can capture forward and backward, with experts that take `Routed.offsets`
(`tokenway.experts`). Outputs have a fixed number of rows there, 0 beyond those that came. `torch.compile` compiles what
is around these functions, not through them: not with fullgraph=True. Gradients of gradients are not supported.

Errors are those of `Group.route`, `Group.dispatch` and `Group.combine`; what is raised in a backward pass comes out of
`backward()`. A rank that raises tells its peers where it can (PeerRefused), else they hear when it leaves its group.
"""

from tokenway.pytorch.autograd import Grouped, Routed, by_expert, combine, dispatch, make_group
from tokenway.pytorch.collective_gradients import all_gatherv, reduce_scatterv
from tokenway.pytorch.gradients import weight_columns

__all__ = [
    "Grouped",
    "Routed",
    "all_gatherv",
    "by_expert",
    "combine",
    "dispatch",
    "make_group",
    "reduce_scatterv",
    "weight_columns",
]
