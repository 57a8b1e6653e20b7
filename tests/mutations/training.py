"""Mutations of experts that are trained in several slots, and move."""

from mutation import Edit, Mutation

REPLICAS = "python/tokenway/balance/replicas.py"
BORDER = "python/tokenway/balance/training.py"
EXPERTS = "python/tokenway/pytorch/training.py"
NUMPY = "py/test_balance_training"
GIVEN = "py/test_training_plans"
TORCH = "py/test_training_experts"

TRAINING = (
    Mutation(
        "sums in the dtype of the gradients",
        "sums",
        NUMPY,
        "test_sums",
        (
            Edit(
                REPLICAS,
                "return row.float() if self._torch else row.astype(np.float32)",
                "return row.clone() if self._torch else row.copy()",
            ),
        ),
    ),
    Mutation(
        "sums by slot, descending",
        "sums",
        NUMPY,
        "test_sums",
        (
            Edit(
                REPLICAS,
                "for slot in slots[1:]:\n            at = slot",
                "for slot in slots[:0:-1]:\n            at = slot",
            ),
        ),
    ),
    Mutation(
        "gradients of peers are read before they are there",
        "M1",
        NUMPY,
        "test_as_in_one_process",
        (
            Edit(
                REPLICAS,
                "        self.meet()\n        for layer, slots in found:\n            if",
                "        for layer, slots in found:\n            if",
            ),
        ),
    ),
    Mutation(
        "gradients are set to 0 while peers read them",
        "M1",
        NUMPY,
        "test_as_in_one_process",
        (Edit(REPLICAS, "        self.meet()  # no gradient is read any more\n", ""),),
    ),
    Mutation(
        "what came of a peer's gradient stays in the spare slot",
        "a slot without an expert has no gradient",
        NUMPY,
        "test_as_in_one_process",
        (Edit(REPLICAS, "self._places((*slots[1:], spare[layer]))", "self._places(slots[1:])"),),
    ),
    Mutation(
        "replicas keep the whole gradient",
        "a norm counts each expert once",
        NUMPY,
        "test_sums",
        (Edit(REPLICAS, "self._places((*slots[1:], spare[layer]))", "self._places((spare[layer],))"),),
    ),
    Mutation(
        "the highest slot leads where weights are spread",
        "replicas are copies of one slot",
        NUMPY,
        "test_weights_of_who_leads",
        (
            Edit(
                REPLICAS,
                "[(slot, slots[0]) for slot in slots[1:]]",
                "[(slot, slots[-1]) for slot in slots[:-1]]",
            ),
        ),
    ),
    Mutation(
        "states stay where they are",
        "states move with what leads",
        NUMPY,
        "test_as_in_one_process",
        (Edit(BORDER, " + bring(epoch.layer, states, parts.states)", ""),),
    ),
    Mutation(
        "a step follows a plan that rank 0 has not told",
        "ranks follow one plan",
        NUMPY,
        "test_as_in_one_process",
        (
            Edit(
                BORDER,
                "        self.replicas.meet()\n        if self.group.rank != PLANNER:",
                "        if self.group.rank != PLANNER:",
            ),
        ),
    ),
    Mutation(
        "a step returns before all lanes have its maps",
        "M4",
        NUMPY,
        "test_as_in_one_process",
        (Edit(BORDER, "for lane in range(self.group.settings.lanes or 1):", "for lane in range(1):"),),
    ),
    Mutation(
        "a copy that has failed at the border is as good as any",
        "M6",
        NUMPY,
        "test_failed_copies",
        (
            Edit(
                BORDER,
                "failed = [not self._bring(epoch) for epoch in level]",
                "failed = [self._bring(epoch) is None for epoch in level]",
            ),
        ),
    ),
    Mutation(
        "what follows a void epoch of a border is staged",
        "M1",
        NUMPY,
        "test_failed_copies",
        (Edit(BORDER, "self._rounds = deque(later for later in kept if later)", "del kept"),),
    ),
    Mutation(
        "a plan that is given waits for the border after",
        "a given plan goes before rank 0's own",
        GIVEN,
        "test_a_plan_that_is_given",
        (Edit(BORDER, "if self._given is not None:", "if self._given is not None and self._every is None:"),),
    ),
    Mutation(
        "ranks ask for a plan while one is under way",
        "plans are followed one after another",
        GIVEN,
        "test_plans_that_are_given_meanwhile",
        (Edit(BORDER, "self._asks = self.idle and ", "self._asks = "),),
    ),
    Mutation(
        "ranks that make no plans do not ask for any",
        "a given plan is taken at the next border",
        GIVEN,
        "test_a_plan_that_is_given",
        (Edit(BORDER, "self._asks = self._every is None  #", "self._asks = False  #"),),
    ),
    Mutation(
        "an optimiser's states stay in its own memory",
        "states move with what leads",
        TORCH,
        "test_loaded_states",
        (Edit(EXPERTS, "kept[name] = place.copy_(value)", "place.copy_(value)"),),
    ),
    Mutation(
        "PyTorch is not told that weights have changed",
        "a backward pass across a border is refused",
        TORCH,
        "test_a_backward_pass_behind_a_switch",
        (Edit(REPLICAS, "versions.written(self.weights.shown)", "pass"),),
    ),
)
