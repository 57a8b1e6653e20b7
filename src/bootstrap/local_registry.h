// LocalRegistry: what a rank gives to the other ranks of its process, by number. It takes a shared object and gives a
// number, by which any thread finds the object again. An object that has gone is found missing, where a pointer would
// dangle; the registry keeps no object alive.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace tw {

template <class T>
class LocalRegistry {
 public:
  uint64_t add(const std::shared_ptr<T>& given) {
    const std::lock_guard lock(mutex_);
    std::erase_if(given_, [](const auto& entry) { return entry.second.expired(); });
    given_[++last_] = given;
    return last_;
  }
  std::shared_ptr<T> find(uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = given_.find(number);
    return found == given_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<T>> given_;
  uint64_t last_ = 0;
};

}  // namespace tw
