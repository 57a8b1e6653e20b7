/*
 * What lies between the hosts of hosts.pml: puts and adds that are under way, and the agents that fold.
 */

#define RUNS(r) (!(gone && (r) == 2) && ENGINE_STANDS(r))
#define REACHES(x, to) (RUNS(x) && RUNS(to))
/* Of what is under way from x on l: the bank of the older step, and that step. */
#define OLDER(mask, x, l) (((mask) & BIT(BANK(step[AT(x, l)] + 1))) -> BANK(step[AT(x, l)] + 1) : BANK(step[AT(x, l)]))
#define STEP_IN(x, l, b) (BANK(step[AT(x, l)]) == (b) -> step[AT(x, l)] : step[AT(x, l)] - 1)

#define SPOIL(cell, s) cell = (cell != 0 && cell != (s) -> DESTROYED : cell)

/* Someone writes a row of step s into a bank of rank r: other steps' rows there are no more. */
inline store(rank, l_, s_)
{
    SPOIL(here[CELL(rank, l_, BANK(s_))], s_);
    SPOIL(copied[CELL(rank, l_, BANK(s_))], s_);
    SPOIL(partial[CELL(rank, l_, BANK(s_))], s_);
#ifdef MORE_KINDS
    SPOIL(straight_rail[CELL(rank, l_, BANK(s_))], s_);
    SPOIL(straight_across[CELL(rank, l_, BANK(s_))], s_);
#endif
#ifdef BY_DOMAIN
    SPOIL(relay[CELL(rank, l_, BANK(s_))], s_);
#endif
    SPOIL_AT_STORE(rank, l_, s_)
}

inline land_rows(from_, l_, b_)
{
    CLAIM(T10, failed[from_] == 0 && failed[RAIL(from_)] == 0);
    if
    :: !BLOCK_APART -> block[CELL(from_, l_, BLOCK_BANK(b_))] = staged_block[CELL(from_, l_, b_)]
    :: else
    fi;
    if
    :: staged_block[CELL(from_, l_, b_)] == 1 + DISPATCH ->
        inbox[CELL(from_, l_, INBOX_BANK(b_))] = staging[CELL(from_, l_, STAGING_BANK(b_))]
#ifndef BY_DOMAIN
    :: staged_block[CELL(from_, l_, b_)] == 1 + COMBINE ->
        store(RAIL(from_), l_, t);
        partial[CELL(RAIL(from_), l_, b_)] = staging[CELL(from_, l_, STAGING_BANK(b_))]
#endif
#ifdef MORE_KINDS
    :: staged_block[CELL(from_, l_, b_)] == 1 + STRAIGHT ->
        store(RAIL(from_), l_, t);
        straight_rail[CELL(RAIL(from_), l_, b_)] = staging[CELL(from_, l_, STAGING_BANK(b_))];
        rows_word_rail[CELL(RAIL(from_), l_, b_)] = t
#endif
    :: else
    fi;
    fly[AT(from_, l_)] = fly[AT(from_, l_)] & ~ROWS_BIT(b_);
    if
    :: BURIES -> /* dead, unless it goes to another rank yet */
        staging[CELL(from_, l_, b_)] = ((fly_across[AT(from_, l_)] & BIT(b_)) -> staging[CELL(from_, l_, b_)] : 0);
        staged_block[CELL(from_, l_, b_)] = 0
    :: else
    fi
}

inline land_word(from_, l_, b_)
{
    word[CELL(from_, l_, b_)] = t;
    fly[AT(from_, l_)] = fly[AT(from_, l_)] & ~WORD_BIT(b_)
}

inline land_block(from_, l_, b_)
{
    block[CELL(from_, l_, BLOCK_BANK(b_))] = staged_block[CELL(from_, l_, b_)];
    fly[AT(from_, l_)] = fly[AT(from_, l_)] & ~BLOCK_BIT(b_)
}

inline land_across(from_, l_, b_)
{
    store(ACROSS(from_), l_, t);
    straight_across[CELL(ACROSS(from_), l_, b_)] = staging[CELL(from_, l_, STAGING_BANK(b_))];
    rows_word_across[CELL(ACROSS(from_), l_, b_)] = t;
    fly_across[AT(from_, l_)] = fly_across[AT(from_, l_)] & ~BIT(b_);
    if
    :: BURIES ->
        staging[CELL(from_, l_, b_)] = ((fly[AT(from_, l_)] & ROWS_BIT(b_)) -> staging[CELL(from_, l_, b_)] : 0)
    :: else
    fi
}

/* The fold of rank x for its rail peer: what an agent reads, and puts. */
inline fold(ff_, lf_, bf_)
{
    CLAIM(T3, relay[CELL(ff_, lf_, RELAY_BANK(bf_))] == t ||
              signal[CELL(ff_, lf_, bf_)] >= REFUSED_SIGNAL);
    staged_fold[CELL(ff_, lf_, bf_)] = t;
    signal[CELL(ff_, lf_, bf_)] = STEP_OF(signal[CELL(ff_, lf_, bf_)]) |
        ((flight[ff_] & BIT(lf_)) -> signal[CELL(ff_, lf_, bf_)] & REFUSED_SIGNAL : 0);
    relay[CELL(ff_, lf_, RELAY_BANK(bf_))] = (BURIES -> 0 : relay[CELL(ff_, lf_, RELAY_BANK(bf_))]);
    folds[AT(ff_, lf_)] = folds[AT(ff_, lf_)] & ~AGENT_BIT(bf_);
    if
    :: SLOW(ff_) -> folds[AT(ff_, lf_)] = folds[AT(ff_, lf_)] | FOLD_BIT(bf_)
    :: else -> land_fold(ff_, lf_, bf_)
    fi
}

inline land_fold(from_, l_, b_)
{
    inbox[CELL(from_, l_, INBOX_BANK(b_))] = staged_fold[CELL(from_, l_, b_)];
    fold_word[CELL(from_, l_, b_)] = t;
    folds[AT(from_, l_)] = folds[AT(from_, l_)] & ~FOLD_BIT(b_)
}

#define FOLDS(x, l) (folds[AT(x, l)] & 3)
#define FOLDS_FLY(x, l) (folds[AT(x, l)] >> 2)
#define MAY_FOLD_AT(x, l, b) \
  (FOLDS(x, l) && STEP_OF(signal[CELL(x, l, b)]) >= STEP_IN(x, l, b) && MAY_FOLD(x, l, STEP_IN(x, l, b)))
#ifndef FOLDS_IN_COMPLETION
#define AGENT(x, l) \
  :: atomic { RUNS(x) && failed[x] == 0 && MAY_FOLD_AT(x, l, OLDER(FOLDS(x, l), x, l)) -> \
       b = OLDER(FOLDS(x, l), x, l); t = STEP_IN(x, l, b); fold(x, l, b); b = 0; t = 0 }
#else
#define AGENT(x, l)
#endif

#define FLIES(x, l) (fly[AT(x, l)] & 3)
#define WORDS_FLY(x, l) ((fly[AT(x, l)] >> 2) & 3)
#ifdef APART
#define LANDS(x, l) \
  :: atomic { FLIES(x, l) && REACHES(x, RAIL(x)) -> \
       b = OLDER(FLIES(x, l), x, l); t = STEP_IN(x, l, b); land_rows(x, l, b); b = 0; t = 0 } \
  :: atomic { WORDS_FLY(x, l) && REACHES(x, RAIL(x)) && WORD_MAY_LAND(x, l, OLDER(WORDS_FLY(x, l), x, l)) -> \
       b = OLDER(WORDS_FLY(x, l), x, l); t = STEP_IN(x, l, b); land_word(x, l, b); b = 0; t = 0 } \
  :: atomic { BLOCK_APART && (fly[AT(x, l)] >> 4) && !WORDS_FLY(x, l) && REACHES(x, RAIL(x)) -> \
       b = OLDER(fly[AT(x, l)] >> 4, x, l); land_block(x, l, b); b = 0; t = 0 }
#else
#define LANDS(x, l) \
  :: atomic { FLIES(x, l) && REACHES(x, RAIL(x)) -> \
       b = OLDER(FLIES(x, l), x, l); t = STEP_IN(x, l, b); land_rows(x, l, b); land_word(x, l, b); b = 0; t = 0 }
#endif
#ifdef MORE_KINDS
#define LANDS_ACROSS(x, l) \
  :: atomic { fly_across[AT(x, l)] && REACHES(x, ACROSS(x)) -> \
       b = OLDER(fly_across[AT(x, l)], x, l); t = STEP_IN(x, l, b); land_across(x, l, b); b = 0; t = 0 }
#else
#define LANDS_ACROSS(x, l)
#endif
#ifdef BY_DOMAIN
#define LANDS_FOLD(x, l) AGENT(x, l) \
  :: atomic { FOLDS_FLY(x, l) && REACHES(x, RAIL(x)) -> \
       b = OLDER(FOLDS_FLY(x, l), x, l); t = STEP_IN(x, l, b); land_fold(x, l, b); b = 0; t = 0 }
#else
#define LANDS_FOLD(x, l)
#endif
#define ENGINE(x, l) LANDS(x, l) LANDS_ACROSS(x, l) LANDS_FOLD(x, l)

active proctype Network()
{
    byte b, t;
end:
    do
    ENGINE(0, 0) ENGINE(1, 0) ENGINE(2, 0) ENGINE(3, 0)
#ifndef ONE_CHANNEL
    ENGINE(0, 1) ENGINE(1, 1) ENGINE(2, 1) ENGINE(3, 1)
#endif
    od
}
