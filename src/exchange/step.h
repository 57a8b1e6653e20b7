// The two ends of a step on hosts, the same for every kind of step: publish_step tells all ranks, await_step waits for
// all. They take a transport and the step's place, and give a StepEnd: data, or an error and the rank to blame.
//
// Here S2, S4 and S6 are kept: a wait that ends without every rank's signal lets a rank run two steps ahead, and a wait
// without a deadline never ends. The order in which failures are looked at decides which rank is blamed.
#pragma once

#include "exchange/notes.h"
#include "exchange/signals.h"
#include "exchange/transport.h"
#include "layout/window_map.h"
#include "tokenway/tokenway.h"

namespace tw {

// Writes the signals of a new window: at the first step value, so that nothing has arrived yet whatever the first step
// is.
inline void prepare_signals(const WindowMap& map, uint32_t first_step, std::byte* window) {
  for (int channel = 0; channel < map.shape().channels; ++channel) {
    for (int bank = 0; bank < 2; ++bank) {
      for (int source = 0; source < map.shape().ranks; ++source) {
        *reinterpret_cast<uint64_t*>(window + map.signal(channel, bank, source)) = pack({first_step, Mode::kNone, 0});
      }
    }
  }
}

// Publishes this rank's signal of a step to every rank, itself included: always, with n = 0 too. The caller has put all
// rows of the step (S4) and read everything it wants of the previous step's bank (S3): after this, peers may move on.
// count(peer): n. `note`: the bound, and what exchange/notes.h puts beside it.
template <Transport T, class Count>
void publish_step(T& t, const WindowMap& map, StepPlace at, Mode mode, uint64_t note, Count count) {
  t.flush();
  for (int i = 1; i <= t.ranks(); ++i) {
    const int peer = (t.rank() + i) % t.ranks();  // everyone starts elsewhere, so nobody is written to by all at once
    t.publish(peer, map.signal(at.channel, at.bank(), t.rank()), {at.step, mode, static_cast<uint32_t>(count(peer))},
              note);
  }
}

// How a step ended at this rank.
struct StepEnd {
  twResult_t code = twSuccess;
  int32_t peer = -1;  // the culprit
  Signal seen;        // the culprit's signal
  uint32_t note = 0;  // its bound
};

// The result of a wait that did not end in data.
inline twResult_t code_of(Wake wake) {
  if (wake == Wake::kLate) return twTimeout;
  if (wake == Wake::kDied) return twPeerDied;
  return wake == Wake::kInterrupted ? twInterrupted : twExcluded;
}

// Waits for every rank's signal of a step, and ends in data or in an error (S6). counts[source] becomes its n, 0 for a
// source whose rows are not there. When a wait fails the other signals are still looked at, without waiting, so that
// what arrived is known; the first failure is the one reported. `any` accepts every mode: it is for draining.
template <Transport T>
StepEnd await_step(T& t, const WindowMap& map, StepPlace at, Mode mode, uint64_t note, TimePoint deadline,
                   int32_t* counts, bool any = false) {
  const uint32_t bound = static_cast<uint32_t>(note) & ~kHasOffsets;
  StepEnd sticky;
  StepEnd refused;
  for (int i = 1; i <= t.ranks(); ++i) {
    const int peer = (t.rank() + i) % t.ranks();
    const uint64_t offset = map.signal(at.channel, at.bank(), peer);
    counts[peer] = 0;
    const Waited waited = sticky.code == twSuccess
                              ? Waited(t.wait(peer, offset, at.step, deadline))
                              : (reached(t.load(offset).step, at.step) ? Wake::kArrived : Wake::kLate);
    const Signal signal = t.load(offset);
    StepEnd end{twSuccess, peer, signal, 0};
    if (waited.wake == Wake::kArrived) {
      const uint64_t noted = *reinterpret_cast<const uint64_t*>(t.local(offset + kNoteOffset));
      end.note = static_cast<uint32_t>(noted);
      if (signal.step != at.step) {
        end.code = twInternalError;  // S2 says that nobody is further ahead than this step on this bank
      } else if (signal.mode == Mode::kRefused && !any) {
        end.code = twPeerRefused;
      } else if (signal.mode != mode && !any) {
        end.code = twCallMismatch;
      } else if (noted != note && !any) {
        end.code = twBoundMismatch;
      } else if (signal.n > bound && !any) {
        end.code = twInternalError;
      } else if (!any) {
        counts[peer] = static_cast<int32_t>(signal.n);
      }
    } else {
      end.code = code_of(waited.wake);
      if (waited.culprit >= 0) {
        end.peer = waited.culprit;
        end.seen = t.load(map.signal(at.channel, at.bank(), waited.culprit));
      }
    }
    const bool of_the_call = end.code == twPeerRefused || end.code == twBoundMismatch;
    StepEnd& worst = of_the_call ? refused : sticky;
    if (end.code != twSuccess && worst.code == twSuccess) worst = end;
  }
  return sticky.code != twSuccess ? sticky : refused;
}

// Whether await_step would end at once, in data or in an error. Waits for that until `until` at most; takes nothing.
template <Transport T>
bool would_end(T& t, const WindowMap& map, StepPlace at, TimePoint until) {
  for (int peer = 0; peer < t.ranks(); ++peer) {
    const Waited waited = t.wait(peer, map.signal(at.channel, at.bank(), peer), at.step, until);
    if (waited.wake == Wake::kLate) return false;
    if (waited.wake != Wake::kArrived) return true;
  }
  return true;
}

}  // namespace tw
