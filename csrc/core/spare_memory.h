#pragma once

// Reads how much memory the system still has for this process.

#include <cstdint>
#include <functional>
#include <string>

#include <shoestring/core/export.h>

namespace shoestring {

struct SpareMemory {
  int64_t total = 0;      // bytes of memory of the machine, or of the tightest control group
  int64_t available = 0;  // bytes that this process can still use without swapping
};

/// Returns the text of a file, or "" if it cannot be read.
SHOESTRING_API std::string text_of(const std::string& path);

/// Returns the memory of the machine (MemTotal and MemAvailable), limited by the control groups of this
/// process and their ancestors, of version 1 and 2. Files that a group caches and has not used lately count
/// as available. Returns the largest int64 values where the system reports nothing. `read` is text_of, or
/// another function in tests.
SHOESTRING_API SpareMemory
spare_memory(const std::function<std::string(const std::string& path)>& read = text_of);

}  // namespace shoestring
