// Tests the heap of large host blocks: placement, counts, the return of memory, threads and forks.

#include "core/host_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "catch.h"
#include "child.h"

using shoestring::HeapStats;
using shoestring::HostHeap;

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kPage = HostHeap::kHugePage;
constexpr int64_t kPlenty = std::numeric_limits<int64_t>::max() / 2;

struct PlentyHeap : HostHeap {
  PlentyHeap() : HostHeap(size_t{4} << 30, [] { return kPlenty; }) {}
};

int64_t allowance(size_t most_used) { return static_cast<int64_t>(most_used + HostHeap::kSlack); }

// Returns the bytes of a range that are in physical memory.
size_t resident_bytes(void* block, size_t bytes) {
  std::vector<unsigned char> pages(bytes / 4096);
  REQUIRE(::mincore(block, bytes, pages.data()) == 0);
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](auto p) { return p & 1; })) * 4096;
}

// Fills a block with bytes that follow from a key, and tells whether they are still there.
void fill_block(void* block, size_t bytes, unsigned key) {
  auto* at = static_cast<unsigned char*>(block);
  for (size_t i = 0; i < bytes; i += 511) at[i] = static_cast<unsigned char>(key + i);
  at[bytes - 1] = static_cast<unsigned char>(key);
}
bool block_is_filled(const void* block, size_t bytes, unsigned key) {
  const auto* at = static_cast<const unsigned char*>(block);
  if (at[bytes - 1] != static_cast<unsigned char>(key)) return false;
  for (size_t i = 0; i + 1 < bytes; i += 511)
    if (at[i] != static_cast<unsigned char>(key + i)) return false;
  return true;
}

}  // namespace

TEST_CASE("a heap splits free blocks and merges free neighbours", "[host_heap]") {
  PlentyHeap heap;
  void *a = heap.allocate(3 * kMiB), *b = heap.allocate(5 * kMiB), *c = heap.allocate(7 * kMiB);
  CHECK(heap.owns(a));
  CHECK(!heap.owns(&heap));
  // Free neighbours become one block, whichever is freed first.
  CHECK(heap.free(b) == 5 * kMiB);
  CHECK(heap.free(a) == 3 * kMiB);
  void* joined = heap.allocate(8 * kMiB);
  CHECK(joined == a);
  // The smallest free block that is large enough is taken: here the hole of 3 MiB, not the one of 8 MiB.
  heap.free(joined);
  void *e = heap.allocate(8 * kMiB), *f = heap.allocate(3 * kMiB), *g = heap.allocate(kMiB);
  heap.free(f);
  heap.free(e);
  void* d = heap.allocate(2 * kMiB);
  CHECK(e == a);
  CHECK(d == f);
  heap.free(g);
  CHECK(heap.stats().used == static_cast<int64_t>(9 * kMiB));
  heap.free(c);
  heap.free(d);
  CHECK(heap.stats().used == 0);
  CHECK(heap.allocate(18 * kMiB) == a);
}

TEST_CASE("a heap counts requested and rounded bytes", "[host_heap]") {
  PlentyHeap heap;
  void* block = heap.allocate(4097);
  CHECK(reinterpret_cast<uintptr_t>(block) % HostHeap::kUnit == 0);
  CHECK(heap.stats().used == 8192);
  CHECK(heap.stats().resident == static_cast<int64_t>(kPage));
  CHECK(heap.free(block) == 4097);
  CHECK(heap.stats().used == 0);
  CHECK(heap.stats().resident == static_cast<int64_t>(kPage));  // kept for reuse
  CHECK(heap.trim() == static_cast<int64_t>(kPage));
  CHECK(heap.stats().resident == 0);
  CHECK(heap.stats().peak_resident == static_cast<int64_t>(kPage));
  heap.reset_peak();
  CHECK(heap.stats().peak_resident == 0);
}

TEST_CASE("a freed block is reused without new memory", "[host_heap]") {
  PlentyHeap heap;
  void* block = heap.allocate(64 * kMiB);
  const int64_t taken = heap.stats().taken;
  for (int i = 0; i < 100; ++i) {
    heap.free(block);
    REQUIRE(heap.allocate(64 * kMiB) == block);
  }
  CHECK(heap.stats().taken == taken);
  CHECK(heap.stats().returned == 0);
}

TEST_CASE("a heap returns free memory before it holds more than the allowance", "[host_heap]") {
  PlentyHeap heap;
  void *a = heap.allocate(40 * kMiB), *b = heap.allocate(40 * kMiB);
  std::memset(a, 1, 40 * kMiB);
  std::memset(b, 2, 40 * kMiB);
  heap.free(a);
  // The free block of 40 MiB is too small for 60 MiB, and 40 + 40 + 60 MiB are more than the allowance.
  void* c = heap.allocate(60 * kMiB);
  std::memset(c, 3, 60 * kMiB);
  CHECK(heap.stats().resident <= allowance(100 * kMiB));
  CHECK(heap.stats().returned >= static_cast<int64_t>(36 * kMiB));
  CHECK(resident_bytes(a, 40 * kMiB) <= 4 * kMiB);
  // A block is placed on resident pages if there are any, and its pages are taken again otherwise.
  void* d = heap.allocate(30 * kMiB);
  std::memset(d, 4, 30 * kMiB);
  CHECK(heap.stats().resident <= allowance(130 * kMiB));
  CHECK(std::all_of(static_cast<char*>(b), static_cast<char*>(b) + 40 * kMiB, [](char v) { return v == 2; }));
}

TEST_CASE("a limit lowers the allowance", "[host_heap]") {
  PlentyHeap heap;
  heap.set_limit(50 * kMiB);
  for (const size_t size : {20, 30, 40, 44}) {
    void* block = heap.allocate(size * kMiB);
    CHECK(heap.stats().resident <= static_cast<int64_t>(50 * kMiB));
    heap.free(block);
  }
  void* more = heap.allocate(80 * kMiB);  // blocks in use may need more than the limit
  CHECK(more != nullptr);
}

TEST_CASE("a heap returns free memory while the system is short of it", "[host_heap]") {
  int64_t spare = kPlenty;
  HostHeap heap(size_t{1} << 30, [&] { return spare; }, std::chrono::milliseconds(0));
  void *a = heap.allocate(100 * kMiB), *b = heap.allocate(10 * kMiB);
  std::memset(a, 1, 100 * kMiB);
  heap.free(a);
  CHECK(heap.stats().returned == 0);
  spare = -static_cast<int64_t>(30 * kMiB);  // as many bytes should be returned
  void* c = heap.allocate(4096);
  CHECK(heap.stats().returned >= static_cast<int64_t>(30 * kMiB));
  CHECK(heap.stats().returned <= static_cast<int64_t>(32 * kMiB));
  spare = std::numeric_limits<int64_t>::min() / 2;
  void* d = heap.allocate(4096);
  CHECK(heap.stats().resident <= static_cast<int64_t>(10 * kMiB + 3 * kPage));
  CHECK(resident_bytes(a, 100 * kMiB) <= 2 * kPage);
  for (void* block : {b, c, d}) heap.free(block);
}

TEST_CASE("a heap refuses what does not fit its addresses", "[host_heap]") {
  HostHeap heap(64 * kMiB, [] { return kPlenty; });
  CHECK(heap.allocate(std::numeric_limits<size_t>::max()) == nullptr);
  CHECK(heap.allocate(std::numeric_limits<size_t>::max() - 4000) == nullptr);
  CHECK(heap.allocate(64 * kMiB + 1) == nullptr);
  void* all = heap.allocate(64 * kMiB);
  REQUIRE(all != nullptr);
  fill_block(all, 64 * kMiB, 9);
  CHECK(heap.allocate(1) == nullptr);
  CHECK(heap.stats().used == static_cast<int64_t>(64 * kMiB));
  heap.free(all);
  CHECK(heap.allocate(1) != nullptr);
}

TEST_CASE("blocks of a heap keep their contents and do not overlap", "[host_heap]") {
  PlentyHeap heap;
  std::mt19937 random(7);
  struct Live {
    void* block;
    size_t bytes;
    unsigned key;
  };
  std::vector<Live> live;
  int64_t used = 0, most = 0;
  for (unsigned i = 0; i < 4000; ++i) {
    if (live.size() > 40 || (!live.empty() && random() % 2)) {
      std::swap(live[random() % live.size()], live.back());
      const Live gone = live.back();
      live.pop_back();
      REQUIRE(block_is_filled(gone.block, gone.bytes, gone.key));
      REQUIRE(heap.free(gone.block) == gone.bytes);
      used -= static_cast<int64_t>((gone.bytes + 4095) / 4096 * 4096);
    } else {
      const size_t most_bytes = size_t{1} << (12 + random() % 11);
      const size_t bytes = 1 + random() % most_bytes;
      const int64_t taken = heap.stats().taken;
      live.push_back({heap.allocate(bytes), bytes, i});
      fill_block(live.back().block, bytes, i);
      used += static_cast<int64_t>((bytes + 4095) / 4096 * 4096);
      most = std::max(most, used);
      // A free block that holds no whole huge page may keep parts of two of them.
      const int64_t gaps = static_cast<int64_t>(live.size() + 1);
      const int64_t bound =
          std::max(allowance(static_cast<size_t>(most)), used + gaps * 2 * static_cast<int64_t>(kPage));
      if (heap.stats().taken > taken) REQUIRE(heap.stats().resident <= bound);
    }
    REQUIRE(heap.stats().used == used);
  }
  for (const Live& each : live) {
    CHECK(block_is_filled(each.block, each.bytes, each.key));
    heap.free(each.block);
  }
  CHECK(heap.stats().used == 0);
  heap.trim();
  CHECK(heap.stats().resident == 0);
  CHECK(heap.stats().taken == heap.stats().returned);
}

TEST_CASE("a child of fork uses its own copy of a heap", "[host_heap]") {
  PlentyHeap heap;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      while (!stop) heap.free(heap.allocate(kMiB));
    });
  void* kept = heap.allocate(3 * kMiB);
  fill_block(kept, 3 * kMiB, 5);
  for (int i = 0; i < 20; ++i) {
    heap.lock();  // the fork handlers of the process's allocator do so
    const int status = in_child([&] {
      heap.unlock();
      if (!block_is_filled(kept, 3 * kMiB, 5)) return 1;
      heap.free(kept);
      heap.trim();
      void* own = heap.allocate(20 * kMiB);
      fill_block(own, 20 * kMiB, 6);
      return block_is_filled(own, 20 * kMiB, 6) ? 0 : 2;
    });
    heap.unlock();
    REQUIRE(status == 0);
    REQUIRE(block_is_filled(kept, 3 * kMiB, 5));
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  heap.free(kept);
  CHECK(heap.stats().used == 0);
}
