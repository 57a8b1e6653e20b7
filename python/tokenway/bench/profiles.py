"""The MoE layers that the benchmarks know, by the names of public models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenway.gating import sigmoid_group_topk, softmax_topk

GATINGS = ("softmax_topk", "topk_softmax", "sigmoid_group_topk")


@dataclass(frozen=True)
class Profile:
    """One model's MoE layer, as far as dispatch and combine see it.

    gating is one of GATINGS; groups, topk_groups and scale matter to sigmoid_group_topk only.
    experts counts routed experts: shared ones run on every token's own rank and never travel. inner: elements inside
    one of them.
    """

    name: str
    hidden: int
    experts: int
    top_k: int
    inner: int
    gating: str
    groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0

    def gate(self, logits: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The model's gate: logits [T, E] -> (ids int32 [T, K], weights float32 [T, K]).

        bias: float32 [E] or None, for sigmoid_group_topk only.
        """
        if self.gating == "sigmoid_group_topk":
            return sigmoid_group_topk(logits, self.top_k, self.groups, self.topk_groups, bias, self.scale)
        if bias is not None:
            raise ValueError(f"bias: given; must be None with gating {self.gating}")
        return softmax_topk(logits, self.top_k, topk_first=self.gating == "topk_softmax")


_DEEPSEEK = {
    "hidden": 7168,
    "experts": 256,
    "top_k": 8,
    "inner": 2048,
    "gating": "sigmoid_group_topk",
    "groups": 8,
    "topk_groups": 4,
    "scale": 2.5,
}

_ALL = (
    # hidden_size, n_routed_experts, num_experts_per_tok, moe_intermediate_size, n_group, topk_group and
    # routed_scaling_factor of https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json;
    # DeepSeek-R1 has the same architecture and values.
    Profile("deepseek-v3", **_DEEPSEEK),
    Profile("deepseek-r1", **_DEEPSEEK),
    # hidden_size, num_experts, num_experts_per_tok, moe_intermediate_size, norm_topk_prob = true of
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json and .../Qwen3-235B-A22B/...
    Profile("qwen3-30b-a3b", hidden=2048, experts=128, top_k=8, inner=768, gating="softmax_topk"),
    Profile("qwen3-235b-a22b", hidden=4096, experts=128, top_k=8, inner=1536, gating="softmax_topk"),
    # hidden_size, num_local_experts, num_experts_per_tok, intermediate_size of
    # https://huggingface.co/mistralai/Mixtral-8x7B-Instruct-v0.1/blob/main/config.json
    Profile("mixtral-8x7b", hidden=4096, experts=8, top_k=2, inner=14336, gating="softmax_topk"),
    # hidden_size, num_experts, experts_per_token, intermediate_size of ModelConfig in gpt_oss/torch/model.py,
    # https://github.com/openai/gpt-oss
    Profile("gpt-oss-120b", hidden=2880, experts=128, top_k=4, inner=2880, gating="topk_softmax"),
    # hidden_size, n_routed_experts, num_experts_per_tok, moe_intermediate_size, n_group = 1, routed_scaling_factor of
    # https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json
    Profile("kimi-k2", 7168, experts=384, top_k=8, inner=2048, gating="sigmoid_group_topk", scale=2.827),
)

PROFILES: dict[str, Profile] = {p.name: p for p in _ALL}
