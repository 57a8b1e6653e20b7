#!/usr/bin/env python3
"""Searches the models of the protocol, whole, and shows that they notice each known mistake.

    python3 spec/run.py             everything, two searches at a time
    python3 spec/run.py --quick     without those searches that take half of the time
    python3 spec/run.py one-bank    only what has this in its name; a mutation found also prints its story
    python3 spec/run.py hosts.pml   only what is searched in this model

Needs spin and a C compiler. Without them it says so and exits 0, or 1 where TW_STRICT=1.

A configuration must be searched to the end without an error. A mutation must be caught, and by one of the claims that
its row names: a mutation caught by something else shows nothing about its invariant. "hang" is spin's invalid end
state: ranks that wait for ever.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).resolve().parent
DEPTH = 5000  # several times the longest run; a search that reaches it is refused
MEMORY_MIB = 2800  # per search, so that two fit in 6 GB
SECONDS = 900  # per search; the largest takes under a minute on an idle core


class Search(NamedTuple):
    name: str
    switches: str
    caught_by: tuple = ()  # the claims that may catch it; empty: nothing may be found
    long: bool = False
    model: str = "exchange.pml"
    small: bool = False  # searched in less time than compiling well takes


# The largest first, so that two searches at a time end together.
SEARCHES = [
    Search("late rank, 2 channels, 6 steps", "LATE", long=True),
    Search("stopped rank, 2 channels, 6 steps", "", long=True),
    Search("moving weights: handles, 2 channels, 5 dispatches", "HANDLES", long=True, model="moving.pml"),
    Search(
        "moving weights: handles, failed pulls, 1 channel, 3 epochs",
        "HANDLES VOIDS ONE_CHANNEL EPOCHS=3 LENGTH=6",
        long=True,
        model="moving.pml",
    ),
    Search("hosts: 2 channels, 2 steps each, late rank", "PAIRS LATE", long=True, model="hosts.pml"),
    Search("hosts: 2 channels, 2 steps each, stopped rank", "PAIRS STOP", long=True, model="hosts.pml"),
    Search("hosts: 2 channels, 4 steps in all, rank that quits", "QUITS", long=True, model="hosts.pml"),
    Search("hosts: 2 channels, 2 steps each, by domain", "PAIRS BY_DOMAIN", long=True, model="hosts.pml"),
    Search(
        "hosts: 1 channel, 3 steps, refusals, all kinds",
        "REFUSAL MORE_KINDS ONE_CHANNEL LENGTH=3",
        long=True,
        model="hosts.pml",
    ),
    Search(
        "hosts: 1 channel, 3 steps, refusals, by domain",
        "REFUSAL BY_DOMAIN ONE_CHANNEL LENGTH=3",
        long=True,
        model="hosts.pml",
    ),
    Search("hosts: 2 channels, 4 steps in all", "", long=True, model="hosts.pml"),
    Search("stopped rank, 2 channels, 3 steps, rows apart", "LENGTH=3 ROWS_APART"),
    Search("counts and stopped rank, 2 channels, 4 steps", "COUNTS LENGTH=4"),
    Search(
        "counts, refusals, stopped rank, 1 channel, 4 steps, rows apart",
        "COUNTS LENGTH=4 REFUSAL ONE_CHANNEL ROWS_APART",
    ),
    Search("anyone late, 1 channel, 6 steps, rows apart", "LATE_ALL ONE_CHANNEL ROWS_APART"),
    Search("refusals and stopped rank, 1 channel, 6 steps, rows apart", "REFUSAL ONE_CHANNEL ROWS_APART"),
    Search("parts and stopped rank, 2 channels, 5 steps", "PARTS LENGTH=5"),
    Search("parts and stopped rank, 1 channel, 6 steps, rows apart", "PARTS ONE_CHANNEL ROWS_APART"),
    Search("parts and late rank, 1 channel, 6 steps", "PARTS ONE_CHANNEL LATE"),
    Search("agreement of 4 ranks that come at any time", "", model="agreement.pml"),
    Search("moving weights: words apart, 1 channel", "APART ONE_CHANNEL LENGTH=4", model="moving.pml"),
    Search("moving weights: handles, at leisure, 1 channel", "HANDLES AT_LEISURE ONE_CHANNEL", model="moving.pml"),
    Search("moving weights: failed pulls, death, 1 channel", "VOIDS DEATH ONE_CHANNEL LENGTH=4", model="moving.pml"),
    Search("moving weights: death, lag 1, 2 channels", "DEATH LAG=1 LENGTH=3", model="moving.pml"),
    Search("moving weights: failed pulls, lag 1, 2 channels", "VOIDS LAG=1 LENGTH=4", model="moving.pml"),
    Search("moving weights: handles, lag 1, 2 channels", "HANDLES LAG=1 LENGTH=4", model="moving.pml"),
    Search("moving weights: handles, 2 layers, 1 channel", "HANDLES LAYERS=2 EPOCHS=3 ONE_CHANNEL", model="moving.pml"),
    Search("moving weights: failed pulls, some never end, 2 channels", "VOIDS STUCK", model="moving.pml"),
    Search("moving weights: refusals, 1 channel", "REFUSALS ONE_CHANNEL", model="moving.pml"),
    Search("hosts: 2 channels, 2 steps each", "PAIRS", model="hosts.pml", small=True),
    Search("hosts: 1 channel, 4 steps, stopped rank", "MORE_KINDS STOP ONE_CHANNEL", model="hosts.pml", small=True),
    Search(
        "hosts: 1 channel, 4 steps, stopped rank, by domain",
        "BY_DOMAIN STOP ONE_CHANNEL",
        model="hosts.pml",
        small=True,
    ),
    Search("hosts: 1 channel, 4 steps, late rank", "MORE_KINDS LATE ONE_CHANNEL", model="hosts.pml", small=True),
    Search("hosts: 1 channel, 4 steps, rank that quits", "MORE_KINDS QUITS ONE_CHANNEL", model="hosts.pml", small=True),
    Search(
        "hosts: 1 channel, 4 steps, slow everywhere", "MORE_KINDS ALL_SLOW ONE_CHANNEL", model="hosts.pml", small=True
    ),
    Search(
        "hosts: 1 channel, 4 steps, by domain", "BY_DOMAIN ALL_SLOW MESSAGE ONE_CHANNEL", model="hosts.pml", small=True
    ),
    Search(
        "hosts: 1 channel, 4 steps, words apart",
        "APART MORE_KINDS ALL_SLOW ONE_CHANNEL",
        model="hosts.pml",
        small=True,
    ),
    Search("hosts: 1 channel, 4 steps, a message", "MORE_KINDS MESSAGE ONE_CHANNEL", model="hosts.pml", small=True),
    Search("hosts: 1 channel, 4 steps, refusals", "REFUSAL ONE_CHANNEL", model="hosts.pml", small=True),
    Search("hosts: words by add, no fault", "", model="hosts_words.pml", small=True),
    Search("hosts: words by add, an add lost or doubled", "FAULT", model="hosts_words.pml", small=True),
    Search("one-bank", "MUTATION_ONE_BANK ONE_CHANNEL", ("S2", "S3")),
    Search("bank-by-cycle", "MUTATION_BANK_BY_CYCLE ONE_CHANNEL", ("S2", "S3")),
    Search("shared-counter", "MUTATION_SHARED_COUNTER ONE_CHANNEL", ("S4",)),
    Search("plain-compare", "MUTATION_PLAIN_COMPARE ONE_CHANNEL", ("S4",)),
    Search("send-ahead", "MUTATION_SEND_AHEAD ONE_CHANNEL", ("S2", "S3")),
    Search("early-publish", "MUTATION_EARLY_PUBLISH ONE_CHANNEL", ("S3",)),
    Search("publish-before-rows", "MUTATION_PUBLISH_BEFORE_ROWS ONE_CHANNEL", ("S4",)),
    Search("host-order", "MUTATION_HOST_ORDER", ("S2", "S4", "hang")),
    # Who goes on for more than half a wrap looks like somebody behind: that is S4.
    Search("go-on-after-timeout", "MUTATION_GO_ON_AFTER_TIMEOUT LATE_ALL ONE_CHANNEL", ("S2", "S3", "S4")),
    Search("no-abort", "MUTATION_NO_ABORT LATE ONE_CHANNEL", ("hang",)),
    Search("counts-ahead", "MUTATION_COUNTS_AHEAD COUNTS LENGTH=3", ("S2",)),
    Search("parts-without-skips", "MUTATION_PARTS_WITHOUT_SKIPS PARTS ONE_CHANNEL", ("S3",)),
    Search("refuse-without-drain", "MUTATION_REFUSE_WITHOUT_DRAIN REFUSAL ONE_CHANNEL", ("S2", "S3")),
    Search("own-count", "MUTATION_OWN_COUNT", ("A2",), model="agreement.pml"),
    Search("every-side", "MUTATION_EVERY_SIDE", ("A1",), model="agreement.pml"),
    Search("one-calm-round", "MUTATION_ONE_CALM_ROUND", ("A1", "A2"), model="agreement.pml"),
    Search("done-per-peer", "MUTATION_DONE_PER_PEER ONE_CHANNEL LENGTH=3 EPOCHS=1", ("M2",), model="moving.pml"),
    Search("flags-direct", "MUTATION_FLAGS_DIRECT ONE_CHANNEL", ("M2",), model="moving.pml"),
    Search("short-lag", "MUTATION_SHORT_LAG ONE_CHANNEL LENGTH=3 EPOCHS=1", ("M2",), model="moving.pml"),
    Search("one-version", "MUTATION_ONE_VERSION", ("M2",), model="moving.pml"),
    Search("refuser-takes-nothing", "MUTATION_REFUSER_TAKES_NOTHING REFUSALS ONE_CHANNEL", ("M2",), model="moving.pml"),
    Search("bind-at-route", "MUTATION_BIND_AT_ROUTE ONE_CHANNEL", ("M2", "M4"), model="moving.pml"),
    Search("done-before-pull", "MUTATION_DONE_BEFORE_PULL ONE_CHANNEL", ("M1", "M4"), model="moving.pml"),
    Search("overlapping-epochs", "MUTATION_OVERLAP ONE_CHANNEL", ("M1",), model="moving.pml"),
    Search("open-after-own-pull", "MUTATION_OPEN_AFTER_PULL ONE_CHANNEL", ("M1", "M4"), model="moving.pml"),
    Search("open-after-one-channel", "MUTATION_OPEN_AFTER_CHANNEL", ("M4",), model="moving.pml"),
    Search("reads-not-awaited", "MUTATION_UNDRAINED ONE_CHANNEL", ("M4",), model="moving.pml"),
    Search("handle-ignored", "MUTATION_HANDLE_IGNORED HANDLES ONE_CHANNEL", ("M4",), model="moving.pml"),
    Search("table-by-epoch", "MUTATION_TABLE_BY_EPOCH VOIDS ONE_CHANNEL", ("M5",), model="moving.pml"),
    Search("void-ignored", "MUTATION_VOID_IGNORED VOIDS ONE_CHANNEL", ("M1", "M4", "M6"), model="moving.pml"),
    Search("least-after-death", "MUTATION_LEAST_AFTER_DEATH DEATH ONE_CHANNEL", ("M7",), model="moving.pml"),
    Search(
        "own-voids-after-death", "MUTATION_OWN_VOIDS_AFTER_DEATH VOIDS DEATH ONE_CHANNEL", ("M7",), model="moving.pml"
    ),
    Search("wait-for-pull", "MUTATION_WAIT_FOR_PULL STUCK ONE_CHANNEL", ("hang",), model="moving.pml"),
    Search("one-inbox", "MUTATION_ONE_INBOX ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search("one-staging", "MUTATION_ONE_STAGING ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search("one-block", "MUTATION_ONE_BLOCK ONE_CHANNEL", ("T8",), model="hosts.pml"),
    Search("one-relay", "MUTATION_ONE_RELAY BY_DOMAIN ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search("put-from-tensor", "MUTATION_PUT_FROM_TENSOR ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search("put-from-view", "MUTATION_PUT_FROM_VIEW ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search("send-ahead-of-hosts", "MUTATION_SEND_AHEAD ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search(
        "empty-step-not-awaited", "MUTATION_EMPTY_STEP_NOT_AWAITED ONE_CHANNEL MORE_KINDS", ("T3",), model="hosts.pml"
    ),
    Search("read-behind-word", "MUTATION_READ_BEHIND_WORD ONE_CHANNEL", ("T3",), model="hosts.pml"),
    Search(
        "rows-word-not-awaited", "MUTATION_ROWS_WORD_NOT_AWAITED ONE_CHANNEL MORE_KINDS", ("T5",), model="hosts.pml"
    ),
    Search("word-on-another-context", "MUTATION_WORD_ON_ANOTHER_CONTEXT ONE_CHANNEL", ("T5", "T8"), model="hosts.pml"),
    Search("word-at-each-mate", "MUTATION_WORD_AT_EACH_MATE ONE_CHANNEL", ("T5", "T8"), model="hosts.pml"),
    Search("empty-step-silent", "MUTATION_EMPTY_STEP_SILENT ONE_CHANNEL MORE_KINDS", ("hang",), model="hosts.pml"),
    Search("refusal-silent", "MUTATION_REFUSAL_SILENT ONE_CHANNEL REFUSAL", ("hang",), model="hosts.pml"),
    Search("whole-queue", "MUTATION_WHOLE_QUEUE ONE_CHANNEL STOP", ("hang",), model="hosts.pml"),
    Search("block-behind-word", "MUTATION_BLOCK_BEHIND_WORD ONE_CHANNEL", ("T8",), model="hosts.pml"),
    Search("owner-blamed", "MUTATION_OWNER_BLAMED ONE_CHANNEL STOP", ("T9",), model="hosts.pml"),
    Search("notice-not-asked-for", "MUTATION_NOTICE_NOT_ASKED_FOR ONE_CHANNEL STOP", ("T9",), model="hosts.pml"),
    Search("notice-of-channel", "MUTATION_NOTICE_OF_CHANNEL QUITS LENGTH=2", ("T9",), model="hosts.pml"),
    Search("free-before-meeting", "MUTATION_FREE_BEFORE_MEETING ONE_CHANNEL", ("T10",), model="hosts.pml"),
    Search("free-without-abort", "MUTATION_FREE_WITHOUT_ABORT ONE_CHANNEL LATE", ("T10",), model="hosts.pml"),
    Search("ring", "MUTATION_RING ONE_CHANNEL LENGTH=2", ("hang",), model="hosts.pml"),
    Search("forward-in-completion", "MUTATION_FORWARD_IN_COMPLETION LENGTH=2", ("hang",), model="hosts.pml"),
    Search(
        "forward-after-own-wait", "MUTATION_FORWARD_AFTER_OWN_WAIT ONE_CHANNEL LENGTH=2", ("hang",), model="hosts.pml"
    ),
    Search(
        "forward-and-a-message",
        "MUTATION_FORWARD_ON_ALL_CHANNELS MESSAGE ONE_CHANNEL LENGTH=2",
        ("hang",),
        model="hosts.pml",
    ),
    Search(
        "forward-and-a-refusal",
        "MUTATION_FORWARD_ON_ALL_CHANNELS REFUSAL ONE_CHANNEL LENGTH=2",
        ("hang",),
        model="hosts.pml",
    ),
    Search("fold-in-completion", "MUTATION_FOLD_IN_COMPLETION BY_DOMAIN LENGTH=2", ("hang",), model="hosts.pml"),
    Search(
        "fold-after-own-wait",
        "MUTATION_FOLD_AFTER_OWN_WAIT BY_DOMAIN ONE_CHANNEL LENGTH=2",
        ("hang",),
        model="hosts.pml",
    ),
    Search(
        "fold-and-a-message",
        "MUTATION_FOLD_ON_ALL_CHANNELS MESSAGE BY_DOMAIN ONE_CHANNEL LENGTH=2",
        ("hang",),
        model="hosts.pml",
    ),
    Search("one-word", "MUTATION_ONE_WORD", ("T6",), model="hosts_words.pml"),
    Search("shared-latch", "MUTATION_SHARED_LATCH", ("T6", "hang"), model="hosts_words.pml"),
    Search("latch-born-zero", "MUTATION_LATCH_BORN_ZERO", ("T6", "hang"), model="hosts_words.pml"),
    Search("refusal-leaves-latch", "MUTATION_REFUSAL_LEAVES_LATCH", ("T6",), model="hosts_words.pml"),
    Search("not-equal", "MUTATION_NOT_EQUAL FAULT", ("T6",), model="hosts_words.pml"),
    Search("owner-resets", "MUTATION_OWNER_RESETS", ("T6",), model="hosts_words.pml"),
]

# Whatever says that part of the state space was not looked at.
TRUNCATED = (
    "max search depth too small",
    "out of memory",
    "memory bound",
    "aborting search",
    "Search not completed",
    "VECTORSZ is too small",
    "bitstate",
)


class Result(NamedTuple):
    search: Search
    states: int
    depth: int
    verdict: str
    passed: bool
    seconds: float
    story: str


def command(arguments, folder):
    done = subprocess.run(
        arguments,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    return done.returncode, done.stdout


def judge(search, output):
    """The verdict, short, and whether it is the wanted one."""
    errors = re.search(r"errors: (\d+)", output)
    if errors is None:
        return "no result: " + (output.strip().splitlines() or ["silence"])[-1], False
    if "out of bounds" in output:
        return "the model indexes out of bounds", False
    if int(errors[1]):
        found = re.search(r"assertion violated .*\b([SAMT]\d+)\)* \(at depth", output)
        claim = found[1] if found else "hang" if "invalid end state" in output else "an unnamed error"
        if claim in search.caught_by:
            return f"caught by {claim}", True
        return f"FAILED: {claim}" + (f", not {' or '.join(search.caught_by)}" if search.caught_by else ""), False
    cut = next((sign for sign in TRUNCATED if sign in output), None)
    if cut:
        return f"TRUNCATED: {cut}", False
    if search.caught_by:
        return "SURVIVED", False
    # spin names what it looked for; "-" in place of "+" would mean that a kind of error was switched off.
    if not re.search(r"assertion violations\s+\+", output) or not re.search(r"invalid end states\s+\+", output):
        return "assertions or end states were not checked", False
    return "holds", True


def run(search, compiler, scratch, want_story):
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=scratch))
    # spin breaks its own C preprocessor command at odd characters in a path, and copies are cheap.
    for model in MODELS.glob("*.pml"):
        shutil.copy(model, folder)
    defines = [f"-D{switch}" for switch in search.switches.split()]
    output, story = "", ""
    try:
        # A mutation is found at once, so there is no time to be saved that compiling well would not take.
        optimisation = "-O0" if search.caught_by or search.small else "-O2"
        # NOREDUCE: every transition touches what others see, so partial-order reduction finds nothing to leave out.
        for step in (
            ["spin", *defines, "-a", search.model],
            [compiler, optimisation, "-w", "-DSAFETY", "-DNOREDUCE", f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c"],
        ):
            code, output = command(step, folder)
            if code:
                break
        else:
            # Claims that one mutation's #ifdef leaves unreachable are no news: -n leaves that listing out.
            _, output = command(["./pan", f"-m{DEPTH}", "-n"], folder)
        verdict, passed = judge(search, output)
        if want_story and (folder / f"{search.model}.trail").exists():
            story = command(["spin", *defines, "-t", "-p", search.model], folder)[1]
    except subprocess.TimeoutExpired:
        verdict, passed = f"TRUNCATED: {SECONDS} s", False
    shutil.rmtree(folder, ignore_errors=True)

    def number(pattern):
        found = re.search(pattern, output)
        return int(float(found[1])) if found else 0

    return Result(
        search,
        number(r"([\d.e+]+) states, stored"),
        number(r"depth reached (\d+)"),
        verdict,
        passed,
        time.monotonic() - start,
        story,
    )


def main():
    quick = "--quick" in sys.argv
    wanted = next((argument for argument in sys.argv[1:] if argument != "--quick"), "")
    searches = [
        search
        for search in SEARCHES
        if (search.model == wanted if wanted.endswith(".pml") else wanted in search.name)
        and not (quick and search.long)
    ]
    if not searches:
        sys.exit(f"spec: nothing has {wanted!r} in its name; there are: " + "; ".join(s.name for s in SEARCHES))
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    missing = [name for name, there in (("spin", shutil.which("spin")), ("a C compiler", compiler)) if not there]
    if missing:
        message = f"spec: {' and '.join(missing)} not found; the protocol's model was NOT checked"
        if os.environ.get("TW_STRICT") == "1":
            sys.exit(message + " (TW_STRICT=1)")
        print(f"{'*' * len(message)}\n{message}\n(SKIPPED; Debian: apt-get install spin gcc)\n{'*' * len(message)}")
        return 0

    start = time.monotonic()
    print(f"{'search':<64} {'states':>10} {'depth':>6} {'s':>6}  result", flush=True)
    with tempfile.TemporaryDirectory(prefix="tokenway-spec-") as scratch, ThreadPoolExecutor(2) as pool:
        results = []
        for result in pool.map(
            lambda search: run(search, compiler, scratch, bool(wanted) and not wanted.endswith(".pml")), searches
        ):
            results.append(result)
            name = f"mutation {result.search.name}" if result.search.caught_by else result.search.name
            print(
                f"{name:<64} {result.states:>10} {result.depth:>6} {result.seconds:>6.1f}  {result.verdict}", flush=True
            )
            if result.story:
                print(result.story)
    bad = [result.search.name for result in results if not result.passed]
    print(
        f"spec: {len(results) - len(bad)} of {len(results)} as wanted, {time.monotonic() - start:.0f} s"
        + (f"; NOT: {', '.join(bad)}" if bad else "")
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
