#include "offload/disturb.h"

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

namespace shoestring::offload::io {
namespace {

std::atomic<int64_t> max_delay_us{0}, until_failure{-1}, state{1};
std::atomic<int> error{0};
std::atomic<bool> short_transfers{false}, reserves{true};

}  // namespace

void disturb(const Disturbance& d) {
  max_delay_us = d.max_delay_us;
  error = d.error;
  short_transfers = d.short_transfers;
  reserves = d.reserves;
  until_failure = d.fail_after;
}

int64_t random_delay_us() {
  const int64_t most = max_delay_us.load(std::memory_order_relaxed);
  if (most == 0) return 0;
  uint64_t x = static_cast<uint64_t>(state.fetch_add(1)) *
               0x9E3779B97F4A7C15u;  // hashes a counter to random bits (splitmix64)
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  return static_cast<int64_t>((x ^ x >> 31) % static_cast<uint64_t>(most));
}

void delay() {
  if (const int64_t us = random_delay_us(); us > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(us));
}

std::optional<ssize_t> failure() {
  if (until_failure.load(std::memory_order_relaxed) < 0 || until_failure.fetch_sub(1) != 0)
    return std::nullopt;
  return -error;
}

int reserve(int fd, int64_t offset, int64_t size) {
  if (!reserves) return EOPNOTSUPP;
  while (::fallocate(fd, 0, offset, size) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

ssize_t shortened(ssize_t result, int64_t asked) {
  if (short_transfers && result == asked && asked > 8192) return asked / 8192 * 4096;
  return result;
}

}  // namespace shoestring::offload::io
