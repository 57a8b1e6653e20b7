/*
 * The protocol between hosts (T1 to T11, "Between hosts" in docs/PROTOCOL.md), small enough to be searched whole.
 * python3 spec/run.py does so, beside exchange.pml, whose head says how to do one by hand.
 *
 * What is here: 2 hosts of 2 ranks, 1 or 2 channels, every sequence of LENGTH steps over them in one order (S5). Ranks
 * 0 and 2 are rail peers, and so are 1 and 3. A send stages the rows for the other host, puts them into the inbox that
 * is its own at its rail peer, with a block that says what the step is, and adds to a word there. Both ranks of that
 * host look at the word, and take their rows from there. hosts_rules.pml has the rules, and the mistakes that must be
 * found; hosts_words.pml has what an add does to a word (T6).
 *
 *     (default)      dispatches, and combines whose partials go by the rail peer: into a bank of its window, for both
 *                    owners. The network is slow where rank 0 puts.
 *     -DMORE_KINDS   also combines straight to their owners, with a rows word there, and steps without rows.
 *     -DBY_DOMAIN    combines fold a host's partials before they travel: mates put theirs to the rank on the owner's
 *                    rail, and an agent there, which its send has started, folds them and puts them to the owner.
 *     -DPAIRS        on each channel a dispatch, and then a combine.
 *     -DALL_SLOW     the network is slow everywhere.
 *     -DAPART        rows and their word land one after the other.
 *     -DSTOP         rank 2 may stop for ever at any point, and with it all that its engine moves.
 *     -DQUITS        rank 2 may stop calling; its threads go on. Others give up when nothing moves any more.
 *     -DLATE         any rank may give up on rank 2 while it has not sent the step that is waited for. It goes on.
 *     -DREFUSAL      any rank may refuse any call.
 *     -DMESSAGE      rank 3 completes no step before another rank has completed one: a message that travels elsewhere.
 *
 * What is reduced, and why nothing is lost:
 *
 *   - A row is one byte, the step that it is of. A cell is written by one source alone, in its bank; what lies in the
 *     same bytes under another map is destroyed by it.
 *   - A send is one transition, and so are a wait and its reads: as in moving.pml and exchange.pml. A rank that stops
 *     takes back the signal to its mate that may not have been stored yet, and what the network has not moved is lost.
 *   - Rows, block and word land in one transition, as early as they are posted: a row does harm by being early, and a
 *     word that lands late looks like a wait that ends late. -DAPART checks that. Only what is put from staging that is
 *     written again must be looked at late, and one slow source is enough for one wrong row; ranks are alike, so it is
 *     rank 0. Where rank 2 may stop, everything to and from it is slow. -DALL_SLOW checks both.
 *   - Dead values are blanked, but in mutated models, where it could hide or make damage.
 *   - The first step is on channel 0, the rank that stops is 2: channels are alike, and so are ranks.
 *   - The sequence is chosen place by place, when the first rank gets there, and forgotten when the last has passed.
 *
 * What is not here: what steps are within a host (exchange.pml), n and notes, chunks, hosts of unlike sizes or a third
 * one, memory and networks weaker than "who sees a word sees what was put before it to the same rank" (T5 is that
 * demand on engines), two stopped ranks, shrinking.
 */

#include "hosts_rules.pml"

/* As in exchange.pml: claims are named, and mutated models have no rules about bookkeeping. */
hidden byte S3, T2, T3, T5, T6, T7, T8, T9, T10;
#define CLAIM(invariant, condition) assert((condition) || invariant)
#ifdef MUTATED
#define RULE(invariant, condition) skip
#define BURIES false
#else
#define RULE(invariant, condition) CLAIM(invariant, condition)
#define BURIES true
#endif

#define N 4
#define MATE(r) ((r) ^ 1)
#define RAIL(r) ((r) ^ 2)
#define ACROSS(r) ((r) ^ 3)
#ifdef ONE_CHANNEL
#define CHANNELS 1
#else
#define CHANNELS 2
#endif
#define OTHER (CHANNELS - 1) /* of two channels the second; of one channel that one, once more */
#ifndef LENGTH
#define LENGTH 4
#endif

#define BIT(l) (1 << (l))
#define AT(r, l) ((r) * CHANNELS + (l))
#define CELL(r, l, b) (AT(r, l) * 2 + (b))
#define DESTROYED 99

/* Kinds of steps. A block says 1 + kind, or that its step is refused. */
#define DISPATCH 0
#define COMBINE 1
#define STRAIGHT 2
#define EMPTY 3
#define KINDS 4
#define REFUSED 5
#define REFUSED_SIGNAL 16
#define STEP_OF(value) ((value) & 15)

/* ---- Memory ---- */

/* At a rank, in its banks: the mate's row; the other host's rows of a dispatch, which it has copied; partials from its
   rail peer for both ranks of the host; partials straight for itself, from either; its mate's partial for its fold. */
byte here[N * CHANNELS * 2], copied[N * CHANNELS * 2], partial[N * CHANNELS * 2];
byte straight_rail[N * CHANNELS * 2], straight_across[N * CHANNELS * 2], relay[N * CHANNELS * 2];

/* At a rank, by what its mate has stored. */
byte signal[N * CHANNELS * 2];

/* By source: what it has staged, and what lies in its inbox at its rail peer. */
byte staging[N * CHANNELS * 2], staged_block[N * CHANNELS * 2], staged_fold[N * CHANNELS * 2];
byte inbox[N * CHANNELS * 2], block[N * CHANNELS * 2], word[N * CHANNELS * 2];
byte rows_word_rail[N * CHANNELS * 2], rows_word_across[N * CHANNELS * 2], fold_word[N * CHANNELS * 2];

/* By source: what is under way, a bit for each bank. To the rail peer, to the other rank there, and folds. */
byte fly[N * CHANNELS], fly_across[N * CHANNELS], folds[N * CHANNELS];
#define ROWS_BIT(b) (1 << (b))
#define WORD_BIT(b) (4 << (b))
#define BLOCK_BIT(b) (16 << (b))
#define AGENT_BIT(b) (1 << (b))
#define FOLD_BIT(b) (4 << (b))

/* ---- What ranks do ---- */

byte step[N * CHANNELS]; /* the last one begun */
byte flight[N];          /* a bit for each channel whose step is not completed */
byte sent[N];            /* steps begun on all channels: what a rank answers who asks it */
byte doing[N];
#define START 0 /* has yet to choose what it does next */
#define BEGIN 1 /* will begin its next step */
#define SENDING 2
#define WAIT(l) (3 + (l))

byte program[LENGTH]; /* 0 is not chosen yet, else 1 + KINDS * channel + kind */
byte passed[LENGTH];

byte failed[N]; /* 1 + whom it has named */
bit gone, message;
byte left; /* how many ranks are done */

#ifdef FORWARDS
byte forwarded[N * CHANNELS];
#endif

#ifdef STOP
#define SLOW(x) ((x) == 0 || (x) == 2)
#define SLOW_ACROSS(x) ((x) == 1 || (x) == 2)
#elif defined(ALL_SLOW)
#define SLOW(x) true
#define SLOW_ACROSS(x) true
#elif defined(LATE)
#define SLOW(x) ((x) == 0 || (x) == 2)
#define SLOW_ACROSS(x) false
#else
#define SLOW(x) ((x) == 0)
#define SLOW_ACROSS(x) ((x) == 0)
#endif
#if defined(MUTATION_WORD_ON_ANOTHER_CONTEXT) || defined(MUTATION_BLOCK_BEHIND_WORD)
#define APART
#endif

#include "hosts_network.pml"

/* ---- A rank ---- */

#define COMPLETE 1
#define FAIL 2

#define KIND(l) ((kinds >> (2 * (l))) & 3)
#define REFUSING(l) ((refusing & BIT(l)) != 0)
#define STEP step[AT(me, l)]
#define CHANNEL_NEXT ((program[at] - 1) / KINDS)
#define MAY_BE_OTHER (CHANNELS == 2 && at > 0 && FREE(OTHER))
#define MAY_BEGIN (at < LENGTH && (program[at] == 0 -> (FREE(0) && IN_PAIR(0)) || (MAY_BE_OTHER && IN_PAIR(OTHER)) : \
                                                         FREE(CHANNEL_NEXT)))
#ifdef PAIRS
#define IN_PAIR(l) (step[AT(me, l)] < 2)
#define MAY_BE(kind) (step[AT(me, l)] == (kind))
#else
#define IN_PAIR(l) true
#define MAY_BE(kind) true
#endif

/* What the host does next, and then does: begin its next step, or complete one and block in that. */
inline choose()
{
    if
    :: flight[me] & 1 -> doing[me] = WAIT(0)
    :: flight[me] & 2 -> doing[me] = WAIT(OTHER)
    :: MAY_BEGIN -> doing[me] = BEGIN; plan()
    :: at == LENGTH && flight[me] == 0 -> leave()
#ifdef REFUSAL
    :: at == LENGTH && flight[me] != 0 && (flight[me] & ~refusing) == 0 -> forget(); goto end /* no step drains them */
#endif
    fi
}

/* The first rank to get there chooses the next place of the sequence. */
inline plan()
{
    if
    :: program[at] != 0
    :: program[at] == 0 ->
        if
        :: FREE(0) && IN_PAIR(0)
        :: MAY_BE_OTHER && IN_PAIR(OTHER) -> l = 1
        fi;
        if
        :: MAY_BE(DISPATCH) -> program[at] = 1 + KINDS * l + DISPATCH
        :: MAY_BE(COMBINE) -> program[at] = 1 + KINDS * l + COMBINE
#ifdef MORE_KINDS
        :: program[at] = 1 + KINDS * l + STRAIGHT
        :: program[at] = 1 + KINDS * l + EMPTY
#endif
        fi;
        l = 0
    fi
}

inline begin()
{
    l = CHANNEL_NEXT;
    kinds = (kinds & ~(3 << (2 * l))) | (((program[at] - 1) % KINDS) << (2 * l));
    if
    :: true
#ifdef REFUSAL
    :: refusing = refusing | BIT(l)
#endif
    fi;
    passed[at]++;
    if
    :: passed[at] == N -> program[at] = 0; passed[at] = 0
    :: else
    fi;
    at++;
    sent[me] = at;

    if
    :: !READS_LATE -> read_view()
    :: else
    fi;
    RULE(T2, (flight[me] & BIT(l)) == 0);
    STEP++;
    RULE(T2, step[AT(0, l)] + 1 >= STEP && step[AT(1, l)] + 1 >= STEP);
    RULE(T2, step[AT(2, l)] + 1 >= STEP && step[AT(3, l)] + 1 >= STEP);
    RULE(T7, (fly[AT(me, l)] & (ROWS_BIT(BANK(STEP)) | WORD_BIT(BANK(STEP)))) == 0);
    RULE(T7, (fly_across[AT(me, l)] & BIT(BANK(STEP))) == 0);
    RULE(T7, (folds[AT(me, l)] & (AGENT_BIT(BANK(STEP)) | FOLD_BIT(BANK(STEP)))) == 0);
    flight[me] = flight[me] | BIT(l);

    if
    :: REFUSING(l) || KIND(l) == EMPTY
    :: else ->
        store(me, l, STEP); store(MATE(me), l, STEP);
        here[CELL(MATE(me), l, BANK(STEP))] = STEP;
        staging[CELL(me, l, STAGING_BANK(STEP))] = STEP
#ifdef BY_DOMAIN
        ;
        if
        :: KIND(l) == COMBINE -> relay[CELL(MATE(me), l, RELAY_BANK(STEP))] = STEP
        :: else
        fi
#endif
    fi;
    signal[CELL(MATE(me), l, BANK(STEP))] = STEP | (REFUSING(l) -> REFUSED_SIGNAL : 0);
    staged_block[CELL(me, l, BANK(STEP))] = (REFUSING(l) -> REFUSED : 1 + KIND(l));
    post();
#ifdef MUTATION_READ_BEHIND_WORD
    late[l] = views & BIT(l); views = views & ~BIT(l);
#endif
#ifdef MUTATION_RING
    doing[me] = SENDING; sending = l;
#else
    doing[me] = START;
#endif
    l = 0
}

inline post()
{
    b = BANK(STEP); t = STEP;
    if
    :: SIGNALS(l) && (!BURIES || REACHES(me, RAIL(me))) -> /* nobody looks at what never lands */
        fly[AT(me, l)] = fly[AT(me, l)] | ROWS_BIT(b) | WORD_BIT(b) | (BLOCK_APART -> BLOCK_BIT(b) : 0)
    :: else
    fi;
#ifdef MORE_KINDS
    if
    :: KIND(l) == STRAIGHT && !REFUSING(l) && (!BURIES || REACHES(me, ACROSS(me))) ->
        fly_across[AT(me, l)] = fly_across[AT(me, l)] | BIT(b);
        if
        :: !SLOW_ACROSS(me) && REACHES(me, ACROSS(me)) -> land_across(me, l, b)
        :: else
        fi
    :: else
    fi;
#endif
#ifdef BY_DOMAIN
    if
    :: KIND(l) == COMBINE && !REFUSING(l) -> folds[AT(me, l)] = folds[AT(me, l)] | AGENT_BIT(b)
    :: else
    fi;
#endif
    if
    :: SIGNALS(l) && !SLOW(me) && !BLOCK_APART && REACHES(me, RAIL(me)) -> land_rows(me, l, b); land_word(me, l, b)
    :: else
    fi;
    b = 0; t = 0
}

/* The last moment at which the view of the step before may be read: by experts in place, and by a combine's send. */
inline read_view()
{
    if
    :: views & BIT(l) ->
        CLAIM(S3, here[CELL(me, l, BANK(STEP))] == STEP && copied[CELL(me, l, BANK(STEP))] == STEP);
        here[CELL(me, l, BANK(STEP))] = 0; copied[CELL(me, l, BANK(STEP))] = 0;
        views = views & ~BIT(l)
    :: else
    fi
}

#define BLOCK(x, l, s) block[CELL(x, l, BLOCK_BANK(s))]
#define ROWS_WORD(x, l, s) \
  ((x) == RAIL(me) -> rows_word_rail[CELL(me, l, BANK(s))] : rows_word_across[CELL(me, l, BANK(s))])
#ifdef BY_DOMAIN
#define HAS_TOLD_ROWS(x, l, s) \
  (BLOCK(x, l, s) != 1 + COMBINE || (x) != RAIL(me) || fold_word[CELL(x, l, BANK(s))] >= (s))
#else
#define HAS_TOLD_ROWS(x, l, s) (BLOCK(x, l, s) != 1 + STRAIGHT || ROWS_WORD(x, l, s) >= (s) || !AWAITS_ROWS_WORDS)
#endif
#define HAS(x, l, s) (SEEN(x, l, s) && HAS_TOLD_ROWS(x, l, s) && HAS_ROWS_OF(x, l, s))
#define HAS_MATE(l, s) (STEP_OF(signal[CELL(me, l, BANK(s))]) >= (s))
#define ALL_HERE(l) (HAS_MATE(l, step[AT(me, l)]) && HAS(RAIL(me), l, step[AT(me, l)]) && \
                     HAS(ACROSS(me), l, step[AT(me, l)]))
#define HAS_HELPED(l) (HAS_FORWARDED(l) && HAS_FOLDED(l) && LOOKED(l))
#ifdef FORWARDS
#define HAS_FORWARDED(l) (forwarded[AT(RAIL(me), l)] >= step[AT(me, l)])
#define NEXT_FORWARDED(l) (forwarded[AT(RAIL(me), l)] + 1)
#define CAN_FORWARD(l) \
  (word[CELL(RAIL(me), l, BANK(NEXT_FORWARDED(l)))] >= NEXT_FORWARDED(l) && MAY_FORWARD(l))
#else
#define HAS_FORWARDED(l) true
#endif
#ifdef FOLDS_IN_COMPLETION
#define HAS_FOLDED(l) (FOLDS(me, l) == 0)
#else
#define HAS_FOLDED(l) true
#endif
#ifdef BY_DOMAIN
#define MESSENGER 1 /* for whom rank 3 folds */
#else
#define MESSENGER 2 /* the mate that could forward to it */
#endif
#ifdef MESSAGE
#define MAY_WAIT (me != 3 || message)
#else
#define MAY_WAIT true
#endif

/* The first that is missing. */
#define MISSED(l, s) (!HAS_MATE(l, s) -> MATE(me) : (!HAS(RAIL(me), l, s) -> RAIL(me) : ACROSS(me)))

/* Dead values: nobody reads them any more. */
#define MATE_HAS_COMPLETED \
  (BURIES && (step[AT(MATE(me), l)] > STEP || (step[AT(MATE(me), l)] == STEP && (flight[MATE(me)] & BIT(l)) == 0)))

inline bury(source)
{
    block[CELL(source, l, BLOCK_BANK(STEP))] = 0;
    inbox[CELL(source, l, INBOX_BANK(STEP))] = 0;
    partial[CELL(RAIL(source), l, BANK(STEP))] = 0
}

inline complete()
{
    RULE(T6, STEP_OF(signal[CELL(me, l, BANK(STEP))]) == STEP);
    RULE(T6, word[CELL(RAIL(me), l, BANK(STEP))] == STEP && word[CELL(ACROSS(me), l, BANK(STEP))] == STEP);
    if
    :: REFUSING(l) || signal[CELL(me, l, BANK(STEP))] >= REFUSED_SIGNAL ||
       BLOCK(RAIL(me), l, STEP) == REFUSED || BLOCK(ACROSS(me), l, STEP) == REFUSED || KIND(l) == EMPTY
    :: else ->
        CLAIM(T8, BLOCK(RAIL(me), l, STEP) == 1 + KIND(l) && BLOCK(ACROSS(me), l, STEP) == 1 + KIND(l));
        check(here[CELL(me, l, BANK(STEP))]);
        if
        :: KIND(l) == DISPATCH ->
            if
            :: !READS_LATE -> check(inbox[CELL(RAIL(me), l, INBOX_BANK(STEP))]);
                              check(inbox[CELL(ACROSS(me), l, INBOX_BANK(STEP))])
            :: else
            fi;
            store(me, l, STEP);
            copied[CELL(me, l, BANK(STEP))] = STEP;
            views = views | BIT(l)
#ifdef BY_DOMAIN
        :: KIND(l) == COMBINE -> check(inbox[CELL(RAIL(me), l, INBOX_BANK(STEP))])
#else
        :: KIND(l) == COMBINE -> check(partial[CELL(me, l, BANK(STEP))]); check(partial[CELL(MATE(me), l, BANK(STEP))])
#endif
#ifdef MORE_KINDS
        :: KIND(l) == STRAIGHT -> check(straight_rail[CELL(me, l, BANK(STEP))]);
                                  check(straight_across[CELL(me, l, BANK(STEP))]);
                                  straight_rail[CELL(me, l, BANK(STEP))] = 0;
                                  straight_across[CELL(me, l, BANK(STEP))] = 0
#endif
        fi
    fi;
    SPOIL_AT_RESULT(me, l, STEP);
    if
    :: (folds[AT(me, l)] & AGENT_BIT(BANK(STEP))) == 0 -> /* else the agent has yet to look at it */
        signal[CELL(me, l, BANK(STEP))] = STEP_OF(signal[CELL(me, l, BANK(STEP))])
    :: else
    fi;
    if
    :: BURIES -> rows_word_rail[CELL(me, l, BANK(STEP))] = 0; rows_word_across[CELL(me, l, BANK(STEP))] = 0
    :: else
    fi;
    here[CELL(me, l, BANK(STEP))] = (views & BIT(l) -> here[CELL(me, l, BANK(STEP))] : 0);
    if
    :: MATE_HAS_COMPLETED -> bury(RAIL(me)); bury(ACROSS(me))
    :: else
    fi;
    flight[me] = flight[me] & ~BIT(l);
    kinds = kinds & ~(3 << (2 * l));
    refusing = refusing & ~BIT(l);
    message = (me == MESSENGER -> 1 : message);
    l = 0;
    doing[me] = START
}

#ifdef MUTATION_READ_BEHIND_WORD
inline look(channel)
{
    CLAIM(T3, inbox[CELL(RAIL(me), channel, BANK(step[AT(me, channel)] - 1))] == step[AT(me, channel)] - 1);
    CLAIM(T3, inbox[CELL(ACROSS(me), channel, BANK(step[AT(me, channel)] - 1))] == step[AT(me, channel)] - 1);
    late[channel] = 0
}
#define LOOKED(l) (late[l] == 0)
#else
#define LOOKED(l) true
#endif

inline check(cell)
{
    CLAIM(T5, cell >= STEP); /* it came before its word */
    CLAIM(T3, cell == STEP)  /* and is still there */
}

inline fail() /* t: whom it names */
{
    CLAIM(T9, t == 2);
    failed[me] = 1 + t;
    end_connections();
    forget();
    goto end
}

/* What was under way from here never comes to be: the engine's own threads have ended. */
inline end_connections()
{
    for (l : 0 .. OTHER) {
        fly[AT(me, l)] = (ENGINE_STANDS(me) -> fly[AT(me, l)] : 0);
        fly_across[AT(me, l)] = (ENGINE_STANDS(me) -> fly_across[AT(me, l)] : 0);
        folds[AT(me, l)] = 0
    }
}

/* The signal to its mate may not have been stored yet; what the network has not moved to or from here never comes. */
#define UNSEEN(r, s) (step[AT(r, l)] < (s) || (step[AT(r, l)] == (s) && (flight[r] & BIT(l))))

inline stop()
{
    gone = 1;
    for (l : 0 .. OTHER) {
        fly[AT(0, l)] = 0; fly[AT(2, l)] = 0; fly_across[AT(1, l)] = 0; fly_across[AT(2, l)] = 0;
        folds[AT(0, l)] = folds[AT(0, l)] & 3; folds[AT(2, l)] = 0;
        if
        :: true
        :: STEP > 0 && UNSEEN(3, STEP) -> signal[CELL(3, l, BANK(STEP))] = 0
        fi
    }
    forget();
    goto end
}

inline leave()
{
    for (l : 0 .. OTHER) { read_view() }
    left++;
    if
    :: left == N && FREES_AT(left) ->
        for (b : 0 .. N * CHANNELS - 1) { FREED(fly[b] == 0 && fly_across[b] == 0 && folds[b] == 0) }
        b = 0
    :: left != N && FREES_AT(left) ->
        for (l : 0 .. OTHER) { FREED(fly[AT(me, l)] == 0 && fly_across[AT(me, l)] == 0 && folds[AT(me, l)] == 0) }
    :: else
    fi;
    forget();
    goto end
}

inline forget() { doing[me] = START; at = 0; kinds = 0; refusing = 0; views = 0; l = 0; b = 0; t = 0 }

#define WAITS(l) (doing[me] == WAIT(l))
#define MAY_PUT QUEUED(CHANNEL_NEXT)
#define LOOKS ((doing[me] == BEGIN && MAY_PUT) || doing[me] >= WAIT(0))
#define MISSES(l) (WAITS(l) && !ALL_HERE(l))
#if defined(STOP)
#define GIVES_UP(l) (MISSES(l) && gone && KNOWN)
#elif defined(QUITS)
#define GIVES_UP(l) (MISSES(l) && timeout)
#elif defined(LATE)
#define GIVES_UP(l) (MISSES(l) && me != 2 && step[AT(2, l)] < step[AT(me, l)])
#endif

active [N] proctype Rank()
{
    byte me = _pid - 1;
    byte at;               /* place in the sequence */
    byte kinds;            /* two bits per channel */
    byte refusing, views;  /* a bit per channel */
    byte l, b, t, act;
#ifdef MUTATION_READ_BEHIND_WORD
    byte late[CHANNELS];
#endif
#ifdef MUTATION_RING
    byte sending;
#endif

    do
    :: atomic {
        if
        :: doing[me] == START /* only at the start */
        :: doing[me] == BEGIN && MAY_PUT -> begin()
#ifdef MUTATION_RING
        :: doing[me] == SENDING && ROOM(sending) -> doing[me] = START
#endif
        :: WAITS(0) && MAY_WAIT && (ALL_HERE(0) || !NEEDS_WORDS(0)) && HAS_HELPED(0) -> act = COMPLETE
        :: CHANNELS == 2 && WAITS(OTHER) && MAY_WAIT && (ALL_HERE(OTHER) || !NEEDS_WORDS(OTHER)) && HAS_HELPED(OTHER) ->
            act = COMPLETE; l = OTHER
#ifdef FORWARDS
        :: MAY_HELP(0) && MAY_WAIT && CAN_FORWARD(0) -> forwarded[AT(RAIL(me), 0)]++
        :: CHANNELS == 2 && MAY_HELP(OTHER) && MAY_WAIT && CAN_FORWARD(OTHER) -> forwarded[AT(RAIL(me), OTHER)]++
#endif
#ifdef FOLDS_IN_COMPLETION
        :: MAY_HELP(0) && MAY_WAIT && MAY_FOLD_AT(me, 0, OLDER(FOLDS(me, 0), me, 0)) ->
            b = OLDER(FOLDS(me, 0), me, 0); t = STEP_IN(me, 0, b); fold(me, 0, b); b = 0; t = 0
        :: CHANNELS == 2 && MAY_HELP(OTHER) && MAY_WAIT && MAY_FOLD_AT(me, OTHER, OLDER(FOLDS(me, OTHER), me, OTHER)) ->
            b = OLDER(FOLDS(me, OTHER), me, OTHER); t = STEP_IN(me, OTHER, b); fold(me, OTHER, b); b = 0; t = 0
#endif
#ifdef MUTATION_READ_BEHIND_WORD
        :: late[0] -> look(0)
        :: CHANNELS == 2 && late[OTHER] -> look(OTHER)
#endif
#ifdef GIVES_UP
        :: GIVES_UP(0) -> t = BLAMED(0, step[AT(me, 0)]); act = FAIL
        :: CHANNELS == 2 && GIVES_UP(OTHER) -> t = BLAMED(OTHER, step[AT(me, OTHER)]); act = FAIL
        /* An abort signal may come late, so it is a choice to look at it. */
        :: LOOKS && failed[MATE(me)] -> t = failed[MATE(me)] - 1; act = FAIL
        :: LOOKS && failed[RAIL(me)] -> t = failed[RAIL(me)] - 1; act = FAIL
        :: LOOKS && failed[ACROSS(me)] -> t = failed[ACROSS(me)] - 1; act = FAIL
#endif
#ifdef STOP
        :: me == 2 -> stop()
#endif
#ifdef QUITS
        :: me == 2 -> forget(); goto end
#endif
        fi;
        if
        :: act == COMPLETE -> act = 0; complete()
        :: act == FAIL -> act = 0; fail()
        :: else
        fi;
        if
        :: doing[me] == START -> choose()
        :: else
        fi
    }
    od;
end: /* in data, in an error, or stopped; to be anywhere else for ever is an invalid end state */
    false
}
