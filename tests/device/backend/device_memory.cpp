#include "device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>

#include "kernels.h"
#include "streams.h"

namespace simdev {
namespace {

// All bytes 0xff: NaN in every floating-point type, and -1 in integers.
constexpr int kPoison = 0xff;
constexpr size_t kAlignment = 512;
// Views of one tensor never touch the next one, and kernels that leave a tensor hit no other one.
constexpr size_t kGap = 512;

struct Block {
  char* begin = nullptr;
  size_t size = 0;      // bytes that were asked for
  size_t capacity = 0;  // the size rounded up, by which freed blocks are found
  int stream = 0;       // the stream that was current at the allocation
  bool is_free = false;
  std::vector<Access> seen;
  std::vector<int> recorded;      // streams of record_stream()
  std::vector<Position> pending;  // where these streams were when the block was freed
};

struct Device {
  size_t top = 0;
  MemoryCounts counts;
};

// All guarded by records(). They outlive tensors that live until the process ends.
auto& blocks = *new std::map<char*, Block>;
auto& free_blocks =
    *new std::map<std::pair<int, size_t>, std::vector<char*>>;  // free blocks by stream and capacity
auto& waiting = *new std::vector<char*>;                        // freed, but still recorded
auto& devices = *new std::array<Device, kDevices>;

// Adds bytes to the counts of a device, and reports them as PyTorch's allocators do.
void count_bytes(char* begin, int64_t bytes) {
  const int device = device_of(begin);
  Device& on = devices[device];
  on.counts.bytes += bytes;
  on.counts.peak_bytes = std::max(on.counts.peak_bytes, on.counts.bytes);
  c10::reportMemoryUsageToProfiler(begin, bytes, static_cast<size_t>(on.counts.bytes), on.top,
                                   c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
}

Block* block_of(const void* p) {
  auto after = blocks.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (after == blocks.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return p < block.begin + block.capacity ? &block : nullptr;
}

// Allocation and release are writes of the allocating stream, so an access by another stream must be ordered
// after the one and before the other.
void allocate_in_stream(const Block& block) {
  enqueue_locked(block.stream, {"malloc()",
                                [p = kernel_address(block.begin), size = block.size] {
                                  std::memset(p, kPoison, size);
                                  add_kernel_memory(p, size);
                                },
                                {{block.begin, block.begin + block.size, true}},
                                /*is_kernel=*/false});
}
void free_in_stream(Block& block) {
  enqueue_locked(block.stream, {"free()",
                                [p = kernel_address(block.begin), size = block.size] {
                                  remove_kernel_memory(p);
                                  std::memset(p, kPoison, size);
                                },
                                {{block.begin, block.begin + block.size, true}},
                                /*is_kernel=*/false});
  block.is_free = true;
  free_blocks[{block.stream, block.capacity}].push_back(block.begin);
}

// Frees blocks whose recorded streams have passed their positions.
void collect_waiting() {
  std::erase_if(waiting, [](char* begin) {
    Block& block = blocks[begin];
    for (const Position& p : block.pending) {
      if (!is_over(p)) return false;
    }
    // The host has seen that these streams are done, and only then is the memory reused.
    for (const Position& p : block.pending) {
      Clock passed{};
      passed[p.stream] = p.number;
      order_locked(block.stream, passed);
    }
    block.pending.clear();
    free_in_stream(block);
    return true;
  });
}

void release(void* p) {
  if (p == nullptr) return;
  prepare_stack();
  const std::lock_guard lock(records());
  Block& block = blocks.at(static_cast<char*>(p));
  count_bytes(block.begin, -static_cast<int64_t>(block.size));
  for (const int stream : block.recorded) block.pending.push_back({stream, clock_locked(stream)[stream]});
  if (block.pending.empty()) {
    free_in_stream(block);
    return;
  }
  // Streams that were not recorded must be done for the allocating stream already.
  const Clock& clock = clock_locked(block.stream);
  for (const Access& access : block.seen) {
    const bool is_recorded =
        std::find(block.recorded.begin(), block.recorded.end(), access.stream) != block.recorded.end();
    if (access.stream == block.stream || is_recorded || clock[access.stream] >= access.number) continue;
    add_finding(
        "race: memory is freed that another stream still uses, which record_stream was not called "
        "for: " +
        describe(access));
  }
  waiting.push_back(block.begin);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const int device = current_device();
    const c10::Device on(kType, static_cast<c10::DeviceIndex>(device));
    if (size == 0) return {nullptr, nullptr, &release, on};
    check_error();
    prepare_stack();
    const size_t capacity = (size + kAlignment - 1) / kAlignment * kAlignment;
    const int stream = current_stream(device);
    const std::lock_guard lock(records());
    collect_waiting();
    MemoryCounts& counts = devices[device].counts;
    ++counts.allocations;
    auto& ready = free_blocks[{stream, capacity}];
    char* begin = nullptr;
    if (ready.empty()) {
      ++counts.fresh;
      size_t& top = devices[device].top;
      TORCH_CHECK_WITH(OutOfMemoryError, top + capacity + kGap <= kDeviceBytes,
                       "simdev: out of memory: device ", device, " has ", kDeviceBytes, " bytes");
      begin = device_memory().tensor + static_cast<size_t>(device) * kDeviceBytes + top;
      top += capacity + kGap;
    } else {
      begin = ready.back();
      ready.pop_back();
    }
    Block& block = blocks[begin];
    block.begin = begin, block.size = size, block.capacity = capacity, block.stream = stream;
    block.is_free = false;
    block.recorded.clear();
    allocate_in_stream(block);
    count_bytes(begin, static_cast<int64_t>(size));
    return {begin, begin, &release, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    auto* source = static_cast<char*>(const_cast<void*>(from));
    auto* target = static_cast<char*>(to);
    enqueue(current_stream(device_of(to)),
            {"copy_data()",
             [=] { std::memcpy(kernel_address(target), kernel_address(source), size); },
             {{source, source + size, false}, {target, target + size, true}}});
  }

  bool initialized() override { return true; }
  // Freed memory stays where it is, but the kernel takes its pages back.
  void emptyCache(c10::MempoolId_t) override {
    for (int stream = 0; stream < kStreams; ++stream) {
      if (!is_over(position_of(stream))) synchronize_stream(stream, "empty_cache()");
    }
    const std::lock_guard lock(records());
    collect_waiting();
    for (const auto& [key, all] : free_blocks) {
      for (char* begin : all) {
        char* first = kernel_address(begin) + kPage - 1;
        first -= reinterpret_cast<uintptr_t>(first) % kPage;
        char* last = kernel_address(begin) + key.second;
        last -= reinterpret_cast<uintptr_t>(last) % kPage;
        if (first < last) madvise(first, static_cast<size_t>(last - first), MADV_REMOVE);
      }
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, from_c10(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryCounts counts = memory_counts(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = counts.bytes, bytes.peak = counts.peak_bytes;
    stats.num_device_alloc = counts.fresh;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak_memory(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kDeviceBytes - static_cast<size_t>(memory_counts(device).bytes), kDeviceBytes};
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto& one = *new DeviceAllocator;
  return &one;
}

void check_device_access(const Range& range, const Position& position, const Clock& clock, const char* name) {
  Block* block = block_of(range.begin);
  if (block == nullptr || block->is_free) {
    add_finding(std::string("use after free: ") + name + " uses memory that has been freed.\n" +
                text_of(prepared_stack()));
  }
  if (block != nullptr) check_access(block->seen, range, position, clock, name);
}

void record_stream(const c10::DataPtr& data, int stream) {
  const std::lock_guard lock(records());
  const auto found = blocks.find(static_cast<char*>(data.get()));
  if (found == blocks.end() || found->second.stream == stream) return;
  auto& recorded = found->second.recorded;
  if (std::find(recorded.begin(), recorded.end(), stream) == recorded.end()) recorded.push_back(stream);
}

MemoryCounts memory_counts(int device) {
  const std::lock_guard lock(records());
  return devices[device].counts;
}

void reset_peak_memory(int device) {
  const std::lock_guard lock(records());
  devices[device].counts.peak_bytes = devices[device].counts.bytes;
}

}  // namespace simdev
