#pragma once

// Checksums of memory that goes to a file and comes back.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/checksum.h"

namespace shoestring::offload {

/// The checksums of a range of bytes, one for each unit of it. Units begin at 0 and again at `split`.
class Checksums {
 public:
  Checksums() = default;
  Checksums(int64_t size, int64_t unit, int64_t split = 0)
      : size_(size), unit_(unit), split_(split), first_(units(split)),
        sums_(static_cast<size_t>(first_ + units(size - split))) {}

  /// Calls body(begin, size, sum) for each whole unit within the bytes [begin, end).
  template <class Body>
  void for_each(int64_t begin, int64_t end, Body body) {
    int64_t i = begin < split_ ? units(begin) : first_ + units(begin - split_);
    for (; i < static_cast<int64_t>(sums_.size()); ++i) {
      const bool is_first = i < first_;
      const int64_t from = is_first ? i * unit_ : split_ + (i - first_) * unit_;
      const int64_t to = std::min(from + unit_, is_first ? split_ : size_);
      if (to > end) break;
      body(from, to - from, sums_[static_cast<size_t>(i)]);
    }
  }

 private:
  int64_t units(int64_t bytes) const { return (bytes + unit_ - 1) / unit_; }
  int64_t size_ = 0, unit_ = 1, split_ = 0, first_ = 0;
  std::vector<uint32_t> sums_;
};

}  // namespace shoestring::offload
