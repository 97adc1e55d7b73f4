// Tests how the memory that is left is read from files of the system.

#include "core/spare_memory.h"

#include <limits>
#include <map>

#include "catch.h"

using shoestring::spare_memory;

namespace {

using SystemFiles = std::map<std::string, std::string>;

int64_t available(const SystemFiles& files) {
  const auto read = [&](const std::string& path) {
    const auto found = files.find(path);
    return found == files.end() ? "" : found->second;
  };
  return spare_memory(read).available;
}

const char* const kMachine = "MemTotal:  1000000 kB\nMemFree:  10 kB\nMemAvailable:   900000 kB\n";
constexpr int64_t kMachineAvailable = int64_t{900000} * 1024;

}  // namespace

TEST_CASE("spare memory is that of the machine without control groups", "[spare_memory]") {
  CHECK(available({}) == std::numeric_limits<int64_t>::max());
  CHECK(available({{"/proc/meminfo", kMachine}}) == kMachineAvailable);
}

TEST_CASE("control groups and their ancestors limit spare memory", "[spare_memory]") {
  const std::string outer = "/sys/fs/cgroup/outer", inner = outer + "/inner";
  SystemFiles files{{"/proc/meminfo", kMachine}, {"/proc/self/cgroup", "0::/outer/inner\n"}};
  files[inner + "/memory.max"] = "max\n";
  files[inner + "/memory.current"] = "5000\n";
  CHECK(available(files) == kMachineAvailable);
  files[outer + "/memory.max"] = "70000\n";
  files[outer + "/memory.current"] = "60000\n";
  files[outer + "/memory.stat"] = "anon 100\ninactive_file 25000\n";
  CHECK(available(files) == 35000);  // cached files can be dropped
  files[inner + "/memory.max"] = "6000\n";
  CHECK(available(files) == 1000);
  files[inner + "/memory.current"] = "6500\n";
  CHECK(available(files) == 0);
  files["/sys/fs/cgroup/memory.max"] = "1\n";
  files["/proc/self/cgroup"] = "no line of the expected form\n0::\n";
  CHECK(available(files) == kMachineAvailable);
}

TEST_CASE("control groups of version 1 limit spare memory", "[spare_memory]") {
  const std::string group = "/sys/fs/cgroup/memory/job";
  SystemFiles files{{"/proc/meminfo", kMachine},
                    {"/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n3:cpuset:/\n0::/\n"}};
  files[group + "/memory.limit_in_bytes"] = "9223372036854771712\n";
  files[group + "/memory.usage_in_bytes"] = "1000\n";
  CHECK(available(files) == kMachineAvailable);
  files[group + "/memory.limit_in_bytes"] = "50000\n";
  files[group + "/memory.stat"] = "total_inactive_file 400\n";
  CHECK(available(files) == 49400);
}

TEST_CASE("this machine reports spare memory", "[spare_memory]") {
  const auto memory = spare_memory();
  CHECK(memory.available > 0);
  CHECK(memory.total >= memory.available);
}
