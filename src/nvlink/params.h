// What host and kernels have in common: the structs that kernels take by value. The memory that outlives them is in
// state.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "exchange/routing.h"
#include "layout/collective_map.h"
#include "layout/window_map.h"
#include "nvlink/maps.h"
#include "nvlink/state.h"
#include "tokenway/tokenway.h"
#include "views/columns.h"

namespace tw::nvlink {

// Of a block that exchanges. Its threads may have 128 registers, so it fills an SM, and a grid of SMs is all there at
// once.
inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kRound = kThreads;  // tokens that are routed at a time; of the first round one by each thread
inline constexpr int kMostLines = 2 * kRound;  // tokens of a bound with which all rows may go as lines
inline constexpr int kGroup = 32;              // tokens that a warp marks at a time, and that a word has bits for
inline constexpr int kCounted = 2 * kGroup;    // and that a block counts at a time, in an exchange of counts
inline constexpr int kTailLines = 32;          // of more rows than go as lines, at least so many, the last, do
inline constexpr int kTailSent = 192;          // in all, of a dispatch's tokens; at most a round
inline constexpr int kTailKnown = 128;         // if those before them go without what travels beside rows
inline constexpr int kTailSummed = 64;         // and of a combine's rows
inline constexpr int kUnitGroups = 4;          // at most so many groups of lines are one warp's at a time
inline constexpr int kSummedGroups = 2;        // or so many, of rows that are sums: registers
inline constexpr uint32_t kPushedVectors = 32 * kUnitGroups;  // of 16 bytes, of a row into an inbox, likewise
inline constexpr int kMetaGroups = 2;  // in so many lies what travels beside the payloads of a row
inline constexpr int kChunks = 32;     // chunks of a block that may be under way or waiting for their fence
inline constexpr int kNear = 8;
inline constexpr int kRanksAtOnce = 32;  // bits of a mask of ranks
inline constexpr int kMostRounds = 8;    // that are remembered at most

// Where an expert is, in one word: its rank and its slot there.
constexpr int kSlotBits = 20;
static_assert(TW_MAX_EXPERTS <= 1 << kSlotBits && TW_MAX_RANKS <= 1 << (32 - kSlotBits));
constexpr uint32_t pack_expert(int32_t rank, int32_t slot) {
  return static_cast<uint32_t>(rank) << kSlotBits | static_cast<uint32_t>(slot);
}
constexpr uint32_t kNoExpert = ~0u;  // its rank is beyond all
constexpr int32_t expert_rank(uint32_t packed) { return static_cast<int32_t>(packed >> kSlotBits); }
constexpr int32_t expert_slot(uint32_t packed) { return static_cast<int32_t>(packed & ((1u << kSlotBits) - 1)); }

// x / d for x < 2^31, without a division. Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994.
struct Divider {
  uint32_t divisor = 1;
  uint32_t factor = 0;
  uint32_t shift = 0;

  static constexpr Divider make(uint32_t d) {
    Divider by;
    by.divisor = d;
    while (by.shift < 32 && (uint64_t{1} << by.shift) < d) ++by.shift;
    by.factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << by.shift) - d)) / d + 1);
    return by;
  }
};

// Everything about a group, for a kernel.
struct GroupView {
  WindowMap map;
  int32_t me;
  int32_t local_experts;
  int32_t line_tokens;  // 0: lines are not in use
  int32_t no_wait;
  int32_t by_shares;               // slots are chosen by their shares
  int32_t note_bits;               // exchange/notes.h
  const uint32_t* experts;         // [E] pack_expert; of a group with a placement its slots, [P]
  std::byte* near_windows[kNear];  // of the first ranks: a kernel has its parameters before it can load anything
  std::byte* const* windows;       // [N]
  ControlPage* const* pages;       // [N]
  // Over a carrier, else NULL: what goes out to all ranks, a block for each, instead of their windows. As the bank of
  // the step in a window would begin, that of a window's beginning; and this rank's words, [N].
  std::byte* out;
  std::byte* out_words;
  int32_t waits;  // the end of the step follows at once
  DeviceState* state;
  LaneState* lanes;
  uint32_t* marks;  // [lanes, mark_words] which tokens of each 32 go to each rank (routing.cuh)
  uint64_t timeout_ns;
  TallyView loads;
};

// [groups of tokens, N] of a lane; the first round's stay where they are made. Of an exact layout handles have them.
constexpr int64_t mark_words(const Shape& shape) {
  const bool later = shape.max_tokens > kRound && !shape.exact();
  return later ? int64_t{(shape.max_tokens + kGroup - 1) / kGroup} * shape.ranks : 0;
}

// A handle's arrays. Destinations of token t begin at t * fan_out(); meta rows lie as slots do, [N, b].
struct HandleView {
  int32_t* ids;
  float* weights;
  int32_t* fan;  // [T]
  Destination* destinations;
  int32_t* send_counts;
  int32_t* counts;
  uint64_t* meta;
  ExpertRow* places;
  int32_t* expert_counts;
  int32_t* status;
  int32_t* choices;  // [E] of its tokens, of a group that counts
  uint32_t* digest;  // of the map that the slots in `ids` are from
  // High throughput alone: exchange/counts.h.
  int32_t* sent_rows;     // [N, N]
  int32_t* experts;       // [L]
  int64_t* begin;         // [N]
  int64_t* source;        // [N + 1]
  int64_t* expert_begin;  // [L + 1]
  int32_t* offsets;       // [L + 1]
  int32_t* overflow;      // 1: a rank would receive too many rows, and none goes to any
  GroupMarks* marks;      // [groups, N]; NULL: a dispatch makes its own
  uint32_t* beside;       // low half of the step that brought what travels beside rows; 0: none. NULL: each brings it
  uint64_t* landing;      // [N, payloads] as of Counts
};

struct PayloadIn {
  const std::byte* data;
  int64_t stride;       // bytes
  int32_t width;        // bytes that every access may take: 16, 4 or 1
  uint32_t vectors;     // of that many bytes in a row
  uint32_t per_unit;    // of them in a unit of a row that is no line
  uint32_t first_word;  // in the stream of a line (layout/lines.h)
};

// Of so many units each, the turns of chunks that a block has ahead of what it has sent (chunks.cuh): what keeps its
// warps busy, and those whose fence is under way; not many more, as what is drawn early is not shared out any more.
constexpr int32_t turns_ahead(int32_t items) { return std::min(kChunks / 2, (kWarps + items - 1) / items + 3); }

// How rows are shared out: a unit is a warp's, some groups of four lines of a row, or as large a part of the row as it
// lies.
struct Units {
  Divider per_row;
  uint32_t unit_groups;  // groups of lines in a unit, the last of a row excepted
  uint32_t groups;       // of a row
  uint32_t words;        // of a row as a stream
  uint32_t line_bytes;   // of a row's lines
};

// The first rows in wider units, of several of the others each. Where few SMs work all rows that are no lines: there,
// what a unit costs beside its bytes counts. (Where all SMs do, a unit that comes late does: a combine of 4096 tokens
// took twice as long.) Else those that warps of a dispatch begin with; of rows alone all but the last (units.h).
struct WideUnits {
  Divider per_row;
  uint32_t parts;  // of the others in one
  uint32_t rows;   // that are shared out so

  constexpr uint32_t units() const { return rows * per_row.divisor; }
};

// WindowMap::line of a lane, without what a kernel need not compute.
struct LinesAt {
  uint64_t bank[2];
  uint64_t source;  // bytes from one source's lines to the next
  uint32_t row;     // and from one slot's

  static LinesAt make(const WindowMap& map, int lane) {
    return {{map.line(lane, 0, 0, 0), map.line(lane, 1, 0, 0)},
            map.line_row() * static_cast<uint64_t>(map.shape().line_tokens),
            static_cast<uint32_t>(map.line_row())};
  }
};

// A grid's work: the first blocks send, the others receive or sum. What an SM loads waits behind what it has stored to
// a link that is full: sums took three times as long where all SMs sent. A grid that is not apart does both in every
// block, sending first (S7), or only one of the two.
struct Roles {
  int32_t apart;
  int32_t sending;  // blocks
  int32_t receiving;

  static constexpr Roles two(int sending, int receiving) { return {1, sending, receiving}; }
  static constexpr Roles one(int blocks) { return {0, blocks, blocks}; }
  constexpr int grid() const { return apart != 0 ? sending + receiving : sending; }
};

// Each kind of call has a kernel: instructions that a kernel meets for the first time take five to ten cycles each, so
// what other calls need may not stand between.
//
// Usual: of a dispatch, up to two payloads, of 16 bytes at a time; up to 8 ids, which lie as whole vectors of 16 bytes;
// up to 32 ranks; a table of experts in shared memory. Of a combine, rows of the wire's type, 16 bytes at a time, as
// they are; sums of that type; own rows where the caller has them.
//
// Few: usual, by up to a quarter of the device's SMs (backend.h, kind_of). Units are whole rows, or large parts:
// what a warp does beside moving one is done while something of it is on its way.
//
// Lines: usual, with a bound of up to two rounds of tokens, and up to 32 ranks; so all that is sent or received are
// lines. Of a combine also rows by expert, whose sums are made on the way.
enum class Kind : int32_t { kAny, kUsual, kFew, kLines };
// Those that a bulk kernel is made for; `use(std::integral_constant<Kind, ...>)`: of one of them.
inline constexpr Kind kBulkKinds[] = {Kind::kAny, Kind::kUsual, Kind::kFew};
template <class Use>
int with_kind(Kind kind, Use&& use) {
  if (kind == Kind::kFew) return use(std::integral_constant<Kind, Kind::kFew>{});
  if (kind == Kind::kUsual) return use(std::integral_constant<Kind, Kind::kUsual>{});
  return use(std::integral_constant<Kind, Kind::kAny>{});
}
inline constexpr int kFastIds = 8;
inline constexpr int kFewTokens = 32;  // one for each lane of a warp

// How received ids are shown; NULL: not wanted.
struct Shown {
  void* ids;
  float* weights;
  int32_t* counts;  // [N]
  int32_t wide;
  int32_t local;
  int32_t invalid;
};

// Places in shared memory, from its beginning; decided on the host, so that a kernel finds them among its parameters
// and keeps no pointers in registers.
struct DispatchScratch {
  uint32_t windows;       // std::byte* [N]
  uint32_t here;          // int32 [N] row of the window where each source's begin
  uint32_t there;         // int32 [N] row at each rank where this rank's begin
  uint32_t limit;         // int32 [N] rows that may go to a rank
  uint32_t rounds;        // that are remembered; a power of two
  uint32_t going;         // uint32 [rounds, kWarps, N] which tokens of 32 go to a rank
  uint32_t base;          // int32 [2 * rounds, N] slots of a rank that earlier rounds have taken
  uint32_t meta;          // uint64 [kWarps, 1 + K] what travels beside a warp's row; of one sent, with position 0
  uint32_t before_lines;  // int32 [N] tokens for a rank that are no lines
  uint32_t routed;        // int32 rounds that are
  uint32_t progress;      // int32 [kWarps] the round that a sending warp is in
  uint32_t plain;         // uint32 sending warps whose rows are all sent, but for lines
  uint32_t source_error;  // int32 [N] twResult_t
  uint32_t failed;        // int32 one of these is an error
  uint32_t table;         // uint32 [E + 1] where each expert is, if there are few; at last, of no rank
  uint32_t map;           // MapWords from kFirst on, without `several`, likewise
  uint32_t bytes;

  static DispatchScratch make(const Shape& shape);
};
// A set is what one token's sum or one row's partial needs: every warp has one.
struct CombineScratch {
  uint32_t windows;     // std::byte* [N]
  uint32_t rows;        // const std::byte* [sets, K] the caller's rows of a partial, k ascending
  uint32_t weights;     // float [sets, K]
  uint32_t row_counts;  // int32 [sets]
  uint32_t places;      // const std::byte* [sets, F] where a term of a token's sum is found
  uint32_t kinds;       // int32 [sets, F]
  uint32_t from;        // Destination [sets, F] who sends it, and in which slot
  uint32_t first;       // int32 [N] of exact layouts: row where each source's begin; else 0
  uint32_t counts;      // int32 [N] received from each owner
  uint32_t sent_rows;   // int32 [N] sent to each rank
  uint32_t given;       // uint64 [kChunks] gate: it is known which chunk has this place (chunks.cuh, Work)
  uint32_t sent;        // uint64 [kChunks] gate: all of it is
  uint32_t taken;       // int32 [kChunks] the chunk that has the place; -1: none is left
  uint32_t failed;      // int32 the step has
  uint32_t bytes;

  static CombineScratch make(const Shape& shape);
};

struct DispatchParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  PayloadIn payloads[kMaxPayloads];
  Shown shown;
  int32_t lane;
  int32_t bank;  // that the rows must go to
  int32_t bound;
  int32_t tokens;
  int32_t rows;        // of an exact layout: that are shown, those beyond what comes too
  int32_t first_line;  // token from which on rows travel as lines
  int32_t rehearses;   // whether blocks that send do, if the kernel comes early (dispatch.cu)
  int32_t early;       // units of the last lines that the warps that route send, before any of the others
  int32_t send;
  int32_t receive;
  int32_t lands;                     // rows go where handle.landing says
  std::byte* landing[kMaxPayloads];  // that of this rank; NULL: in the bank
  DispatchScratch at;
  Units units;
  WideUnits wide;  // of rows that are no lines
  LinesAt lines;
  Roles roles;
  int32_t table;    // the expert table is kept in shared memory
  int32_t whole;    // payloads allow 8 bytes at a time
  int32_t counted;  // mix_counted
  int32_t layer;
  Tally tally;
  Kind kind;
};

inline constexpr int kFastPayloads = 2;

// The caller's rows of a combine; what their partials are made of: sum.cuh.
struct CombineParams {
  CombineScratch at;
  GroupView group;
  HandleView handle;
  Units units;
  WideUnits wide;   // of tokens' sums
  uint32_t single;  // by few SMs: whose next unit is this or a later one draws none beside it
  int32_t joins;    // blocks that have sent sum too
  LinesAt lines;
  Roles roles;
  int32_t lane;
  int32_t bank;  // that the rows must go to, over a carrier; else -1
  int32_t bound;
  int32_t tokens;
  int32_t send;
  int32_t receive;
  int32_t expert_major;
  int32_t weighted;
  int32_t late_word;  // rows lie in the window: publishing must follow their last read (S3)
  int32_t plain;      // a partial is one row, bit for bit
  Kind kind;
  int32_t tail_lines;     // of more rows for an owner than go as lines, the last so many do
  int32_t own_direct;     // this rank's own partials are made where they are summed
  int32_t vectors_fit;    // rows, inbox and output allow 16 bytes of the wire's type at a time
  int32_t words_fit;      // and 8
  int32_t sums_fit;       // vectors do, and rows are of the wire's type: partials are made of whole vectors
  int32_t word_sums_fit;  // likewise of words
  twDtype_t rows_dtype;
  twDtype_t wire_dtype;
  twDtype_t out_dtype;
  int64_t elements;
  const std::byte* rows;
  int64_t block_stride;
  int64_t row_stride;
  std::byte* out;
  int64_t out_stride;
  uint32_t vectors;      // of 16 bytes in a row
  uint32_t per_unit;     // of them in a unit of a sum
  uint32_t pushed;       // of them in a unit of a row that goes into an inbox
  int32_t pushed_parts;  // such units of a row
  int32_t turn_chunks;   // that are drawn together
  int32_t drawn;         // turns_ahead
  int32_t rehearses;     // whether blocks that send do, if the kernel comes early (dispatch.cu)
};

// Copies out of the window: rank_major outputs that the caller gave, or expert_major ones.
struct ViewParams {
  GroupView group;
  HandleView handle;
  int32_t lane;
  int32_t bound;
  Divider ids;                        // of a row
  Divider pairs;                      // of them
  Divider slots;                      // of a source
  std::byte* payloads[kMaxPayloads];  // NULL: not wanted
  // Where its rows begin, by bank: worked out on the host, as kernels take some ten cycles for each instruction that
  // they meet for the first time.
  const std::byte* from[2][kMaxPayloads];
  int32_t width[kMaxPayloads];
  uint32_t vectors[kMaxPayloads];  // of that many bytes in a row
  Columns columns[kMaxPayloads];
  Shown shown;       // by expert: [L, N*b] or grouped; counts are handle.expert_counts and `counts`
  int32_t* offsets;  // grouped: [L + 1]
  int64_t* origins;  // grouped, NULL: not wanted
  int32_t rows;      // grouped: that are shown, those beyond what comes too
};

// The exchange of counts.
struct CountsParams {
  GroupView group;
  HandleView handle;
  IdsIn in;
  int32_t* told;  // [N + E] rows for each rank and expert, while they are counted; else 0
  int32_t lane;
  int32_t bank;  // over a carrier; else -1
  int32_t tokens;
  int32_t alignment;               // of an expert's rows in the grouped layout
  int32_t drop;                    // rows beyond a receiver's room, instead of refusing them all
  uint64_t landing[kMaxPayloads];  // as of CountsCall
  int32_t send;
  int32_t receive;
  CountsOnHost* on_host;  // NULL: the host does not want them
  uint64_t serial;        // that tells it
};

// One tensor of a gather or reduce.
struct CollectiveRows {
  const std::byte* in;
  int64_t block_stride;  // bytes; of a gather 0, and of flat rows that follow each other
  int64_t row_stride;
  std::byte* out;  // NULL: not wanted but in the window
  int64_t out_stride;
  uint64_t begin;  // in a bank
  uint32_t row_bytes;
  uint32_t elements;
  uint32_t first_word;  // in a row's stream of lines
  uint32_t parts;       // of a row that lies in the window: each of kPushedVectors
  int32_t width;        // bytes that every access may take: 16, 4 or 1
  twDtype_t from;
  twDtype_t to;
};

// Places in shared memory. The last four are what chunks.cuh uses.
struct CollectiveScratch {
  uint32_t windows;  // std::byte* [N]
  uint32_t sizes;    // int32 [N] rows that are each rank's own, as far as they are known
  uint32_t first;    // int32 [N + 1] row of flat tensors where each rank's begin; else what there is instead
  uint32_t came;     // int32 [N] as words tell it
  uint32_t failed;   // int32 the step has
  uint32_t given;    // uint64 [kChunks]
  uint32_t sent;     // uint64 [kChunks]
  uint32_t taken;    // int32 [kChunks]
  uint32_t bytes;

  static CollectiveScratch make(const Shape& shape);
};

struct CollectiveParams {
  CollectiveScratch at;
  GroupView group;
  Units units;
  LinesAt lines;
  Roles roles;
  int32_t lane;
  int32_t bank;  // that the rows must go to; -1: any
  int32_t bound;
  int32_t send;
  int32_t receive;
  int32_t reduces;
  int32_t flat;        // the rows of all ranks
  int32_t by_lines;    // all rows travel as lines
  int32_t late_word;   // publishing must follow all reads and stores: rows lie in the window, or are seen there
  int32_t own_pushed;  // this rank's own rows go through its window, as others' do
  int32_t own_sent;    // who sends a gather's lines also puts this rank's own rows where they belong
  int32_t usual;       // one tensor, of vectors, or of words where all rows are lines; and sums of its own type
  int32_t tensors;
  int32_t chunk_rows;
  int32_t pushed_parts;  // of a row of all tensors
  int32_t turn_chunks;   // that are drawn together
  int32_t drawn;         // turns_ahead
  uint32_t digest;
  int32_t all_sizes;
  int32_t wide_sizes;    // int64
  const void* sizes_at;  // NULL: the host knows them
  int32_t* counts;
  int32_t* offsets;
  CollectiveRows rows[kMaxPayloads];  // few calls use more than the first: collective.cuh warms no others
  int32_t sizes[kMostHostSizes];
};

struct RefuseParams {
  GroupView group;
  int32_t lane;
  int32_t bank;           // of the dispatch that is refused; -1: of any other step
  const int32_t* status;  // of the dispatch that a combine answers
  twPhase_t phase;
  int32_t send;
  int32_t receive;
};

// Rows that have come in blocks by source.
struct LandParams {
  GroupView group;
  HandleView handle;
  const std::byte* from;
  int32_t lane;
  int32_t bank;
  int32_t bound;
};

struct AwaitParams {
  GroupView group;
  int32_t lane;
};

struct SelfTestParams {
  GroupView group;
  uint32_t* torn;  // lines found torn, plus peers that never answered
  int32_t rounds;  // the launch decides
};

// Launches; a cudaError_t comes back as int, so that the host side needs no CUDA header for this. `grid` blocks;
// `early`: the kernel may come onto the device before the one before it in its stream has ended (launch.h).
int launch_dispatch(const DispatchParams& params, int grid, bool early, void* stream);
int launch_dispatch_placed(const DispatchParams& params, int grid, bool early, void* stream);
int launch_dispatch_lines(const DispatchParams& params, int grid, bool early, void* stream);
int launch_combine_lines(const CombineParams& params, int grid, bool early, void* stream);
int launch_combine(const CombineParams& params, int grid, bool early, void* stream);
int launch_rank_view(const ViewParams& params, int grid, bool early, void* stream);
int launch_expert_view(const ViewParams& params, int grid, bool early, void* stream);
int launch_counts(const CountsParams& params, int grid, void* stream);
int launch_gather(const CollectiveParams& params, int grid, bool early, void* stream);
int launch_reduce(const CollectiveParams& params, int grid, bool early, void* stream);
int launch_refuse(const RefuseParams& params, void* stream);
int launch_land(const LandParams& params, int grid, void* stream);
int launch_await(const AwaitParams& params, void* stream);
int launch_self_test(const SelfTestParams& params, void* stream);
// Loads a kernel onto the current device and lets it have so much shared memory. Never less than before: groups of
// other shapes use the same kernel.
int allow_shared(const void* kernel, uint32_t bytes);
// Loads every kernel, so that none is loaded while ranks wait for each other.
int load_kernels(const Shape& shape);

}  // namespace tw::nvlink
