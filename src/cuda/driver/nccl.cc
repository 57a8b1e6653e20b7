// Finds libnccl.so.2 and its functions. nccl.h says which one serves, and why.
#include "cuda/driver/nccl.h"

#include <dlfcn.h>

#include <type_traits>

namespace tw::cuda {

#if TOKENWAY_WITH_GIN
static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 7), "the build takes no older headers");

namespace {

struct Found {
  Nccl nccl;
  Sentence problem;  // empty: it is there
};

Found load() {
  Found found;
  const std::string needed = nccl_version_text(NCCL_VERSION_CODE);
  void* const file = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    found.problem = compose(
        "libnccl.so.2 cannot be loaded here ({}); NCCL {} or newer is needed (pip: nvidia-nccl-cu13, loaded before the "
        "first group is made)",
        dlerror(), needed);
    return found;
  }
  const auto find = [file](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(file, name));
    return *function != nullptr;
  };
  Nccl& nccl = found.nccl;
  int version = 0;
  if (!find("ncclGetVersion", &nccl.version) || nccl.version(&version) != ncclSuccess || version < NCCL_VERSION_CODE) {
    found.problem = compose("the NCCL of this process is {}; {} or newer is needed, whose headers this library has",
                            nccl_version_text(version), needed);
    return found;
  }
  if (!find("ncclGetErrorString", &nccl.error_string) || !find("ncclGetLastError", &nccl.last_error) ||
      !find("ncclGetUniqueId", &nccl.unique_id) || !find("ncclCommInitRankConfig", &nccl.init) ||
      !find("ncclCommGetAsyncError", &nccl.async_error) || !find("ncclCommQueryProperties", &nccl.properties) ||
      !find("ncclCommWindowRegister", &nccl.add_window) || !find("ncclCommWindowDeregister", &nccl.drop_window) ||
      !find("ncclDevCommCreate", &nccl.make_device_comm) || !find("ncclDevCommDestroy", &nccl.drop_device_comm) ||
      !find("ncclCommDestroy", &nccl.destroy) || !find("ncclCommAbort", &nccl.abort)) {
    found.problem = compose("the NCCL {} of this process lacks functions of NCCL {}: it is another library by its name",
                            nccl_version_text(version), needed);
  }
  return found;
}

}  // namespace

std::string nccl_version_text(int version) {
  constexpr int kMajor = 10000;
  constexpr int kMinor = 100;
  return std::to_string(version / kMajor) + "." + std::to_string(version % kMajor / kMinor) + "." +
         std::to_string(version % kMinor);
}

Status Nccl::check(const char* what, ncclResult_t result) const {
  if (result == ncclSuccess) return {};
  const char* detail = last_error(nullptr);  // of whichever thread of NCCL's has failed last
  if (detail == nullptr || *detail == '\0') detail = "NCCL_DEBUG=WARN tells more";
  return fail(twSystemError, "NCCL cannot {}: {} (ncclResult {}; {})", what, error_string(result),
              static_cast<int>(result), detail);
}

Status find_nccl(const Nccl** nccl) {
  static const Found found = load();
  if (!found.problem.parts().empty()) return fail(twUnsupported, "{}", found.problem);
  *nccl = &found.nccl;
  return {};
}
#endif

}  // namespace tw::cuda
