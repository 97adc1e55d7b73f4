#pragma once

// Allocates large blocks of host memory from one range of addresses in huge pages.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <shoestring/core/export.h>

namespace shoestring {

struct HeapStats {
  int64_t used = 0;           // bytes of blocks in use, each rounded up to kUnit
  int64_t resident = 0;       // bytes of huge pages that a block has used and that were not returned since
  int64_t peak_resident = 0;  // maximum of `resident` since the start or since reset_peak()
  int64_t taken = 0;          // bytes of huge pages that allocations took from the system so far
  int64_t returned = 0;       // bytes of huge pages that were returned to the system so far
};

/// A best-fit heap of large blocks. The heap reserves a range of addresses once, uses it from the bottom up,
/// splits free blocks, and merges free neighbours. Free memory stays resident, so that its next use costs no
/// page fault, as long as the resident memory is at most the allowance:
///
///     allowance = maximum of used bytes + kSlack
///
/// An allocation that would exceed the allowance first returns whole huge pages of free blocks to the system.
/// Free memory is also returned while the system is short of memory.
///
/// Thread-safe: a block may be freed by any thread. A forked child has its own copy of the heap; whoever
/// forks calls lock() before and unlock() after it, in both processes.
class SHOESTRING_API HostHeap {
 public:
  static constexpr size_t kUnit = 4096;  // sizes and addresses are multiples of it
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kSlack = kHugePage;

  /// Reserves up to `address_space` bytes of addresses, or fewer if the process may not have as many. `spare`
  /// returns how many bytes the process may still take from the system before it should return free memory; a
  /// negative number says how many bytes it should return. The heap calls `spare` with its lock held, at most
  /// once per `interval`, when memory is allocated.
  HostHeap(size_t address_space, std::function<int64_t()> spare,
           std::chrono::milliseconds interval = std::chrono::milliseconds(100));
  ~HostHeap();
  HostHeap(const HostHeap&) = delete;
  HostHeap& operator=(const HostHeap&) = delete;

  /// Returns an uninitialised block of at least `bytes` bytes, aligned to kUnit, or nullptr if the range of
  /// addresses or the system's memory is exhausted.
  void* allocate(size_t bytes);
  /// Frees a block that allocate() returned. Returns the number of bytes for which allocate() was called.
  size_t free(void* block);
  /// Tells whether an address lies in the reserved range.
  bool owns(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin_ && at < limit_;
  }
  /// Returns all whole huge pages of free blocks to the system, and forgets the maximum from which the
  /// allowance follows. Returns the number of bytes that were returned.
  int64_t trim();
  /// Sets a further limit of the allowance. Blocks in use may need more.
  void set_limit(size_t bytes);

  HeapStats stats();
  void reset_peak();

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Block {
    size_t size;
    size_t requested;  // 0 if the block is free
  };
  using Blocks = std::map<uintptr_t, Block>;

  struct Place {
    uintptr_t at = 0;
    uintptr_t block = 0;  // the free block, or 0 if none is large enough
    size_t fresh = 0;     // bytes of huge pages that this place takes from the system
  };

  Place find(size_t size) const;
  bool extend(size_t size, Place& place);
  void take(const Place& place, size_t size, size_t requested);
  void check_spare();
  void make_room(size_t fresh);
  size_t return_pages(size_t bytes);
  size_t fresh_bytes(uintptr_t from, size_t size) const;
  void merge(Blocks::iterator block);
  size_t page_of(uintptr_t at) const { return (at - begin_) / kHugePage; }

  const std::function<int64_t()> spare_;
  const std::chrono::milliseconds interval_;
  std::mutex mutex_;
  uintptr_t begin_ = 0, top_ = 0, limit_ = 0;    // reserved range, and the end of its writable part
  Blocks blocks_;                                // all blocks below top_, without gaps
  std::set<std::pair<size_t, uintptr_t>> free_;  // size and address of the free blocks
  std::vector<bool> resident_;                   // whether each huge page below top_ counts as resident
  HeapStats stats_;
  size_t most_used_ = 0;             // maximum of used bytes since the last trim()
  size_t most_resident_ = SIZE_MAX;  // the limit of set_limit()
  int64_t spare_now_ = 0;            // the result of spare_(), less the bytes taken since
  int64_t next_check_ = 0;           // milliseconds of the clock at which spare_() is called again
};

}  // namespace shoestring
