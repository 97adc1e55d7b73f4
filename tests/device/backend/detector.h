#pragma once

// The detector of races. Each operation says which bytes it reads and writes. When it is added to a stream,
// every earlier access to these bytes must be ordered before it by the clocks. Findings therefore depend only
// on what the host calls, and not on when streams run.

#include <cstdint>
#include <string>
#include <vector>

#include "clocks.h"
#include "stacks.h"

namespace simdev {

struct Position;

/// Bytes that an operation accesses, by the addresses that tensors hold.
struct Range {
  char* begin = nullptr;
  char* end = nullptr;
  bool is_write = false;
};

/// An access that has been added to a stream.
struct Access {
  Range range;
  int stream = 0;
  uint64_t number = 0;  // number of the operation in its stream
  const char* name = "";
  StackPtr stack;
};

/// Checks accesses of a new operation, and records them. The caller holds records().
void check_accesses(const Position& position, const Clock& clock, const char* name,
                    const std::vector<Range>& ranges);

/// Checks one access against the accesses in `seen`, and records it there.
void check_access(std::vector<Access>& seen, const Range& range, const Position& position, const Clock& clock,
                  const char* name);

/// Records a finding. The caller holds records().
void add_finding(std::string text);
/// Describes an access by its operation and stack.
std::string describe(const Access& access);

/// Returns the findings since the last call.
std::vector<std::string> take_findings();

}  // namespace simdev
