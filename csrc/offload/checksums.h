#pragma once

// Checksums of memory that goes to a file and comes back.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace shoestring::offload {

/// Returns a checksum of `size` bytes. Each step of a lane is a bijection of the lane and of the word, so a
/// change of any one word changes the result of its lane.
inline uint32_t checksum(const void* memory, int64_t size) {
  constexpr int64_t kLanes = 32, kStep = kLanes * 4;
  std::array<uint32_t, kLanes> lanes{}, words;
  const auto step = [&] {
    for (int64_t i = 0; i < kLanes; ++i) {
      const uint32_t x = lanes[i] ^ words[i];
      lanes[i] = ((x << 13) | (x >> 19)) + 0x9e3779b9U;
    }
  };
  const char* from = static_cast<const char*>(memory);
  int64_t left = size;
  for (; left >= kStep; left -= kStep, from += kStep) {
    std::memcpy(words.data(), from, kStep);
    step();
  }
  if (left > 0) {
    words.fill(0);
    std::memcpy(words.data(), from, static_cast<size_t>(left));
    step();
  }
  auto sum = static_cast<uint32_t>(size);
  for (const uint32_t lane : lanes) sum = (sum ^ lane) * 0x01000193U;  // the multiplier is odd: a bijection
  return sum;
}

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
