#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <shoestring/core/export.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace shoestring::activations {

/// Counts the bytes of tensors that this thread, and backward passes started by it, allocate and free between
/// begin() and end(). The count covers PyTorch's allocators on every device, is exact to the byte, and
/// ignores other threads of the process.
class SHOESTRING_API MemoryMeter : public torch::CustomClassHolder {
 public:
  MemoryMeter();
  ~MemoryMeter() override;
  // Throws a ValueError if the allocator of `device` reports nothing.
  void begin(c10::Device device);
  void end();
  // Bytes allocated since begin() and not yet freed, minus bytes freed that were allocated before begin().
  int64_t current() const;
  // The maximum of current() since begin() or reset_peak().
  int64_t peak() const;
  void reset_peak();

 private:
  struct Counter;
  std::shared_ptr<Counter> counter_;
  std::unique_ptr<c10::DebugInfoGuard> guard_;
  int log_level_ = 0;
};

}  // namespace shoestring::activations
