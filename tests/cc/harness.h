// What the exchange's tests share: ranks in one process, traffic between them, and one rank's side of an exchange,
// checked against reference.h.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reference.h"
#include "tokenway/tokenway.h"

inline void PrintTo(twResult_t result, std::ostream* out) { *out << twResultString(result); }

namespace tw::test {

inline ::testing::AssertionResult same_result(const char*, const char* call, twResult_t want, twResult_t got) {
  if (want == got) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << call << " gave " << twResultString(got) << ", not " << twResultString(want)
                                       << (got == twSuccess ? "" : ": ") << (got == twSuccess ? "" : twLastError());
}

// Whether the last call's sentence has a part.
inline ::testing::AssertionResult says(const std::string& part) {
  if (std::string(twLastError()).find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << '"' << twLastError() << "\" does not say \"" << part << '"';
}

#define EXPECT_TW(want, call) EXPECT_PRED_FORMAT2(::tw::test::same_result, want, call)
#define ASSERT_TW(want, call) ASSERT_PRED_FORMAT2(::tw::test::same_result, want, call)

// An environment variable for as long as the object lives; comms read them when they are created.
class Env {
 public:
  Env(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Env() { ::unsetenv(name_); }
  Env(const Env&) = delete;
  Env& operator=(const Env&) = delete;

 private:
  const char* name_;
};

// run(rank) in a thread per rank; returns when all have.
void on_all_ranks(int ranks, const std::function<void(int)>& run);

// How many of so many ranks a host has: all, or as many as TOKENWAY_TEST_HOSTS says, by which the whole suite runs
// between hosts too.
int ranks_per_host(int ranks);
// So long that a call looks anew for what ranks of other hosts have posted; it does so once in a millisecond.
void until_looked_again();

// One bfloat16 payload of `elements`, combined in bfloat16.
twGroupConfig_t make_config(int experts, int top_k, int max_tokens, int64_t elements = 8);
// 6 experts, top 2, 4 tokens; waits end soon. For ranks that never come: 60 ms are too few for one that shall.
twGroupConfig_t impatient(int timeout_ms = 60);
// Time for calls that must not wait, after a wait that took the whole timeout: enough for a busy machine, too little
// for another wait.
constexpr int kOneWaitMs = 2000;

twTensor_t tensor(void* data, twDtype_t dtype, std::initializer_list<int64_t> shape);
twErrorRecord_t error_of(twGroup_t group);
// One dispatch without tokens, as a new group must be able to: the number of sources that it shows.
int64_t dispatch_nothing(twGroup_t group, const twGroupConfig_t& config);

// All ranks of a group, in this process.
class World {
 public:
  // `each` may change a rank's configuration.
  World(int ranks, const twGroupConfig_t& config, const std::function<void(int, twGroupConfig_t*)>& each = {});
  // Over comms of another kind, which become the world's.
  World(std::vector<twComm_t> connected, const twGroupConfig_t& config);
  // In the windows of another world's groups, on whose comms they are.
  World(const World& arena, const twGroupConfig_t& config);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int size() const { return static_cast<int>(groups.size()); }
  twGroup_t operator[](int rank) const { return groups[rank]; }
  // Ends the group early; the destructor then only ends the comms.
  void destroy_groups();
  // Ends the rank's group and comm without asking anybody, as the end of its process would.
  void kill(int rank);
  // Finishes the rank's group without telling the others, so that its end waits for nobody.
  void abandon(int rank);
  // All channels of a rank's window: signals, rows and inboxes, without the header's abort signals.
  std::vector<uint8_t> window(int rank) const;

  twGroupConfig_t config;
  Homes homes;
  std::vector<twComm_t> comms;
  std::vector<twGroup_t> groups;
};

// The tokens of all ranks in one exchange, and their experts.
struct Traffic {
  std::vector<int> tokens;                // [N]
  std::vector<std::vector<int32_t>> ids;  // [N][T * K]
  std::vector<std::vector<float>> weights;
};
// Whether a token has an expert of a rank, where each rank has two, one's behind the other's.
bool goes(const Traffic& traffic, const twGroupConfig_t& config, int rank, int token, int to);
// Distinct ids, some -1.
Traffic make_traffic(const twGroupConfig_t& config, const std::vector<int>& tokens, uint32_t seed);

// How an exchange is asked for.
struct Style {
  twLayout_t layout = twRankMajor;
  twWeighting_t weighting = twWeightNone;
  twDtype_t rows = twFloat32;
  twDtype_t out = twFloat32;
  int32_t bound = 0;
  int32_t lane = -1;
  bool own_memory = false;  // the caller gives memory for everything received
  bool in_place = false;    // rows are written over the received view: payload 0 must be the rows
};

// One rank's part in an exchange.
class Side {
 public:
  Side(const World& world, const Traffic& traffic, int rank, const Style& style, uint32_t salt, void* memory = nullptr);
  ~Side();
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  twResult_t dispatch(bool send_only = false);
  twResult_t complete();
  twResult_t combine(bool send_only = false);
  // Writes other contents under the same routing: a second dispatch must not show the first's.
  void renew(uint32_t salt);
  // Has the sums of the combines that follow start from rows of this type; in_place: those of the output.
  void give_bias(twDtype_t dtype, bool in_place);
  void expect_received() const;
  void expect_tokens() const;

  twHandle_t handle = nullptr;
  twDispatchInput_t input{};
  twDispatchOutput_t received{};
  twCombineInput_t rows{};
  twCombineOutput_t sums{};

 private:
  struct Arrival {
    int source;
    int slot;
    int token;
  };
  // One wanted row of an expert.
  struct Place {
    int expert;  // local
    int64_t place;
    int source;
    int token;
    int k;
  };
  std::vector<Arrival> arrivals() const;
  std::vector<Place> places() const;
  int bound() const { return style_.bound != 0 ? style_.bound : world_.config.max_tokens; }
  int32_t id(int source, int token, int k) const { return traffic_.ids[source][token * world_.config.top_k + k]; }
  float weight(int source, int token, int k) const { return traffic_.weights[source][token * world_.config.top_k + k]; }
  int64_t row_bytes(int q) const;
  uint8_t payload_byte(int q, int source, int token, int64_t j) const;
  int32_t shown(int32_t id) const;
  int64_t id_at(int64_t i) const;
  void give_memory();
  void write_rows();
  float local_sum(int source, int token, int rank, int64_t i) const;
  float partial(int token, int rank, int64_t i, bool* any) const;
  void add_choices(int token, int64_t i, Total* total) const;
  void add_partials(int token, int64_t i, Total* total) const;
  void expect_rank_major() const;
  void expect_expert_major() const;
  void expect_payload(int64_t row, int source, int token) const;

  const World& world_;
  const Traffic& traffic_;
  int rank_;
  Style style_;
  uint32_t salt_;
  std::vector<std::vector<uint8_t>> payloads_;
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<uint8_t> rows_;
  std::vector<uint8_t> sums_;
  std::vector<uint8_t> bias_rows_;
  std::vector<float> bias_;  // the same as numbers; empty: there is none
};

// The sides of all ranks.
class Exchange {
 public:
  Exchange(const World& world, Traffic traffic, const Style& style, uint32_t salt);
  Side& operator[](int rank) { return *sides_[rank]; }
  int size() const { return static_cast<int>(sides_.size()); }
  // Staged, in this thread: every rank sends, then every rank completes; what arrives is checked.
  void send_dispatch();
  void complete_dispatch();
  void send_combine();
  void complete_combine();
  void dispatch() { send_dispatch(), complete_dispatch(); }
  void combine() { send_combine(), complete_combine(); }
  void renew(uint32_t salt);

 private:
  std::unique_ptr<Traffic> traffic_;
  std::vector<std::unique_ptr<Side>> sides_;
};

}  // namespace tw::test
