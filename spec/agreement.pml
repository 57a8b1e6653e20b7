/*
 * How survivors agree on who they are ("Shrinking" in docs/PROTOCOL.md, src/core/shrink.cc), small enough to be searched
 * whole. python3 spec/run.py does so, beside exchange.pml.
 *
 * What is here: 4 ranks that come at any time or never, in rounds. Each sends what it knows to all whom it still asks,
 * and ends a round at any moment: whose answer is not there is late. Ranks that take no part any more say so (left), and
 * those whose new group stands tell the others (went on); who may see that sees it, or not yet.
 *
 *   - Patience is longer than what takes no waiting: it ends for nobody while a rank has all answers that it can get, and
 *     a rank that ends a round has sent its next parcels. So late is who has not come, who has ended or asks no more, and
 *     who itself waits for such a one. Without that no number of rounds would do: the last of them can always be missed, and
 *     then creating the group fails.
 *   - Nobody dies, which would be away from the start, or between two parcels of the last round, which no number of rounds
 *     mends.
 *   - A parcel that nobody will take is not sent, ranks come in order, since they are alike, and dead values are blanked.
 *
 * What is claimed:
 *   A1  whoever goes on, goes on with the same ranks, at most one side in all;
 *   A2  nobody waits, in creating the new group, for a rank that has found itself given up or has decided not to go on.
 */

/* As in exchange.pml: the name of a claim is read from the expression that failed. */
hidden byte A1, A2;
#define CLAIM(name, condition) assert((condition) || name)

#define N 4
#define BIT(rank) (1 << (rank))
#define PAIR(from, to) ((from) * N + (to))

/* What a rank knows of each: masks of four bits. Of all that are silent or away, out has a bit too. */
byte out[N];    /* asked no more */
byte silent[N]; /* somebody has missed an answer */
byte away[N];   /* somebody knows that it has left */
byte missed[N]; /* of a mutation: whom this rank itself has missed */

byte sent_out[N]; /* as of the round that it waits in */
bit waits[N];   /* in a round */
bit left[N];    /* has said that it takes no part */
byte group[N];  /* has agreed on these; creates a group with them */
bit stands[N];  /* and has it */

byte come; /* ranks are alike, so rank 0 comes first, then rank 1, ... */

/* Whether a rank has all answers that it can get; a round that is complete ends before anybody's patience does. */
#define HAS(me, rank) \
  ((rank) == (me) || (sent_out[me] & BIT(rank)) || len(parcel[PAIR(rank, me)]) > 0 || left[rank])
#define COMPLETE(me) (waits[me] && HAS(me, 0) && HAS(me, 1) && HAS(me, 2) && HAS(me, 3))

/* Of each pair, since none is more than a round ahead of one that it asks: what is not taken yet. */
chan parcel[N * N] = [2] of { byte, byte, byte, bit };

inline count(mask, into) {
  into = (mask & 1) + ((mask >> 1) & 1) + ((mask >> 2) & 1) + ((mask >> 3) & 1);
}

inline look_around() {
  r = 0;
  do
  :: r < N ->
    if
    :: left[r] && r != me -> out[me] = out[me] | BIT(r); away[me] = away[me] | BIT(r)
    :: else -> skip
    :: true -> skip /* not yet */
    fi;
    r++
  :: else -> break
  od
}

inline send_round() {
  sent_out[me] = out[me]; sent_silent = silent[me]; sent_away = away[me];
  r = 0;
  do
  :: r < N ->
    if
    :: r != me && !(out[me] & BIT(r)) && !left[r] && !group[r] && !(out[r] & BIT(me)) ->
      assert(nfull(parcel[PAIR(me, r)]));
      parcel[PAIR(me, r)]!sent_out[me], sent_silent, sent_away, calm
    :: else -> skip
    fi;
    r++
  :: else -> break
  od
}

inline end_round() {
  calm = 1; all_calm = was_calm;
  r = 0;
  do
  :: r < N ->
    if
    :: r == me || (sent_out[me] & BIT(r)) -> skip
    :: else ->
      if
      :: nempty(parcel[PAIR(r, me)]) ->
        parcel[PAIR(r, me)]?a, b, c, theirs_calm;
        all_calm = all_calm && theirs_calm;
        calm = calm && a == sent_out[me] && b == sent_silent && c == sent_away;
        out[me] = out[me] | a; silent[me] = silent[me] | b; away[me] = away[me] | c
      :: empty(parcel[PAIR(r, me)]) && left[r] ->
        calm = 0; out[me] = out[me] | BIT(r); away[me] = away[me] | BIT(r)
      :: empty(parcel[PAIR(r, me)]) && !left[r] ->
        calm = 0; out[me] = out[me] | BIT(r); silent[me] = silent[me] | BIT(r);
#ifdef MUTATION_OWN_COUNT
        missed[me] = missed[me] | BIT(r)
#endif
      fi
    fi;
    r++
  :: else -> break
  od;
  calm = calm && out[me] == sent_out[me] && silent[me] == sent_silent && away[me] == sent_away
}

/* Whether this rank's side is the larger one. */
inline decide() {
#ifdef MUTATION_OWN_COUNT
  count(missed[me], a);
#else
  count((silent[me] & ~away[me] & 15), a);
#endif
  count((15 & ~out[me]), b);
#ifdef MUTATION_EVERY_SIDE
  a = 0;
#endif
  larger = a < b
}

#define WAITED_FOR(rank) ((group[0] | group[1] | group[2] | group[3]) & BIT(rank))
#define SAME(rank) (group[rank] == 0 || group[rank] == group[me])
#define STANDS_WITHOUT(rank) (stands[rank] && !(group[rank] & BIT(me)))
#define HAS_AGREED(rank) (!(group[me] & BIT(rank)) || group[rank] == group[me])

inline leave() {
  left[me] = 1; waits[me] = 0; sent_out[me] = 0;
  CLAIM(A2, !WAITED_FOR(me));
  r = 0; /* dead values */
  do
  :: r < N ->
    do
    :: nempty(parcel[PAIR(r, me)]) -> parcel[PAIR(r, me)]?_, _, _, _
    :: empty(parcel[PAIR(r, me)]) -> break
    od;
    r++
  :: else -> break
  od;
  out[me] = 15; silent[me] = 0; away[me] = 0; missed[me] = 0
}

proctype survivor(byte me) {
  byte r, a, b, c;
  byte sent_silent, sent_away;
  bit calm, was_calm, all_calm, theirs_calm, larger;

  atomic { come == me -> come++; look_around(); send_round(); waits[me] = 1 }
  do
  :: atomic {
    (STANDS_WITHOUT(0) || STANDS_WITHOUT(1) || STANDS_WITHOUT(2) || STANDS_WITHOUT(3)) -> leave(); break
    }
  :: atomic {
    COMPLETE(me) || !(COMPLETE(0) || COMPLETE(1) || COMPLETE(2) || COMPLETE(3)) ->
    was_calm = calm;
    end_round();
#ifdef MUTATION_ONE_CALM_ROUND
    all_calm = 1;
#endif
    if
    :: out[me] & BIT(me) -> leave(); break
    :: !(out[me] & BIT(me)) && calm && all_calm ->
      decide();
      if
      :: larger ->
        group[me] = 15 & ~out[me]; waits[me] = 0; sent_out[me] = 0;
        CLAIM(A1, SAME(0) && SAME(1) && SAME(2) && SAME(3));
        r = 0;
        do
        :: r < N -> CLAIM(A2, !((group[me] & BIT(r)) && left[r])); r++
        :: else -> break
        od;
        r = 0; a = 0; b = 0; c = 0; sent_silent = 0; sent_away = 0; calm = 0; all_calm = 0;
        was_calm = 0; theirs_calm = 0; larger = 0;
        goto create
      :: else -> leave(); break
      fi
    :: else ->
      a = 0; b = 0; c = 0; theirs_calm = 0; was_calm = 0; all_calm = 0;
      look_around(); send_round()
    fi
    }
  od;
  atomic {
    r = 0; a = 0; b = 0; c = 0; sent_silent = 0; sent_away = 0; calm = 0; all_calm = 0; was_calm = 0;
    theirs_calm = 0; larger = 0;
    goto over
  }
create:
  atomic { HAS_AGREED(0) && HAS_AGREED(1) && HAS_AGREED(2) && HAS_AGREED(3) -> stands[me] = 1 }
over:
  skip
}

init {
  atomic { run survivor(0); run survivor(1); run survivor(2); run survivor(3) }
}
