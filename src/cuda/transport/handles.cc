// Which handles device memory can have (transport/handles.h), and what the core asks before there is a group: what the
// platform grants a device, and whether a rank can map a piece of another one's memory.
//
// What breaks if this changes: ranks of several hosts are joined where each has mapped a piece of every other's memory.
// If less were tried, creating their first group would fail instead of taking another backend.
#include "cuda/transport/handles.h"

#include <cstring>

#include "bootstrap/host.h"
#include "core/make_backend.h"
#include "cuda/transport/window.h"

namespace tw::cuda {
namespace {

constexpr uint64_t kSampleBytes = 1;  // the driver rounds it up

// What a rank gives of itself before there is a group.
struct Sample {
  Offer offer;
  Domain domain;
  char boot[kBootBytes];  // which host
};

std::string hex(const Uuid& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) / 16];
    text += kDigits[static_cast<unsigned char>(byte) % 16];
  }
  return text;
}

std::string text_of(const Domain& domain) {
  if (domain.known != twDomainNamed) return "none beyond its host";
  return "cluster " + hex(domain.cluster) + ", clique " + std::to_string(domain.clique);
}

// The driver, for a device that may not have been used yet: its context must be there before memory is mapped.
Status wake(const Driver** driver) {
  TW_CUDA(cudaFree(nullptr));
  return find_driver(driver);
}

Sample read(const std::string& bytes) {
  Sample sample;
  if (bytes.size() == sizeof sample) std::memcpy(&sample, bytes.data(), sizeof sample);
  return sample;
}

}  // namespace

bool knows_fabric_handles(const Driver& driver, int device) {
  CUdevice known = 0;
  int supported = 0;
  return driver.device(&known, device) == CUDA_SUCCESS &&
         driver.attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, known) == CUDA_SUCCESS &&
         supported != 0;
}

CUmemAllocationProp properties(int device, HandleKinds kinds) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  const int types = (kinds.descriptors ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0) |
                    (kinds.fabric ? CU_MEM_HANDLE_TYPE_FABRIC : 0);
  prop.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
  prop.allocFlags.gpuDirectRDMACapable = kinds.network ? 1 : 0;
  return prop;
}

Uuid uuid_of(int device) {
  Uuid uuid{};
  cudaDeviceProp prop{};
  if (cudaGetDeviceProperties(&prop, device) == cudaSuccess) std::memcpy(uuid.data(), prop.uuid.bytes, uuid.size());
  return uuid;
}

Status fabric_refused(const Driver& driver, const char* what, CUresult result) {
  const Status told = driver.check(what, result);
  return fail(result == CUDA_ERROR_OUT_OF_MEMORY ? twOutOfMemory : twUnsupported,
              "{}; fabric handles are for processes with an IMEX channel (/dev/nvidia-caps-imex-channels)",
              told.sentence);
}

}  // namespace tw::cuda

namespace tw {

Status device_fabric(int device, twFabric_t* fabric) {
  using namespace cuda;
  const OnDevice on(device);
  const OutsideCaptures outside;
  const Driver* driver = nullptr;
  TW_RETURN_IF_FAILED(wake(&driver));
  const Domain domain = find_domain(uuid_of(device));
  fabric->domain = domain.known;
  fabric->clique = domain.clique;
  std::memcpy(fabric->cluster, domain.cluster.data(), domain.cluster.size());
  fabric->handles = twHandlesDescriptors;
  if (!knows_fabric_handles(*driver, device)) return {};
  std::shared_ptr<DeviceMapping> piece;
  TW_RETURN_IF_FAILED(DeviceMapping::create(*driver, device, {device}, kSampleBytes, {true, true}, &piece));
  Offer offer;
  TW_RETURN_IF_FAILED(piece->offer(&offer));
  fabric->handles = offer.fabric != 0 ? twHandlesFabric : twHandlesRefused;
  fabric->refusal = offer.refusal;
  return {};
}

Status offer_sample(int device, std::string* offer, std::shared_ptr<void>* sample) {
  using namespace cuda;
  const OnDevice on(device);
  const OutsideCaptures outside;
  const Driver* driver = nullptr;
  TW_RETURN_IF_FAILED(wake(&driver));
  if (!knows_fabric_handles(*driver, device)) {
    return fail(twUnsupported, "its device or driver knows no fabric handles");
  }
  Sample mine{};
  TW_RETURN_IF_FAILED(name_boot(1, mine.boot));
  mine.domain = find_domain(uuid_of(device));
  std::shared_ptr<DeviceMapping> piece;
  TW_RETURN_IF_FAILED(DeviceMapping::create(*driver, device, {device}, kSampleBytes, {false, true}, &piece));
  TW_RETURN_IF_FAILED(piece->offer(&mine.offer));
  offer->assign(reinterpret_cast<const char*>(&mine), sizeof mine);
  *sample = std::move(piece);
  return {};
}

Status check_sample(int device, const std::string& own, const std::string& theirs) {
  using namespace cuda;
  const OnDevice on(device);
  const OutsideCaptures outside;
  const Sample mine = read(own);
  const Sample other = read(theirs);
  // Containers of one host are joined by its NVSwitch, which needs no name; there mapping decides.
  const bool one_host = std::memcmp(mine.boot, other.boot, sizeof mine.boot) == 0;
  const bool told = !one_host && mine.domain.known != twDomainUnknown && other.domain.known != twDomainUnknown;
  if (told && !mine.domain.joins(other.domain)) {
    return fail(twUnsupported, "NVLink does not join their devices: their domains are {} and {}", text_of(mine.domain),
                text_of(other.domain));
  }
  const Driver* driver = nullptr;
  TW_RETURN_IF_FAILED(wake(&driver));
  std::shared_ptr<DeviceMapping> piece;
  Status mapped = DeviceMapping::import(*driver, other.offer, -1, device, kSampleBytes, &piece);
  return mapped.ok() ? Status{} : Status{twUnsupported, mapped.sentence};
}

}  // namespace tw
