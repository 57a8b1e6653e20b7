/*
 * The rules of hosts.pml, beside the mistakes that spin must find in each. The last branch is the protocol.
 */

#if defined(MUTATION_ONE_INBOX) || defined(MUTATION_ONE_STAGING) || defined(MUTATION_ONE_BLOCK) || \
    defined(MUTATION_ONE_RELAY) || defined(MUTATION_PUT_FROM_TENSOR) || defined(MUTATION_PUT_FROM_VIEW) || \
    defined(MUTATION_SEND_AHEAD) || defined(MUTATION_EMPTY_STEP_NOT_AWAITED) || \
    defined(MUTATION_READ_BEHIND_WORD) || defined(MUTATION_ROWS_WORD_NOT_AWAITED) || \
    defined(MUTATION_WORD_ON_ANOTHER_CONTEXT) || defined(MUTATION_WORD_AT_EACH_MATE) || \
    defined(MUTATION_EMPTY_STEP_SILENT) || defined(MUTATION_REFUSAL_SILENT) || defined(MUTATION_WHOLE_QUEUE) || \
    defined(MUTATION_BLOCK_BEHIND_WORD) || defined(MUTATION_FREE_BEFORE_MEETING) || \
    defined(MUTATION_FREE_WITHOUT_ABORT) || defined(MUTATION_RING) || defined(MUTATION_FORWARD_IN_COMPLETION) || \
    defined(MUTATION_FORWARD_ON_ALL_CHANNELS) || defined(MUTATION_FORWARD_AFTER_OWN_WAIT) || \
    defined(MUTATION_FOLD_IN_COMPLETION) || defined(MUTATION_FOLD_ON_ALL_CHANNELS) || \
    defined(MUTATION_FOLD_AFTER_OWN_WAIT) || defined(MUTATION_OWNER_BLAMED) || \
    defined(MUTATION_NOTICE_NOT_ASKED_FOR) || defined(MUTATION_NOTICE_OF_CHANNEL)
#define MUTATED
#endif

#define BANK(s) ((s) % 2) /* S1 */

/* T3: two banks of everything that a step writes and another rank, or the network, reads. */
#ifdef MUTATION_ONE_INBOX
#define INBOX_BANK(s) 0
#else
#define INBOX_BANK(s) BANK(s)
#endif
#ifdef MUTATION_ONE_STAGING
#define STAGING_BANK(s) 0
#else
#define STAGING_BANK(s) BANK(s)
#endif
#ifdef MUTATION_ONE_BLOCK
#define BLOCK_BANK(s) 0
#else
#define BLOCK_BANK(s) BANK(s)
#endif
#ifdef MUTATION_ONE_RELAY
#define RELAY_BANK(s) 0
#else
#define RELAY_BANK(s) BANK(s)
#endif

/* T4: what the network reads is nobody else's. */
#ifdef MUTATION_PUT_FROM_TENSOR /* which its caller writes again when it has the result */
#define SPOIL_AT_RESULT(r, l, s) staging[CELL(r, l, STAGING_BANK(s))] = DESTROYED
#else
#define SPOIL_AT_RESULT(r, l, s) skip
#endif
#ifdef MUTATION_PUT_FROM_VIEW /* in the bank of the step before, where the next one's rows come to lie */
#define SPOIL_AT_STORE(r, l, s) \
  staging[CELL(r, l, BANK((s) + 1))] = (staging[CELL(r, l, BANK((s) + 1))] == (s) - 1 -> DESTROYED : \
                                        staging[CELL(r, l, BANK((s) + 1))])
#else
#define SPOIL_AT_STORE(r, l, s) skip
#endif

/* T2: a send follows the wait before it, a wait needs all words, and a send's words follow all reads. */
#ifdef MUTATION_SEND_AHEAD
#define FREE(l) true
#else
#define FREE(l) ((flight[me] & BIT(l)) == 0)
#endif
#ifdef MUTATION_EMPTY_STEP_NOT_AWAITED
#define NEEDS_WORDS(l) (KIND(l) != EMPTY)
#else
#define NEEDS_WORDS(l) true
#endif
#ifdef MUTATION_READ_BEHIND_WORD
#define READS_LATE true
#else
#define READS_LATE false
#endif
#ifdef MUTATION_ROWS_WORD_NOT_AWAITED
#define AWAITS_ROWS_WORDS false
#else
#define AWAITS_ROWS_WORDS true
#endif

/* T5: where a word comes behind its rows, and that it always comes. */
#ifdef MUTATION_WORD_ON_ANOTHER_CONTEXT
#define WORD_MAY_LAND(x, l, b) true
#else
#define WORD_MAY_LAND(x, l, b) ((fly[AT(x, l)] & ROWS_BIT(b)) == 0)
#endif
#ifdef MUTATION_WORD_AT_EACH_MATE /* added at the reader itself, it knows nothing of rows elsewhere */
#define SEEN(x, l, s) (((x) == ACROSS(me) && step[AT(x, l)] >= (s)) || word[CELL(x, l, BANK(s))] >= (s))
#else
#define SEEN(x, l, s) (word[CELL(x, l, BANK(s))] >= (s))
#endif
#if defined(MUTATION_EMPTY_STEP_SILENT)
#define SIGNALS(l) (KIND(l) != EMPTY)
#elif defined(MUTATION_REFUSAL_SILENT)
#define SIGNALS(l) (!REFUSING(l))
#else
#define SIGNALS(l) true
#endif

/* T7: two steps fit in the queue to a peer. A put that finds it full waits for that peer, and looks at nothing else. */
#ifdef MUTATION_WHOLE_QUEUE
#define QUEUED(l) (fly[AT(me, l)] == 0)
#else
#define QUEUED(l) true
#endif

/* T8: the block lands with the rows, before the word. */
#ifdef MUTATION_BLOCK_BEHIND_WORD
#define BLOCK_APART true
#else
#define BLOCK_APART false
#endif

/* T10: who frees its memory has met all, or has ended its connections. */
#ifdef MUTATION_FREE_BEFORE_MEETING
#define FREES_AT(count) true
#define FREED(condition) CLAIM(T10, condition)
#else
#define FREES_AT(count) ((count) == N)
#define FREED(condition) RULE(T10, condition)
#endif
#ifdef MUTATION_FREE_WITHOUT_ABORT
#define ENGINE_STANDS(r) true
#else
#define ENGINE_STANDS(r) (failed[r] == 0)
#endif

/* T1, T11: what a send may leave to do, and what it may wait for. */
#ifdef MUTATION_RING /* the inbox holds half of a step; who completes it makes room for the other half */
#define ROOM(l) (doing[RAIL(me)] == WAIT(l) && doing[ACROSS(me)] == WAIT(l))
#else
#define ROOM(l) true
#endif

#if defined(MUTATION_FORWARD_IN_COMPLETION) || defined(MUTATION_FORWARD_ON_ALL_CHANNELS) || \
    defined(MUTATION_FORWARD_AFTER_OWN_WAIT)
#define FORWARDS /* a rank has rows of its mate's rail from its mate alone, which had them from the network */
#define HAS_ROWS_OF(x, l, s) ((x) == RAIL(me) || forwarded[AT(x, l)] >= (s))
#else
#define HAS_ROWS_OF(x, l, s) true
#endif
#if defined(MUTATION_FOLD_IN_COMPLETION) || defined(MUTATION_FOLD_ON_ALL_CHANNELS)
#define FOLDS_IN_COMPLETION
#endif
#if defined(MUTATION_FORWARD_ON_ALL_CHANNELS) || defined(MUTATION_FOLD_ON_ALL_CHANNELS)
#define MAY_HELP(l) (doing[me] >= WAIT(0))
#else
#define MAY_HELP(l) (doing[me] == WAIT(l))
#endif
#ifdef MUTATION_FORWARD_AFTER_OWN_WAIT
#define MAY_FORWARD(l) (HAS_ROWS_OF(ACROSS(me), l, step[AT(me, l)]))
#else
#define MAY_FORWARD(l) true
#endif
#ifdef MUTATION_FOLD_AFTER_OWN_WAIT
#define MAY_FOLD(f, l, s) (step[AT(f, l)] > (s) || (flight[f] & BIT(l)) == 0)
#else
#define MAY_FOLD(f, l, s) true
#endif

/* T9: whom a rank names that misses something of step s on channel l. Who has stopped does not answer. */
#define FEWER(a, b) (sent[a] <= sent[b] -> (a) : (b))
#define FEWEST_SENDS FEWER(FEWER(FEWER(0, 1), 3), 2) /* 2 if it alone is behind all others */
#define BEHIND(a, l, s) (step[AT(a, l)] < (s))
#if defined(MUTATION_OWNER_BLAMED) || defined(MUTATION_NOTICE_NOT_ASKED_FOR)
#define KNOWN timeout /* a deadline: nothing else moves */
#else
#define KNOWN true
#endif
#if defined(MUTATION_OWNER_BLAMED)
#define BLAMED(l, s) MISSED(l, s)
#elif defined(MUTATION_NOTICE_NOT_ASKED_FOR) /* the last that was heard: what it told before it stopped counts */
#define BLAMED(l, s) \
  (MISSED(l, s) == MATE(me) -> MATE(me) : (BEHIND(MISSED(l, s), l, s) -> MISSED(l, s) : RAIL(MISSED(l, s))))
#elif defined(MUTATION_NOTICE_OF_CHANNEL)
#define BLAMED(l, s) \
  (BEHIND(0, l, s) -> 0 : (BEHIND(1, l, s) -> 1 : (BEHIND(2, l, s) -> 2 : 3)))
#elif defined(LATE)
#define BLAMED(l, s) 2 /* which alone is given up */
#else
#define BLAMED(l, s) (gone -> 2 : FEWEST_SENDS)
#endif
