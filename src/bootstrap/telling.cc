// Tells ranks that come late why this rank has failed to connect: they would wait for it until their timeout. A thread
// stays behind at this rank's place and tells each of them once, until the timeout of the attempt that failed, or until
// this process wants the place for another attempt. connect_over is here too: it connects by a Way, and makes the mesh,
// or the thread. Without it, one rank's bad argument costs all others their timeout, and they blame the wrong thing.
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "bootstrap/connecting.h"
#include "bootstrap/descriptors.h"
#include "core/interrupt.h"

namespace tw {
namespace {

struct Teller {
  std::atomic<bool> stop = false;
  pid_t process = ::getpid();  // a forked child has the entry, but not the thread
};

struct Tellers {
  std::mutex mutex;
  std::condition_variable ended;
  std::map<std::string, std::shared_ptr<Teller>> at;  // by place
};

// Never destroyed: threads may outlive the end of main.
Tellers& tellers() {
  static auto* const all = new Tellers;
  return *all;
}

void stay(std::unique_ptr<Connecting> connecting, const std::shared_ptr<Teller>& teller, const std::string& place) {
  connecting->tell_late(teller->stop);
  connecting.reset();
  Tellers& all = tellers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.at.find(place);
  if (found != all.at.end() && found->second == teller) all.at.erase(found);
  all.ended.notify_all();
}

// Ends all such threads when the program ends, because a place may be a file, and none may be left behind.
void end_all() {
  Tellers& all = tellers();
  std::unique_lock lock(all.mutex);
  for (const auto& [place, teller] : all.at) teller->stop = true;
  std::erase_if(all.at, [](const auto& entry) { return entry.second->process != ::getpid(); });
  all.ended.wait_for(lock, std::chrono::seconds(1), [&] { return all.at.empty(); });
}

// Tells the others why an attempt has failed; by a thread of its own if some have not come yet.
void tell_others(std::unique_ptr<Connecting> connecting, const Status& why, const std::string& place) {
  if (!connecting->tell(why)) return;
  auto teller = std::make_shared<Teller>();
  if (!place.empty()) {
    static std::once_flag once;
    std::call_once(once, [] { (void)std::atexit(end_all); });
    const std::lock_guard lock(tellers().mutex);
    tellers().at[place] = teller;
  }
  try {
    const auto shared = std::make_shared<std::unique_ptr<Connecting>>(std::move(connecting));
    start_thread([shared, teller, place] { stay(std::move(*shared), teller, place); }).detach();
  } catch (const std::system_error&) {  // no thread can be had: ranks that come later wait
    const std::lock_guard lock(tellers().mutex);
    tellers().at.erase(place);
  }
}

// Ends the telling at a place that this process wants again.
void end_telling(const std::string& place) {
  Tellers& all = tellers();
  std::unique_lock lock(all.mutex);
  const auto found = all.at.find(place);
  if (found == all.at.end()) return;
  const std::shared_ptr<Teller> teller = found->second;
  teller->stop = true;
  if (teller->process != ::getpid()) {
    all.at.erase(found);
    return;
  }
  all.ended.wait(lock, [&] {
    const auto now = all.at.find(place);
    return now == all.at.end() || now->second != teller;
  });
}

}  // namespace

Status connect_over(std::unique_ptr<Way> way, int rank, int size, TimePoint deadline,
                    std::unique_ptr<Bootstrap>* bootstrap) {
  raise_descriptor_limit();
  const std::string place = way->place(rank);
  const bool carries = way->carries_descriptors();
  end_telling(place);
  auto connecting = std::make_unique<Connecting>(std::move(way), rank, size, deadline);
  Status status = connecting->run();
  if (status.ok()) {
    *bootstrap = make_mesh(rank, connecting->take_links(), connecting->take_wake(), carries);
  } else {
    tell_others(std::move(connecting), status, place);
  }
  return status;
}

}  // namespace tw
