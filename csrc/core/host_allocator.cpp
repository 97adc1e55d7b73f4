// The allocator of CPU tensors for training. Small storages come from the C library, large ones from a heap
// in huge pages.

#include <shoestring/core/host_allocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include <malloc.h>
#include <pthread.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "core/host_heap.h"
#include "core/spare_memory.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);

namespace shoestring::host_allocator {
namespace {

constexpr size_t kSmall = size_t{64} << 10;     // storages below this size come from the C library
constexpr size_t kHeader = 64;                  // bytes before a small storage that hold its size
constexpr size_t kMostBytes = size_t{1} << 47;  // more than the address space of a process
constexpr uint8_t kPriority = 0;                // that of PyTorch's own allocator, so that it can return
// Memory that is left to the rest of the system: a twentieth of the memory, within these bounds.
constexpr int64_t kLeastReserve = int64_t{64} << 20, kMostReserve = int64_t{2} << 30;

int64_t raise(std::atomic<int64_t>& value, std::atomic<int64_t>& peak, int64_t bytes) {
  const int64_t now = value.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t most = peak.load(std::memory_order_relaxed);
  while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
  return now;
}

class HostAllocator final : public c10::Allocator {
 public:
  // The allocator is never destroyed, because tensors in static storage may outlive every static object.
  static HostAllocator& get() {
    static auto* allocator = new HostAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* data = bytes > kMostBytes || beyond_limit(bytes) ? nullptr : obtain(bytes);
    if (data == nullptr) fail(bytes);
    const int64_t now = raise(allocated_, peak_allocated_, static_cast<int64_t>(bytes));
    allocations_.fetch_add(1, std::memory_order_relaxed);
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(data, static_cast<int64_t>(bytes), now, 0, cpu);
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void enable(std::optional<int64_t> limit) {
    limit_ = limit.value_or(std::numeric_limits<int64_t>::max());
    heap_.set_limit(limit ? static_cast<size_t>(*limit) : SIZE_MAX);
    if (is_enabled()) return;
    c10::Allocator* before = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this, kPriority);
    TORCH_CHECK(is_enabled(),
                "host_allocator: expected that the allocator of CPU tensors can be replaced, but one with a "
                "priority above 0 is installed. Remove the other allocator.");
    before_ = before;
  }
  void disable() {
    if (!is_enabled()) return;
    c10::SetCPUAllocator(before_, kPriority);
    empty_cache();
  }
  bool is_enabled() const { return c10::GetCPUAllocator() == this; }

  HostAllocatorStats stats() {
    const HeapStats heap = heap_.stats();
    HostAllocatorStats s;
    s.allocated = allocated_;
    s.peak_allocated = peak_allocated_;
    s.held = heap.resident + small_;
    s.peak_held = heap.peak_resident + peak_small_;
    s.allocations = allocations_;
    s.taken = heap.taken;
    s.returned = heap.returned;
    return s;
  }
  void reset_peaks() {
    heap_.reset_peak();
    peak_allocated_ = allocated_.load();
    peak_small_ = small_.load();
  }
  int64_t empty_cache() {
    const int64_t returned = heap_.trim();
    ::malloc_trim(0);
    return returned;
  }

 private:
  HostAllocator() : heap_(address_space(), &spare) {
    // A child of fork() has only the thread that forked, so no other thread may hold the lock then.
    ::pthread_atfork([] { get().heap_.lock(); }, [] { get().heap_.unlock(); }, [] { get().heap_.unlock(); });
  }

  // Fragmentation costs addresses only, so there are many more of them than memory.
  static size_t address_space() {
    const SpareMemory memory = spare_memory();
    return static_cast<size_t>(std::clamp<int64_t>(memory.total, int64_t{1} << 30, int64_t{1} << 43)) * 8;
  }

  bool beyond_limit(size_t bytes) const {
    const int64_t limit = limit_;
    return limit < std::numeric_limits<int64_t>::max() && allocated_ + static_cast<int64_t>(bytes) > limit;
  }

  void* obtain(size_t bytes) {
    void* data = try_to_obtain(bytes);
    if (data == nullptr) {
      empty_cache();
      data = try_to_obtain(bytes);
    }
    return data;
  }

  void* try_to_obtain(size_t bytes) {
    if (bytes < kSmall) return small(bytes);
    if (void* data = heap_.allocate(bytes)) {
      if (FLAGS_caffe2_cpu_allocator_do_zero_fill) std::memset(data, 0, bytes);
      return data;
    }
    return nullptr;
  }

  void* small(size_t bytes) {
    char* base = nullptr;
    try {
      base = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
    } catch (const c10::Error&) {
      return nullptr;
    }
    std::memcpy(base, &bytes, sizeof bytes);
    raise(small_, peak_small_, static_cast<int64_t>(bytes + kHeader));
    return base + kHeader;
  }

  static void release(void* data) {
    if (data != nullptr) get().give_back(data);
  }

  void give_back(void* data) {
    size_t bytes = 0;
    if (heap_.owns(data)) {
      bytes = heap_.free(data);
    } else {
      char* base = static_cast<char*>(data) - kHeader;
      std::memcpy(&bytes, base, sizeof bytes);
      small_.fetch_sub(static_cast<int64_t>(bytes + kHeader), std::memory_order_relaxed);
      c10::free_cpu(base);
    }
    const auto freed = static_cast<int64_t>(bytes);
    const int64_t now = allocated_.fetch_sub(freed, std::memory_order_relaxed) - freed;
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(data, -freed, now, 0, c10::Device(c10::DeviceType::CPU));
  }

  [[noreturn]] void fail(size_t bytes) {
    const int64_t now = allocated_, limit = limit_;
    if (c10::memoryProfilingEnabled())
      c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), now, 0,
                                       c10::Device(c10::DeviceType::CPU));
    if (bytes <= kMostBytes && beyond_limit(bytes))
      TORCH_CHECK_WITH(OutOfMemoryError, false,
                       "host_allocator: not enough memory: expected that CPU tensors hold at most ", limit,
                       " bytes, the limit, but they hold ", now, " and ", bytes,
                       " more are needed. Raise the limit, or use smaller batches.");
    TORCH_CHECK_WITH(OutOfMemoryError, false, "host_allocator: not enough memory: the system refused ", bytes,
                     " bytes; CPU tensors hold ", now, ". Use smaller batches or a smaller model.");
  }

  static int64_t spare() {
    const SpareMemory memory = spare_memory();
    return memory.available - std::clamp(memory.total / 20, kLeastReserve, kMostReserve);
  }

  std::atomic<int64_t> allocated_{0}, peak_allocated_{0}, small_{0}, peak_small_{0}, allocations_{0};
  std::atomic<int64_t> limit_{std::numeric_limits<int64_t>::max()};
  c10::Allocator* before_ = nullptr;
  HostHeap heap_;
};

}  // namespace

void enable(const HostAllocatorOptions& options) {
  TORCH_CHECK(!options.limit() || *options.limit() > 0,
              "host_allocator: limit: expected a positive number of bytes, got ", *options.limit(),
              ". Leave the limit out to let the system decide.");
  HostAllocator::get().enable(options.limit());
}
void disable() { HostAllocator::get().disable(); }
bool is_enabled() { return HostAllocator::get().is_enabled(); }
HostAllocatorStats stats() { return HostAllocator::get().stats(); }
void reset_peaks() { HostAllocator::get().reset_peaks(); }
int64_t empty_cache() { return HostAllocator::get().empty_cache(); }

}  // namespace shoestring::host_allocator

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  using namespace shoestring::host_allocator;
  m.impl("_host_allocator_enable",
         [](std::optional<int64_t> limit) { enable(HostAllocatorOptions().limit(limit)); });
  m.impl("_host_allocator_disable", [] { disable(); });
  m.impl("_host_allocator_is_enabled", [] { return is_enabled(); });
  m.impl("_host_allocator_stats", [] {
    const HostAllocatorStats s = stats();
    return std::vector<int64_t>{s.allocated,   s.peak_allocated, s.held,    s.peak_held,
                                s.allocations, s.taken,          s.returned};
  });
  m.impl("_host_allocator_reset_peaks", [] { reset_peaks(); });
  m.impl("_host_allocator_empty_cache", [] { return empty_cache(); });
}
