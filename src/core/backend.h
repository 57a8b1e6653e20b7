// What a backend is: a handful of functions over a window. core/ knows backends by this alone.
#pragma once

#include <memory>
#include <span>

#include "bootstrap/bootstrap.h"
#include "core/config.h"
#include "exchange/dispatch.h"
#include "exchange/step.h"
#include "views/rank_major.h"

namespace tw {

// Everything about a group that its steps need.
struct Context {
  WindowMap map;
  int32_t me = 0;
  Placement placement{};
  int32_t local_experts = 0;
  IdStyle ids;
  twDtype_t wire = twBfloat16;  // of combined rows
  int64_t elements = 0;         // of a combined row
  uint32_t first_step = 0;
};

// Where a received dispatch is shown to the caller. NULL: not wanted, or, for payloads, a view of the window suffices.
struct DispatchTargets {
  twLayout_t layout = twRankMajor;
  std::byte* payloads[kMaxPayloads] = {};
  void* ids = nullptr;
  float* weights = nullptr;
  int32_t* counts = nullptr;  // [N] or [L] by layout; never NULL
};

struct DispatchCall {
  StepPlace at;
  int32_t bound = 0;
  bool send_only = false;
  RowsIn payloads[kMaxPayloads];
  DispatchTargets targets;
};

struct CombineCall {
  StepPlace at;
  int32_t bound = 0;  // of the dispatch that it answers
  twLayout_t layout = twRankMajor;
  bool weighted = false;
  bool keep_own = false;  // this rank's own partials are summed from where the caller has them
  twDtype_t rows_dtype = twFloat32;
  Grid rows;
  twDtype_t out_dtype = twFloat32;
  std::byte* out = nullptr;
  int64_t out_stride = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Start a step: everything is written and published on return, in stream order. Never wait for a peer.
  virtual void send_dispatch(const DispatchCall& call, const Routing& routing) = 0;
  virtual void send_combine(const CombineCall& call, const Received& received) = 0;
  virtual void send_refusal(StepPlace at) = 0;

  // Finish it. After an error the targets are memory-safe: counts 0 and invalid ids for what did not arrive, NaN for
  // sums that could not be made.
  virtual StepEnd finish_dispatch(const DispatchCall& call, TimePoint deadline, Received* received) = 0;
  virtual StepEnd finish_combine(const CombineCall& call, TimePoint deadline, const Routing& routing) = 0;
  // Waits for a step that this rank refused.
  virtual StepEnd drain(StepPlace at, TimePoint deadline) = 0;

  // Where payload q of a step lies in this rank's window, [N, b, row]: the zero-copy view.
  virtual void* view(StepPlace at, int q) = 0;
  // Whether an address lies in this rank's window.
  virtual bool in_window(const void* address) = 0;

  // Tells every peer that this rank gives the group up; and whether a peer has.
  virtual void announce_abort(AbortWord reason) = 0;
  virtual AbortWord find_abort() = 0;
  virtual AbortWord abort_of(int writer) = 0;
};

// What a backend needs to come into being: it makes this rank's window and maps the others'.
struct BackendInit {
  const Context* context = nullptr;
  Bootstrap* bootstrap = nullptr;
  std::span<const int> members;  // ranks of the bootstrap, by rank of the group
  uint64_t tag = 0;              // for one exchange
  TimePoint deadline;
  int32_t spin_us = -1;
  uint64_t cache_bytes = 0;
};

// src/cpu. Collective among members; a rank that fails on its own tells the others before it returns.
Status make_cpu_backend(const BackendInit& init, std::unique_ptr<Backend>* backend);

}  // namespace tw
