// HostRoutes: how rows that go to each host once travel between this rank and the others, in memory of the device
// (launch/posts.h, HostRows). It takes a Topology, and gives tables that stay the same, and counters of rows.
//
// What breaks if this changes: S10. A source puts its message where its rail peer's host reads it.
#pragma once

#include "cuda/driver/driver.h"
#include "cuda/launch/posts.h"
#include "layout/topology.h"

namespace tw::cuda {

class HostRoutes {
 public:
  HostRoutes() = default;
  ~HostRoutes();
  HostRoutes(const HostRoutes&) = delete;
  HostRoutes& operator=(const HostRoutes&) = delete;

  Status make(const Topology& topology, int me, int channels);
  // Fills in the tables, and the counters of a channel.
  void place(int channel, HostRows* rows) const;

 private:
  RankRoute* ranks_ = nullptr;        // [N]
  MessageRoute* messages_ = nullptr;  // [others]
  uint32_t* rows_ = nullptr;          // [channels, others]
  int others_ = 0;
};

}  // namespace tw::cuda
