#include "detector.h"

#include <utility>

#include <c10/util/StringUtil.h>

#include "device_memory.h"
#include "pinned_memory.h"
#include "streams.h"

namespace simdev {
namespace {

std::vector<std::string>& findings() {
  static auto& all = *new std::vector<std::string>;
  return all;
}

std::string operation(const char* name, int stream, uint64_t number) {
  return c10::str(name, " (stream ", stream % kStreamsPerDevice, " of device ", device_of_stream(stream),
                  ", operation ", number, ")");
}

const char* verb(bool is_write) { return is_write ? "writes" : "reads"; }

}  // namespace

void add_finding(std::string text) {
  if (findings().size() < 1000) findings().push_back(std::move(text));
}

std::string describe(const Access& access) {
  return operation(access.name, access.stream, access.number) + ", which was called at\n" +
         text_of(access.stack);
}

void check_access(std::vector<Access>& seen, const Range& range, const Position& position, const Clock& clock,
                  const char* name) {
  for (Access& other : seen) {
    const bool overlaps = other.range.begin < range.end && range.begin < other.range.end;
    if (!overlaps || !(other.range.is_write || range.is_write)) continue;
    if (other.stream == position.stream || clock[other.stream] >= other.number) continue;
    add_finding(c10::str("race: ", operation(name, position.stream, position.number), " ",
                         verb(range.is_write), " ", range.end - range.begin, " bytes that ",
                         operation(other.name, other.stream, other.number), " ", verb(other.range.is_write),
                         ", and nothing orders them.\n  The later one was called at\n",
                         text_of(prepared_stack()), config().stacks ? "" : python_stack(),
                         "  The earlier one was called at\n", text_of(other.stack)));
    other.number = 0;  // one finding is enough
  }
  // Drop earlier accesses that are ordered before this one: whatever conflicts with them conflicts with this
  // one.
  std::erase_if(seen, [&](const Access& other) {
    const bool inside = other.range.begin >= range.begin && other.range.end <= range.end;
    const bool ordered = clock[other.stream] >= other.number;
    return inside && (range.is_write ? ordered : !other.range.is_write && other.stream == position.stream);
  });
  seen.push_back({range, position.stream, position.number, name, prepared_stack()});
}

void check_accesses(const Position& position, const Clock& clock, const char* name,
                    const std::vector<Range>& ranges) {
  for (const Range& range : ranges) {
    if (range.begin >= range.end) continue;
    if (device_of(range.begin) >= 0) {
      check_device_access(range, position, clock, name);
    } else {
      check_pinned_access(range, position, clock, name);
    }
  }
}

std::vector<std::string> take_findings() {
  const std::lock_guard lock(records());
  return std::exchange(findings(), {});
}

}  // namespace simdev
