// The functions of NCCL that the network calls: fake_nccl.h. TOKENWAY_FAKE_NCCL is the version that it claims, if set.
#include "fake_nccl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

using tw::gin::fake_nccl;
using tw::gin::Step;

struct World {
  int ranks = 0;
  std::vector<int> arrived;  // by number of the step
};

std::mutex mutex;
std::map<std::string, std::shared_ptr<World>> worlds;  // by unique id

}  // namespace

namespace tw::gin {

FakeNccl& fake_nccl() {
  static FakeNccl one;
  return one;
}

}  // namespace tw::gin

struct ncclComm {
  std::shared_ptr<World> world;
  int rank = 0;
  size_t steps = 0;  // that this rank has begun
  ncclResult_t failed = ncclSuccess;
};

namespace {

ncclResult_t begin(ncclComm* comm, Step step) {
  const std::lock_guard lock(mutex);
  const size_t number = comm->steps++;
  std::vector<int>& arrived = comm->world->arrived;
  if (arrived.size() <= number) arrived.resize(number + 1);
  const bool faulty = step == fake_nccl().faulty && comm->rank == fake_nccl().faulty_rank;
  if (faulty && fake_nccl().fails) return comm->failed = ncclInternalError;
  if (!faulty) ++arrived[number];
  return ncclInProgress;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const char* const claimed = std::getenv("TOKENWAY_FAKE_NCCL");
  *version = claimed == nullptr ? NCCL_VERSION_CODE : std::atoi(claimed);
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t) { return "internal error"; }
const char* ncclGetLastError(ncclComm_t) { return "as it was told to"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static int last = 0;
  const std::lock_guard lock(mutex);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &++last, sizeof last);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidArgument;
  *comm = new ncclComm;
  (*comm)->rank = rank;
  {
    const std::lock_guard lock(mutex);
    std::shared_ptr<World>& world = worlds[std::string(id.internal, sizeof id.internal)];
    if (world == nullptr) world = std::make_shared<World>();
    world->ranks = ranks;
    (*comm)->world = world;
  }
  return begin(*comm, Step::kInit);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* found) {
  const std::lock_guard lock(mutex);
  *found = comm->failed;
  if (comm->failed == ncclSuccess && comm->world->arrived[comm->steps - 1] < comm->world->ranks)
    *found = ncclInProgress;
  if (*found == ncclSuccess && comm->rank == fake_nccl().cut_off) *found = ncclRemoteError;
  return ncclSuccess;
}

ncclResult_t ncclCommQueryProperties(ncclComm_t, ncclCommProperties_t* properties) {
  properties->deviceApiSupport = true;
  properties->ginType = fake_nccl().type;
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t, ncclWindow_t* window, int flags) {
  if (flags != (NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING)) return ncclInvalidArgument;
  const ncclResult_t begun = begin(comm, Step::kWindow);
  if (begun != ncclInProgress) return begun;
  *window = static_cast<ncclWindow_t>(memory);
  ++fake_nccl().windows;
  return begun;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) {
  --fake_nccl().windows;
  return ncclSuccess;
}

ncclResult_t ncclDevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t* needs, ncclDevComm_t* made) {
  if (needs->ginConnectionType != NCCL_GIN_CONNECTION_FULL || !needs->ginStrongSignalsRequired)
    return ncclInvalidArgument;
  const ncclResult_t begun = begin(comm, Step::kDevice);
  if (begun != ncclInProgress) return begun;
  made->rank = comm->rank;
  made->nRanks = comm->world->ranks;
  made->ginContextCount = static_cast<uint32_t>(std::min(needs->ginContextCount, fake_nccl().most_contexts));
  ++fake_nccl().device_comms;
  return begun;
}

ncclResult_t ncclDevCommDestroy(ncclComm_t, const ncclDevComm_t*) {
  --fake_nccl().device_comms;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ++fake_nccl().destroyed;
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ++fake_nccl().aborted;
  delete comm;
  return ncclSuccess;
}

}  // extern "C"
