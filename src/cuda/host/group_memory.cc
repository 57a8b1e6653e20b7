// The device memory of a group: group_memory.h tells what it holds.
//
// All tables are one block, made and filled at creation; host pages come several at a time and are reused when the
// exchange that writes to them has ended.
//
// What breaks if this changes: the layout of a map must be that of MapWords (launch/expert_tables.h). Memory that is
// pinned or freed while a peer waits for this rank may hold both up, so pages are taken ahead and memory goes on a
// stream of its own (S6).
#include "cuda/host/group_memory.h"

#include <algorithm>
#include <cstring>

#include "cuda/host/tables.h"

namespace tw::cuda {

namespace {

std::vector<uint32_t> words_of_maps(const Shape& shape, const std::vector<ExpertMap>& maps) {
  std::vector<uint32_t> all;
  for (const ExpertMap& map : maps) {
    const std::vector<uint32_t> words = words_of_map(shape, map);
    for (int32_t i = 0; i <= shape.moves; ++i) all.insert(all.end(), words.begin(), words.end());
  }
  return all;
}

}  // namespace

GroupMemory::~GroupMemory() {
  const OutsideCaptures outside;
  if (stream_ != nullptr) {
    if (tables_ != nullptr) cudaFreeAsync(tables_, stream_);
    for (void* const marks : more_marks_) cudaFreeAsync(marks, stream_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  if (loads_.averages_there != nullptr) cudaFreeHost(loads_.averages_there);
  for (void* const pages : page_blocks_) cudaFreeHost(pages);
}

Status GroupMemory::create(const Context& context, GroupView* view, std::unique_ptr<GroupMemory>* memory) {
  std::unique_ptr<GroupMemory> made(new GroupMemory);
  const Shape& shape = context.map.shape();
  Tables tables;
  std::vector<uint32_t> experts(shape.experts);
  for (int32_t e = 0; e < shape.experts; ++e) {
    experts[e] = pack_expert(context.placement.rank[e], context.placement.slot[e]);
  }
  const size_t experts_at = tables.place(experts.data(), sizeof(uint32_t) * experts.size());
  // The exchange of counts' counters, by channel.
  const size_t told = shape.exact() ? static_cast<size_t>(shape.ranks) + static_cast<size_t>(shape.experts) : 0;
  const size_t told_at = tables.place(nullptr, sizeof(int32_t) * told * static_cast<size_t>(shape.channels));
  const std::vector<uint32_t> maps = words_of_maps(shape, *context.maps);
  const size_t maps_at = tables.place(maps.data(), sizeof(uint32_t) * maps.size());
  const bool chosen = context.spec->policy == twReplicaBalanced || context.spec->moves;
  const bool balances = context.spec->given && chosen && !BalanceParams::fits(shape);
  const size_t balance_at =
      tables.place(nullptr, balances ? sizeof(int32_t) * BalanceParams::scratch_words(shape) * shape.channels : 0);
  const auto lists = static_cast<size_t>(list_words(context.local_experts) * shape.channels);
  const size_t lists_at = tables.place(nullptr, sizeof(int32_t) * lists);
  // Load statistics.
  const auto rows = static_cast<size_t>(shape.counts_loads * shape.channels * context.spec->layers);
  const size_t averages = rows * static_cast<size_t>(shape.choices());
  const size_t averages_at = tables.place(nullptr, sizeof(float) * averages);
  const size_t dispatches_at = tables.place(nullptr, sizeof(long long) * rows);
  const size_t clocks_at = tables.place(nullptr, sizeof(uint32_t) * rows);
  const size_t told_of_at = tables.place(nullptr, sizeof(uint32_t) * rows);
  const size_t marks_at =
      tables.place(nullptr, sizeof(uint32_t) * static_cast<size_t>(mark_words(shape) * shape.channels));
  const size_t numbers_at = tables.place(nullptr, sizeof(uint32_t) * static_cast<size_t>(shape.channels));
  const auto moving = static_cast<size_t>(shape.moves);
  const size_t heads_at = tables.place(nullptr, sizeof(uint32_t) * moving * static_cast<size_t>(context.spec->layers));
  const size_t versions_at = tables.place(nullptr, sizeof(uint64_t) * moving * static_cast<size_t>(shape.channels));
  const size_t ready_at = tables.place(nullptr, sizeof(uint32_t) * moving);
  TW_CUDA(cudaStreamCreateWithFlags(&made->stream_, cudaStreamNonBlocking));
  TW_RETURN_IF_FAILED(tables.copy_to_device(made->stream_, &made->tables_));
  view->experts = reinterpret_cast<const uint32_t*>(made->tables_ + experts_at);
  view->marks = reinterpret_cast<uint32_t*>(made->tables_ + marks_at);
  made->loads_.layers = context.spec->layers;
  made->loads_.decay = context.spec->decay;
  if (rows > 0) {
    TW_RETURN_IF_FAILED(made->show_loads(averages, rows, static_cast<size_t>(shape.channels)));
    made->loads_.averages = reinterpret_cast<float*>(made->tables_ + averages_at);
    made->loads_.dispatches = reinterpret_cast<long long*>(made->tables_ + dispatches_at);
    made->loads_.clocks = reinterpret_cast<uint32_t*>(made->tables_ + clocks_at);
    made->loads_.told_of = reinterpret_cast<uint32_t*>(made->tables_ + told_of_at);
    made->loads_.numbers = reinterpret_cast<uint32_t*>(made->tables_ + numbers_at);
  }
  made->maps_ = reinterpret_cast<uint32_t*>(made->tables_ + maps_at);
  if (shape.moves != 0) {
    auto* const heads = reinterpret_cast<uint32_t*>(made->tables_ + heads_at);
    auto* const ready = reinterpret_cast<uint32_t*>(made->tables_ + ready_at);
    TW_RETURN_IF_FAILED(made->moving_.create(shape, context.spec->layers, {made->maps_, heads, ready}, made->stream_));
    made->loads_.moving.heads = heads;
    made->loads_.moving.ready = ready;
    made->loads_.moving.versions = reinterpret_cast<uint64_t*>(made->tables_ + versions_at);
  }
  view->loads = made->loads_;
  made->balance_ = reinterpret_cast<int32_t*>(made->tables_ + balance_at);
  made->list_counts_ = reinterpret_cast<int32_t*>(made->tables_ + lists_at);
  made->told_ = reinterpret_cast<int32_t*>(made->tables_ + told_at);
  made->page_bytes_ = CountsOnHost::bytes(context.local_experts);
  // This is done now, as memory that is pinned while a peer waits for this rank may hold both up.
  if (CountsOnHost* const first = shape.exact() ? made->take_page() : nullptr) made->free_pages_.push_back(first);
  *memory = std::move(made);
  return {};
}

// Gives the host a place for load statistics: `averages` averages, and dispatches and clocks of `rows` rows. Behind
// them are the versions of channels.
Status GroupMemory::show_loads(size_t averages, size_t rows, size_t channels) {
  const size_t before = (sizeof(float) * averages + 63) / 64 * 64;
  const size_t bytes = before + (sizeof(long long) + sizeof(uint32_t)) * rows;
  const size_t versions_at = (bytes + 63) / 64 * 64;
  const size_t all = versions_at + sizeof(uint64_t) * channels;
  void* there = nullptr;
  TW_CUDA(cudaHostAlloc(&there, all, cudaHostAllocPortable));
  std::memset(there, 0, all);
  loads_.averages_there = static_cast<float*>(there);
  loads_.dispatches_there = reinterpret_cast<long long*>(static_cast<std::byte*>(there) + before);
  loads_.clocks_there = reinterpret_cast<uint32_t*>(loads_.dispatches_there + rows);
  loads_.moving.versions_there = reinterpret_cast<uint64_t*>(static_cast<std::byte*>(there) + versions_at);
  return {};
}

CountsOnHost* GroupMemory::take_page() {
  const auto written = [](const GivenPage& given) {
    return __atomic_load_n(&given.page->serial, __ATOMIC_ACQUIRE) == given.serial;
  };
  for (size_t i = given_pages_.size(); i-- > 0;) {
    if (!written(given_pages_[i])) continue;
    free_pages_.push_back(given_pages_[i].page);
    given_pages_.erase(given_pages_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (free_pages_.empty()) {
    const OutsideCaptures outside;
    void* made = nullptr;
    const size_t pages = std::clamp<size_t>(kPageBlock / page_bytes_, 1, kPages);
    const bool there = cudaHostAlloc(&made, pages * page_bytes_, cudaHostAllocPortable) == cudaSuccess;
    (void)cudaGetLastError();
    if (!there) return nullptr;
    std::memset(made, 0, pages * page_bytes_);
    page_blocks_.push_back(made);
    for (size_t i = pages; i-- > 0;) {
      free_pages_.push_back(reinterpret_cast<CountsOnHost*>(static_cast<std::byte*>(made) + i * page_bytes_));
    }
  }
  CountsOnHost* const page = free_pages_.back();
  free_pages_.pop_back();
  return page;
}

void GroupMemory::read_loads(const Context& context, float* loads, int64_t* dispatches) const {
  const Shape& shape = context.map.shape();
  const auto rows = static_cast<size_t>(shape.channels * context.spec->layers);
  std::vector<float> averages(rows * static_cast<size_t>(shape.choices()));
  std::vector<int64_t> counted(rows);
  std::vector<uint32_t> clocks(rows);
  // The device may be writing: each number is read once, as it is.
  for (size_t i = 0; i < averages.size(); ++i) {
    __atomic_load(&loads_.averages_there[i], &averages[i], __ATOMIC_RELAXED);
  }
  for (size_t i = 0; i < rows; ++i) {
    counted[i] = __atomic_load_n(&loads_.dispatches_there[i], __ATOMIC_RELAXED);
    clocks[i] = __atomic_load_n(&loads_.clocks_there[i], __ATOMIC_RELAXED);
  }
  sum_channels(*context.spec, shape, {averages.data(), counted.data(), clocks.data()}, loads, dispatches);
}

Status GroupMemory::make_marks(const Shape& shape, uint32_t** marks) {
  const auto bytes = sizeof(uint32_t) * static_cast<size_t>(mark_words(shape) * shape.channels);
  if (bytes == 0) return {};
  void* memory = nullptr;
  TW_CUDA(cudaMallocAsync(&memory, bytes, stream_));
  more_marks_.push_back(memory);
  TW_CUDA(cudaMemsetAsync(memory, 0, bytes, stream_));
  TW_CUDA(cudaStreamSynchronize(stream_));
  *marks = static_cast<uint32_t*>(memory);
  return {};
}

// Copies to the device, and waits for that. The stream has nothing else to wait for.
Status GroupMemory::write_map(int32_t layer, const Shape& shape, const ExpertMap& map) {
  const OutsideCaptures outside;
  const std::vector<uint32_t> words = words_of_map(shape, map);
  uint32_t* const to = maps_ + map_at(layer, shape);
  TW_CUDA(cudaMemcpyAsync(to, words.data(), words.size() * sizeof(uint32_t), cudaMemcpyHostToDevice, stream_));
  TW_CUDA(cudaStreamSynchronize(stream_));
  return {};
}

std::byte* GroupMemory::allocate(size_t bytes) {
  const OutsideCaptures outside;
  void* block = nullptr;
  const bool made = cudaMallocAsync(&block, bytes, stream_) == cudaSuccess &&
                    cudaStreamSynchronize(stream_) == cudaSuccess;  // other streams may use it at once
  (void)cudaGetLastError();
  return made ? static_cast<std::byte*>(block) : nullptr;
}

void GroupMemory::release(std::byte* block) {
  const OutsideCaptures outside;
  cudaFreeAsync(block, stream_);
}

}  // namespace tw::cuda
