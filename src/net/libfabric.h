// libfabric, loaded at run time: the library neither links with it nor needs it. The build takes its headers
// (TOKENWAY_FABRIC); libfabric.so.1 is looked for by the first call in a process, and stays.
//
// Functions are asked for by the version of their symbol, FABRIC_1.3, whose structs are the beginning of those in every
// later header; so a newer libfabric than that of the build serves, and an older one is refused by a sentence.
#pragma once

#include <csignal>
#include <mutex>
#include <string>

#include "core/status.h"

struct fi_info;
struct fi_fabric_attr;
struct fid_fabric;

namespace tw::net {

struct Library {
  int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags, const fi_info* hints,
                 fi_info** info) = nullptr;
  void (*freeinfo)(fi_info* info) = nullptr;
  fi_info* (*dupinfo)(const fi_info* info) = nullptr;
  int (*fabric)(fi_fabric_attr* attributes, fid_fabric** fabric, void* context) = nullptr;
  const char* (*strerror)(int error) = nullptr;
  uint32_t (*version)() = nullptr;
};

// Gives the library that is loaded. twUnsupported, with a sentence that says what to install, if there is none.
Status find_library(const Library** library);

// Puts handlers of signals back, in the end, where they were. What distributions link libfabric with takes SIGINT,
// SIGSEGV and others for itself when it is loaded (Debian's: libpsm_infinipath), and providers do when they open (shm):
// Python then never hears of Ctrl-C.
class KeptSignals {
 public:
  KeptSignals();
  ~KeptSignals();
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;

 private:
  static constexpr int kSignals = 32;  // the others are nobody's in particular
  static std::recursive_mutex turn_;   // or one would keep the handlers of what another is loading
  const std::lock_guard<std::recursive_mutex> lock_{turn_};
  struct sigaction kept_[kSignals] = {};
};

// What can be told of it without an engine.
struct LibraryFacts {
  std::string version;    // "1.17"
  std::string providers;  // of those that the engine knows, those that work here: "tcp, shm"
};
Status describe_library(LibraryFacts* facts);

}  // namespace tw::net
