// libfabric's calls. Objects are closed in the reverse order of their making, as libfabric asks.
#include "net/endpoint.h"

#if TOKENWAY_WITH_FABRIC
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <random>
#include <vector>
#endif

namespace tw::net {

#if TOKENWAY_WITH_FABRIC
namespace {

static_assert(sizeof(Context) >= sizeof(fi_context2) && alignof(Context) >= alignof(fi_context2));
static_assert(kApiVersion == FI_VERSION(1, 11));

struct FreeInfo {
  const Library* library;
  void operator()(fi_info* info) const { library->freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

struct CloseFid {
  template <class Fid>
  void operator()(Fid* fid) const {
    fi_close(&fid->fid);
  }
};
template <class Fid>
using Object = std::unique_ptr<Fid, CloseFid>;

char* copied(const char* text) { return ::strdup(text); }  // fi_freeinfo frees it

// What the engine asks of a provider, and the ways in which it can name memory.
Info make_hints(const Library& library, const char* provider) {
  Info hints(library.dupinfo(nullptr), FreeInfo{&library});
  if (hints == nullptr) return hints;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->fabric_attr->prov_name = copied(provider);
  return hints;
}

Info find_info(const Library& library, const char* provider, const char* address, int* error) {
  const Info hints = make_hints(library, provider);
  fi_info* found = nullptr;
  const uint64_t flags = address != nullptr ? FI_SOURCE : 0;
  *error = hints == nullptr ? -FI_ENOMEM : library.getinfo(kApiVersion, address, nullptr, flags, hints.get(), &found);
  return {*error == 0 ? found : nullptr, FreeInfo{&library}};
}

// A number that nobody else knows, in as many bytes as keys of the domain have.
uint64_t make_key(size_t bytes) {
  std::random_device random;
  const uint64_t key = uint64_t{random()} << 32 | random();
  return bytes >= sizeof key ? key : key & ((uint64_t{1} << 8 * bytes) - 1);
}

class LibfabricEndpoint final : public Endpoint {
 public:
  LibfabricEndpoint(const Library& library, Info info) : library_(library), info_(std::move(info)) {}

  Status open() {
    TW_RETURN_IF_FAILED(made("fi_fabric", library_.fabric(info_->fabric_attr, out(fabric_), nullptr)));
    TW_RETURN_IF_FAILED(made("fi_domain", fi_domain(fabric_.get(), info_.get(), out(domain_), nullptr)));
    fi_av_attr names{};
    names.type = FI_AV_TABLE;
    TW_RETURN_IF_FAILED(made("fi_av_open", fi_av_open(domain_.get(), &names, out(av_), nullptr)));
    fi_cq_attr queue{};
    queue.format = FI_CQ_FORMAT_CONTEXT;
    queue.size = info_->tx_attr->size + info_->rx_attr->size;
    queue.wait_obj = FI_WAIT_FD;
    if (fi_cq_open(domain_.get(), &queue, out(cq_), nullptr) == 0) {
      sleeps_ = fi_control(&cq_->fid, FI_GETWAIT, &descriptor_) == 0;
    } else {
      queue.wait_obj = FI_WAIT_NONE;
      TW_RETURN_IF_FAILED(made("fi_cq_open", fi_cq_open(domain_.get(), &queue, out(cq_), nullptr)));
    }
    TW_RETURN_IF_FAILED(made("fi_endpoint", fi_endpoint(domain_.get(), info_.get(), out(ep_), nullptr)));
    TW_RETURN_IF_FAILED(made("fi_ep_bind", fi_ep_bind(ep_.get(), &av_->fid, 0)));
    TW_RETURN_IF_FAILED(made("fi_ep_bind", fi_ep_bind(ep_.get(), &cq_->fid, FI_TRANSMIT | FI_RECV)));
    TW_RETURN_IF_FAILED(made("fi_enable", fi_enable(ep_.get())));
    size_t length = 0;
    if (const int result = fi_getname(&ep_->fid, nullptr, &length); result != -FI_ETOOSMALL) {
      TW_RETURN_IF_FAILED(made("fi_getname", result));
    }
    name_.resize(length);
    return made("fi_getname", fi_getname(&ep_->fid, name_.data(), &length));
  }

  std::string provider() const override { return info_->fabric_attr->prov_name; }
  std::string name() const override { return name_; }

  Status add_peer(const std::string& name) override {
    fi_addr_t address = FI_ADDR_UNSPEC;
    const int added = fi_av_insert(av_.get(), name.data(), 1, &address, 0, nullptr);
    if (added != 1) return made("fi_av_insert", added < 0 ? added : -FI_EINVAL);
    peers_.push_back(address);
    return {};
  }

  bool ordered() const override { return (info_->tx_attr->msg_order & info_->rx_attr->msg_order & FI_ORDER_SAW) != 0; }
  uint64_t largest() const override { return info_->ep_attr->max_msg_size; }
  size_t depth() const override { return info_->tx_attr->size; }

  Status add_memory(std::byte* memory, uint64_t bytes, Registered* registered) override {
    const auto mode = static_cast<uint64_t>(info_->domain_attr->mr_mode);
    const uint64_t key = (mode & FI_MR_PROV_KEY) != 0 ? 0 : make_key(info_->domain_attr->mr_key_size);
    constexpr uint64_t kAccess = FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
    Object<fid_mr> region;
    TW_RETURN_IF_FAILED(
        made("fi_mr_reg", fi_mr_reg(domain_.get(), memory, bytes, kAccess, 0, key, 0, out(region), nullptr)));
    registered->tag = fi_mr_desc(region.get());
    registered->extent = {bytes, (mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uint64_t>(memory) : 0,
                          fi_mr_key(region.get())};
    regions_.push_back(std::move(region));
    return {};
  }

  Sent write(int peer, const void* from, uint64_t bytes, void* tag, uint64_t to, uint64_t key, bool delivered,
             Context* context, int* error) override {
    const iovec source{const_cast<void*>(from), bytes};
    const fi_rma_iov target{to, bytes, key};
    fi_msg_rma message{};
    message.msg_iov = &source;
    message.desc = &tag;
    message.iov_count = 1;
    message.addr = peers_[static_cast<size_t>(peer)];
    message.rma_iov = &target;
    message.rma_iov_count = 1;
    message.context = context;
    return sent(fi_writemsg(ep_.get(), &message, FI_COMPLETION | (delivered ? FI_DELIVERY_COMPLETE : 0)), error);
  }

  Sent send(int peer, const void* from, uint64_t bytes, void* tag, Context* context, int* error) override {
    return sent(fi_send(ep_.get(), from, bytes, tag, peers_[static_cast<size_t>(peer)], context), error);
  }

  Sent receive(void* to, uint64_t bytes, void* tag, Context* context, int* error) override {
    return sent(fi_recv(ep_.get(), to, bytes, tag, FI_ADDR_UNSPEC, context), error);
  }

  int progress(std::span<Completion> ended, int* error) override {
    fi_cq_entry entries[kEntries];
    const ssize_t read = fi_cq_read(cq_.get(), entries, std::min(ended.size(), size_t{kEntries}));
    if (read == -FI_EAVAIL) {
      fi_cq_err_entry entry{};
      const ssize_t told = fi_cq_readerr(cq_.get(), &entry, 0);
      if (told == -FI_EAGAIN) return 0;
      if (told >= 0) {
        ended[0] = {static_cast<Context*>(entry.op_context), entry.err};
        return 1;
      }
      *error = static_cast<int>(-told);
      return -1;
    }
    if (read == -FI_EAGAIN || read == -FI_EINTR) return 0;
    if (read < 0) {
      *error = static_cast<int>(-read);
      return -1;
    }
    for (ssize_t i = 0; i < read; ++i)
      ended[static_cast<size_t>(i)] = {static_cast<Context*>(entries[i].op_context), 0};
    return static_cast<int>(read);
  }

  int sleep_on() override {
    if (!sleeps_) return -1;
    fid* const queue = &cq_->fid;
    fid* queues[] = {queue};
    return fi_trywait(fabric_.get(), queues, 1) == 0 ? descriptor_ : -1;
  }

  std::string text_of(int error) const override { return library_.strerror(error); }

 private:
  static constexpr size_t kEntries = 16;

  // Where libfabric writes an object that it makes.
  template <class Fid>
  class Out {
   public:
    explicit Out(Object<Fid>& object) : object_(object) {}
    ~Out() { object_.reset(made_); }
    operator Fid**() { return &made_; }

   private:
    Object<Fid>& object_;
    Fid* made_ = nullptr;
  };
  template <class Fid>
  static Out<Fid> out(Object<Fid>& object) {
    return Out<Fid>(object);
  }

  Status made(const char* what, int result) const {
    if (result >= 0) return {};
    return fail(twSystemError, "libfabric's {}: {} failed: {}", info_->fabric_attr->prov_name, what,
                library_.strerror(-result));
  }

  static Sent sent(ssize_t result, int* error) {
    if (result == 0) return Sent::kSent;
    if (result == -FI_EAGAIN) return Sent::kAgain;
    *error = static_cast<int>(-result);
    return Sent::kFailed;
  }

  const Library& library_;
  Info info_;
  std::string name_;
  std::vector<fi_addr_t> peers_;
  bool sleeps_ = false;
  int descriptor_ = -1;
  // In the order in which they are made.
  Object<fid_fabric> fabric_;
  Object<fid_domain> domain_;
  Object<fid_av> av_;
  Object<fid_cq> cq_;
  std::vector<Object<fid_mr>> regions_;
  Object<fid_ep> ep_;
};

}  // namespace

bool has_provider(const Library& library, const char* provider) {
  int error = 0;
  return find_info(library, provider, nullptr, &error) != nullptr;
}

Status open_endpoint(const std::string& provider, const std::string& address, std::unique_ptr<Endpoint>* endpoint) {
  const Library* library = nullptr;
  TW_RETURN_IF_FAILED(find_library(&library));
  const KeptSignals kept;
  int error = 0;
  Info info = find_info(*library, provider.c_str(), address.empty() ? nullptr : address.c_str(), &error);
  if (info == nullptr) {
    return fail(twUnsupported, "libfabric has no provider \"{}\" here that has remote writes and messages: {}",
                provider, library->strerror(-error));
  }
  auto opened = std::make_unique<LibfabricEndpoint>(*library, std::move(info));
  TW_RETURN_IF_FAILED(opened->open());
  *endpoint = std::move(opened);
  return {};
}
#else
Status open_endpoint(const std::string&, const std::string&, std::unique_ptr<Endpoint>*) {
  const Library* library = nullptr;
  return find_library(&library);
}
#endif

}  // namespace tw::net
