// Connects the ranks of a group over its carrier (core/carrier_channel.h): the offer, the carrier's `open`, and the
// meeting in which all tell how it went. The order in which failures are named (gone ranks, silent ones, then what a
// rank failed by) decides which rank is blamed; every wait here has a deadline (S6).
#include "core/carrier_channel.h"

#include <algorithm>

#include "core/interrupt.h"

namespace tw {
namespace {

// Time for the others to say how it went, behind the deadline: they look up every few milliseconds, on a busy machine.
constexpr std::chrono::milliseconds kAnswer{2000};

int32_t is_over(const void* meeting) { return static_cast<const CarrierMeeting*>(meeting)->over() ? 1 : 0; }

}  // namespace

bool CarrierMeeting::over() const {
  std::string failed;
  return std::any_of(init_.members.begin(), init_.members.end(), [&](int member) {
    return member != me_ && (!init_.bootstrap->alive(member) || init_.bootstrap->posted(member, tag_, &failed));
  });
}

Status CarrierMeeting::meet(const Status& mine, const std::string& bytes, std::vector<std::string>* all) const {
  const TimePoint now = std::chrono::steady_clock::now();
  const bool in_time = now < init_.deadline;
  for (const int member : init_.members) {
    if (!mine.ok() && member != me_) init_.bootstrap->post(member, tag_, mine.text());
  }
  if (mine.code == twInterrupted) return mine;  // and the whole call is given up
  Packer packer = pack_result(mine);
  packer.add_bytes(bytes.data(), bytes.size());
  const TimePoint until = mine.ok() ? std::max(now, init_.deadline) + kAnswer : now + kAnswer;
  std::vector<Parcel> parcels;
  Status arrived = gather(*init_.bootstrap, init_.members, tag_, {packer.take(), {}}, until, kConnecting, &parcels);
  // A rank that is late is to blame only where there was time for it to come.
  const bool own_trouble = !mine.ok() && mine.code != twTimeout;
  if (!arrived.ok() && !(own_trouble && in_time && arrived.code == twTimeout)) return arrived;
  if (own_trouble) return mine;
  all->clear();
  for (size_t rank = 0; rank < parcels.size(); ++rank) {
    Unpacker reader(parcels[rank].bytes);
    const Status theirs = read_status(reader);
    if (!theirs.ok() && (theirs.code != twTimeout || mine.ok())) {
      return fail(theirs.code, "rank {}: {}", rank, theirs.sentence);
    }
    all->push_back(reader.get_bytes());
  }
  return mine;
}

int milliseconds_to(TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 1, INT32_MAX));
}

Status open_carrier_channel(const BackendInit& init, uint64_t tag, int device, const Status& ready,
                            int64_t* carrier_channel) {
  const twCarrier_t& calls = init.carrier->calls;
  const int me = init.context->me;
  const auto ranks = static_cast<int>(init.members.size());
  int32_t port = 0;
  *carrier_channel = -1;
  const bool offered = ready.ok() && (me != 0 || ranks == 1 || calls.offer(calls.context, &port) == 0);
  std::vector<Parcel> all;
  const Parcel mine{Packer().add<uint8_t>(offered).add(port).take(), {}};
  TW_RETURN_IF_FAILED(gather(*init.bootstrap, init.members, tag, mine, init.deadline, kConnecting, &all));
  TW_RETURN_IF_FAILED(ready);
  for (int rank = 0; rank < ranks; ++rank) {
    Unpacker reader(all[rank].bytes);
    if (reader.get<uint8_t>() == 0) return fail(twSystemError, "rank {} could not begin to connect", rank);
    if (rank == 0) port = reader.get<int32_t>();
  }
  if (ranks == 1) return {};

  const std::string local = own_address(*init.bootstrap, init.members);
  std::string own;
  std::string host = "127.0.0.1";
  if (me != 0) init.bootstrap->addresses(init.members[0], &own, &host);
  const std::vector<int32_t> comm_ranks(init.members.begin(), init.members.end());
  twChannelConfig_t config{};
  config.size = sizeof config;
  config.rank = me;
  config.nranks = ranks;
  config.comm_ranks = comm_ranks.data();
  config.local = local.c_str();
  config.host = host.c_str();
  config.port = port;
  config.timeout_ms = milliseconds_to(init.deadline);
  config.queues = init.context->map.shape().channels;
  config.key = init.tag;
  config.device = device;
  const CarrierMeeting meeting(init, tag + 1);
  config.over = is_over;
  config.meeting = &meeting;
  char error[256] = "";
  std::vector<std::string> nothing;
  Status connected;
  if (calls.open(calls.context, &config, carrier_channel, error) != 0 || *carrier_channel < 0) {
    *carrier_channel = -1;
    if (is_interrupted_now()) return meeting.meet(fail(twInterrupted, "{} was interrupted", kConnecting), "", &nothing);
    error[sizeof error - 1] = '\0';
    connected = error[0] != '\0' ? fail(twSystemError, "{}: {}", kConnecting, error)
                                 : fail(twTimeout, "{}: not all ranks were connected in time", kConnecting);
  }
  return meeting.meet(connected, "", &nothing);
}

}  // namespace tw
