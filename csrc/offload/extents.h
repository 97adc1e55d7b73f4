#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace shoestring::offload {

/// Keeps track of the free extents of a file or of a slab of memory. An allocation takes the first free
/// extent that is large enough; neighbouring free extents are merged.
class Extents {
 public:
  /// Adds `size` free bytes at offset `from`, by which the file or slab has grown at its end.
  void grow(int64_t from, int64_t size) { free(from, size); }

  /// Allocates `size` bytes. Returns their offset, or -1 if no free extent is large enough.
  int64_t allocate(int64_t size) {
    for (auto i = free_.begin(); i != free_.end(); ++i) {
      if (i->second < size) continue;
      const auto [offset, length] = *i;
      free_.erase(i);
      if (length > size) free_.emplace(offset + size, length - size);
      return offset;
    }
    return -1;
  }

  void free(int64_t offset, int64_t size) {
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += size;
        return;
      }
    }
    free_.emplace(offset, size);
  }

  /// Returns how many bytes are free at the end of a file or slab of `end` bytes.
  int64_t at_end(int64_t end) const {
    if (free_.empty()) return 0;
    const auto& [offset, length] = *free_.rbegin();
    return offset + length == end ? length : 0;
  }

 private:
  std::map<int64_t, int64_t> free_;  // sizes of the free extents, by offset
};

}  // namespace shoestring::offload
