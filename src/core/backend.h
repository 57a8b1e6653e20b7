// Backend: the interface between the host's bookkeeping (core/) and what moves bytes (src/cpu, src/cuda). It has the
// structs that describe a call (DispatchCall, CombineCall, ...), the arrays of a handle, and the functions that start
// and finish each kind of step. core/ knows backends by this file alone.
//
// send_* must write, publish and never wait for a peer (S7); finish_* must end in data or in an error (S6), and leave
// outputs that are safe to read. A field that one backend ignores makes results differ between backends.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "core/carrier.h"
#include "core/config.h"
#include "core/hosts.h"
#include "core/moving_backend.h"
#include "core/record.h"
#include "core/routing_source.h"
#include "core/sharing_call.h"
#include "exchange/choices.h"
#include "exchange/collective.h"
#include "exchange/counts.h"
#include "exchange/dispatch.h"
#include "exchange/routing_layout.h"
#include "exchange/step.h"
#include "layout/layouts.h"
#include "views/columns.h"
#include "views/index_lists.h"
#include "views/rank_major.h"

namespace tw {

// Everything about a group that its steps need.
struct Context {
  WindowMap map;
  int32_t me = 0;
  Placement placement{};
  int32_t local_experts = 0;
  ReplicaSet replicas;  // the ranks that hold the same tokens as this one
  Domains domains;      // whose partials are folded before they are summed
  IdStyle ids;
  uint32_t first_step = 0;
  // Other maps of the window that views may be of: those before each growth, also of the groups that share it.
  std::vector<WindowMap> former;
  uint32_t growth = 0;                           // growth_digest or placed_digest: which map of the window this is
  const PlacementSpec* spec = nullptr;           // what all layers' maps have in common
  const std::vector<ExpertMap>* maps = nullptr;  // [layers], empty without a placement
};

// What a handle shows: callers may write to these arrays, as the library reads none of them again.
struct ShownArrays {
  int32_t* counts = nullptr;        // [N]
  void* ids = nullptr;              // [N, B, K] or [R, K], in the group's id type
  float* weights = nullptr;         // likewise
  int32_t* offsets = nullptr;       // [L + 1], high throughput alone: PerExpert::begin, in 32 bits
  int32_t* slot_offsets = nullptr;  // [L + 1], low latency alone: the same of PerExpert::slot_begin
};

// The received rows of each local expert.
struct PerExpert {
  int32_t* counts = nullptr;  // [L]
  int64_t* begin = nullptr;   // [L + 1], high throughput alone: the row of a grouped layout at which an expert's begin
  // [L + 1], low latency on hosts alone: the same of what a dispatch has brought. Apart, as a handle of both modes may
  // be dispatched by its counts again.
  int64_t* slot_begin = nullptr;
};

// What a handle has on a device alone: arrays there, and what the host knows of them.
struct DeviceArrays {
  ExpertRow* places = nullptr;        // [N * B, K]: where each received (row, k) of an expert_major dispatch went
  twLayout_t placed = twRankMajor;    // the layout by expert whose places of the last dispatch these are; else none's
  uint32_t* digest = nullptr;         // MapOfRouting::digest, as the device has read it
  int32_t* status = nullptr;          // twResult_t of the last dispatch, as the device knows it
  void* stream = nullptr;             // stream of the last dispatch
  int32_t* overflow = nullptr;        // 1: the exchange of counts found too little room, so nothing is sent
  uint32_t* metadata_step = nullptr;  // the step whose dispatch brought the metadata; 0: none since the counts
  bool brought = false;               // what is launched will bring it: the device alone knows when
  GroupMarks* marks = nullptr;        // [groups of 32 tokens, N], made by the exchange of counts
  // [kMaxParts + 1, 2, N]: how many rows of tokens before each part of a combine came from each rank, and how many went
  // to it; behind the last part all.
  int32_t* part_counts = nullptr;
  // [N, low_latency_tokens] metadata of low-latency dispatches in a group of both modes, apart from Received::meta:
  // what high throughput has brought there does not come again.
  std::byte* slot_meta = nullptr;
  void* counts_page = nullptr;  // the backend's: where the device tells the host the counts
  uint64_t counts_serial = 0;   // the last exchange that tells the host; 0: none does
  uint64_t page_serial = 0;     // the last exchange that writes to the page
};

// The arrays of a handle: one routing, and what its dispatch brought. They are in device memory on a device.
struct HandleArrays {
  Routing routing;
  TokensOfSet all;
  RoutingSource source;
  MapOfRouting map;
  Received received;
  PerExpert experts;
  ShownArrays shown;
  Counts counts;  // high throughput alone
  DeviceArrays device;

  // How many rows go to each rank [N] in a call of this shape: in exact layouts without those that are dropped.
  int32_t* send_counts(const Shape& shape, int32_t me) const {
    return shape.exact() ? &counts.at(shape, me, 0) : routing.send_counts;
  }
  Routing sent_routing(const Shape& shape, int32_t me) const {
    Routing sent = routing;
    sent.send_counts = send_counts(shape, me);
    return sent;
  }
};

// An exchange of counts as the host knows it.
struct KnownCounts {
  bool known = false;
  bool failed = false;               // the counts did not come, on any rank
  std::vector<int32_t> received;     // [N] rows from each rank
  std::vector<int32_t> expert_rows;  // [L] rows for each local expert, those that are dropped too
  int64_t flat_rows = 0;
  int64_t grouped_rows = 0;
  Overflow overflow;
};

// Where a received dispatch is shown to the caller. NULL: not wanted, or, for payloads, a view of the window suffices.
struct DispatchTargets {
  twLayout_t layout = twRankMajor;
  std::byte* payloads[kMaxPayloads] = {};
  Columns columns[kMaxPayloads];  // by expert alone
  void* ids = nullptr;
  float* weights = nullptr;
  int32_t* counts = nullptr;         // [N] or [L] by layout; never NULL
  int32_t* offsets = nullptr;        // [L + 1], grouped alone, in either mode
  int32_t alignment = 1;             // of an expert's rows in the grouped of low latency
  int64_t* origins = nullptr;        // [L, N*b] or [P], by expert alone
  int32_t* source_counts = nullptr;  // [L, N], likewise
  int64_t rows = 0;                  // rows of a packed layout
  IndexLists lists;                  // rank_major and flat alone
};

// What the rows of a dispatch consist of, and where in a bank they lie then.
struct DispatchRows {
  WindowMap map;
  int32_t payloads = 0;
  twPayload_t types[kMaxPayloads] = {};
  bool own = false;  // those that the group was made with
  // What ranks must have alike; 0: own rows of a group that never grew. In a group of both modes it says which the call
  // is of, as the map's shape does (Shape::exact).
  uint32_t digest = 0;
};

// The same of a combine.
struct CombineRows {
  WindowMap map;
  twDtype_t wire = twBfloat16;  // dtype of combined rows on the wire
  int64_t elements = 0;
  uint32_t digest = 0;
  bool values = false;  // a value of each choice goes beside them
  // Of rows as twFloat8e4m3, else none: which scales they have, and the one of all elements (twScalesTensor; else 0).
  twScales_t scales = twScalesNone;
  float scale = 0.0f;
};

// Values of choices beside rows (CombineRows::values): the caller's, in the rows' layout, and the owner's, [T, K].
struct ChoiceValues {
  Grid in;
  float* out = nullptr;
};

struct DispatchCall {
  StepPlace at;
  DispatchRows rows;
  void* stream = nullptr;
  int32_t bound = 0;
  bool send_only = false;
  // Whether rows go to the receive offsets that the exchange of counts before has announced, and those of this rank:
  // for each payload an offset in its window; 0: in the bank.
  bool has_offsets = false;
  uint64_t receive_offset[kMaxPayloads] = {};
  bool counted = true;   // whether twGroupLoads counts it
  int32_t sm_limit = 0;  // of the call's kernels, in place of the group's; 0: the group's. Ranks may differ
  RowsIn payloads[kMaxPayloads];
  DispatchTargets targets;
};

struct CountsCall {
  StepPlace at;
  void* stream = nullptr;
  bool send_only = false;
  int32_t room = 0;                            // rows of all sources that a rank may receive, on all ranks alike
  int32_t alignment = 1;                       // rows of an expert in the grouped layout begin at multiples of it
  bool drop = false;                           // rows beyond a receiver's room are left out, instead of refusing all
  bool again = false;                          // counts of this routing have been exchanged before
  bool known = false;                          // and nothing has changed since but the receive offsets
  int32_t sm_limit = 0;                        // as in DispatchCall
  uint32_t growth = 0;                         // Context::growth
  uint64_t receive_offset[kMaxPayloads] = {};  // for the dispatch that follows
};

// A routing whose layout a device is to find; no step.
struct LayoutCall {
  int32_t layer = 0;
  int32_t tokens = 0;
  RoutingSource source;  // without weights
  void* stream = nullptr;
  RoutingLayout layout;
};

struct CombineCall {
  StepPlace at;
  CombineRows sent;
  void* stream = nullptr;
  bool send_only = false;
  int32_t sm_limit = 0;  // as in DispatchCall
  int32_t bound = 0;     // bound of the dispatch that it answers
  int32_t parts = 1;     // how many parts it has
  int32_t part = 0;      // which one this is: Shape::part_tokens() tokens, from part * part_tokens() on. Behind
                         // the first each has a step that is left out before it, so that all have the same bank
  twLayout_t layout = twRankMajor;
  int32_t alignment = 1;  // as in DispatchTargets
  bool weighted = false;
  bool in_window = false;  // the rows lie where a peer's next step may write: Backend::peers_write
  bool apart = false;      // neither a peer nor the sums can overwrite the rows while the call runs
  bool keep_own = false;   // this rank's own partials are summed from the caller's memory
  twDtype_t rows_dtype = twFloat32;
  Grid rows;
  twDtype_t out_dtype = twFloat32;
  std::byte* out = nullptr;
  int64_t out_stride = 0;
  ChoiceValues values;
  // Where rows return per expert: those of the call, else those of the handle if it is `weighted`.
  OwnerWeights weights;
  Bias bias;  // of this rank's share of the tokens
  // Where the first of all T tokens goes, of which `out` and `values` have this rank's share.
  std::byte* all_out = nullptr;
  float* all_values = nullptr;
};

// One tensor of a gather or reduce.
struct CollectiveTensor {
  const std::byte* in = nullptr;
  int64_t block_stride = 0;  // bytes; 0 for a gather, and for flat rows, which follow each other
  int64_t row_stride = 0;
  twDtype_t from = twUint8;  // for a reduce
  twDtype_t to = twUint8;
  int64_t elements = 0;
  std::byte* out = nullptr;  // NULL: not wanted
  int64_t out_stride = 0;
};

// A gather or a reduce (tokenway/collectives.h).
struct CollectiveCall {
  StepPlace at;
  void* stream = nullptr;
  bool send_only = false;
  bool reduces = false;
  bool flat = true;        // layout of the rows of all ranks: a reduce's input, a gather's output
  bool views = false;      // a gather's output is seen in the window
  bool in_window = false;  // a reduce's input lies there
  int32_t sm_limit = 0;    // as in DispatchCall
  int32_t bound = 0;
  int32_t rows = 0;            // rows of a gather's input, or a reduce's output: this rank's, or what there is room for
  uint32_t digest = 0;         // digest of what ranks must have alike, except sizes that the host does not know
  bool all_sizes = false;      // `sizes` are those of all ranks, not this rank's alone
  std::vector<int32_t> sizes;  // [N] or [1]; empty where they are in device memory
  const void* sizes_at = nullptr;  // where they are then
  bool wide_sizes = false;         // they are int64
  CollectiveMap places;
  CollectiveTensor tensors[kMaxPayloads];
  int32_t* counts = nullptr;   // [N], NULL: not wanted
  int32_t* offsets = nullptr;  // [N + 1], likewise

  twPhase_t phase() const { return reduces ? twPhaseReduce : twPhaseGather; }
  Mode mode() const { return reduces ? Mode::kReduce : Mode::kGather; }
};

// A call that this rank refuses, and what is known of its peers' calls.
struct Refusal {
  twPhase_t phase = twPhaseNone;            // what the step would have been
  bool views = false;                       // the step would have shown the window
  const HandleArrays* combining = nullptr;  // the handle, if it is a combine
  void* stream = nullptr;
  int32_t bound = 0;     // 0: max_tokens; -1: not known
  WindowMap map;         // of the call's rows, if they are known, else of the group's own
  CollectiveMap places;  // for a gather or reduce; without tensors where the arguments do not tell
  bool skips = false;    // of a step that is abandoned: it was sent behind one that is left out
  bool values = false;   // of a combine whose rows have values of choices beside them
};

struct BackendInit;

// What twGroupInfo tells of the ways between devices.
struct DeviceLinks {
  int32_t packet_tokens = 0;
  twLinks_t known = twLinksOther;
  twHandles_t handles = twHandlesNone;
  int32_t refusal = 0;
};

class Backend : public MovingBackend {
 public:
  explicit Backend(const Context& context) : context_(context) {}
  virtual ~Backend() = default;

  // These start a step: everything is written and published on return, in stream order. They never wait for a peer.
  virtual Status send_dispatch(const DispatchCall& call, HandleArrays& handle) = 0;
  virtual Status send_combine(const CombineCall& call, HandleArrays& handle) = 0;
  // In high throughput alone.
  virtual Status send_counts(const CountsCall& call, HandleArrays& handle) = 0;
  virtual Status send_collective(const CollectiveCall& call) = 0;
  virtual Status send_refusal(StepPlace at, const Refusal& refusal) = 0;
  // Whether a refusal can be sent to the peers: where they wait in a collective, it must be known which one.
  virtual bool can_refuse(const Refusal&) const { return true; }

  // With staged transport, moves what the peers' combine moves. Their hosts take a dispatch that this rank refused for
  // a good one and combine; they would wait for this rank's part.
  virtual Status keep_pace(StepPlace, int32_t /*bound*/, const CombineRows&, void* /*stream*/) { return {}; }

  // These finish a step. After an error the targets are memory-safe: counts 0 and invalid ids for what did not arrive,
  // NaN for sums that could not be made.
  virtual StepEnd finish_dispatch(const DispatchCall& call, TimePoint deadline, HandleArrays& handle) = 0;
  virtual StepEnd finish_combine(const CombineCall& call, TimePoint deadline, HandleArrays& handle) = 0;
  // *known: what has come, unless a device tells it later.
  virtual StepEnd finish_counts(const CountsCall& call, TimePoint deadline, HandleArrays& handle,
                                KnownCounts* known) = 0;
  // After an error counts and offsets are 0, and sums are NaN.
  virtual StepEnd finish_collective(const CollectiveCall& call, TimePoint deadline) = 0;
  // Whether finish_counts would not wait: all counts have come, or something has gone wrong, which it then tells. Waits
  // for that until `until` at most, on the calling thread alone; takes nothing and gives nothing back.
  virtual bool counts_ready(StepPlace, TimePoint /*until*/) { return true; }
  // Behind a combine, where token replicas share their sums. A step of all ranks: those of other sets neither send nor
  // get rows, but signals. On a device it is launched whatever has become of the combine, and is no step there where
  // the combine was none. finish_sharing leaves NaN for all T tokens after an error, and so does spoil_sharing.
  virtual Status send_sharing(const SharingCall& call, HandleArrays& handle) = 0;
  virtual StepEnd finish_sharing(const SharingCall& call, TimePoint deadline, HandleArrays& handle) = 0;
  virtual void spoil_sharing(const SharingCall&, const HandleArrays&) {}
  // As keep_pace, of that step.
  virtual Status keep_sharing_pace(const SharingCall&) { return {}; }
  // Makes a step without rows before a part of a combine, so that the part has the same bank as the one before. A
  // device makes it in the kernel of the part.
  virtual StepEnd skip(const CombineCall&, TimePoint /*deadline*/, HandleArrays&) { return {}; }
  // Makes the end of a step that was sent alone, without outputs, where drain alone does not: of a group that ends
  // while others go on with its lanes.
  virtual Status abandon(StepPlace, const Refusal& /*sent*/) { return {}; }
  // Waits for a step that this rank refused.
  virtual StepEnd drain(StepPlace at, TimePoint deadline) = 0;

  // This rank's window, and an object that keeps it mapped for as long as anybody has it. The latter may be asked from
  // any thread.
  virtual std::byte* window() = 0;
  virtual std::shared_ptr<void> keep_window() = 0;
  // The map of a dispatch of such rows and such a bound: where the rows come to lie in this rank's window. `shown`:
  // rows of the view, which may be more than can come.
  virtual WindowMap places(const WindowMap& rows, int32_t /*bound*/, int64_t /*shown*/) const { return rows; }
  // Where payload q of a step lies in the window, [N, b, row]: the zero-copy view. `map`: what places() gives.
  void* view(const WindowMap& map, StepPlace at, int q) {
    return window() + map.payload(at.channel, at.bank(), q, 0, 0, 0);
  }
  // Where tensor q of a gather lies in the window, [N, b, row].
  void* view_gathered(const CollectiveCall& call, int q) {
    return window() + context_.map.bank(call.at.channel, call.at.bank()) + call.places.row(q, 0, 0);
  }
  // Whether an address lies in the part of this rank's window that steps overwrite: channels, also those of before the
  // group grew, whose views are still good.
  bool in_window(const void* address) {
    return any_map([at = offset_of(address)](const WindowMap& map) { return map.in_channels(at); });
  }
  // Whether an address lies where a peer's step may write rows, so that reads of it must come before this rank's signal
  // (S3). Unpacked rows and leases do not.
  bool peers_write(const void* address) {
    return any_map(
        [at = offset_of(address)](const WindowMap& map) { return map.in_channels(at) && !map.in_unpacked(at); });
  }
  // Whether an address lies in a channel's part of it.
  bool in_channel(int channel, const void* address) {
    return any_map([&, at = offset_of(address)](const WindowMap& map) { return map.in_channel(channel, at); });
  }

  // announce_abort tells every peer that this rank gives the group up. find_abort says whether a peer has done so, and
  // abort_of what a given rank has said.
  virtual void announce_abort(AbortSignal reason) = 0;
  virtual AbortSignal find_abort() = 0;
  virtual AbortSignal abort_of(int writer) = 0;
  // Why this rank's network has failed, where the backend asks for that; twSuccess: it goes, as far as is known.
  virtual Status network_failure() { return {}; }

  // Replaces a layer's map, for routings that are read after what is enqueued on the stream.
  virtual Status replace_map(int32_t /*layer*/, const ExpertMap& /*map*/, void* /*stream*/) { return {}; }
  // Gives the averages of all layers, in a group that counts: tokenway/placement.h. dispatches may be NULL. Never
  // waits.
  virtual void read_loads(float* /*loads*/, int64_t* /*dispatches*/) {}

  // Makes room in all windows for `grown`, which becomes the map if end_growth says so; until then, and if not, calls
  // go on as before. Collective: init is as at creation, and every rank's result is told to the others. end_growth
  // follows once, after success or failure: `grown`, it must not fail, and context_.map is the grown map already;
  // `certain`: no rank can have taken it for a success, so that memory may go.
  virtual Status prepare_growth(const BackendInit& init, WindowMap* grown) = 0;
  virtual void end_growth(bool grown, bool certain) = 0;

  // Tells how a carrier is used; false if there is none.
  virtual bool describe(twPortableInfo_t*) const { return false; }

  // ---- For backends on devices. There, send_* of a call that is not send_only launches all of it, and finish_*
  // returns at once: poll() finds what goes wrong later.
  virtual bool on_device() const { return false; }
  virtual DeviceLinks links() const { return {}; }
  // Whether a call may be launched on a stream.
  virtual Status check_stream(const void* stream) const {
    if (stream == nullptr) return {};
    return fail(twInvalidArgument, "{} is {}; it must be NULL on the CPU", Argument("stream"), stream);
  }
  // Finds the layout of a routing, in stream order. Elsewhere the host does, which can read the ids.
  virtual Status find_layout(const LayoutCall&) { return {}; }
  // Whether a call on this stream would be captured into a graph.
  virtual bool captures(const void* /*stream*/) const { return false; }
  // Whether any stream that calls have used is captured.
  virtual bool captures_any() const { return false; }
  // Waits until nothing that was launched uses memory of the group any more.
  virtual void settle() {}
  // Takes over what steps have found out since: fills the record and returns true if there is something new. Never
  // blocks.
  virtual bool poll(ErrorRecord*) { return false; }
  // Memory for handles; NULL if there is none.
  virtual std::byte* allocate(size_t) { return nullptr; }
  virtual void release(std::byte*) {}
  // Reads what a device has told the host of the last exchange of counts; the host may wait for it until `until`. Never
  // blocks the device or a stream.
  virtual void read_counts(const HandleArrays&, TimePoint /*until*/, KnownCounts*) {}
  // Forgets a handle that is about to end.
  virtual void forget(HandleArrays&) {}
  // Copies the received counts of a dispatched handle to the host. May wait for the device.
  virtual Status copy_counts(const HandleArrays& handle, int32_t* counts) {
    std::copy_n(handle.received.counts, shape().ranks, counts);
    return {};
  }

 protected:
  // From the window's begin; where the address lies before it, it wraps.
  uint64_t offset_of(const void* address) {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(window());
  }
  // Whether `has` holds for the map, or for one of before the group grew.
  template <class Has>
  bool any_map(Has&& has) const {
    return has(context_.map) || std::any_of(context_.former.begin(), context_.former.end(), has);
  }
  const Shape& shape() const { return context_.map.shape(); }

  const Context& context_;
};

}  // namespace tw
