"""Models of transformers whose experts two ranks share through Tokenway, against the same models on one rank."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from frameworks import need_devices, need_version, within
from harness import AT_ONCE, HANGS, said
from transformers_ranks import EXPERTS, LAYERS, MODELS, MUTATIONS, NEW, WAYS, four_ranks, two_ranks

import tokenway as tw

pytestmark = [pytest.mark.torch, pytest.mark.processes]

PINNED = "5.24.0"
# Results are not the same bits: attention that two ranks share adds in another order, and products of other numbers of
# rows may. float32 of some hundred additions: a few units in the last place of the largest.
CLOSE = 2e-5
STEPS = 2 * LAYERS  # of a forward pass: a dispatch and a combine in each layer


@pytest.fixture(scope="module")
def pinned(torch: Any) -> None:
    """Skips without the version that these tests are for."""
    need_version("transformers", PINNED)


@pytest.fixture(scope="module")
def ran(pinned: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found, and rank 0's last words."""
    need_devices()
    folder = tmp_path_factory.mktemp("transformers")
    with tw.Ranks(two_ranks, 2, str(folder)) as ranks:
        outcomes = ranks.wait(6 * HANGS)
    assert outcomes[0] is not None and outcomes[0].ok, outcomes
    parts = [pickle.loads((folder / f"found-{rank}").read_bytes()) for rank in range(2)]
    parts[0]["dying"] = True, (outcomes[0].value, outcomes[1])
    return parts


def of(ran: list[dict[str, Any]], part: str) -> list[Any]:
    """What both ranks returned from a part; their tracebacks where they did not."""
    outcomes = [found[part] for found in ran]
    assert all(ok for ok, _ in outcomes), "\n".join(str(value) for ok, value in outcomes if not ok)
    return [value for _, value in outcomes]


def close(found: Any, wanted: Any, tolerance: float = CLOSE) -> None:
    """Of arrays: as large a difference as that part of the largest value, or `frameworks.within` it on devices."""
    assert found.shape == wanted.shape
    scale = np.abs(wanted).max(initial=0.0)
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max(initial=0.0) <= within(tolerance) * max(scale, 1e-3), (found, wanted)


# ---- what is judged --------------------------------------------------------------------------------------------------


def judge_inference(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        close(each["logits"], each["wanted"])
        assert each["text"] == each["text wanted"]
        assert each["steps"] == STEPS
        assert each["text steps"] >= NEW * STEPS  # FSDP's ranks go on until all are through
        assert len(each["received"]) >= LAYERS and all(right for _, right in each["received"])


def judge_training(ranks: list[dict[str, Any]], forward: int = 1) -> None:
    for each in ranks:
        assert each["gradients"].keys() == each["wanted"].keys()
        for name, wanted in each["wanted"].items():
            close(each["gradients"][name], wanted)
        assert each["steps"] == (forward + 1) * STEPS


def judge_implementations(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["usual"] == "grouped_mm"
        found = each["found"]
        for way in ("grouped_mm", "batched_mm"):
            close(found[way], found["eager"])
            for name, wanted in found["eager gradients"].items():
                close(found[f"{way} gradients"][name], wanted)


def judge_experts(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        for found, wanted in zip(each["found"], each["wanted"], strict=True):
            close(found, wanted)
        assert each["steps"] == 4
        assert len(each["received"]) == 1 and all(right for _, right in each["received"])


JUDGES = {
    "inference": judge_inference,
    "training": judge_training,
    "implementations": judge_implementations,
    "experts": judge_experts,
}

# ---- one rank and two ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_inference(ran, name, way) -> None:
    """Logits, and the text that is generated."""
    judge_inference(of(ran, f"inference {name} {way}"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_training(ran, name, way) -> None:
    """Gradients of all parameters; with FSDP those of the mean of both ranks' losses."""
    judge_training(of(ran, f"training {name} {way}"))


@pytest.mark.long
def test_two_batches_of_two_ranks_each(pinned, tmp_path) -> None:
    """Experts over four ranks, tensor-parallel attention over two, FSDP over these."""
    need_devices(4)
    ran = tw.run(four_ranks, 4, str(tmp_path), timeout=6 * HANGS)
    judge_inference(of(ran, "inference qwen3 both"))
    judge_training(of(ran, "training qwen3 both"))


def test_checkpoints(ran) -> None:
    """Gradient checkpointing repeats the forward pass in the backward pass."""
    judge_training(of(ran, "checkpoints"), forward=2)


def test_implementations(ran) -> None:
    """All ways in which transformers computes experts, but for those of kernels that it fetches."""
    judge_implementations(of(ran, "implementations"))


def test_longer_batches(ran) -> None:
    """The group grows with a batch that both ranks hold, and stays as large."""
    for each in of(ran, "longer"):
        close(each["logits"], each["wanted"])
        close(*each["again"])
        assert each["room"] == (256, 512) and each["steps"] == STEPS  # 600 tokens, of which each rank sends 300


def test_another_dtype(ran) -> None:
    """bfloat16 rows go through the window that was made for float32."""
    for each in of(ran, "bfloat16"):
        for found, wanted in zip(each["found"], each["wanted"], strict=True):
            close(found, wanted, tolerance=2**-7)
        assert each["same group"] and each["steps"] == 4


def test_float16(ran) -> None:
    """For inference; what is summed in training must have a wider range."""
    for each in of(ran, "float16"):
        close(each["found"], each["wanted"], tolerance=2**-9)
        said(each["told"], "twInvalidArgument", "dtype is float16; to train with it must be float32 or bfloat16")


@pytest.mark.parametrize("given", EXPERTS, ids=str)
def test_uneven_ranks(ran, given) -> None:
    """Ranks with other numbers of tokens, or none; choices of nobody; and a rank that receives nothing."""
    judge_experts(of(ran, f"experts {given}"))


# ---- what is refused, and what fails ---------------------------------------------------------------------------------


def test_more_tokens_than_were_said(ran) -> None:
    """The rank is told, its peer at once, and all goes on."""
    (first, first_took, after), (second, second_took, also) = of(ran, "too many")
    said(second, "twInvalidArgument", r"^tokens are 33; at most 32 were said \(tokenway\.integrations\.transformers")
    said(first, "twPeerRefused", "rank 1")
    assert max(first_took, second_took) < AT_ONCE
    judge_inference([after, also])


def test_sizes_that_nobody_said(ran) -> None:
    for told in of(ran, "unsaid"):
        said(told, "twInvalidUsage", r"say how many a rank has at most.*register\(max_tokens=\.\.\.\)")


def test_ranks_that_are_said_to_be_equal(ran) -> None:
    for logits, wanted, made, unlike in of(ran, "said equal"):
        close(logits, wanted)
        assert made == STEPS
        said(unlike, "twBoundMismatch", "rank [01]")


@pytest.mark.parametrize(("way", "train"), [("tp", False), ("fsdp", False), ("fsdp", True)])
def test_a_rank_whose_experts_fail(ran, way, train) -> None:
    """Its own error is its own; the peer hears of it at once, and both go on."""
    (first, took, after), (second, _, also) = of(ran, f"failing {way} {train}")
    assert second == ("RuntimeError", "no memory, say")
    assert first[0] == "PeerRefused" and took < AT_ONCE
    judge_inference([after, also])


def test_a_rank_that_dies(ran) -> None:
    """Its peer, which waits for it in the combine, gets an error that names it."""
    (result, told, took), other = ran[0]["dying"][1]
    assert other is not None and other.exitcode == 7
    said((result, told), "twPeerDied", "rank 1")
    assert took < AT_ONCE


# ---- tests of these tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(ran, mutation) -> None:
    """An adapter that is wrong fails the test of its part."""
    part = MUTATIONS[mutation][2]
    outcomes = of(ran, f"mutation {mutation}")
    with pytest.raises(AssertionError):
        JUDGES[part](outcomes)


def test_the_guide(ran) -> None:
    """Its program runs as it stands there, and shows that Tokenway is in use."""
    for made, with_grad, in_use in of(ran, "guide"):
        assert made > 0 and any("experts" in name for name in with_grad)
        assert "SharedGroup(experts=8" in in_use
