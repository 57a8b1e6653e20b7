// Comms: which ranks take part, and how they find each other. Included by tokenway.h, which has the conventions.
#ifndef TOKENWAY_COMM_H_
#define TOKENWAY_COMM_H_

// How rows of a dispatch or gather cross between hosts of GPUs. Results have the same bits.
typedef enum TW_AS_INT {
  twCrossFaster = 0,   // once for each host where a GPU sees what the network writes to others of its host, and there
                       // are enough rows, else once for each rank
  twCrossPerHost = 1,  // once for each host: its ranks copy their rows from where they lie at one of them. (Gathers of
                       // more than a dispatch of max_tokens rows go to each rank.)
  twCrossPerRank = 2,  // once for each rank, straight to it
} twCrossing_t;

// What twCommCreateShm, twCommCreateFabric, twCommCreateCuda and twCommCreateLocal take. NULL stands for the defaults.
typedef struct {
  size_t size;
  int32_t timeout_ms;   // how long to wait for the other ranks to arrive; 0: the default (TOKENWAY_TIMEOUT_MS, 100 s)
  const char* address;  // twCommCreateShm and Cuda: a name common to all ranks of this comm and unique to it on the
                        // host (up to 80 bytes). It names abstract Unix sockets; a name that begins with '/' is a path
                        // prefix of socket files instead (for ranks in containers with separate network namespaces)
  int32_t device;       // twCommCreateCuda and Gin: the CUDA device of this rank; -1: the thread's current one
  const int32_t* devices;  // twCommCreateLocal: [nranks] CUDA device of each rank; NULL: ranks on the CPU. Copied
  // For twCommCreateFabric and Gin, and for twCommCreateCuda and Shm instead of an address: gathers `bytes` bytes of
  // every rank, in rank order, into `all`. Returns 0 on success. It is called a few times during creation and never
  // after, equally often on all ranks.
  int (*allgather)(const void* mine, void* all, size_t bytes, void* context);
  void* allgather_context;
  int32_t ranks_per_host;  // twCommCreateFabric and Gin: each host's ranks count as several hosts of so many, in the
                           // order of ranks, the last perhaps smaller (for trials on one host); 0: as they are
  const char* provider;    // twCommCreateFabric: libfabric's, between hosts: "tcp", "verbs" or "efa" (or, for trials on
                           // one host, "shm"); NULL: "tcp". The same on all ranks, as the field before
  twCrossing_t crossing;   // twCommCreateGin. The same on all ranks
} twCommConfig_t;
#define TW_COMM_CONFIG_INIT {sizeof(twCommConfig_t), 0, NULL, -1, NULL, NULL, NULL, 0, NULL, twCrossFaster}

// Connects `nranks` processes of one host on the CPU; rank is this process's place, 0 <= rank < nranks <= TW_MAX_RANKS.
// Collective. Windows are anonymous memory (memfd) whose descriptors travel over Unix sockets; processes of other users
// are turned away. The soft limit of file descriptors is raised to the hard one: a rank needs 3 for each rank, and 8
// more. A file at the address's path is left alone, unless it is a socket on which nobody listens.
//
// Errors: twInvalidArgument, also for an address that is in use; twTimeout, which names the ranks that did not arrive;
// twPeerDied, for a rank that died while others still connect; twConfigMismatch where nranks differ; twSystemError. A
// rank that fails after others could have met it tells them why, and they return its result at once. For ranks that
// come later a thread stays behind, which keeps the address in use until the timeout would have passed, all have heard,
// or this process tries again.
TW_API twResult_t twCommCreateShm(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* config);

// Connects `nranks` processes on the CPU, on any hosts. Collective. Ranks of one host (of one boot and one network
// namespace) exchange through memory that they share, as those of twCommCreateShm do; to ranks of other hosts rows go
// by libfabric, once for each host however many of its ranks want them (docs/HOSTS.md). Groups are called as those of
// twCommCreateShm and give the same bits. config.allgather is needed; each rank connects to all others, over TCP for
// what is told beside rows, at ports that the system chooses, and by libfabric. Nothing on them is encrypted.
//
// Errors: as twCommCreateShm; twUnsupported, on all ranks alike, where a rank has no libfabric, or not that provider,
// or does not reach another rank by it, with the rank and the reason; twConfigMismatch where ranks_per_host or provider
// differ. "verbs" and "efa" have not been tried.
TW_API twResult_t twCommCreateFabric(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* config);

// Connects `nranks` processes, each with a CUDA device of its own, on any hosts. Collective. Ranks of one host (of one
// boot and one network namespace) copy rows into each other's memory, over NVLink or PCIe; to ranks of other hosts
// kernels put them by NCCL's device API (GIN), over the network that NCCL finds (docs/HOSTS.md). Groups are called as
// those of twCommCreateCuda, give the same bits, and can be captured. config.allgather is needed; each rank connects to
// all others over TCP too, for what is told beside rows, at ports that the system chooses. Nothing is encrypted.
//
// Errors: as twCommCreateShm; twUnsupported in a build without CUDA and, on all ranks alike, where NCCL is not here, is
// too old, or has no such network between all ranks; twInvalidArgument; twConfigMismatch where ranks_per_host or
// crossing differ. Groups fail with twUnsupported where crossing is per host, and ranks do not see such rows in time.
TW_API twResult_t twCommCreateGin(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* config);

// Connects `nranks` processes, each with a CUDA device of its own; all pairs of devices must reach each other's memory
// (NVLink, or PCIe peer access). Collective. Windows are CUDA virtual memory, exported as fabric handles where the
// platform grants them, else as file descriptors (twGroupInfo tells which).
//
// Ranks of one host meet over Unix sockets. With config.allgather they may be on several hosts of one NVLink domain, or
// in several network namespaces: they then connect over TCP, at ports that the system chooses, where nothing is
// encrypted, and need fabric handles. Whether NVLink joins them is found out here: no device may be of another domain
// than the others, as far as NVML names domains, and each rank maps a piece of memory of every other.
//
// Errors: as twCommCreateShm; twUnsupported, on all ranks alike, where ranks of several hosts cannot map each other's
// memory, with the rank and the reason; twUnsupported too where there is no driver, in a build without CUDA, or for
// devices that cannot reach each other; twPeerRefused for a rank whose device cannot be used, with an allgather.
TW_API twResult_t twCommCreateCuda(twComm_t* comm, int32_t rank, int32_t nranks, const twCommConfig_t* config);

// Creates all `nranks` ranks of a comm inside this process, comms[0..nranks). Each rank may be driven by a
// thread of its own, or, with send_only calls, all by one thread; creating and destroying groups is collective and
// needs a thread for each rank.
//
// With config.devices, ranks are on CUDA devices, up to TW_MAX_LOCAL_RANKS on each, so that eight ranks can be tried on
// one GPU. Ranks that share a device wait for each other on it, which asks for the following:
//   * Each rank needs a non-blocking stream of its own (the legacy default stream is refused).
//   * Each needs a hardware queue of its own: CUDA_DEVICE_MAX_CONNECTIONS=32, set before the first CUDA call. A value
//     below the ranks of a device is refused.
//   * Nothing between their calls may synchronise the device (cudaFree, lazy loading of modules).
//   * No copy between host and device may be queued behind a call that waits (copies of all streams of a device share
//     queues): synchronise the stream first.
//   * No two of them may be branches of one graph.
TW_API twResult_t twCommCreateLocal(twComm_t* comms, int32_t nranks, const twCommConfig_t* config);

// Connects `nranks` processes, wherever they are, whose groups exchange through collectives of the caller's
// (carrier.h). Collective. Groups are on the CPU and are called as those of twCommCreateShm or, with config.on_device,
// are on CUDA devices and are called as those of twCommCreateCuda. The library's own connections go to ports that the
// system chooses, at addresses of the ranks' network interfaces; nothing on them is encrypted. Errors:
// twInvalidArgument; twTimeout, which names the ranks that could not be reached; twConfigMismatch; twSystemError;
// twUnsupported for devices in a build without CUDA, or a strategy that does not exist on devices.
TW_API twResult_t twCommCreatePortable(twComm_t* comm, int32_t rank, int32_t nranks, const twPortableConfig_t* config);

// Frees this rank's comm. Its groups must have been destroyed (else twInvalidUsage). Peers see the rank as gone.
TW_API twResult_t twCommDestroy(twComm_t comm);

// Gives this rank's place and the number of ranks; either pointer may be NULL. From any thread.
TW_API twResult_t twCommRank(twComm_t comm, int32_t* rank, int32_t* nranks);

// How ranks that are processes have each other's device memory.
typedef enum TW_AS_INT {
  twHandlesNone = 0,         // they have none: ranks are on the CPU, alone, in one process or over a carrier
  twHandlesDescriptors = 1,  // by file descriptors: the device or its driver knows no fabric handles
  twHandlesRefused = 2,      // by file descriptors: fabric handles are known and were refused
  twHandlesFabric = 3,       // by fabric handles, which also go to other hosts of an NVLink domain
} twHandles_t;

// What NVML says of the NVLink domain of a device.
typedef enum TW_AS_INT {
  twDomainUnknown = 0,  // nothing: NVML is not here, or too old
  twDomainNone = 1,     // the device is of no domain that reaches beyond its host
  twDomainNamed = 2,    // it is of a domain: a cluster, and a clique in that
} twDomain_t;

// A device's part in fabrics, as twDeviceFabric tells it.
typedef struct {
  size_t size;
  twHandles_t handles;  // Fabric: this process may export memory of the device by fabric handles; Refused; Descriptors
  int32_t refusal;      // the driver's CUresult where they are refused (800: the process has no IMEX channel), else 0
  twDomain_t domain;
  uint32_t clique;      // of a domain that is named
  uint8_t cluster[16];  // likewise: its UUID
} twFabric_t;

// Tells whether ranks on a device could be joined with ranks of other hosts over NVLink. It makes a small piece of
// memory with a fabric handle and frees it. Not for hot paths. device: a number; -1: the thread's current one. From any
// thread. Errors: twInvalidArgument; twUnsupported where there is no driver, or a build without CUDA.
TW_API twResult_t twDeviceFabric(int32_t device, twFabric_t* fabric);

// Tells of libfabric, which the engine between hosts is made of (docs/BACKENDS.md): its version ("1.17"), and those of
// the providers tcp, shm, verbs and efa that work here ("tcp, shm"; "" where none does). It looks for libfabric.so.1
// when it is first asked. The strings are valid until the thread's next call. Not for hot paths. From any thread.
// Errors: twInvalidArgument; twUnsupported, with a sentence that says what to install, where libfabric is not here, or
// was not when this library was built.
TW_API twResult_t twLibfabric(const char** version, const char** providers);

// Tells of NCCL, which joins CUDA devices of several hosts (twCommCreateGin): the version that this process loads
// ("2.32.3"). Whether NICs are there that it can use, creating a comm tells. It looks for libnccl.so.2 when it is first
// asked. The string is valid until the thread's next call. Not for hot paths. From any thread. Errors:
// twInvalidArgument; twUnsupported, with a sentence that says what to install, where NCCL is not here or too old, in a
// build without its headers, and in one without CUDA.
TW_API twResult_t twNccl(const char** version);

// Gives the CUDA device of this rank, -1 on the CPU.
TW_API twResult_t twCommDevice(twComm_t comm, int32_t* device);

#endif  // TOKENWAY_COMM_H_
