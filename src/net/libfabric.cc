// Finds libfabric.so.1 and its functions, and asks which providers work. libfabric.h says which symbols, and why.
#include "net/libfabric.h"

#include <dlfcn.h>

#include "net/endpoint.h"

#if TOKENWAY_WITH_FABRIC
#include <rdma/fabric.h>
#endif

namespace tw::net {

std::recursive_mutex KeptSignals::turn_;

KeptSignals::KeptSignals() {
  for (int signal = 1; signal < kSignals; ++signal) ::sigaction(signal, nullptr, &kept_[signal]);
}

KeptSignals::~KeptSignals() {
  for (int signal = 1; signal < kSignals; ++signal) ::sigaction(signal, &kept_[signal], nullptr);
}

#if TOKENWAY_WITH_FABRIC
namespace {

struct Found {
  Library library;
  Sentence problem;  // empty: it is there
};

Found load() {
  const KeptSignals kept;
  Found found;
  void* const file = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) {
    found.problem =
        compose("libfabric.so.1 cannot be loaded here ({}; Debian and Ubuntu: apt-get install libfabric1)", dlerror());
    return found;
  }
  const auto find = [file](const char* name, const char* version, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlvsym(file, name, version));
    return *function != nullptr;
  };
  Library& library = found.library;
  if (!find("fi_version", "FABRIC_1.0", &library.version) || !find("fi_strerror", "FABRIC_1.0", &library.strerror) ||
      !find("fi_fabric", "FABRIC_1.1", &library.fabric) || !find("fi_getinfo", "FABRIC_1.3", &library.getinfo) ||
      !find("fi_freeinfo", "FABRIC_1.3", &library.freeinfo) || !find("fi_dupinfo", "FABRIC_1.3", &library.dupinfo) ||
      FI_VERSION_LT(library.version(), kApiVersion)) {
    found.problem = compose("libfabric.so.1 is older than {}.{} here", FI_MAJOR(kApiVersion), FI_MINOR(kApiVersion));
  }
  return found;
}

}  // namespace

Status find_library(const Library** library) {
  static const Found found = load();
  if (!found.problem.parts().empty()) return fail(twUnsupported, "{}", found.problem);
  *library = &found.library;
  return {};
}

Status describe_library(LibraryFacts* facts) {
  const Library* library = nullptr;
  TW_RETURN_IF_FAILED(find_library(&library));
  const KeptSignals kept;
  const uint32_t version = library->version();
  facts->version = std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
  for (const char* provider : kProviders) {
    if (!has_provider(*library, provider)) continue;
    facts->providers += (facts->providers.empty() ? "" : ", ") + std::string(provider);
  }
  return {};
}
#else
Status find_library(const Library**) {
  return fail(twUnsupported,
              "this library was built without libfabric's headers (Debian and Ubuntu: apt-get install libfabric-dev)");
}

Status describe_library(LibraryFacts*) {
  const Library* library = nullptr;
  return find_library(&library);
}
#endif

}  // namespace tw::net
