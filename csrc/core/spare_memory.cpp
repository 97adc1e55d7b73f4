#include "core/spare_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

#include <torch/library.h>

namespace shoestring {
namespace {

using Read = std::function<std::string(const std::string& path)>;

// Returns the number after `key` in a text of lines "key value".
std::optional<int64_t> value_of(const std::string& key, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// Returns the number that a text begins with. A group without a limit has the text "max".
std::optional<int64_t> number_in(const std::string& text) {
  int64_t value = 0;
  if (std::istringstream(text) >> value) return value;
  return std::nullopt;
}

void limit_by_group(const Read& read, const std::string& folder, bool version2, SpareMemory& memory) {
  const auto limit = number_in(read(folder + (version2 ? "/memory.max" : "/memory.limit_in_bytes")));
  const auto usage = number_in(read(folder + (version2 ? "/memory.current" : "/memory.usage_in_bytes")));
  if (!limit || !usage) return;
  const std::string key = version2 ? "inactive_file" : "total_inactive_file";
  const int64_t cache = value_of(key, read(folder + "/memory.stat")).value_or(0);
  const int64_t unused = *limit - std::max<int64_t>(0, *usage - cache);
  memory.total = std::min(memory.total, *limit);
  memory.available = std::min(memory.available, std::max<int64_t>(0, unused));
}

// Applies the limits of a group and of all its ancestors, up to the mount point.
void limit_by_groups(const Read& read, const std::string& mount, std::string group, bool version2,
                     SpareMemory& memory) {
  while (group.size() > 1) {
    limit_by_group(read, mount + group, version2, memory);
    group.erase(group.rfind('/'));
  }
  limit_by_group(read, mount, version2, memory);
}

}  // namespace

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

SpareMemory spare_memory(const Read& read) {
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  SpareMemory memory{kUnknown, kUnknown};
  const std::string machine = read("/proc/meminfo");
  if (const auto total = value_of("MemTotal:", machine)) memory.total = *total * 1024;
  if (const auto free = value_of("MemAvailable:", machine)) memory.available = *free * 1024;
  // Lines are "hierarchy:controllers:path". The line of version 2 names no controllers.
  std::istringstream groups(read("/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers(",");
    controllers.append(line, first + 1, second - first - 1).append(",");
    const std::string group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers == ",,") limit_by_groups(read, "/sys/fs/cgroup", group, true, memory);
    if (controllers.find(",memory,") != std::string::npos)
      limit_by_groups(read, "/sys/fs/cgroup/memory", group, false, memory);
  }
  return memory;
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_spare_memory", [] {
    const SpareMemory memory = spare_memory();
    return std::vector<int64_t>{memory.total, memory.available};
  });
}

}  // namespace shoestring
