/*
 * A word that its writer adds to, as signals go between hosts (T6 in docs/PROTOCOL.md): one writer, one reader, two
 * banks. python3 spec/run.py searches it whole, beside hosts.pml.
 *
 * A word is a byte, step:4 | mode:2 | n:2, as the real one is 32 | 4 | 28 bits; sums wrap in both. Steps begin at 13,
 * so that they wrap too. The writer adds new - old, where old is what it added up to in this bank before. The network
 * adds in order (T5) at any time. The reader waits until the step is reached by serial comparison, then asks for
 * equality. The writer is two steps ahead at most (S2).
 *
 *     -DFAULT   one add of the run, any one, is lost, or made twice.
 *
 * What is claimed: T6, whatever is taken is what was sent; and every run ends, in data or in an error.
 */

hidden byte T6;
#define CLAIM(invariant, condition) assert((condition) || invariant)

#define LENGTH 7
#define FIRST 13
#define STEP_OF(value) ((value) >> 4)
#define WORD(s, low) ((((s) & 15) << 4) | (low))
#define REFUSED 8 /* mode 2, n 0; a step with rows has mode 1 and any n */
#define REACHED(seen, s) (((STEP_OF(seen) - (s)) & 15) < 8)

#ifdef MUTATION_ONE_WORD
#define WORD_BANK(s) 0
#else
#define WORD_BANK(s) ((s) % 2) /* T3 */
#endif
#ifdef MUTATION_SHARED_LATCH
#define LATCH(s) 0
#else
#define LATCH(s) WORD_BANK(s)
#endif
#ifdef MUTATION_LATCH_BORN_ZERO
#define FIRST_LATCHED 0
#else
#define FIRST_LATCHED WORD(FIRST, 0)
#endif
#ifdef MUTATION_REFUSAL_LEAVES_LATCH /* a routine of its own, which forgets what it has added */
#define LATCHES(low) ((low) != REFUSED)
#else
#define LATCHES(low) true
#endif
#ifdef MUTATION_NOT_EQUAL
#define RIGHT_STEP(seen, s) true
#else
#define RIGHT_STEP(seen, s) (STEP_OF(seen) == (s))
#endif
#ifdef MUTATION_OWNER_RESETS
#define AFTER_READ(seen) 0
#else
#define AFTER_READ(seen) seen
#endif

byte word[2];
byte latch[2];
byte sent[2];      /* the low half of what was sent in this bank */
byte under_way[2]; /* the addend */
byte posted, landed, taken; /* steps */
bit faulty, ended;

#define STEP(count) ((FIRST + (count)) & 15)

inline post(low)
{
    new = WORD(STEP(posted + 1), low);
    under_way[STEP(posted + 1) % 2] = new - latch[LATCH(STEP(posted + 1))];
    if
    :: LATCHES(low) -> latch[LATCH(STEP(posted + 1))] = new
    :: else
    fi;
    sent[STEP(posted + 1) % 2] = low;
    posted++;
    new = 0
}

active proctype Writer()
{
    byte new;

    atomic {
        word[0] = WORD(FIRST, 0); word[1] = WORD(FIRST, 0);
        latch[0] = FIRST_LATCHED; latch[1] = FIRST_LATCHED
    }
    do
    :: atomic { posted < LENGTH && posted < taken + 2 && !ended ->
        if
        :: post(4)      /* no rows */
        :: post(7)      /* as many as there can be */
        :: post(REFUSED)
        fi }
    :: atomic { (posted == LENGTH || ended) -> break }
    od
}

#define LAND(times) \
  word[WORD_BANK(STEP(landed + 1))] = word[WORD_BANK(STEP(landed + 1))] + (times) * under_way[STEP(landed + 1) % 2]; \
  under_way[STEP(landed + 1) % 2] = 0; landed++

active proctype Network()
{
end:
    do
    :: atomic { landed < posted -> LAND(1) }
#ifdef FAULT
    :: atomic { landed < posted && !faulty -> faulty = 1; LAND(0) }
    :: atomic { landed < posted && !faulty -> faulty = 1; LAND(2) }
#endif
    od
}

#define SEEN word[WORD_BANK(STEP(taken + 1))]

active proctype Reader()
{
    do
    :: atomic { taken < LENGTH && posted > 0 && REACHED(SEEN, STEP(taken + 1)) ->
        if
        :: RIGHT_STEP(SEEN, STEP(taken + 1)) ->
            CLAIM(T6, SEEN == WORD(STEP(taken + 1), sent[STEP(taken + 1) % 2]) && landed > taken);
            SEEN = AFTER_READ(SEEN);
            taken++
        :: else -> CLAIM(T6, faulty); ended = 1; break /* an error that says so */
        fi }
#ifdef FAULT
    /* A timeout: nothing moves any more. */
    :: atomic { timeout -> CLAIM(T6, faulty); ended = 1; break }
#endif
    :: atomic { taken == LENGTH -> break }
    od
}
