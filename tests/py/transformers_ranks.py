"""What two ranks do with models of transformers, in one start, as to import it takes most of the time. Each part's
outcome is kept for the test that judges it; docs/FRAMEWORKS.md's programs run here too."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frameworks import begin, here, mutated, programs_of, steps, whole
from harness import PATIENT, caught

MODELS = ("qwen3", "mixtral")
WAYS = ("tp", "fsdp")
SIZES = {"tp": {"tp_size": 2}, "fsdp": {"fsdp_size": 2}, "both": {"tp_size": 2, "fsdp_size": 2}}
LAYERS, NEW, VOCABULARY = 2, 4, 64
MOST = 32  # tokens of a rank, as is said where ranks have batches of their own


def make_checkpoints(folder: Path) -> None:
    """Small random models, as one rank has them."""
    import torch
    import transformers as tf

    torch.manual_seed(5)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # as large as makes experts matter: a wrong row is seen in logits and in text
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    qwen3 = tf.Qwen3MoeConfig(**common, intermediate_size=48, moe_intermediate_size=24, num_experts=8)
    tf.Qwen3MoeForCausalLM(qwen3).save_pretrained(folder / "qwen3")
    mixtral = tf.MixtralConfig(**common, intermediate_size=40, num_local_experts=4)
    tf.MixtralForCausalLM(mixtral).save_pretrained(folder / "mixtral")


def load(folder: Path, name: str, way: str | None, **settings: Any) -> Any:
    """A model on one rank, or over two of them: "tp", a batch that both hold, "fsdp", a batch for each; or over four,
    "both"."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if way is not None:
        sizes = SIZES[way] | {"ep_size": 4 if way == "both" else 2}
        config = DistributedConfig(**sizes, ep_implementation=settings.pop("implementation", "tokenway"))
        settings["distributed_config"] = config
    settings.setdefault("dtype", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / name, **settings).eval()
    return model if way is not None else model.to(here())  # transformers places those that ranks share


def tokens(rank: int, way: str, sequences: int | None = None, length: int | None = None) -> Any:
    """A batch [S, length] of ids: the same on both ranks for "tp", for "fsdp" another one for each, of another size,
    and for "both" each of these on two ranks."""
    import torch

    of = {"tp": 0, "fsdp": rank, "both": rank // 2}[way]
    shape = sequences or (2, 1)[of], length or (7, 5)[of]
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(11 + of)).to(here())


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and the steps that it made."""
    before = steps()
    value = function()
    return value, steps() - before


def gradients_of(model: Any, batches: list[Any]) -> dict[str, Any]:
    """Of the mean of the losses of batches."""
    model.zero_grad()
    for batch in batches:
        (model(batch, labels=batch).loss / len(batches)).backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


class Parts:
    """The parts of a rank's program, by name."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.found: dict[str, Any] = {}
        self.ones: dict[str, Any] = {}
        self.many: dict[tuple[str, str], Any] = {}
        self.received: list[tuple[int, bool]] = []

    def watch(self, model: Any) -> None:
        """Notes of what experts are given: how many rows, and whether ids and weights are as they are promised."""
        for exchange in map(exchange_of, model.model.layers):
            nowhere = exchange._local_experts

            def watched(
                rows: Any, ids: Any, weights: Any, kept: Any = exchange._compute, nowhere: int = nowhere
            ) -> Any:
                right = ((ids >= 0) & (ids <= nowhere)).all() and (weights[ids == nowhere] == 0).all()
                self.received.append((len(rows), bool(right)))
                return kept(rows, ids, weights)

            exchange._compute = watched

    def taken(self) -> list[tuple[int, bool]]:
        """Those notes, which begin anew."""
        taken, self.received = self.received, []
        return taken

    def run(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """(True, what it returned) or (False, its traceback)."""
        try:
            self.found[name] = True, function(*args)
        except Exception:
            self.found[name] = False, traceback.format_exc()

    def save(self) -> None:
        (self.folder / f"found-{self.rank}").write_bytes(pickle.dumps(self.found))

    # ---- models as one rank has them, and over both ------------------------------------------------------------------

    def inference(self, name: str, way: str) -> dict[str, Any]:
        import torch

        one, many = self.ones[name], self.many[name, way]
        batch = tokens(self.rank, way)
        self.taken()
        with torch.no_grad():
            wanted = one(batch).logits
            logits, forward = counted(lambda: many(batch).logits)
        said: dict[str, Any] = {"logits": whole(logits), "wanted": whole(wanted), "steps": forward}
        options = {"max_new_tokens": NEW, "do_sample": False}
        text, generated = counted(lambda: many.generate(batch, **options))
        said["received"] = self.taken()
        said |= {"text": text.tolist(), "text wanted": one.generate(batch, **options).tolist(), "text steps": generated}
        return said

    def training(self, name: str, way: str, checkpoints: bool = False) -> dict[str, Any]:
        one, many = self.ones[name], self.many[name, way]
        batches = [tokens(rank, way) for rank in {"tp": (0,), "fsdp": (0, 1), "both": (0, 2)}[way]]
        if checkpoints:
            many.activation_checkpointing_enable()
        many.train()
        found, made = counted(lambda: gradients_of(many, [tokens(self.rank, way)]))
        many.eval()
        if checkpoints:
            many.activation_checkpointing_disable()
        return {"gradients": found, "wanted": gradients_of(one, batches), "steps": made}

    def implementations(self, name: str) -> dict[str, Any]:
        """The ways in which transformers computes experts."""
        import torch

        found, batch, many = {}, tokens(self.rank, "tp"), self.many[name, "tp"]
        usual = many.config._experts_implementation
        for way in ("eager", "grouped_mm", "batched_mm"):
            many.set_experts_implementation(way)
            with torch.no_grad():
                found[way] = whole(many(batch).logits)
            found[f"{way} gradients"] = gradients_of(many, [batch])
        many.set_experts_implementation(usual)
        return {"usual": usual, "found": found}

    def longer(self) -> dict[str, Any]:
        """More tokens than the group had room for, and fewer afterwards."""
        import torch

        (shared,) = self.shared_of("qwen3", "tp")
        before = shared.group.max_tokens
        batch = tokens(0, "tp", 3, 200)
        with torch.no_grad():
            logits, made = counted(lambda: self.many["qwen3", "tp"](batch).logits)
            wanted = self.ones["qwen3"](batch).logits
            few = tokens(0, "tp", 1, 1)
            again = whole(self.many["qwen3", "tp"](few).logits), whole(self.ones["qwen3"](few).logits)
        grown = shared.group.max_tokens
        return {
            "logits": whole(logits),
            "wanted": whole(wanted),
            "again": again,
            "steps": made,
            "room": (before, grown),
        }

    def bfloat16(self) -> dict[str, Any]:
        """Rows of another type, in the same group."""
        import torch

        (shared,) = self.shared_of("qwen3", "tp")
        group, before = shared.group, shared.steps
        many, one = (load(self.folder, "qwen3", way, dtype=torch.bfloat16) for way in ("tp", None))
        x, ids, weights = self.choices(0, 9)
        given = x.bfloat16(), ids, weights.bfloat16()
        found, wanted = (through(model.model.layers[0].mlp.experts, *given) for model in (many, one))
        same = exchange_of(many.model.layers[0])._rows.shared is shared and shared.group is group
        return {"found": found, "wanted": wanted, "same group": same, "steps": shared.steps - before}

    def float16(self) -> dict[str, Any]:
        """Experts without gradients, and with them, which is refused."""
        import torch

        x, ids, weights = self.choices(0, 9)
        given = x.half(), ids, weights.half()
        with torch.no_grad():
            settings = {"dtype": torch.float16, "experts_implementation": "eager"}
            many, one = (load(self.folder, "qwen3", way, **settings) for way in ("tp", None))
            found, wanted = (whole(model.model.layers[0].mlp.experts(*given)) for model in (many, one))
        return {"found": found, "wanted": wanted, "told": caught(many.model.layers[0].mlp.experts, *given)[:2]}

    def shared_of(self, name: str, way: str) -> list[Any]:
        """The groups that a model's layers have."""
        layers = self.many[name, way].model.layers
        found = [exchange_of(layer)._rows.shared for layer in layers]
        return list(dict.fromkeys(found))

    # ---- uneven ranks, and choices of nobody -------------------------------------------------------------------------

    @staticmethod
    def choices(seed: int, count: int) -> tuple[Any, Any, Any]:
        """(tokens, ids, weights) for qwen3's experts."""
        import torch

        rng = torch.Generator().manual_seed(3 + seed)
        ids = torch.rand(count, 8, generator=rng).topk(2).indices
        drawn = torch.randn(count, 32, generator=rng), ids, torch.rand(count, 2, generator=rng)
        return tuple(each.to(here()) for each in drawn)  # type: ignore[return-value]

    def experts(self, way: str, counts: tuple[int, int], kind: str) -> dict[str, Any]:
        """A layer's experts alone, of so many tokens on each rank (for "tp" the first, on both): what comes back, and
        gradients. Of kind "none" some choices are -1; of "off" all are of rank 1, so that rank 0 receives nothing."""
        import torch

        of = self.rank if way == "fsdp" else 0
        x, ids, weights = self.choices(of, counts[of])
        if kind == "none":
            ids[::2, 1] = -1
            ids[1::3, 0] = -1
        if kind == "off":
            ids = ids % 4 + 4  # of rank 1, where each token chooses two that differ
            ids[:, 1] = torch.where(ids[:, 0] == ids[:, 1], 4 + (ids[:, 1] - 3) % 4, ids[:, 1])
        self.many["qwen3", way].set_experts_implementation("eager")  # which knows of no graph where no expert is hit
        mine, ones = (m.model.layers[0].mlp.experts for m in (self.many["qwen3", way], self.ones["qwen3"]))
        self.taken()
        found, made = counted(lambda: through(mine, x, ids, weights))
        self.many["qwen3", way].set_experts_implementation("grouped_mm")
        wanted = through(ones, x, ids, weights, nobody=0)
        return {"found": found, "wanted": wanted, "steps": made, "received": self.taken()}

    # ---- what is refused ---------------------------------------------------------------------------------------------

    def forward(self, way: str, batch: Any) -> Callable[[], Any]:
        import torch

        def call() -> Any:
            with torch.no_grad():
                return self.many["qwen3", way](batch)

        return call

    def too_many(self) -> Any:
        """Rank 1 has more tokens than were said. What each is told, how long it took, and that all goes on."""
        batch = tokens(self.rank, "fsdp", *((1, MOST + 1) if self.rank == 1 else (1, 3)))
        began = time.monotonic()
        told = caught(self.forward("fsdp", batch))[:2]
        return told, time.monotonic() - began, self.inference("qwen3", "fsdp")

    def unsaid(self) -> Any:
        """Ranks with batches of their own, and nobody said how large."""
        from tokenway.integrations import transformers as adapter

        adapter.register("unsaid", timeout=PATIENT)
        model = load(self.folder, "qwen3", "fsdp", implementation="unsaid")
        return caught(lambda: model(tokens(self.rank, "fsdp")))[:2]

    def said_equal(self) -> Any:
        """Ranks that are said to have equally many tokens: what they get when they have, and when they have not."""
        from tokenway.integrations import transformers as adapter

        adapter.register("equal", equal=True, timeout=PATIENT)
        kept = self.many["qwen3", "fsdp"]
        self.many["qwen3", "fsdp"] = load(self.folder, "qwen3", "fsdp", implementation="equal")
        try:
            batch = tokens(self.rank, "fsdp", 2, 4)
            logits, made = counted(lambda: self.forward("fsdp", batch)().logits)
            wanted = self.ones["qwen3"](batch).logits
            unlike = caught(self.forward("fsdp", tokens(self.rank, "fsdp", 1, 4 + self.rank)))[:2]
            return whole(logits), whole(wanted), made, unlike
        finally:
            self.many["qwen3", "fsdp"] = kept

    def failing(self, way: str, train: bool) -> Any:
        """Rank 1's experts raise: what each rank gets, within which time, and that the group goes on."""
        import torch

        exchange = exchange_of(self.many["qwen3", way].model.layers[1])
        kept = exchange._rows._compute

        def fail(*_: Any) -> Any:
            raise RuntimeError("no memory, say")

        exchange._rows._compute = fail if self.rank == 1 else kept
        began = time.monotonic()
        try:
            with torch.set_grad_enabled(train):
                self.many["qwen3", way](tokens(self.rank, way))
            told = "nothing", ""
        except Exception as error:
            told = type(error).__name__, str(error)
        exchange._rows._compute = kept
        return told, time.monotonic() - began, self.inference("qwen3", way)

    def dying(self) -> Any:
        """Rank 1's process ends in its experts: what rank 0 gets. The last part of all."""
        exchange = exchange_of(self.many["qwen3", "tp"].model.layers[1])
        kept = exchange._rows._compute
        exchange._rows._compute = (lambda *_: os._exit(7)) if self.rank == 1 else kept
        began = time.monotonic()
        told = caught(self.forward("tp", tokens(0, "tp")))
        return told[0], told[1], time.monotonic() - began

    # ---- mutations ---------------------------------------------------------------------------------------------------

    def mutated(self, old: str, new: str, function: Callable[..., Any], *args: Any) -> Any:
        """A part, by an adapter whose source says `new` where it says `old`."""
        from tokenway.integrations import expert_rows, transformers_experts

        mutant = mutated(expert_rows, old, new)
        kept = {exchange: exchange._rows for m in self.many.values() for exchange in map(exchange_of, m.model.layers)}
        try:
            transformers_experts.ExpertRows = mutant.ExpertRows  # type: ignore[misc]
            for exchange in kept:
                exchange._rows = None
            return function(*args)
        finally:
            transformers_experts.ExpertRows = expert_rows.ExpertRows  # type: ignore[misc]
            for exchange, rows in kept.items():
                exchange._rows = rows

    # ---- the guide ---------------------------------------------------------------------------------------------------

    def guide(self) -> Any:
        """Its program for transformers, with a small model and few steps of it in place of the large one."""
        program, settings = programs_of("transformers")
        exec(settings, {})
        assert program.count('"Qwen/Qwen3-30B-A3B"') == 1
        names: dict[str, Any] = {}
        _, made = counted(lambda: exec(program.replace("Qwen/Qwen3-30B-A3B", str(self.folder / "qwen3")), names))
        with_grad = [name for name, p in names["model"].named_parameters() if p.grad is not None]
        return made, with_grad, names["in_use"]


def through(module: Any, x: Any, ids: Any, weights: Any, nobody: int = -1) -> list[Any]:
    """What experts make of tokens, and gradients of these and of their weights. nobody: the id that stands for -1, with
    a weight of 0, where a module takes none."""
    import torch

    x, leaf = x.clone().requires_grad_(), weights.clone().requires_grad_()
    given = leaf if nobody < 0 else torch.where(ids >= 0, leaf, 0)
    out = module(x, torch.where(ids >= 0, ids, nobody), given)
    towards = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    if out.requires_grad or nobody < 0:  # on one rank no tokens are no graph
        (out * towards).sum().backward()
    module.zero_grad()
    return [whole(each) for each in (out, *(torch.zeros_like(t) if t.grad is None else t.grad for t in (x, leaf)))]


def exchange_of(layer: Any) -> Any:
    """Of a decoder layer: `transformers_experts.Experts`."""
    (implementation,) = [
        cell.cell_contents for cell in layer.mlp.experts.forward.__closure__ if hasattr(cell.cell_contents, "exchange")
    ]
    return implementation.exchange


# name: (text of expert_rows.py, what a later hand may make of it, the part that shows it, and its arguments). The test
# of that part must fail.
MUTATIONS: dict[str, tuple[str, str, str, tuple[Any, ...]]] = {
    "a row off by one, inference": (
        "results = results.view(came.tokens.shape)",
        "results = results.roll(1, 0).view(came.tokens.shape)",
        "inference",
        ("qwen3", "tp"),
    ),
    "a row off by one, training": (
        "[: len(routed.tokens)]",
        "[: len(routed.tokens)].roll(1, 0)",
        "training",
        ("qwen3", "fsdp"),
    ),
    "weights 2 % off": (
        "routing = ids, weights.float()",
        "routing = ids, weights.float() * 1.02",
        "inference",
        ("qwen3", "fsdp"),
    ),
    "weights 2 % off, training": (
        "routing = ids, weights.float()",
        "routing = ids, weights.float() * 1.02",
        "training",
        ("mixtral", "tp"),
    ),
    "ids off by one rank": (
        "routing = ids, weights.float()",
        "routing = (ids + self._nowhere) % group.experts, weights.float()",
        "inference",
        ("mixtral", "tp"),
    ),
    "no gradient of weights": (
        "routed.weights.to(dtype)",
        "routed.weights.detach().to(dtype)",
        "training",
        ("qwen3", "tp"),
    ),
    "weights of other ranks' experts": (".masked_fill(places == self._nowhere, 0)", "", "inference", ("qwen3", "fsdp")),
}
EXPERTS = [(way, counts, kind) for way in WAYS for counts, kind in (((5, 3), "any"), ((6, 0), "none"), ((3, 4), "off"))]
EXPERTS += [("fsdp", (0, 0), "any"), ("tp", (1, 1), "any"), ("tp", (0, 0), "any")]


def begun(store: str, names: tuple[str, ...], ways: tuple[str, ...], blocking: bool = True) -> Parts:
    """The parts of this rank, and their models."""
    import torch.distributed as dist

    folder, rank, nranks = Path(store), int(os.environ["TOKENWAY_RANK"]), int(os.environ["TOKENWAY_NRANKS"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nranks)}  # as torchrun does
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    begin(folder / "store", nranks, blocking)
    from tokenway.integrations import transformers as adapter

    adapter.register(max_tokens=MOST, timeout=PATIENT)
    if rank == 0:
        make_checkpoints(folder)
    dist.barrier()
    parts = Parts(folder, rank)
    for name in names:
        parts.ones[name] = load(folder, name, None, experts_implementation="eager")
        parts.many |= {(name, way): load(folder, name, way) for way in ways}
    for model in parts.many.values():
        parts.watch(model)
    return parts


def four_ranks(store: str) -> dict[str, Any]:
    parts = begun(store, ("qwen3",), ("both",))
    parts.run("inference qwen3 both", parts.inference, "qwen3", "both")
    parts.run("training qwen3 both", parts.training, "qwen3", "both")
    return parts.found


def two_ranks(store: str) -> Any:
    import torch.distributed as dist

    parts = begun(store, MODELS, WAYS)
    for name in MODELS:
        for way in WAYS:
            parts.run(f"inference {name} {way}", parts.inference, name, way)
            parts.run(f"training {name} {way}", parts.training, name, way)
    parts.run("checkpoints", parts.training, "qwen3", "fsdp", True)
    parts.run("implementations", parts.implementations, "qwen3")
    parts.run("longer", parts.longer)
    parts.run("bfloat16", parts.bfloat16)
    parts.run("float16", parts.float16)
    for given in EXPERTS:
        parts.run(f"experts {given}", parts.experts, *given)
    parts.run("too many", parts.too_many)
    parts.run("unsaid", parts.unsaid)
    parts.run("said equal", parts.said_equal)
    for way, train in (("tp", False), ("fsdp", False), ("fsdp", True)):
        parts.run(f"failing {way} {train}", parts.failing, way, train)
    for mutation, (old, new, part, args) in MUTATIONS.items():
        parts.run(f"mutation {mutation}", parts.mutated, old, new, getattr(parts, part), *args)
    parts.run("guide", parts.guide)
    parts.save()
    dist.barrier()
    return parts.dying()
