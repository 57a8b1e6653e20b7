// One endpoint of libfabric, and all calls of libfabric that an engine makes. It is not for several threads at once:
// the engine holds a lock around every call.
//
// Of a provider it asks reliable datagrams (FI_EP_RDM), remote writes and messages, sends that keep their order
// (FI_ORDER_SAS), and no progress of its own. Atomics of the network are not asked for: tcp has none in many versions,
// those of a NIC are not atomic against the owner's, and an engine has a thread at the target anyway. So a word is a
// message (fabric.cc).
//
// What breaks if this changes: `ordered` is the provider's promise that a message does not overtake a write
// (FI_ORDER_SAW). An endpoint that says so of a provider that does not brings words before their rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/status.h"
#include "net/libfabric.h"
#include "net/windows.h"

namespace tw::net {

// libfabric 1.11: the oldest whose behaviour the code knows.
inline constexpr uint32_t kApiVersion = 1u << 16 | 11u;

// Providers by libfabric's names. tcp and shm are tested; verbs and efa get the same calls.
inline constexpr const char* kProviders[] = {"tcp", "shm", "verbs", "efa"};
bool has_provider(const Library& library, const char* provider);

// What an operation hands to the network and gets back when it has ended; libfabric may write there meanwhile.
struct Context {
  alignas(16) std::byte network[64];
};

struct Completion {
  Context* context = nullptr;
  int error = 0;  // of libfabric; 0: it succeeded
};

// Memory that the network knows.
struct Registered {
  void* tag = nullptr;
  Extent extent;
};

// What happens to an operation that is posted.
enum class Sent { kSent, kAgain, kFailed };

class Endpoint {
 public:
  virtual ~Endpoint() = default;

  virtual std::string provider() const = 0;              // as libfabric says it, with its layers: "tcp;ofi_rxm"
  virtual std::string name() const = 0;                  // by which peers reach it
  virtual Status add_peer(const std::string& name) = 0;  // they are numbered from 0

  virtual bool ordered() const = 0;      // a message never overtakes a write to the same peer
  virtual uint64_t largest() const = 0;  // bytes of a write
  virtual size_t depth() const = 0;      // operations that may be under way, all peers together
  virtual Status add_memory(std::byte* memory, uint64_t bytes, Registered* registered) = 0;

  // With `delivered`, a write ends when its data are in the target's memory; else when its source is free. kFailed
  // leaves libfabric's number in `error`.
  virtual Sent write(int peer, const void* from, uint64_t bytes, void* tag, uint64_t to, uint64_t key, bool delivered,
                     Context* context, int* error) = 0;
  virtual Sent send(int peer, const void* from, uint64_t bytes, void* tag, Context* context, int* error) = 0;
  virtual Sent receive(void* to, uint64_t bytes, void* tag, Context* context, int* error) = 0;

  // Makes progress, and gives operations that have ended. -1: the endpoint itself has failed.
  virtual int progress(std::span<Completion> ended, int* error) = 0;

  // Gives a descriptor that becomes readable when there may be progress, if a thread may sleep on it now; else -1.
  virtual int sleep_on() = 0;

  virtual std::string text_of(int error) const = 0;
};

// Opens an endpoint of a provider. `address`: an address of this host by which peers reach it, or "".
Status open_endpoint(const std::string& provider, const std::string& address, std::unique_ptr<Endpoint>* endpoint);

}  // namespace tw::net
