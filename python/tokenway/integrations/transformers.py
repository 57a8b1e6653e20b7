"""Hugging Face transformers: experts in parallel through Tokenway, by transformers' own registry.

    from tokenway.integrations import transformers as tokenway_transformers

    tokenway_transformers.register()  # on every rank, before the model is made
    config = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="tokenway")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)  # under torchrun

docs/FRAMEWORKS.md says what works, and what ranks must do alike.
"""

from __future__ import annotations

from typing import Any

from tokenway.integrations import supported

# The registry came with 5.24; what may come after it, nobody has tried.
LEAST, BELOW = "5.24", "5.25"


def register(
    name: str = "tokenway", *, max_tokens: int | None = None, equal: bool = False, timeout: float | None = None
) -> type:
    """Makes `DistributedConfig(ep_size=..., ep_implementation=name)` mean Tokenway, for models that are made in this
    process from now on. Not collective; all ranks call it alike. Returns the class that is registered.

    Where the ranks that experts are spread over hold one batch (`ep_size == tp_size`) nothing needs to be said: each
    sends its share of the tokens. Where they hold batches of their own (FSDP), no rank knows the sizes of others', so
    one of two must be: max_tokens, the most tokens (batch times length) of a rank in a forward pass; or equal, that all
    ranks have equally many in each, as batches have that are padded alike. timeout: seconds after which a late rank is
    an error (default 100).

    Comms and groups are made in the first forward pass, and grow in one that has more tokens than all before
    (`tokenway.integrations.groups`): collective among the ranks of the experts, which make that pass together, and not
    in a capture. A model's layers share one group. Errors: Unsupported, which names the versions, where transformers or
    PyTorch is missing, too old or too new; InvalidArgument."""
    supported.check_framework("transformers", LEAST, BELOW)
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    from tokenway.integrations.groups import Sizes
    from tokenway.integrations.transformers_experts import Experts

    sizes = Sizes(max_tokens, equal)

    class TokenwayEP(EPImplementation):
        """The experts of one layer, reached through Tokenway."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
            super().__init__(experts, ep_mesh, tp_mesh)
            self.exchange = Experts(experts, self.experts_forward, ep_mesh, tp_mesh, sizes, timeout)

        def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            return self.exchange(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(name, TokenwayEP)
    return TokenwayEP
