// What backends are asked for behind a combine of a group with token replicas: the step in which a set shares its sums.
//
// All ranks must have the note and the places alike (S10); a set's ranks also its tokens and the rows' types, which the
// digest in their signals tells.
#pragma once

#include "exchange/notes.h"
#include "exchange/token_replicas.h"
#include "tokenway/tokenway.h"

namespace tw {

// One tensor of what a set shares: [T, row], of which this rank has its share.
struct SharedRows {
  std::byte* rows = nullptr;
  uint64_t row_bytes = 0;
  twDtype_t dtype = twFloat32;
  int64_t elements = 0;
};

// The step behind a combine in which ranks that hold the same tokens share their sums.
struct SharingCall {
  StepPlace at;
  void* stream = nullptr;
  int32_t sm_limit = 0;  // as in DispatchCall
  int32_t bound = 0;     // of a share
  static constexpr bool send_only = false;
  int32_t parts = 1;      // those of the combine
  uint32_t digest = 0;    // of what all ranks must have alike, beside the tokens of a set
  CollectiveMap places;   // sharing_places
  SharedRows tensors[2];  // sums and, if places has two tensors, values of choices

  uint64_t note() const { return collective_note(kMaxCount, mix_digest(digest, static_cast<uint64_t>(bound))); }
};

}  // namespace tw
