#include "core/host_heap.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <sys/mman.h>
#include <time.h>

namespace shoestring {
namespace {

// Number of free blocks, from the smallest that is large enough, among which the heap looks for resident
// memory.
constexpr int kCandidates = 16;
constexpr size_t kLeastAddresses = size_t{1} << 30;

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

HostHeap::HostHeap(size_t address_space, std::function<int64_t()> spare, std::chrono::milliseconds interval)
    : spare_(std::move(spare)), interval_(interval) {
  // Reserved addresses need no memory. A limit on the address space (ulimit -v) may refuse the first sizes.
  for (size_t size = round_up(address_space, kHugePage); size >= std::min(address_space, kLeastAddresses);
       size = round_up(size / 2, kHugePage)) {
    void* range = ::mmap(nullptr, size + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (range == MAP_FAILED) {
      if (size == kHugePage) break;
      continue;
    }
    const auto first = reinterpret_cast<uintptr_t>(range);
    begin_ = top_ = round_up(first, kHugePage);
    limit_ = begin_ + size;
    if (begin_ > first) ::munmap(range, begin_ - first);
    if (const size_t rest = first + kHugePage - begin_; rest > 0)
      ::munmap(reinterpret_cast<void*>(limit_), rest);
#if defined(MADV_HUGEPAGE)
    // madvise() is only a hint, so its errors are ignored.
    ::madvise(reinterpret_cast<void*>(begin_), size, MADV_HUGEPAGE);
#endif
    break;
  }
}

HostHeap::~HostHeap() {
  if (limit_ > begin_) ::munmap(reinterpret_cast<void*>(begin_), limit_ - begin_);
}

void* HostHeap::allocate(size_t bytes) {
  if (bytes > limit_ - begin_) return nullptr;
  const size_t size = std::max(kUnit, round_up(bytes, kUnit));
  std::lock_guard guard(mutex_);
  check_spare();
  Place place = find(size);
  if (place.block == 0 && !extend(size, place)) return nullptr;
  stats_.used += static_cast<int64_t>(size);
  most_used_ = std::max(most_used_, static_cast<size_t>(stats_.used));
  take(place, size, bytes);
  return reinterpret_cast<void*>(place.at);
}

// Best fit. Of several free blocks, the heap prefers one whose pages are resident, because a page fault costs
// more than a larger remainder. The block is placed at that end of the free block that has more such pages.
HostHeap::Place HostHeap::find(size_t size) const {
  Place best;
  best.fresh = std::numeric_limits<size_t>::max();
  int candidates = 0;
  for (auto it = free_.lower_bound({size, 0}); it != free_.end() && candidates < kCandidates;
       ++it, ++candidates) {
    const auto [extent, block] = *it;
    for (const uintptr_t at : {block, block + extent - size}) {
      const size_t fresh = fresh_bytes(at, size);
      if (fresh < best.fresh) best = {at, block, fresh};
      if (extent == size) break;
    }
    if (best.fresh == 0) break;
  }
  return best;
}

// Makes more of the reserved range writable and appends it to the last block if that is free.
bool HostHeap::extend(size_t size, Place& place) {
  const auto last = blocks_.empty() ? blocks_.end() : std::prev(blocks_.end());
  const bool joins = last != blocks_.end() && last->second.requested == 0;
  const uintptr_t at = joins ? last->first : top_;
  if (size > limit_ - at) return false;
  const uintptr_t end = begin_ + round_up(at + size - begin_, kHugePage);
  if (::mprotect(reinterpret_cast<void*>(top_), end - top_, PROT_READ | PROT_WRITE) != 0) return false;
  resident_.resize(page_of(end), false);
  if (joins) {
    free_.erase({last->second.size, at});
    last->second.size = end - at;
  } else {
    blocks_.emplace(at, Block{end - at, 0});
  }
  free_.emplace(end - at, at);
  top_ = end;
  place = {at, at, fresh_bytes(at, size)};
  return true;
}

void HostHeap::take(const Place& place, size_t size, size_t requested) {
  const auto whole = blocks_.find(place.block);
  const size_t extent = whole->second.size;
  free_.erase({extent, place.block});
  const size_t before = place.at - place.block, after = extent - before - size;
  auto block = whole;
  if (before > 0) {
    whole->second.size = before;
    free_.emplace(before, place.block);
    block = blocks_.emplace_hint(std::next(whole), place.at, Block{size, requested});
  } else {
    block->second = {size, requested};
  }
  if (after > 0) {
    blocks_.emplace_hint(std::next(block), place.at + size, Block{after, 0});
    free_.emplace(after, place.at + size);
  }
  if (place.fresh > 0) {
    make_room(place.fresh);
    std::fill(resident_.begin() + page_of(place.at), resident_.begin() + page_of(place.at + size - 1) + 1,
              true);
    stats_.resident += static_cast<int64_t>(place.fresh);
    stats_.taken += static_cast<int64_t>(place.fresh);
    stats_.peak_resident = std::max(stats_.peak_resident, stats_.resident);
  }
}

size_t HostHeap::free(void* memory) {
  std::lock_guard guard(mutex_);
  const auto block = blocks_.find(reinterpret_cast<uintptr_t>(memory));
  const size_t requested = std::exchange(block->second.requested, 0);
  stats_.used -= static_cast<int64_t>(block->second.size);
  merge(block);
  return requested;
}

void HostHeap::merge(Blocks::iterator block) {
  if (const auto next = std::next(block); next != blocks_.end() && next->second.requested == 0) {
    free_.erase({next->second.size, next->first});
    block->second.size += next->second.size;
    blocks_.erase(next);
  }
  if (block != blocks_.begin()) {
    if (const auto previous = std::prev(block); previous->second.requested == 0) {
      free_.erase({previous->second.size, previous->first});
      previous->second.size += block->second.size;
      blocks_.erase(block);
      block = previous;
    }
  }
  free_.emplace(block->second.size, block->first);
}

// Asks from time to time how much memory the system has left, and returns free memory if it is too little.
void HostHeap::check_spare() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  const int64_t now = int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1000000;
  if (now < next_check_) return;
  next_check_ = now + interval_.count();
  spare_now_ = spare_();
  if (spare_now_ < 0) spare_now_ += static_cast<int64_t>(return_pages(static_cast<size_t>(-spare_now_)));
}

// Returns free memory to the system before `fresh` bytes are taken from it, if there would be too much.
void HostHeap::make_room(size_t fresh) {
  const size_t total = static_cast<size_t>(stats_.resident) + fresh;
  const size_t allowance = std::min(most_used_ + kSlack, most_resident_);
  size_t excess = total > allowance ? total - allowance : 0;
  if (const int64_t missing = static_cast<int64_t>(fresh) - spare_now_; missing > 0)
    excess = std::max(excess, std::min(fresh, static_cast<size_t>(missing)));
  if (excess > 0) spare_now_ += static_cast<int64_t>(return_pages(excess));
  spare_now_ -= static_cast<int64_t>(fresh);
}

// Returns huge pages that lie wholly in free blocks to the system, at least `bytes` if there are as many.
// Takes them from the largest free blocks first, which needs the fewest system calls.
size_t HostHeap::return_pages(size_t bytes) {
  size_t returned = 0;
  for (auto it = free_.rbegin(); it != free_.rend() && returned < bytes && it->first >= kHugePage; ++it) {
    const size_t first = page_of(round_up(it->second - begin_, kHugePage) + begin_);
    size_t end = page_of(it->second + it->first);
    // The pages go from the end of the block, since blocks are placed at its beginning.
    while (end > first && returned < bytes) {
      while (end > first && !resident_[end - 1]) --end;
      size_t start = end;
      while (start > first && resident_[start - 1] && returned < bytes) {
        resident_[--start] = false;
        returned += kHugePage;
      }
      if (start < end)
        ::madvise(reinterpret_cast<void*>(begin_ + start * kHugePage), (end - start) * kHugePage,
                  MADV_DONTNEED);
      end = start;
    }
  }
  stats_.resident -= static_cast<int64_t>(returned);
  stats_.returned += static_cast<int64_t>(returned);
  return returned;
}

size_t HostHeap::fresh_bytes(uintptr_t from, size_t size) const {
  const auto first = resident_.begin() + page_of(from),
             end = resident_.begin() + page_of(from + size - 1) + 1;
  return static_cast<size_t>(std::count(first, end, false)) * kHugePage;
}

int64_t HostHeap::trim() {
  std::lock_guard guard(mutex_);
  most_used_ = static_cast<size_t>(stats_.used);
  return static_cast<int64_t>(return_pages(std::numeric_limits<size_t>::max()));
}

void HostHeap::set_limit(size_t bytes) {
  std::lock_guard guard(mutex_);
  most_resident_ = bytes;
}

HeapStats HostHeap::stats() {
  std::lock_guard guard(mutex_);
  return stats_;
}

void HostHeap::reset_peak() {
  std::lock_guard guard(mutex_);
  stats_.peak_resident = stats_.resident;
}

}  // namespace shoestring
