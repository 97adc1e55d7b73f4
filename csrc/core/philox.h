#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace shoestring::kernels {

struct Random4 {
  uint32_t value[4];
};

constexpr int kPhiloxRounds =
    7;  // smallest number of rounds that passes all BigCrush tests, according to Philox's authors

constexpr int64_t kRandomBlock = 256;  // number of elements whose random bits are generated together

/// Returns 128 random bits that depend only on the counter and the key. The generator is Philox 4x32 (Salmon,
/// Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
SHOESTRING_HOST_DEVICE Random4 philox(Random4 counter, uint32_t key0, uint32_t key1,
                                      int rounds = kPhiloxRounds) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * counter.value[0];
    const uint64_t b = uint64_t{0xcd9e8d57u} * counter.value[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.value[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.value[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9e3779b9u;  // Philox's constant, from the golden ratio
    key1 += 0xbb67ae85u;  // Philox's constant, from the square root of 3
  }
  return counter;
}

/// Returns Philox's random bits for the counter (index, step) and the key `seed`. They do not depend on the
/// device or the launch configuration.
SHOESTRING_HOST_DEVICE Random4 philox_at(uint64_t seed, uint64_t step, uint64_t index) {
  return philox({{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                  static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)}},
                static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace shoestring::kernels
