// NVML's functions by name, as nvml.h of the CUDA toolkit declares them: nvml.h here tells what is asked.
#include "cuda/driver/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

namespace tw::cuda {
namespace {

using NvmlDevice = void*;  // nvmlDevice_t
constexpr int kSuccess = 0;
constexpr int kOverNvlink = 2;  // of nvmlGpuP2PCapsIndex_t
constexpr int kAtomics = 3;     // the same question as cudaDevP2PAttrNativeAtomicSupported
constexpr int kStatusOk = 0;    // of nvmlGpuP2PStatus_t
constexpr unsigned kMaxLinks = 18;
constexpr unsigned char kCompleted = 3;  // of nvmlGpuFabricState_t

// nvmlGpuFabricInfo_v2_t.
struct FabricInfo {
  unsigned version = sizeof(FabricInfo) | 2u << 24;
  unsigned char cluster[16] = {};
  int status = 0;
  unsigned clique = 0;
  unsigned char state = 0;
  unsigned health = 0;
};
static_assert(sizeof(FabricInfo) == 36, "NVML knows the struct by its size");

struct Nvml {
  int (*start)() = nullptr;
  int (*by_uuid)(const char* uuid, NvmlDevice* device) = nullptr;
  int (*peer_status)(NvmlDevice device, NvmlDevice peer, int capability, int* status) = nullptr;
  int (*link_state)(NvmlDevice device, unsigned link, unsigned* active) = nullptr;
  int (*fabric_info)(NvmlDevice device, FabricInfo* info) = nullptr;  // NULL: NVML is older than the question

  bool usable = false;
};

const Nvml& nvml() {
  static const Nvml found = [] {
    Nvml made;
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return made;
    const auto find = [&](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      return *function != nullptr;
    };
    const bool all = find("nvmlInit_v2", &made.start) && find("nvmlDeviceGetHandleByUUID", &made.by_uuid) &&
                     find("nvmlDeviceGetP2PStatus", &made.peer_status) &&
                     find("nvmlDeviceGetNvLinkState", &made.link_state);
    (void)find("nvmlDeviceGetGpuFabricInfoV", &made.fabric_info);
    made.usable = all && made.start() == kSuccess;
    return made;
  }();
  return found;
}

std::string text_of(const Uuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<unsigned char>(uuid[i]);
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

bool find_device(const Uuid& uuid, NvmlDevice* device) {
  const std::string text = text_of(uuid);
  for (const char* kind : {"GPU-", "MIG-"}) {
    if (nvml().by_uuid((kind + text).c_str(), device) == kSuccess) return true;
  }
  return false;
}

bool has_links(NvmlDevice device) {
  for (unsigned link = 0; link < kMaxLinks; ++link) {
    unsigned active = 0;
    if (nvml().link_state(device, link, &active) == kSuccess && active != 0) return true;
  }
  return false;
}

}  // namespace

twLinks_t find_link(const Uuid& own, const Uuid& peer) {
  NvmlDevice here = nullptr;
  NvmlDevice there = nullptr;
  if (!nvml().usable || !find_device(own, &here)) return twLinksTested;
  // A container may have been given this device alone. One without any link surely has none to a device elsewhere.
  if (!find_device(peer, &there)) return has_links(here) ? twLinksTested : twLinksOther;
  bool told = false;
  for (const int capability : {kOverNvlink, kAtomics}) {
    int status = kStatusOk;
    if (nvml().peer_status(here, there, capability, &status) != kSuccess) continue;
    if (status == kStatusOk) return twLinksNvml;
    told = true;
  }
  return told ? twLinksOther : twLinksTested;
}

Domain find_domain(const Uuid& own) {
  Domain domain;
  NvmlDevice here = nullptr;
  FabricInfo info;
  if (!nvml().usable || nvml().fabric_info == nullptr || !find_device(own, &here)) return domain;
  if (nvml().fabric_info(here, &info) != kSuccess) return domain;
  // Devices of one host behind an NVSwitch of its own are complete too, in a cluster of zeros: it ends with the host.
  const bool named = std::ranges::any_of(info.cluster, [](unsigned char byte) { return byte != 0; });
  domain.known = info.state == kCompleted && info.status == kSuccess && named ? twDomainNamed : twDomainNone;
  if (domain.known != twDomainNamed) return domain;
  domain.clique = info.clique;
  std::memcpy(domain.cluster.data(), info.cluster, sizeof info.cluster);
  return domain;
}

}  // namespace tw::cuda
