// Finds how much memory of the host new windows may take, from /proc/meminfo and the control groups of this process.
// What breaks if it is wrong: a group that would fit is refused, or one is created whose pages the kernel later cannot
// give, and the process is killed instead of getting twOutOfMemory.
#include "core/free_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include "core/status.h"

namespace tw {
namespace {

// The names that a version of control groups has for its files.
struct Version {
  const char* type;          // type of its file system
  const char* controller;    // the controller that its mount must have; "" for any
  const char* limit;         // bytes, or a word for none
  const char* used;          // bytes
  const char* reclaimed[2];  // in memory.stat, for a whole subtree: pages of files, which make room when it is needed
};
constexpr Version kVersions[] = {
    {"cgroup2", "", "memory.max", "memory.current", {"inactive_file", "active_file"}},
    {"cgroup",
     "memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file", "total_active_file"}},
};

// Where a version is mounted, and which of its groups the mount shows.
struct Mount {
  std::string point;
  std::string group;
};

// Reads the number at a file's beginning; UINT64_MAX for a word, or where there is no such file.
uint64_t read_number(const std::string& path) {
  uint64_t value = UINT64_MAX;
  return std::ifstream(path) >> value ? value : UINT64_MAX;
}

// Adds up the values of two names, in a file with a name and a value in each line.
uint64_t read_sum(const std::string& path, const char* const (&names)[2]) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  uint64_t sum = 0;
  while (file >> name >> value) {
    if (name == names[0] || name == names[1]) sum += value;
  }
  return sum;
}

bool has_word(const std::string& list, const std::string& word) {
  return word.empty() || ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// Finds a version's mounts in /proc/self/mountinfo: "31 23 0:28 <group> <point> <options> <more>... - <type> <source>
// <options>".
std::vector<Mount> find_mounts(const std::string& root, const Version& version) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string entry; std::getline(file, entry);) {
    const size_t dash = entry.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream front(entry.substr(0, dash));
    std::istringstream back(entry.substr(dash + 3));
    std::string skipped;
    std::string type;
    std::string options;
    Mount mount;
    front >> skipped >> skipped >> skipped >> mount.group >> mount.point;
    back >> type >> skipped >> options;
    if (type == version.type && has_word(options, version.controller)) mounts.push_back(std::move(mount));
  }
  return mounts;
}

// Finds the group of this process in /proc/self/cgroup: "<number>:<controllers>:<group>", without controllers in
// version 2. "" if there is none.
std::string find_group(const std::string& root, const Version& version) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string entry; std::getline(file, entry);) {
    const size_t first = entry.find(':');
    const size_t second = entry.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = entry.substr(first + 1, second - first - 1);
    const bool ours = *version.controller == '\0' ? controllers.empty() : has_word(controllers, version.controller);
    if (ours) return entry.substr(second + 1);
  }
  return "";
}

// Lists the folders below a mount's point, from that of a group up to the point's own, "". In containers the mount may
// show another part of the tree than the one that has the group's name; then only the point is left.
std::vector<std::string> find_levels(const Mount& mount, std::string group) {
  if (mount.group != "/") {
    const bool within = group == mount.group || group.starts_with(mount.group + "/");
    group = within ? group.substr(mount.group.size()) : "";
  }
  if (group.find("/..") != std::string::npos) group = "";
  std::vector<std::string> levels;
  while (!group.empty() && group != "/") {
    levels.push_back(group);
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
  levels.push_back("");
  return levels;
}

void lower(FreeMemory* free, uint64_t bytes, const std::string& why) {
  if (bytes < free->bytes) *free = {bytes, why};
}

// Lowers *free to what one group leaves of its limit.
void look_at(const std::string& root, const std::string& folder, const Version& version, FreeMemory* free) {
  const std::string path = root + folder;
  const uint64_t limit = read_number(path + "/" + version.limit);
  const uint64_t used = read_number(path + "/" + version.used);
  constexpr uint64_t kNone = uint64_t{1} << 62;  // version 1 has a number for "none", of whole pages
  if (limit >= kNone || used == UINT64_MAX) return;
  const uint64_t taken = used - std::min(used, read_sum(path + "/memory.stat", version.reclaimed));
  lower(free, limit - std::min(limit, taken), "of the " + bytes_text(limit) + " in " + folder + "/" + version.limit);
}

}  // namespace

FreeMemory find_free_memory(const std::string& root) {
  FreeMemory free;
  std::ifstream file(root + "/proc/meminfo");
  for (std::string entry; std::getline(file, entry);) {
    std::istringstream words(entry);
    std::string name;
    uint64_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") lower(&free, kib * 1024, "by MemAvailable in /proc/meminfo");
  }
  for (const Version& version : kVersions) {
    const std::string group = find_group(root, version);
    for (const Mount& mount : find_mounts(root, version)) {
      for (const std::string& level : find_levels(mount, group)) look_at(root, mount.point + level, version, &free);
    }
  }
  return free;
}

}  // namespace tw
