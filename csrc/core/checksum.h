#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace shoestring {

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

}  // namespace shoestring
