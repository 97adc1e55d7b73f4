#include "checkpoint/memory_meter.h"

#include <ATen/ops/empty.h>
#include <c10/util/Logging.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/library.h>

#include <algorithm>

namespace shoestring::activations {

constexpr int kErrorsAlone = 2;  // the log level of c10 that prints only errors

// Counts allocations. PyTorch's allocators report every allocation to the profiler of the thread, if there is
// one, so the counter registers as a profiler.
struct MemoryMeter::Counter : torch::profiler::impl::ProfilerStateBase {
  Counter()
      : ProfilerStateBase(
            torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled,
                                                  /*report_input_shapes=*/false, /*profile_memory=*/true)) {}
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    const int64_t now = current.fetch_add(bytes) + bytes;
    int64_t most = peak.load();
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
  }
  std::atomic<int64_t> current{0}, peak{0};
};

MemoryMeter::MemoryMeter() : counter_(std::make_shared<Counter>()) {}
MemoryMeter::~MemoryMeter() { end(); }

void MemoryMeter::begin(c10::Device device) {
  TORCH_CHECK(guard_ == nullptr, "MemoryMeter: begin: expected a meter that does not run");
  TORCH_CHECK(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr,
              "checkpoint plan: expected no profiler on this thread while blocks are measured, received one; "
              "stop it first");
  // Log only errors while the meter runs. Otherwise the allocator would warn about every freed block that was
  // allocated before begin().
  log_level_ = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = std::max(log_level_, kErrorsAlone);
  counter_->current = 0;
  guard_ = std::make_unique<c10::DebugInfoGuard>(c10::DebugInfoKind::PROFILER_STATE, counter_);
  // An allocator that does not report would make every block look free of cost.
  const bool reports = [&] {
    const at::Tensor probe = at::empty({1}, at::TensorOptions(device).dtype(at::kByte));
    return counter_->current != 0;
  }();
  counter_->current = counter_->peak = 0;
  if (reports) return;
  end();
  TORCH_CHECK_VALUE(false,
                    "checkpoint plan: expected a device whose allocator reports its allocations to PyTorch's "
                    "profiler, such as cpu or cuda, since a plan needs the bytes of each block; received ",
                    device, "; name the blocks to checkpoint, without a budget");
}

void MemoryMeter::end() {
  if (guard_) FLAGS_caffe2_log_level = log_level_;
  guard_.reset();
}

int64_t MemoryMeter::current() const { return counter_->current; }

int64_t MemoryMeter::peak() const { return counter_->peak; }

void MemoryMeter::reset_peak() { counter_->peak = counter_->current.load(); }

}  // namespace shoestring::activations

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  using shoestring::activations::MemoryMeter;
  m.class_<MemoryMeter>("MemoryMeter")
      .def(torch::init<>())
      .def("begin", &MemoryMeter::begin)
      .def("end", &MemoryMeter::end)
      .def("current", &MemoryMeter::current)
      .def("peak", &MemoryMeter::peak)
      .def("reset_peak", &MemoryMeter::reset_peak);
}
