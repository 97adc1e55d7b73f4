// Tests the allocator of CPU tensors: what tensors may rely on, exact counts, threads, forks and errors.

#include <shoestring/core/host_allocator.h>

#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "catch.h"
#include "checkpoint/memory_meter.h"
#include "child.h"

namespace allocator = shoestring::host_allocator;
using allocator::HostAllocatorOptions;
using Catch::Contains;

namespace {

// Uses the allocator in a scope.
struct Enabled {
  explicit Enabled(const HostAllocatorOptions& options = {}) { allocator::enable(options); }
  ~Enabled() { allocator::disable(); }
};

at::Tensor bytes(int64_t count) { return at::empty({count}, at::kByte); }

bool is_64_aligned(const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 64 == 0; }

// Sizes on both sides of the limit below which the C library allocates.
const std::vector<int64_t> kSizes{1, 63, 64, 4096, 65535, 65536, 65537, 1 << 20, (5 << 20) + 3};

}  // namespace

TEST_CASE("tensors stay valid when the host allocator is switched on and off", "[host_allocator]") {
  c10::Allocator* const before = c10::GetCPUAllocator();
  std::vector<at::Tensor> tensors;
  for (const int64_t size : kSizes) tensors.push_back(bytes(size).fill_(1));
  allocator::enable();
  CHECK(allocator::is_enabled());
  CHECK(c10::GetCPUAllocator() != before);
  for (const int64_t size : kSizes) tensors.push_back(bytes(size).fill_(2));
  for (const auto& t : tensors) CHECK(is_64_aligned(t));
  allocator::disable();
  CHECK(!allocator::is_enabled());
  CHECK(c10::GetCPUAllocator() == before);
  for (size_t i = 0; i < tensors.size(); ++i)
    CHECK(tensors[i].eq(i < kSizes.size() ? 1 : 2).all().item<bool>());
  // A tensor keeps its allocator, and grows with it.
  const int64_t held = allocator::stats().allocated;
  tensors.back().resize_({9 << 20});
  CHECK(allocator::stats().allocated == held + (9 << 20) - kSizes.back());
  CHECK(tensors.back().slice(0, 0, kSizes.back()).eq(2).all().item<bool>());
  tensors.clear();
  CHECK(allocator::stats().allocated == 0);
}

TEST_CASE("the host allocator counts exactly", "[host_allocator]") {
  const Enabled enabled;
  allocator::reset_peaks();
  const auto start = allocator::stats();
  int64_t sum = 0;
  {
    std::vector<at::Tensor> tensors;
    for (const int64_t size : kSizes) {
      tensors.push_back(bytes(size));
      sum += size;
    }
    CHECK(allocator::stats().allocated - start.allocated == sum);
    CHECK(allocator::stats().allocations - start.allocations == static_cast<int64_t>(kSizes.size()));
  }
  bytes(100000);
  const auto end = allocator::stats();
  CHECK(end.allocated == start.allocated);
  CHECK(end.peak_allocated - start.allocated == sum);
  CHECK(end.peak_held >= end.peak_allocated);
  CHECK(end.held >= end.allocated);
  allocator::reset_peaks();
  CHECK(allocator::stats().peak_allocated == start.allocated);
  allocator::empty_cache();
  CHECK(allocator::stats().held < end.held);
  CHECK(allocator::stats().returned > start.returned);
}

TEST_CASE("tensors without bytes take no memory of the host allocator", "[host_allocator]") {
  const Enabled enabled;
  const auto start = allocator::stats();
  at::Tensor t = bytes(0);
  CHECK(t.data_ptr() == nullptr);
  CHECK(allocator::stats().allocations == start.allocations);
  t.resize_({70000}).fill_(3);
  CHECK(allocator::stats().allocated == start.allocated + 70000);
  t.resize_({0});
  t = at::Tensor();
  CHECK(allocator::stats().allocated == start.allocated);
}

TEST_CASE("copies and lazy clones of the host allocator's tensors are independent", "[host_allocator]") {
  const Enabled enabled;
  const at::Tensor t = bytes(100001).fill_(4);
  at::Tensor copy = at::_lazy_clone(t);
  copy.fill_(5);
  CHECK(t.eq(4).all().item<bool>());
  CHECK(copy.eq(5).all().item<bool>());
  c10::Allocator* const raw = c10::GetCPUAllocator();
  void* data = raw->raw_allocate(77777);
  REQUIRE(data != nullptr);
  raw->raw_deallocate(data);
}

TEST_CASE("errors of the host allocator", "[host_allocator]") {
  CHECK_THROWS_WITH(allocator::enable(HostAllocatorOptions().limit(0)),
                    Contains("host_allocator: limit: expected a positive number of bytes, got 0"));
  CHECK(!allocator::is_enabled());
  const int64_t before = allocator::stats().allocated;
  {
    const Enabled enabled(HostAllocatorOptions().limit(before + (4 << 20)));
    const at::Tensor t = bytes(3 << 20);
    CHECK_THROWS_AS(bytes(2 << 20), c10::OutOfMemoryError);
    CHECK_THROWS_WITH(bytes(2 << 20), Contains("not enough memory: expected that CPU tensors hold at most") &&
                                          Contains("2097152 more are needed. Raise the limit"));
    CHECK(allocator::stats().allocated == before + (3 << 20));
    CHECK(bytes(1 << 20).defined());
    allocator::enable();  // a second call replaces the limit
    CHECK(bytes(20 << 20).defined());
  }
  const Enabled enabled;
  c10::Allocator* const raw = c10::GetCPUAllocator();
  for (const size_t size : {std::numeric_limits<size_t>::max(), size_t{1} << 63, size_t{1} << 47,
                            std::numeric_limits<size_t>::max() - 100})
    CHECK_THROWS_WITH(raw->allocate(size), Contains("not enough memory: the system refused"));
  CHECK(allocator::stats().allocated == before);
}

TEST_CASE("profilers see the host allocator's memory", "[host_allocator]") {
  const Enabled enabled;
  const at::Tensor old = bytes(70000);
  shoestring::activations::MemoryMeter meter;
  meter.begin(at::kCPU);
  for (const int64_t size : kSizes) {
    const at::Tensor t = bytes(size);
    CHECK(meter.current() == size);
  }
  CHECK(meter.peak() == kSizes.back());
  meter.end();
}

TEST_CASE("threads allocate tensors and other threads free them", "[host_allocator]") {
  const Enabled enabled;
  const int64_t before = allocator::stats().allocated;
  constexpr int kMakers = 3, kTensors = 400;
  struct Made {
    at::Tensor tensor;
    int key;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Made> made;
  int makers = kMakers;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kMakers; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < kTensors; ++i) {
        const int key = static_cast<int>(random() % 251);
        const uint32_t most = 1u << (10 + random() % 11);
        Made each{bytes(1 + static_cast<int64_t>(random() % most)).fill_(key), key};
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return made.size() < 30; });
        made.push_back(std::move(each));
        changed.notify_all();
      }
      const std::lock_guard lock(mutex);
      --makers;
      changed.notify_all();
    });
  }
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (true) {
        Made each;
        {
          std::unique_lock lock(mutex);
          changed.wait(lock, [&] { return !made.empty() || makers == 0; });
          if (made.empty()) return;
          each = std::move(made.front());
          made.pop_front();
          changed.notify_all();
        }
        if (!each.tensor.eq(each.key).all().item<bool>()) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(allocator::stats().allocated == before);
}

TEST_CASE("a process forks while its threads allocate", "[host_allocator]") {
  const Enabled enabled;
  const at::Tensor kept = bytes(1 << 20).fill_(7);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      while (!stop) bytes(300000);
    });
  int failed = 0;
  for (int i = 0; i < 30; ++i) {
    failed += in_child([&] {
                const int64_t before = allocator::stats().allocated;
                const at::Tensor own = bytes(2 << 20).fill_(8);
                if (allocator::stats().allocated != before + (2 << 20)) return 1;
                return kept.eq(7).all().item<bool>() && own.eq(8).all().item<bool>() ? 0 : 2;
              }) != 0;
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(failed == 0);
  CHECK(kept.eq(7).all().item<bool>());
}
