#include <cstdio>
#include <limits>
#include <new>
#include <unordered_set>

#include <c10/core/CachingDeviceAllocator.h>
#include <shoestring/core/host_allocator.h>
#include <shoestring/runs/find_batch_size.h>

#include "core/device.h"
#include "core/spare_memory.h"
#include "optim/core/stored.h"
#include "runs/batch_sizes.h"
#include "runs/run_copy.h"

namespace shoestring {
namespace {

using at::Tensor;

constexpr double kUsable = 0.9;  // share of a CPU's free memory that a trial may be expected to take

c10::Device device_of(const TensorDict& tensors) {
  return tensors.is_empty() ? c10::Device(c10::kCPU) : tensors.values().front().device();
}

// ---- The memory that is in use

// Returns a number of bytes of /proc/self/status, 0 if the system does not report it.
int64_t status(const std::string& key) {
  const std::string text = text_of("/proc/self/status");
  const size_t at = text.find(key);
  return at == std::string::npos ? 0 : std::strtoll(text.c_str() + at + key.size(), nullptr, 10) * 1024;
}

const c10::CachingDeviceAllocator::Stat& allocated(const c10::CachingDeviceAllocator::DeviceStats& stats) {
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

/// Measures the peak of the memory of a device from its construction on.
class Peak {
 public:
  explicit Peak(c10::Device device) : device_(with_index(device)) {
    if (!is_asynchronous(device_)) {
      // Otherwise a step takes memory that an earlier one has freed, which no measurement sees.
      host_allocator::empty_cache();
      if (std::FILE* file = std::fopen("/proc/self/clear_refs", "w")) {  // sets the peak to what is in use
        std::fputc('5', file);
        std::fclose(file);
      }
      before_ = status("VmRSS:");
      return;
    }
    auto* allocator = at::getDeviceAllocator(device_.type());
    allocator->emptyCache();
    allocator->resetPeakStats(device_.index());
    before_ = allocated(allocator->getDeviceStats(device_.index())).current;
  }
  int64_t bytes_taken() const {
    if (!is_asynchronous(device_)) return status("VmHWM:") - before_;
    return allocated(at::getDeviceAllocator(device_.type())->getDeviceStats(device_.index())).peak - before_;
  }

 private:
  c10::Device device_;
  int64_t before_ = 0;
};

// ---- Sizes

// Returns the bytes of the storages of tensors, each once.
int64_t bytes_of(const std::vector<Tensor>& tensors) {
  std::unordered_set<const c10::StorageImpl*> seen;
  int64_t bytes = 0;
  for (const Tensor& t : tensors) {
    if (t.defined() && t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second)
      bytes += static_cast<int64_t>(t.storage().nbytes());
  }
  return bytes;
}

MemoryAdvice advice_on(const std::vector<Tensor>& tensors, c10::Device device,
                       const std::vector<torch::optim::Optimizer*>& optimizers,
                       const MemoryAdviceOptions& options) {
  MemoryAdvice advice;
  advice.weights = bytes_of(tensors);
  for (const Tensor& t : tensors) {
    if (!t.requires_grad()) continue;
    advice.gradients += static_cast<int64_t>(t.nbytes());
    advice.parameters += t.numel();
  }
  for (auto* optimizer : optimizers) {
    if (optimizer->state().empty()) continue;
    advice.state += bytes_of(optim::detail::store(*optimizer).tensors.values());
    advice.has_state = true;
  }
  advice.batch_size = options.batch_size();
  std::optional<int64_t> needed = options.needed();
  if (is_asynchronous(device)) {
    const c10::Device indexed = with_index(device);
    auto* allocator = at::getDeviceAllocator(indexed.type());
    advice.total = static_cast<int64_t>(allocator->getMemoryInfo(indexed.index()).second);
    if (!needed) needed = allocated(allocator->getDeviceStats(indexed.index())).peak;
  } else {
    advice.total = spare_memory().total;
  }
  runs::complete(advice, needed, options.error());
  return advice;
}

}  // namespace

BatchSizeSearch find_batch_size(const std::function<void(int64_t)>& step, TrainingRun& run,
                                const FindBatchSizeOptions& options) {
  runs::BatchSizes sizes(options);
  const c10::Device device = device_of(run.tensors);
  const bool is_gpu = is_asynchronous(device);
  runs::RunCopy copy(run, "find_batch_size");
  while (const auto rows = sizes.next()) {
    const int64_t limit = is_gpu ? std::numeric_limits<int64_t>::max()
                                 : options.memory().value_or(static_cast<int64_t>(
                                       kUsable * static_cast<double>(spare_memory().available)));
    const int64_t expected = is_gpu ? 0 : sizes.expected(*rows);
    if (expected > limit) {
      sizes.add({*rows, false, expected, false});
      continue;
    }
    const Peak peak(device);
    BatchTrial trial{*rows, false, 0, true};
    runs::restoring(copy, [&] {
      try {
        step(*rows);
        step(*rows);
        trial.bytes = peak.bytes_taken();
        trial.fits = trial.bytes <= limit;
      } catch (const std::bad_alloc&) {
      } catch (const c10::Error& error) {
        if (!runs::says_out_of_memory(error.what_without_backtrace())) throw;
      }
    });
    sizes.add(trial);
  }
  if (sizes.best() == 0) {
    const BatchTrial& last = sizes.trials().back();
    MemoryAdviceOptions how;
    how.batch_size(last.batch_size);
    if (last.bytes > 0) how.needed(last.bytes);
    TORCH_CHECK(false, "find_batch_size: at_least: expected a size that fits, received ", options.at_least(),
                ", which does not. ", advice_on(run.tensors.values(), device, run.optimizers, how).text());
  }
  return {sizes.best(), sizes.trials()};
}

MemoryAdvice memory_advice(const torch::nn::Module& module,
                           const std::vector<torch::optim::Optimizer*>& optimizers,
                           const MemoryAdviceOptions& options) {
  std::vector<Tensor> tensors = module.parameters();
  const c10::Device device = tensors.empty() ? c10::Device(c10::kCPU) : tensors.front().device();
  for (const Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return advice_on(tensors, device, optimizers, options);
}

std::string MemoryAdvice::text() const { return runs::sentences(*this, /*python=*/false); }

}  // namespace shoestring
