#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <shoestring/export.h>
#include <torch/custom_class.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace shoestring::activations {

/// Counts the bytes of tensors that this thread allocates and frees between begin() and end(), and backward
/// passes begun by it: those of PyTorch's allocators, on every device, to the byte, whatever the process does
/// besides.
class SHOESTRING_API MemoryMeter : public torch::CustomClassHolder {
 public:
  MemoryMeter();
  ~MemoryMeter() override;
  void begin();
  void end();
  int64_t current() const;  // allocated since begin and still there, minus what was there and is freed
  int64_t peak() const;     // the most that current() was since begin, or since reset_peak()
  void reset_peak();

 private:
  struct Counter;
  std::shared_ptr<Counter> counter_;
  std::unique_ptr<c10::DebugInfoGuard> guard_;
  int log_level_ = 0;
};

}  // namespace shoestring::activations
