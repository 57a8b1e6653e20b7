/*
 * The rules of moving.pml, beside the mistakes that spin must find in each. The last branch is the protocol.
 */

#define SWITCHED(rank, which) which(switched[CHANNEL_AT(rank, 0)], switched[CHANNEL_AT(rank, OTHER)])

#ifdef MUTATION_ONE_VERSION /* whichever channel's wait brought it */
#define VERSION(l) SWITCHED(me, MOST)
#else
#define VERSION(l) switched[CHANNEL_AT(me, l)] /* M2 */
#endif

#if defined(MUTATION_DONE_PER_PEER) || defined(MUTATION_SHORT_LAG)
#define APART
#endif
#define UNTOLD(l, d) untold[(l) * 2 + (d) - 1]
#define LATCHED(l, number) latched[(l) * BANKS + (number) % BANKS]
#ifdef MUTATION_DONE_PER_PEER
#define TO_TELL(l, number) WORD(me)
#else
#define TO_TELL(l, number) LATCHED(l, number) /* M2 */
#endif

/* The dispatch whose words a wait takes, and whether they are there. */
#if LAG == 1 || defined(MUTATION_SHORT_LAG)
#define TAKEN(l) number[l]
#else
#define TAKEN(l) (number[l] - 1)
#endif
#define SIGNALLED(l, d) (signal[SIGNAL_AT(me, l, d)] >= number[l])
#define THERE(l, d) (TAKEN(l) == 0 || TOLD(l, TAKEN(l), d) != 0)
#ifdef MUTATION_SHORT_LAG
#define HAS(l, d) SIGNALLED(l, d)
#define ALL_THERE(l) (THERE(l, 1) && THERE(l, 2)) /* what is not there reads as what was told before */
#else
#define HAS(l, d) (SIGNALLED(l, d) && THERE(l, d)) /* M2 */
#define ALL_THERE(l) true
#endif

#ifdef MUTATION_FLAGS_DIRECT
#define READ_WORD(l, d) WORD(PEER(d))
#else
#define READ_WORD(l, d) TOLD(l, TAKEN(l), d) /* M2 */
#endif
#ifdef MUTATION_VOID_IGNORED
#define READ_FAILED(l) FAILED_OF(READ_WORD(l, 0))
#else
#define READ_FAILED(l) FAILED_OF(READ_WORD(l, 0) | READ_WORD(l, 1) | READ_WORD(l, 2)) /* M6 */
#endif
#ifdef MUTATION_REFUSER_TAKES_NOTHING
#define TAKES(l) (bound[l] != REFUSED)
#else
#define TAKES(l) true
#endif

/* When the next epoch of a layer may open here: the one before is in force, and nothing is read by older maps. */
#define BEFORE (staged + 1 - LAYERS) /* below 1: there is none */
#if defined(MUTATION_OPEN_AFTER_PULL)
#define REACHED (done[me] >= BEFORE)
#elif defined(MUTATION_OPEN_AFTER_CHANNEL)
#define REACHED (SWITCHED(me, MOST) >= BEFORE)
#else
#define REACHED (SWITCHED(me, LESS) >= BEFORE) /* M4: all channels, so all ranks' pulls have ended, too */
#endif
#define NO_OLDER(handle) ((handle) == 0 || (handle) > BEFORE)
#ifdef MUTATION_HANDLE_IGNORED
#define NO_HANDLE true
#else
#define NO_HANDLE (NO_OLDER(kept) && NO_OLDER(bound[0]) && NO_OLDER(bound[OTHER])) /* M4 */
#endif
#ifdef MUTATION_OVERLAP
#define ONE_OPEN (me == 2 && done[me] >= BEFORE)
#define SOURCE_MAP source_map
#else
#define ONE_OPEN false /* M1 */
#define SOURCE_MAP (m - 1)
#endif
#define MAY_OPEN (BEFORE < 1 || (REACHED && NO_HANDLE) || ONE_OPEN)
#ifdef MUTATION_UNDRAINED
#define AWAIT_READS false
#else
#define AWAIT_READS (BEFORE > 0 && REACHED) /* M4, M8 */
#endif

#ifdef MUTATION_DONE_BEFORE_PULL
#define PULLED pulled
#else
#define PULLED done[me]
#endif
#ifdef STUCK
#define MAY_END (PULLED < staged && me != 2)
#else
#define MAY_END (PULLED < staged)
#endif
#ifdef MUTATION_WAIT_FOR_PULL
#define NEEDS_NO_PULL (done[me] == staged)
#else
#define NEEDS_NO_PULL true /* M8 */
#endif

#ifdef MUTATION_LEAST_AFTER_DEATH
#define ADOPTED LESS(SWITCHED(0, MOST), SWITCHED(1, MOST))
#else
#define ADOPTED MOST(SWITCHED(0, MOST), SWITCHED(1, MOST)) /* M7 */
#endif
#ifdef MUTATION_OWN_VOIDS_AFTER_DEATH
#define ADOPTED_MAP(rank) MAP(y, v, voids[rank])
#else
#define ADOPTED_MAP(rank) MAP(y, v, voids[0] | voids[1]) /* M7 */
#endif
