// What control groups leave of their limits, in made-up folders.
#include "core/free_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "harness.h"

namespace tw::test {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class FreeMemoryOf : public ::testing::Test {
 protected:
  FreeMemoryOf() {
    std::string name = ::testing::TempDir() + "tokenway-XXXXXX";
    root = ::mkdtemp(name.data());
    write("/proc/meminfo", "MemTotal:  9000000 kB\nMemFree: 1 kB\nMemAvailable:    4096000 kB\nSwapFree: 5 kB\n");
  }
  ~FreeMemoryOf() override { std::filesystem::remove_all(root); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  void write_v2(const std::string& folder, const std::string& max, uint64_t current, uint64_t file_pages) {
    write(folder + "/memory.max", max + "\n");
    write(folder + "/memory.current", std::to_string(current) + "\n");
    const std::string half = std::to_string(file_pages / 2);
    write(folder + "/memory.stat", "anon 77\nfile 88\ninactive_file " + half + "\nactive_file " + half + "\n");
  }
  void write_v1(const std::string& folder, uint64_t limit, uint64_t usage, uint64_t file_pages) {
    write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    write(folder + "/memory.stat",
          "inactive_file 1\nactive_file 1\ntotal_inactive_file " + std::to_string(file_pages) + "\n");
  }
  void expect(uint64_t bytes, const std::string& why) {
    const FreeMemory found = find_free_memory(root);
    EXPECT_EQ(found.bytes, bytes);
    EXPECT_EQ(found.why, why);
  }
  void expect_host() { expect(4096000ull * 1024, "by MemAvailable in /proc/meminfo"); }

  std::string root;
};

constexpr char kMounts2[] = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr char kMounts1[] =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:3 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

TEST_F(FreeMemoryOf, AHostWithoutControlGroups) { expect_host(); }

TEST_F(FreeMemoryOf, NothingIsKnown) {
  std::filesystem::remove_all(root + "/proc");
  EXPECT_EQ(find_free_memory(root).bytes, UINT64_MAX);
}

TEST_F(FreeMemoryOf, ARootOfVersion2) {
  write("/proc/self/mountinfo", kMounts2);
  write("/proc/self/cgroup", "0::/\n");
  write_v2("/sys/fs/cgroup", "max", 50 * kMiB, 0);
  expect_host();
  write_v2("/sys/fs/cgroup", std::to_string(100 * kMiB), 50 * kMiB, 10 * kMiB);
  expect(60 * kMiB, "of the 100.0 MiB in /sys/fs/cgroup/memory.max");
}

TEST_F(FreeMemoryOf, TheTightestLevelOfVersion2) {
  write("/proc/self/mountinfo", kMounts2);
  write("/proc/self/cgroup", "0::/slurm/job 7/task\n");
  write_v2("/sys/fs/cgroup/slurm", std::to_string(900 * kMiB), 100 * kMiB, 0);
  write_v2("/sys/fs/cgroup/slurm/job 7", std::to_string(300 * kMiB), 100 * kMiB, 0);
  write_v2("/sys/fs/cgroup/slurm/job 7/task", std::to_string(500 * kMiB), 100 * kMiB, 0);
  write_v2("/sys/fs/cgroup/slurm/other", std::to_string(kMiB), kMiB, 0);
  expect(200 * kMiB, "of the 300.0 MiB in /sys/fs/cgroup/slurm/job 7/memory.max");
  write_v2("/sys/fs/cgroup/slurm", std::to_string(150 * kMiB), 400 * kMiB, 0);  // lowered beneath what is used
  expect(0, "of the 150.0 MiB in /sys/fs/cgroup/slurm/memory.max");
}

TEST_F(FreeMemoryOf, Version1BesideVersion2) {
  write("/proc/self/mountinfo", kMounts1);
  write("/proc/self/cgroup", "5:cpu,cpuacct:/else\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n");
  constexpr uint64_t kNoLimit = 9223372036854771712ull;
  write_v1("/sys/fs/cgroup/memory", kNoLimit, 700 * kMiB, 0);
  write_v1("/sys/fs/cgroup/memory/docker", kNoLimit, 600 * kMiB, 0);
  write_v1("/sys/fs/cgroup/memory/docker/abc", kNoLimit, 600 * kMiB, 0);
  expect_host();
  write_v1("/sys/fs/cgroup/memory/docker/abc", 1024 * kMiB, 600 * kMiB, 100 * kMiB);
  expect(524 * kMiB, "of the 1.0 GiB in /sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes");
}

// In a container whose name for its group is the host's, the mount shows that group as its root.
TEST_F(FreeMemoryOf, AContainersMountShowsItsGroupAlone) {
  write("/proc/self/mountinfo", "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  write("/proc/self/cgroup", "4:memory:/docker/abc/inner\n");
  write_v1("/sys/fs/cgroup/memory", 512 * kMiB, 12 * kMiB, 0);
  expect(500 * kMiB, "of the 512.0 MiB in /sys/fs/cgroup/memory/memory.limit_in_bytes");
  write_v1("/sys/fs/cgroup/memory/inner", 64 * kMiB, 4 * kMiB, 0);
  expect(60 * kMiB, "of the 64.0 MiB in /sys/fs/cgroup/memory/inner/memory.limit_in_bytes");
  for (const char* const elsewhere : {"4:memory:/docker/abcd\n", "4:memory:/../sibling\n", "4:memory:/\n"}) {
    write("/proc/self/cgroup", elsewhere);
    expect(500 * kMiB, "of the 512.0 MiB in /sys/fs/cgroup/memory/memory.limit_in_bytes");
  }
}

TEST_F(FreeMemoryOf, TheRefusalNamesTheLimit) {
  twComm_t comm = nullptr;
  ASSERT_TW(twSuccess, twCommCreateLocal(&comm, 1, nullptr));
  twGroupConfig_t config = make_config(1, 1, TW_MAX_TOKENS, 1 << 30);
  twGroup_t group = nullptr;
  EXPECT_TW(twOutOfMemory, twGroupCreate(&group, comm, &config));
  EXPECT_TRUE(says("are free, "));
  EXPECT_TRUE(says(find_free_memory().why.substr(0, 3)));
  EXPECT_TW(twSuccess, twCommDestroy(comm));
}

}  // namespace
}  // namespace tw::test
