"""Mutations of `tokenway plan`: what is fitted from what, rows, and the protocol between domains in closed form."""

from mutation import Edit, Mutation

ROWS = "python/tokenway/planning/rows.py"
FITTING = "python/tokenway/planning/fitting.py"
MODEL = "python/tokenway/planning/model.py"
MEMORY = "python/tokenway/planning/memory.py"
SIMULATION = "python/tokenway/planning/simulation.py"
FLOOR = "python/tokenway/bench/floor.py"
PLANNED = "python/tokenway/planning/posts.py"

PLANNING = (
    Mutation(
        "bytes to other hosts are those to all ranks",
        "predictions",
        "py/test_bench_gin",
        "rows_to_other_hosts",
        (Edit(FLOOR, "if hosts is None else np.asarray(hosts)", "if True else np.asarray(hosts)"),),
    ),
    Mutation(
        "posts are planned without what goes with rows",
        "predictions",
        "py/test_planning",
        "posts",
        (Edit(PLANNED, "(*payloads, memory.meta_bytes(top_k))", "payloads"),),
    ),
    Mutation(
        "partials are planned to go where their rows went",
        "predictions",
        "py/test_planning",
        "posts",
        (Edit(PLANNED, "mesh(to_ranks.T, ", "mesh(to_ranks, "),),
    ),
    Mutation(
        "posts of no rows are planned",
        "predictions",
        "py/test_planning",
        "posts",
        (Edit(PLANNED, "len(parts) * (rows > 0)", "len(parts)"),),
    ),
    Mutation(
        "a token may draw an expert twice",
        "predictions",
        "py/test_planning",
        "hypergeometric",
        (Edit(ROWS, "part = np.minimum(drawn / seen, 1.0)", "part = np.minimum(drawn / len(shares), 1.0)"),),
    ),
    Mutation(
        "a fit sees a file of the other card",
        "predictions",
        "py/test_planning",
        "fits_see_one_card",
        (Edit(FITTING, "        if _card(runs[file]) != card:\n", "        if False:\n"),),
    ),
    Mutation(
        "a fit is above what links reach",
        "predictions",
        "py/test_planning",
        "what_made_the_points",
        (Edit(FITTING, "    if inverse * ceiling < 1:\n", "    if False:\n"),),
    ),
    Mutation(
        "rows are read for nothing",
        "predictions",
        "py/test_planning",
        "events_agree",
        (
            Edit(
                MODEL, "    return machine.card.flag_us + far * row", "    return machine.card.flag_us + 0 * far * row"
            ),
        ),
    ),
    Mutation(
        "all sources put to one domain at first",
        "predictions",
        "py/test_planning",
        "events_agree",
        (
            Edit(
                SIMULATION,
                "        others = [(self.domain[rank] + step) % layer.domains for step in range(1, layer.domains)]",
                "        others = [d for d in range(layer.domains) if d != self.domain[rank]]",
            ),
        ),
    ),
    Mutation(
        "staging is for one host",
        "predictions",
        "py/test_planning",
        "memory_is_the_librarys",
        (
            Edit(
                MEMORY,
                "flat = (hosts - 1) * (inbox + own * returns + max(inbox, returns))",
                "flat = (hosts - 1) * (inbox + own * returns) + max(inbox, returns)",
            ),
        ),
    ),
)
