/*
 * How experts' weights and maps change while steps run (M1 to M8, "Maps that switch together" in docs/MODELS.md), small
 * enough to be searched whole. python3 spec/run.py does so, beside exchange.pml, whose head says how to do one by hand.
 *
 * What is here: 3 ranks, 1 or 2 channels, LENGTH dispatches over them in one order (S5), begun as S2 allows and
 * completed in any order. EPOCHS epochs, each the moves of one layer: every rank pulls its next neighbour's expert into
 * its spare slot, so each pulls, is pulled from, and has a slot freed. A pull ends at any time, or not at all. A
 * dispatch latches how far its rank's pulls are, and tells all ranks. What all have done by then is used LAG dispatches
 * later. moving_rules.pml has the rules, and the mistakes in them that must be found.
 *
 *     (default)      LAG=2: what is told is not ordered with signals; the channel's next dispatch waits for it.
 *     -DLAG=1        it is stored before the signal of its dispatch, and so counts from the next one on.
 *     -DAPART        with LAG=2: it reaches each peer at a time of its own.
 *     -DAT_LEISURE   pulls begin later than they may, and the reads before them end one by one; with one layer.
 *     -DHANDLES      a dispatch's handle may be kept, and used again on any channel until it is released.
 *     -DVOIDS        any pull may fail.
 *     -DSTUCK        the pulls of rank 2 never end.
 *     -DREFUSALS     any rank may refuse any dispatch. It tells and takes what others do.
 *     -DDEATH        rank 2 may stop for ever at any point; the others shrink.
 *
 * What is reduced, and why nothing is lost:
 *
 *   - A slot holds its expert's name, or TORN while it is written. Reading as late as is allowed sees every overwriting
 *     that an earlier read sees, since what a slot held does not come back within these few epochs. So experts' reads
 *     for a dispatch are outstanding until something waits for them, however many are, and so is what is read through a
 *     handle behind its last dispatch (as in a backward pass).
 *   - A pull reads its source when it ends, and its target is torn from its beginning. It begins as soon as the rules
 *     let it, in the transition that fulfils them, and the reads that it has to wait for are made then. -DAT_LEISURE
 *     checks that.
 *   - What a rank has done is raised when its pull ends: raising it later looks as if the pull ended later.
 *   - A wait, its reads and what follows from them are one transition, and so is a send: a peer that a word or signal
 *     reaches late looks like one whose own wait ends late. -DAPART checks that for words. A rank that stops takes back
 *     what may not have arrived yet.
 *   - A dispatch reads the slots of all layers: one of a single layer reads less. Other steps, which tell nothing,
 *     would only stand between.
 *   - The sequence is chosen place by place, when the first rank gets there, and forgotten when all have passed.
 *   - The first dispatch is on channel 0, and the rank that stops is 2: channels are alike, and so are ranks.
 *   - Dead values are blanked.
 *
 * What is not here: rows, banks and the values of signals (exchange.pml), how survivors find each other (agreement.pml)
 * and what they do behind the shrink, maps in which not every rank moves, and memory weaker than "who sees a word that
 * says done sees the weights, and may pull them" (a demand on the code, as S4 is).
 *
 * What is claimed:
 *   M1  a pull finds the expert that it is for in its source, whole;
 *   M2  all ranks use the same version in a dispatch, and banks of words are enough;
 *   M4  experts read the weights that the dispatch's version means, whole;
 *   M5  a version's map is in its table as long as somebody may read it;
 *   M6  a version means the same map to all ranks, also where pulls failed;
 *   M7  after a death the survivors have one map, and each has its experts of that map, whole;
 *   M8  every run ends, also where a pull does not: otherwise spin finds an invalid end state.
 */

/* As in exchange.pml: the name of a claim is read from the expression that failed. */
hidden byte M1, M2, M4, M5, M6, M7;
#define CLAIM(invariant, condition) assert((condition) || invariant)

#define N 3
#ifdef ONE_CHANNEL
#define CHANNELS 1
#else
#define CHANNELS 2
#endif
#define OTHER (CHANNELS - 1) /* of two channels the second; of one channel that one, once more */
#ifndef LENGTH
#define LENGTH 5
#endif
#ifndef EPOCHS
#define EPOCHS 2 /* at most 3 */
#endif
#ifndef LAYERS
#define LAYERS 1
#endif
#ifndef LAG
#define LAG 2
#endif
#define BANKS 4 /* of words, by the dispatch's number */

/* ---- Versions and maps ---- */

/* Epochs are of the layers in turn. A layer's maps are numbered by how often it moved: a void epoch moves nothing. */
#define LAYER(epoch) (((epoch) + LAYERS - 1) % LAYERS)
#define MOVES(epoch, layer, version, lost) \
  (LAYER(epoch) == (layer) && (epoch) <= (version) && ((lost) & (1 << (epoch))) == 0)
#define MAP(layer, version, lost) \
  (MOVES(1, layer, version, lost) + MOVES(2, layer, version, lost) + MOVES(3, layer, version, lost))
#define UP_TO(version) ((2 << (version)) - 1) /* the bits of these epochs */

/* By a layer's map m: the expert of a rank, and where it lies; the map is in the table of the same number. */
#define EXPERT(rank, m) (1 + ((rank) + (m)) % N)
#define TORN 0
#ifdef MUTATION_OVERLAP /* one rank has another spare slot, and another table */
#define PLACES 3
#define PLACE(rank, m) ((rank) == 2 && (m) == 2 -> 2 : (m) % 2)
#else
#define PLACES 2
#define PLACE(rank, m) ((m) % 2)
#endif
#define PLACE_AT(rank, layer, place) (((rank) * LAYERS + (layer)) * PLACES + (place))
#define SLOT(rank, layer, m) slot[PLACE_AT(rank, layer, PLACE(rank, m))]
#ifdef MUTATION_TABLE_BY_EPOCH
#define TABLE(rank, layer, m, epoch) table[PLACE_AT(rank, layer, (epoch) % 2)]
#else
#define TABLE(rank, layer, m, epoch) table[PLACE_AT(rank, layer, PLACE(rank, m))] /* M5 */
#endif

byte slot[N * LAYERS * PLACES];
byte table[N * LAYERS * PLACES]; /* 1 + the map's number */

/* ---- What ranks know ---- */

byte done[N];   /* epochs whose pulls have ended at this rank */
byte failed[N]; /* those of them whose pull here failed: a bit each */

#define WORD(rank) (128 | (failed[rank] << 2) | done[rank])
#define DONE_OF(value) ((value) & 3)
#define FAILED_OF(value) (((value) >> 2) & 31)
#define LESS(a, b) ((a) < (b) -> (a) : (b))
#define MOST(a, b) ((a) > (b) -> (a) : (b))

/* As in exchange.pml a rank names its peers by their distance, and at distance 0 itself. */
#define PEER(d) ((me + (d)) % N)
#define CHANNEL_AT(rank, l) ((rank) * CHANNELS + (l))
#define SIGNAL_AT(rank, l, d) (CHANNEL_AT(rank, l) * 2 + (d) - 1)
#define WORD_AT(rank, l, number, d) ((CHANNEL_AT(rank, l) * BANKS + (number) % BANKS) * N + (d))
#define TOLD(l, number, d) word[WORD_AT(me, l, number, d)]

byte signal[N * CHANNELS * 2];       /* the number of the peer's last dispatch on the channel */
byte word[N * CHANNELS * BANKS * N]; /* 0: not there */
byte switched[N * CHANNELS];         /* the version that the channel's next dispatch uses */
byte voids[N];                       /* the epochs up to that, on any channel, that are void */

/* The sequence: 0 is not chosen yet, else 1 + KINDS * channel + kind. And which version the first rank used there. */
byte program[LENGTH];
byte passed[LENGTH];
byte used[LENGTH];
byte used_voids[LENGTH];

bit gone;    /* rank 2 has stopped */
bit lost[N]; /* has failed since */
bit met[N];  /* waits for the other survivor */

#include "moving_rules.pml"

/* ---- A rank ---- */

/* Kinds of dispatches: with a new handle, which is kept or not; with the kept one, for the last time or not. */
#define NEW 0
#define KEEP 1
#define AGAIN 2
#define LAST 3
#define KINDS 4
#define REFUSED 64 /* in place of 1 + a version */

#define FLIES(l) (bound[l] != 0)
#define KIND ((program[at] - 1) % KINDS)
#define CHANNEL_NEXT ((program[at] - 1) / KINDS)
#define MAY_BE_OTHER (CHANNELS == 2 && at > 0 && !FLIES(OTHER))
#define MAY_BEGIN (at < LENGTH && (program[at] == 0 -> !FLIES(0) || MAY_BE_OTHER : !FLIES(CHANNEL_NEXT))) /* S2 */

/* Takes the next place of the sequence, binds its version (M3), latches what this rank has done (M2), and sends. */
inline begin()
{
    if
    :: program[at] != 0 -> l = CHANNEL_NEXT
    :: program[at] == 0 ->
        if
        :: !FLIES(0) -> l = 0
        :: MAY_BE_OTHER -> l = 1
        fi;
        if
        :: program[at] = 1 + KINDS * l + NEW
#ifdef HANDLES
        :: kept == 0 -> program[at] = 1 + KINDS * l + KEEP
        :: kept != 0 -> program[at] = 1 + KINDS * l + AGAIN
        :: kept != 0 -> program[at] = 1 + KINDS * l + LAST
#endif
        fi
    fi;

    bound[l] = (KIND >= AGAIN -> kept : 1 + VERSION(l));
    if
    :: KIND == KEEP -> kept = bound[l]
    :: KIND == LAST -> kept = 0 /* while it travels, bound stands for it, and then reads do */
    :: else
#ifdef MUTATION_BIND_AT_ROUTE /* which was before the channel's last wait here, and behind it elsewhere */
    :: KIND < AGAIN -> bound[l] = 1 + version_before[l]
#endif
    fi;
    if
    :: agree()
#ifdef REFUSALS
    :: bound[l] = REFUSED
#endif
    fi;
    passed[at]++;
    if
    :: passed[at] == N -> program[at] = 0; passed[at] = 0; used[at] = 0; used_voids[at] = 0
    :: else
    fi;
    at++;

    number[l]++;
    CLAIM(M2, TOLD(l, number[l], 0) == 0);
    TOLD(l, number[l], 0) = WORD(me);
#ifdef APART
    LATCHED(l, number[l]) = WORD(me);
    UNTOLD(l, 1)++; UNTOLD(l, 2)++;
#else
    tell(l, number[l], 1, WORD(me)); tell(l, number[l], 2, WORD(me));
#endif
    signal[SIGNAL_AT(PEER(1), l, 2)] = number[l]; signal[SIGNAL_AT(PEER(2), l, 1)] = number[l];
    l = 0
}

/* A note's digest would find this. The first rank says what it uses, and the last one forgets it. */
inline agree()
{
    if
    :: used[at] == 0 -> used[at] = bound[l]; used_voids[at] = voids[me] & UP_TO(bound[l] - 1)
    :: else ->
        CLAIM(M2, used[at] == bound[l]);
        CLAIM(M6, used_voids[at] == (voids[me] & UP_TO(bound[l] - 1)))
    fi
}

inline tell(l_, number_, d, value)
{
    CLAIM(M2, word[WORD_AT(PEER(d), l_, number_, N - (d))] == 0);
    word[WORD_AT(PEER(d), l_, number_, N - (d))] = value
}

#ifdef APART
/* The oldest that is under way to the peer: it needs them in order, so nobody can see one overtake another. */
inline arrive(l_, d)
{
    v = number[l_] + 1 - UNTOLD(l_, d);
    tell(l_, v, d, TO_TELL(l_, v));
    UNTOLD(l_, d)--;
    LATCHED(l_, v) = (UNTOLD(l_, N - (d)) <= UNTOLD(l_, d) -> 0 : LATCHED(l_, v)); /* dead, if the other peer has it */
    v = 0
}
#endif

#define MAY_COMPLETE(l) (FLIES(l) && HAS(l, 1) && HAS(l, 2) && NEEDS_NO_PULL)

/* The wait ends in data. Experts read from now on, and the words say which version comes next on this channel. */
inline complete(l_)
{
#ifdef MUTATION_BIND_AT_ROUTE
    version_before[l_] = VERSION(l_);
#endif
    if
    :: TAKEN(l_) > 0 && ALL_THERE(l_) && TAKES(l_) ->
        switched[CHANNEL_AT(me, l_)] =
            LESS(DONE_OF(READ_WORD(l_, 0)), LESS(DONE_OF(READ_WORD(l_, 1)), DONE_OF(READ_WORD(l_, 2))));
        voids[me] = voids[me] | (READ_FAILED(l_) & UP_TO(switched[CHANNEL_AT(me, l_)]))
    :: else
    fi;
    if
    :: TAKEN(l_) > 0 -> TOLD(l_, TAKEN(l_), 0) = 0; TOLD(l_, TAKEN(l_), 1) = 0; TOLD(l_, TAKEN(l_), 2) = 0
    :: else
    fi;
    reads = reads | (bound[l_] == REFUSED -> 0 : 1 << (bound[l_] - 1));
    bound[l_] = 0
}

/* All outstanding reads by versions before this one. */
#define BY_OLDER(version) ((1 << (version)) - 1)

inline read_before(version)
{
    for (v : 0 .. (version) - 1) {
        if
        :: reads & (1 << v) -> read(v)
        :: else
        fi
    }
    reads = reads & ~BY_OLDER(version);
    v = 0
}

inline read(version)
{
    for (y : 0 .. LAYERS - 1) {
        m = MAP(y, version, voids[me]);
        CLAIM(M4, SLOT(me, y, m) == EXPERT(me, m));
        CLAIM(M5, TABLE(me, y, m, version) == 1 + m)
    }
    y = 0; m = 0
}

/* Begins the pulls that may begin: slots that were freed, or not used yet, are written from now on. So are tables. */
inline open()
{
    do
    :: staged < EPOCHS && MAY_OPEN ->
        if
        :: AWAIT_READS -> read_before(BEFORE)
        :: else
        fi;
        staged++;
        y = LAYER(staged);
        m = 1 + MAP(y, staged - 1, voids[me]);
#ifdef MUTATION_OVERLAP
        source_map = VERSION(0);
#endif
        SLOT(me, y, m) = TORN;
        TABLE(me, y, m, staged) = 1 + m;
        y = 0; m = 0
    :: else -> break
    od
}

/* The oldest pull that is open here ends: an epoch after the other (M5). */
#define SOURCE SLOT((me + m - SOURCE_MAP) % N, y, SOURCE_MAP)

inline pull()
{
    y = LAYER(PULLED + 1);
    m = 1 + MAP(y, PULLED, voids[me]);
    CLAIM(M1, SOURCE == EXPERT(me, m));
    SLOT(me, y, m) = SOURCE;
    PULLED++;
    y = 0; m = 0
}

inline leave()
{
    read_before(EPOCHS + 1);
    if
    :: kept != 0 -> read(kept - 1)
    :: else
    fi;
    forget();
    goto end
}

inline forget()
{
    at = 0; staged = 0; kept = 0; reads = 0; l = 0;
    number[0] = 0; number[OTHER] = 0; bound[0] = 0; bound[OTHER] = 0
}

#ifdef DEATH
#define MISSES(l) (FLIES(l) && gone && !HAS(l, 2 - me)) /* of ranks 0 and 1 */

/*
 * What is under way from a rank that stops may be lost: the signal of its last dispatch, the words that a peer wants
 * with that, and those it wants with the signal before. Each keeps a wait from ending, as if the signal were missing.
 */
inline stop()
{
    gone = 1;
    for (l : 0 .. OTHER) { lose(1); lose(2) }
    forget();
    goto end
}

#define LAST_SIGNAL(d) signal[SIGNAL_AT(PEER(d), l, N - (d))]

inline lose(d)
{
    if
    :: true
    :: LAST_SIGNAL(d) > 0 -> LAST_SIGNAL(d)--
    :: LAST_SIGNAL(d) > 1 && LAG == 2 -> LAST_SIGNAL(d) = LAST_SIGNAL(d) - 2
    fi
}

/* It sends nothing more, and ends its pulls; one from the rank that has stopped may fail. */
inline fail()
{
    lost[me] = 1;
    if
    :: MAY_END -> pull()
    :: true
    fi;
    met[me] = 1;
    leave()
}

inline adopt()
{
    v = ADOPTED;
    for (y : 0 .. LAYERS - 1) {
        CLAIM(M7, ADOPTED_MAP(0) == ADOPTED_MAP(1));
        CLAIM(M7, SLOT(0, y, ADOPTED_MAP(0)) == EXPERT(0, ADOPTED_MAP(0)));
        CLAIM(M7, SLOT(1, y, ADOPTED_MAP(1)) == EXPERT(1, ADOPTED_MAP(1)))
    }
}
#endif

#ifdef APART
#define ALL_TOLD (UNTOLD(0, 1) == 0 && UNTOLD(0, 2) == 0 && UNTOLD(OTHER, 1) == 0 && UNTOLD(OTHER, 2) == 0)
#else
#define ALL_TOLD true
#endif

proctype Rank(byte me)
{
    byte at;               /* place in the sequence */
    byte number[CHANNELS]; /* of the last dispatch begun on the channel */
    byte bound[CHANNELS];  /* 1 + the version of the dispatch that is under way there */
    byte kept;             /* 1 + the version of the handle that is kept */
    byte reads;            /* a bit for each version by which experts may still read */
    byte staged;           /* epochs whose pulls have begun here */
    byte l, v, y, m;
#ifdef APART
    byte untold[CHANNELS * 2]; /* how many words are under way to a peer */
    byte latched[CHANNELS * BANKS];
#endif
    byte version_before[CHANNELS], pulled, source_map; /* of mutations */

    atomic { open() }
    do
    :: atomic {
        if
        :: MAY_BEGIN -> begin()
        :: MAY_COMPLETE(0) -> complete(0)
        :: CHANNELS == 2 && MAY_COMPLETE(OTHER) -> complete(OTHER)
        :: MAY_END -> pull()
#ifdef AT_LEISURE
        :: staged < EPOCHS && MAY_OPEN && (reads & BY_OLDER(BEFORE)) == 0 -> open()
        :: reads & 1 -> read(0); reads = reads & ~1
        :: reads & 2 -> read(1); reads = reads & ~2
#endif
#ifdef VOIDS
        :: MAY_END -> failed[me] = failed[me] | (2 << PULLED); PULLED++ /* M6 */
#endif
#ifdef MUTATION_DONE_BEFORE_PULL
        :: done[me] < staged -> done[me]++
#endif
#ifdef APART
        :: UNTOLD(0, 1) > 0 -> arrive(0, 1)
        :: UNTOLD(0, 2) > 0 -> arrive(0, 2)
        :: CHANNELS == 2 && UNTOLD(OTHER, 1) > 0 -> arrive(OTHER, 1)
        :: CHANNELS == 2 && UNTOLD(OTHER, 2) > 0 -> arrive(OTHER, 2)
#endif
#ifdef DEATH
        :: me == 2 -> stop()
        :: me != 2 && (MISSES(0) || MISSES(OTHER) || lost[1 - me]) -> fail()
#endif
        :: at == LENGTH && !FLIES(0) && !FLIES(OTHER) && ALL_TOLD -> met[me] = 1; leave()
        fi;
#ifndef AT_LEISURE
        open()
#endif
    }
    od;
end: /* in data, in an error, or stopped; to be anywhere else for ever is an invalid end state */
    false
}

init
{
    byte r, v, y;

    atomic {
        for (r : 0 .. N - 1) {
            for (y : 0 .. LAYERS - 1) { SLOT(r, y, 0) = EXPERT(r, 0); TABLE(r, y, 0, 0) = 1 }
        }
        run Rank(0); run Rank(1); run Rank(2)
    }
#ifdef DEATH
end:
    atomic { met[0] && met[1] && gone -> adopt() }
#endif
}
