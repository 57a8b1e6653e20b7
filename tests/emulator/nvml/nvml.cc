// An NVML for emulated devices, built as libnvidia-ml.so.1: it knows all of them, whichever a process sees, by the
// UUIDs that runtime.cc gives. TOKENWAY_EMULATOR_NVML says how they are joined: by NVLink ("nvlink", the default) or
// not
// ("pcie"), or that it was given the device alone which the process sees, with links ("own") or without ("bare").
// TOKENWAY_EMULATOR_CLIQUE is the clique of all devices in their cluster, which has hosts in common; not set: there is
// none.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kNotFound = 6;

const char* wiring() {
  const char* const text = std::getenv("TOKENWAY_EMULATOR_NVML");
  return text == nullptr ? "nvlink" : text;
}

bool is(const char* what) { return std::strcmp(wiring(), what) == 0; }

}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  unsigned number = 0;
  if (std::sscanf(uuid, "GPU-%2x7e7e7e-7e7e-7e7e-7e7e-7e7e7e7e7e7e", &number) != 1) return kNotFound;
  const char* const own = std::getenv("TOKENWAY_EMULATOR_VISIBLE");
  const bool alone = is("own") || is("bare");
  if (alone && (own == nullptr || number != static_cast<unsigned>(std::atoi(own)))) return kNotFound;
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(number + 1));
  return 0;
}

int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = is("pcie") ? 1 : 0;
  return 0;
}

int nvmlDeviceGetNvLinkState(void*, unsigned, unsigned* active) {
  *active = is("pcie") || is("bare") ? 0 : 1;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void*, void* to) {
  struct Info {  // nvmlGpuFabricInfo_v2_t
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
  };
  auto* const info = static_cast<Info*>(to);
  if (info->version != (sizeof(Info) | 2u << 24)) return 25;  // NVML_ERROR_ARGUMENT_VERSION_MISMATCH
  const char* const clique = std::getenv("TOKENWAY_EMULATOR_CLIQUE");
  std::memset(info->cluster, clique != nullptr ? 0xc1 : 0, sizeof info->cluster);
  info->status = 0;
  info->clique = clique != nullptr ? static_cast<unsigned>(std::atoi(clique)) : 0;
  info->state = 3;  // complete
  info->health = 0;
  return 0;
}

}  // extern "C"
