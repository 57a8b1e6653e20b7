/*
 * The exchange protocol of docs/PROTOCOL.md, small enough to be searched whole.
 *
 *     python3 spec/run.py         searches every configuration and every mutation (a minute or two)
 *
 * One by hand, in an empty folder:
 *
 *     spin -a .../spec/exchange.pml && cc -O2 -DSAFETY -DNOREDUCE -o pan pan.c && ./pan -m2000
 *
 * and, where it found something, `spin -t -p .../spec/exchange.pml` tells the story (with the same -D switches).
 *
 * What is here: 3 ranks, 2 channels, every sequence of dispatches and combines over the channels with LENGTH = 6 steps
 * in all, every interleaving of the stores of the signals to the single peers, sends in flight on both channels at once,
 * completed in any order, in-place reads of a dispatch view until the next publish, and trouble:
 *
 *     (default)      rank 2 may stop for ever at any point. A wait gives up only on a rank that did stop, so that a
 *                    timeout cannot hide a hang and nobody but rank 2 may be blamed.
 *     -DLATE         nobody stops, but rank 0 may give up on rank 2 at any moment at which its signal is missing: a
 *                    rank that is slower than the timeout, and then goes on. All others must name rank 2 as well.
 *     -DLATE_ALL     every wait of every rank may give up on whom it misses. Nothing is claimed about whom to blame.
 *     -DREFUSAL      in addition to rank 2's stopping, any rank may refuse any of its calls.
 *
 *     -DCOUNTS       a third kind of step beside dispatch and combine, the exchange of counts of high throughput. It is a
 *                    row of its own in the bytes of the others; and a dispatch, on whatever channel, needs the counts
 *                    that were sent before it: a rank that does not know them yet puts its row where another's belongs.
 *
 *     -DPARTS        combines may take parts: behind a combine of a dispatch's view there may be a skip, which writes no
 *                    row, and then another combine of the same view, and so on. Not together with COUNTS.
 *
 * -DONE_CHANNEL and -DLENGTH=n make room for these. run.py has the list of what is searched: the first two on two
 * channels to length 6, the other two, which are far larger, on one channel to length 6.
 *
 * What is reduced, and why nothing is lost:
 *
 *   - A row is one byte that names (source, kind, step); one row stands for all rows of a source in a step, since a
 *     signal covers them all alike.
 *   - A send stores its rows at once, when it begins. A row can be missed only if it is stored after its signal, which
 *     S4 forbids (and MUTATION_PUBLISH_BEFORE_ROWS does); and it can harm the row of an earlier step only by being early.
 *     -DROWS_APART stores each at any time before its own signal instead, to check that argument.
 *   - A wait and the reads after it are one transition. Signals never go back, so a wait that could have ended earlier
 *     can still end now; and what overwrites a row between the wait and the read has also overwritten it before this.
 *   - The last read of a dispatch view is one transition with the first publish after it. Reading as late as is allowed
 *     sees every overwriting that an earlier read sees.
 *     With PARTS a view is looked at before the first publish of each combine that reads it.
 *   - Dead values are blanked: a row after the last read it may have, a signal's mode when it was read, the variables
 *     of a rank that has left. A read too many finds a blank instead of an old row, which is as wrong.
 *   - The sequence is chosen place by place, when the first rank gets there, and forgotten when the last one has
 *     passed. No rank looks ahead, so this is the same as choosing it at the start.
 *   - The first step is on channel 0 (channels are alike); the rank that stops is 2, the one that gives up is 0 (ranks
 *     are alike, and each publishes to its peers in any order).
 *   - Sequences shorter than LENGTH are prefixes: a rank may complete everything in flight before its next send.
 *
 * What is not here: n, notes and the bound b, LL128 packets and chunk signals, S7, S8, S10, memory weaker than "the
 * signal is stored after its rows" (S4 is that demand on the code), two stopped ranks, shrinking (agreement.pml).
 *
 * S9 is every claim about a row read: it is the one that the sequence alone determines, whatever the timing was.
 */

#define N 3
#define CHANNELS 2
#ifndef LENGTH
#define LENGTH 6
#endif

/*
 * Steps wrap at 8 as the real ones do at 2^32. FIRST is what counters and signals hold before the first step; from 5
 * the steps are 6, 7, 0, 1, 2, 3, so the wrap is met early, with both banks in use.
 */
#define WRAP 8
#define FIRST 5
#define NEXT(s) (((s) + 1) % WRAP)
#define DISTANCE(a, b) (((a) + WRAP - (b)) % WRAP)
#define NOT_BEFORE(a, b) (DISTANCE(a, b) < WRAP / 2)

#define DISPATCH 0
#define COMBINE 1
#define COUNT 2
#define SKIP 2 /* in place of COUNT */
#ifdef COUNTS
#define KINDS 3
#else
#define KINDS 2 /* of rows */
#endif
#ifdef PARTS
#define SORTS 3 /* of steps */
#else
#define SORTS KINDS
#endif

/* A signal: step and mode. */
#define REFUSED 8
#define SIGNAL(s, refused) ((s) | ((refused) * REFUSED))
#define STEP_OF(value) ((value) & 7)

/* A row's value; 0 is a blank, hence the 64. */
#define ROW(source, kind, s) (64 | ((source) << 4) | (((kind) & 1) << 3) | (((kind) >> 1) << 7) | (s))

/*
 * A bank's dispatched rows, its inbox and its counts are the same bytes under different maps, so a row of one kind may
 * destroy any row of another, whatever source that came from. The model lets it destroy all of them.
 */
#define DESTROYED 1

/*
 * A rank names its peers by their distance, 1 or 2, so that no array has a place for oneself. Seen from the peer at
 * distance d, this rank is at distance N - d.
 */
#define PEER(d) ((me + (d)) % N)
#define CHANNEL_AT(rank, l) ((rank) * CHANNELS + (l))
#define SIGNAL_AT(rank, l, bank, d) ((CHANNEL_AT(rank, l) * 2 + (bank)) * 2 + (d) - 1)
#define ROW_AT(rank, l, bank, kind, d) (((CHANNEL_AT(rank, l) * 2 + (bank)) * KINDS + (kind)) * 2 + (d) - 1)
#define ABORT_AT(rank, d) ((rank) * 2 + (d) - 1)

/* The windows. */
byte row[N * CHANNELS * 2 * KINDS * 2];
byte signal[N * CHANNELS * 2 * 2] = FIRST;
byte abort_signal[N * 2]; /* 1 + culprit */

/* Each rank's counters: the last step begun on the channel. Global only so that claims can compare them. */
byte step[N * CHANNELS] = FIRST;

/* The sequence, the same on all ranks (S5): 0 is not chosen yet, else 1 + SORTS * channel + kind. */
byte program[LENGTH];
byte passed[LENGTH]; /* how many ranks have taken it */

bit gone; /* rank 2 has stopped */

#if defined(MUTATION_ONE_BANK) || defined(MUTATION_BANK_BY_CYCLE) || defined(MUTATION_SHARED_COUNTER) || \
    defined(MUTATION_SEND_AHEAD) || defined(MUTATION_EARLY_PUBLISH) || defined(MUTATION_GO_ON_AFTER_TIMEOUT) || \
    defined(MUTATION_PUBLISH_BEFORE_ROWS) || defined(MUTATION_HOST_ORDER) || defined(MUTATION_NO_ABORT) || \
    defined(MUTATION_REFUSE_WITHOUT_DRAIN) || defined(MUTATION_PLAIN_COMPARE) || defined(MUTATION_COUNTS_AHEAD) || \
    defined(MUTATION_PARTS_WITHOUT_SKIPS)
#define MUTATED
#endif

/*
 * A claim is an assertion that names its invariant: the names are variables that stay 0, and spin prints the expression
 * that failed, from which run.py reads the name. A RULE is a claim about bookkeeping, which some mutations break by
 * definition; mutated models have none, so that a mutation is caught only by damage: a wrong row read, or a hang.
 */
hidden byte S1, S2, S3, S4, S6;
#define CLAIM(invariant, condition) assert((condition) || invariant)
#ifdef MUTATED
#define RULE(invariant, condition) skip
#else
#define RULE(invariant, condition) CLAIM(invariant, condition)
#endif

/* ---- What the mutations change. The last branch of each is the protocol. ---- */

#define STEP step[CHANNEL_AT(me, channel)]

#if defined(MUTATION_ONE_BANK)
#define BANK 0
#define BANK_BEFORE 0
#elif defined(MUTATION_BANK_BY_CYCLE) /* a dispatch opens a cycle, the combines after it share its bank, beside it */
#define KINDS_APART
byte cycle[N * CHANNELS];
#define BANK (cycle[CHANNEL_AT(me, channel)] % 2)
#define BANK_BEFORE ((cycle[CHANNEL_AT(me, channel)] + 1 - KIND) % 2)
#else
#define BANK (STEP % 2) /* S1 */
#define BANK_BEFORE ((STEP + 1) % 2)
#endif

#define SEEN(d) signal[SIGNAL_AT(me, channel, BANK, d)]
#if defined(MUTATION_SHARED_COUNTER) /* one counter a channel, which every peer adds one to in every step */
byte count[N * CHANNELS];
#define ARRIVED(d) (count[CHANNEL_AT(me, channel)] >= (N - 1) * DISTANCE(STEP, FIRST))
#elif defined(MUTATION_PLAIN_COMPARE)
#define ARRIVED(d) (STEP_OF(SEEN(d)) >= STEP)
#else
#define ARRIVED(d) NOT_BEFORE(STEP_OF(SEEN(d)), STEP)
#endif

#ifdef MUTATION_SEND_AHEAD
#define FREE(l) true
#else
#define FREE(l) ((flight & (1 << (l))) == 0) /* S2 */
#endif

#ifdef MUTATION_COUNTS_AHEAD
#define KNOWN true
#else
#define KNOWN (!COUNTING) /* a handle is dispatched when its counts are known */
#endif

/*
 * Parts: how many steps ago, with this one, the dispatch was whose view the channel's combines read: odd in a dispatch or
 * a skip, even in a combine; 0 where there is none.
 */
#ifdef PARTS
#define AGE age[channel]
#define AGE_OF(l) age[l]
#else
#define AGE 0
#define AGE_OF(l) 0
#endif
#ifdef MUTATION_PARTS_WITHOUT_SKIPS
#define MAY_SKIP(l) false
#define MUST_COMBINE(l) false
#define READS_VIEW(before) ((before) > 0)
#else
#define MAY_SKIP(l) (AGE_OF(l) > 0 && AGE_OF(l) % 2 == 0)
#define MUST_COMBINE(l) (AGE_OF(l) > 1 && AGE_OF(l) % 2 == 1)
#define READS_VIEW(before) ((before) % 2 == 1)
#endif

#ifdef MUTATION_HOST_ORDER /* rank 2 swaps every two steps */
#define PLACE (me == 2 -> (at ^ 1) : at)
#else
#define PLACE at /* S5 */
#endif

#if defined(MUTATION_PUBLISH_BEFORE_ROWS)
#define MAY_WRITE(d) ((todo & SIGNAL_BIT(d)) == 0)
#define MAY_PUBLISH(d) true
#else
#define MAY_WRITE(d) true
#define MAY_PUBLISH(d) ((todo & ROW_BIT(d)) == 0) /* S4 */
#endif
#if !defined(ROWS_APART) && (defined(MUTATION_PUBLISH_BEFORE_ROWS) || defined(MUTATION_SHARED_COUNTER))
#define ROWS_APART
#endif

#if defined(LATE_ALL)
#define LOST(d) (!ARRIVED(d))
#define BLAMABLE(whom) true
#elif defined(LATE)
#define LOST(d) (!ARRIVED(d) && me == 0 && PEER(d) == 2)
#define BLAMABLE(whom) ((whom) == 2)
#else
#define MAY_STOP
#define LOST(d) (!ARRIVED(d) && gone && PEER(d) == 2)
#define BLAMABLE(whom) (gone && (whom) == 2)
#endif

#ifdef ONE_CHANNEL
#define MAY_BE_OTHER false
#else
#define MAY_BE_OTHER (at > 0 && FREE(1))
#endif

/* ---- A rank ---- */

/* What it is doing. */
#define IDLE 0
#define SENDING 1
#define COMPLETING 2
#define FAILING 3

/* What it has still to store, in a send or a failure: bits by distance, and one for MUTATION_EARLY_PUBLISH. */
#define ROW_BIT(d) (1 << ((d) - 1))
#define SIGNAL_BIT(d) (4 << ((d) - 1))
#define ALL_ROWS 3
#define ALL_SIGNALS 12
#define VIEW_BIT 16

#define CHANNEL_BIT (1 << channel)
#define KIND_OF(l) ((kinds >> (2 * (l))) & 3)
#define KIND KIND_OF(channel)
#define COUNTING (((flight & 1) && KIND_OF(0) == COUNT) || ((flight & 2) && KIND_OF(1) == COUNT))
#define REFUSING ((refusing >> channel) & 1)
#define VIEW_OF(d) (ROW_BIT(d) << (2 * channel))

/* The next step of the sequence; of one that is not chosen yet, no channel and no kind. */
#define CHANNEL_NEXT ((program[PLACE] - 1) / SORTS)
#define KIND_NEXT (program[PLACE] == 0 -> SORTS : (program[PLACE] - 1) % SORTS)

/* What the host does next: start the next step of the sequence, or complete (and block in) any that is in flight. */
inline choose()
{
    if
    :: flight & 1 -> doing = COMPLETING; channel = 0
    :: flight & 2 -> doing = COMPLETING; channel = 1
    :: at < LENGTH && (program[PLACE] == 0 -> FREE(0) || MAY_BE_OTHER : FREE(CHANNEL_NEXT)) &&
       (KIND_NEXT != DISPATCH || KNOWN) ->
        if
        :: program[PLACE] == 0 && FREE(0) && KNOWN && !MUST_COMBINE(0) -> program[PLACE] = 1 + DISPATCH
        :: program[PLACE] == 0 && FREE(0) -> program[PLACE] = 1 + COMBINE
        :: program[PLACE] == 0 && MAY_BE_OTHER && KNOWN && !MUST_COMBINE(1) -> program[PLACE] = 1 + SORTS + DISPATCH
        :: program[PLACE] == 0 && MAY_BE_OTHER -> program[PLACE] = 1 + SORTS + COMBINE
#ifdef PARTS
        :: program[PLACE] == 0 && FREE(0) && MAY_SKIP(0) -> program[PLACE] = 1 + SKIP
        :: program[PLACE] == 0 && MAY_BE_OTHER && MAY_SKIP(1) -> program[PLACE] = 1 + SORTS + SKIP
#endif
#ifdef COUNTS
        :: program[PLACE] == 0 && FREE(0) -> program[PLACE] = 1 + COUNT
        :: program[PLACE] == 0 && MAY_BE_OTHER -> program[PLACE] = 1 + SORTS + COUNT
#endif
        :: program[PLACE] != 0
        fi;
        begin()
    :: at == LENGTH && flight == 0 -> leave()
    fi
}

/* Takes the next place of the sequence and begins its step. */
inline begin()
{
    doing = SENDING;
    channel = CHANNEL_NEXT;
    kinds = (kinds & ~(3 << (2 * channel))) | (((program[PLACE] - 1) % SORTS) << (2 * channel));
    passed[PLACE]++;
    if
    :: passed[PLACE] == N -> program[PLACE] = 0; passed[PLACE] = 0
    :: else
    fi;
    at++;

    RULE(S2, (flight & CHANNEL_BIT) == 0);
    STEP = NEXT(STEP);
    grow_old();
#ifdef MUTATION_BANK_BY_CYCLE
    cycle[CHANNEL_AT(me, channel)] = cycle[CHANNEL_AT(me, channel)] + 1 - KIND;
#endif
    RULE(S1, BANK == STEP % 2 && BANK != BANK_BEFORE);
    RULE(S2, NOT_BEFORE(NEXT(step[CHANNEL_AT(PEER(1), channel)]), STEP));
    RULE(S2, NOT_BEFORE(NEXT(step[CHANNEL_AT(PEER(2), channel)]), STEP));
    flight = flight | CHANNEL_BIT;

    todo = ALL_SIGNALS;
    if
#ifdef ROWS_APART
    :: KIND == SKIP && KINDS == 2
    :: KIND != SKIP || KINDS != 2 -> todo = ALL_SIGNALS | ALL_ROWS; write_to_self()
#else
    :: KIND == SKIP && KINDS == 2
    :: KIND != SKIP || KINDS != 2 -> write(1); write(2)
#endif
#ifdef REFUSAL
    :: refusing = refusing | CHANNEL_BIT
#endif
    fi;
#ifdef MUTATION_EARLY_PUBLISH
    todo = todo | VIEW_BIT
#endif
}

/* With parts: whether this step reads the view of the last dispatch. A view that no step will read any more is dead. */
inline grow_old()
{
#ifdef PARTS
    if
    :: KIND == SKIP || (KIND == COMBINE && READS_VIEW(AGE)) -> AGE++
    :: else ->
        if
        :: AGE > 1 -> bury(1); bury(2); views = views & ~(3 << (2 * channel))
        :: else
        fi;
        AGE = (KIND == DISPATCH -> 1 : 0)
    fi
#else
    skip
#endif
}

#define VIEW_STEP DISTANCE(STEP, AGE - 1)
#define VIEW_AT(d) row[ROW_AT(me, channel, VIEW_STEP % 2, DISPATCH, d)]

/* Before AGE is that of the step that begins. A peer may have written to the bank already, in that step. */
inline bury(d)
{
    if
    :: row[ROW_AT(me, channel, DISTANCE(STEP, AGE) % 2, DISPATCH, d)] == ROW(PEER(d), DISPATCH, DISTANCE(STEP, AGE)) ->
        row[ROW_AT(me, channel, DISTANCE(STEP, AGE) % 2, DISPATCH, d)] = 0
    :: else
    fi
}

inline write(d)
{
    row[ROW_AT(PEER(d), channel, BANK, KIND, N - (d))] = ROW(me, KIND, STEP);
    destroy(PEER(d));
    misplace(d);
    todo = todo & ~ROW_BIT(d)
}

/* Of three ranks: the row of the third one, at the peer. */
#define THIRD(d) row[ROW_AT(PEER(d), channel, BANK, KIND, d)]

inline misplace(d)
{
#ifdef COUNTS
    if
    :: KIND == DISPATCH && COUNTING -> THIRD(d) = (THIRD(d) -> DESTROYED : 0)
    :: else
    fi
#else
    skip
#endif
}

#define OTHERS(rank, other, d) row[ROW_AT(rank, channel, BANK, (KIND + (other)) % KINDS, d)]

inline destroy(rank) /* a blank stays one: it is dead already, or its own source has yet to write it */
{
#ifdef KINDS_APART
    skip
#else
    destroy_kind(rank, 1);
#ifdef COUNTS
    destroy_kind(rank, 2)
#endif
#endif
}

inline destroy_kind(rank, other)
{
    OTHERS(rank, other, 1) = (OTHERS(rank, other, 1) -> DESTROYED : 0);
    OTHERS(rank, other, 2) = (OTHERS(rank, other, 2) -> DESTROYED : 0)
}

inline write_to_self() /* its own rows need no signal and have no reader but its own stream; only the harm matters */
{
    destroy(me)
}

inline publish(d)
{
#ifndef MUTATION_EARLY_PUBLISH
    read_view(); /* S3 */
#endif
#ifdef MUTATION_SHARED_COUNTER
    count[CHANNEL_AT(PEER(d), channel)]++;
#else
    signal[SIGNAL_AT(PEER(d), channel, BANK, N - (d))] = SIGNAL(STEP, REFUSING);
#endif
    todo = todo & ~SIGNAL_BIT(d)
}

/*
 * The last moment at which the view of a dispatch one step back may be read: the experts compute in place, and a
 * combine's send reads their rows out of the bank until it publishes.
 */
inline read_view()
{
    if
    :: AGE > 1 -> /* of this combine, and perhaps of others behind it */
        if
        :: KIND == COMBINE && (todo & ALL_SIGNALS) == ALL_SIGNALS -> look_at(1); look_at(2)
        :: else
        fi
    :: else ->
        read_view_of(1);
        read_view_of(2);
        views = views & ~(3 << (2 * channel))
    fi
}

inline look_at(d)
{
    CLAIM(S3, (views & VIEW_OF(d)) == 0 || VIEW_AT(d) == ROW(PEER(d), DISPATCH, VIEW_STEP))
}

#define VIEWED(d) row[ROW_AT(me, channel, BANK_BEFORE, DISPATCH, d)]

inline read_view_of(d)
{
    if
    :: views & VIEW_OF(d) -> CLAIM(S3, VIEWED(d) == ROW(PEER(d), DISPATCH, DISTANCE(STEP, 1))); VIEWED(d) = 0
    :: else
    fi
}

inline sent()
{
    if
    :: todo == 0 ->
#ifdef MUTATION_REFUSE_WITHOUT_DRAIN
        flight = flight & ~(REFUSING << channel);
#endif
        doing = IDLE
    :: else
    fi
}

/*
 * A source's row in the step that this rank completes. A combine's is summed now, counts are copied now, a dispatch's is
 * first seen now.
 */
#define READ(d) row[ROW_AT(me, channel, BANK, KIND, d)]

inline read(d)
{
    RULE(S2, STEP_OF(SEEN(d)) == STEP);
    if
    :: KIND == SKIP && KINDS == 2
    :: REFUSING || (SEEN(d) & REFUSED) -> /* this rank only drains, or nothing was sent */
        READ(d) = 0;
        SEEN(d) = STEP_OF(SEEN(d))
    :: else ->
        CLAIM(S4, READ(d) == DESTROYED || (READ(d) != 0 && NOT_BEFORE(STEP_OF(READ(d)), STEP))); /* it came */
        CLAIM(S2, READ(d) == ROW(PEER(d), KIND, STEP)); /* and is still there */
        if
        :: KIND == DISPATCH -> views = views | VIEW_OF(d)
        :: else -> READ(d) = 0
        fi
    fi
}

inline completed()
{
    flight = flight & ~CHANNEL_BIT;
    kinds = kinds & ~(3 << (2 * channel));
    refusing = refusing & ~CHANNEL_BIT;
    doing = IDLE
}

inline fail(whom)
{
    CLAIM(S6, BLAMABLE(whom));
#ifdef MUTATION_NO_ABORT
    leave();
#endif
    forget();
    doing = FAILING; /* for ever: it sends nothing more, on any channel */
    culprit = 1 + (whom);
    todo = ALL_SIGNALS
}

inline tell(d)
{
    abort_signal[ABORT_AT(PEER(d), N - (d))] = culprit;
    todo = todo & ~SIGNAL_BIT(d);
    if
    :: todo == 0 -> leave()
    :: else
    fi
}

inline forget()
{
    doing = IDLE; at = 0; channel = 0; todo = 0; flight = 0; kinds = 0; refusing = 0; views = 0; culprit = 0;
#ifdef PARTS
    age[0] = 0; age[1] = 0
#endif
}

inline leave()
{
    forget();
    goto end
}

#define ABORTED(d) abort_signal[ABORT_AT(me, d)]

active [N] proctype Rank()
{
    byte me = _pid;
    byte doing, channel, todo, culprit;
    byte at;                      /* place in the sequence */
    byte flight, refusing;        /* a bit per channel */
    byte kinds;                   /* two bits per channel */
    byte views;                   /* two bits per channel: whose rows of the last dispatch may still be read */
#ifdef PARTS
    byte age[CHANNELS];
#endif

    do
    :: atomic {
        if
        :: doing == IDLE /* only at the start */
        :: doing == SENDING && MAY_PUBLISH(1) && (todo & SIGNAL_BIT(1)) -> publish(1); sent()
        :: doing == SENDING && MAY_PUBLISH(2) && (todo & SIGNAL_BIT(2)) -> publish(2); sent()
#ifdef ROWS_APART
        :: doing == SENDING && MAY_WRITE(1) && (todo & ROW_BIT(1)) -> write(1); sent()
        :: doing == SENDING && MAY_WRITE(2) && (todo & ROW_BIT(2)) -> write(2); sent()
#endif
#ifdef MUTATION_EARLY_PUBLISH
        :: doing == SENDING && todo == VIEW_BIT -> read_view(); todo = 0; sent()
#endif

        :: doing == COMPLETING && ARRIVED(1) && ARRIVED(2) -> read(1); read(2); completed()
#ifdef MUTATION_GO_ON_AFTER_TIMEOUT /* it leaves out what is missing, and does everything else */
        :: doing == COMPLETING && LOST(1) && ARRIVED(2) -> read(2); completed()
        :: doing == COMPLETING && LOST(2) && ARRIVED(1) -> read(1); completed()
        :: doing == COMPLETING && LOST(1) && LOST(2) -> completed()
#else
        :: doing == COMPLETING && LOST(1) -> fail(PEER(1))
        :: doing == COMPLETING && LOST(2) -> fail(PEER(2))
#endif

        /* An abort signal is looked for in waits and before stores; it may come just after, so it is a choice. */
        :: (doing == SENDING || doing == COMPLETING) && ABORTED(1) -> fail(ABORTED(1) - 1)
        :: (doing == SENDING || doing == COMPLETING) && ABORTED(2) -> fail(ABORTED(2) - 1)
        :: doing == FAILING && (todo & SIGNAL_BIT(1)) -> tell(1)
        :: doing == FAILING && (todo & SIGNAL_BIT(2)) -> tell(2)

#ifdef MAY_STOP
        :: me == 2 -> gone = 1; leave()
#endif
        fi;
        if
        :: doing == IDLE -> choose()
        :: else
        fi
    }
    od;
end: /* in data, in an error, or stopped; to be anywhere else for ever is an invalid end state */
    false
}
