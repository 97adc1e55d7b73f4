// The monitor of the program that it runs in. It measures on the device how long waits for data leave the
// device without work.

#include <shoestring/runs/monitor.h>

#include <unistd.h>

#include <chrono>
#include <deque>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "core/device.h"
#include "runs/monitor_sampler.h"

namespace shoestring {
namespace {

// Returns the accelerator if this process has used it. A monitor does not initialise a device.
std::optional<c10::Device> device_in_use() {
  const auto type = at::getAccelerator();
  if (!type.has_value()) return {};
  const c10::impl::VirtualGuardImpl guard(*type);
  if (guard.deviceCount() == 0) return {};
  const c10::Device device = guard.getDevice();
  try {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
    if (!hooks.hasPrimaryContext(device.index())) return {};
  } catch (const c10::Error&) {
    return {};  // a backend need not have hooks
  }
  return device;
}

double host_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

namespace runs {

// Measures idle times of a device between an event at the end of a step's work and one after the wait. If the
// queue still has work when the wait ends, the second event follows the first at once.
class IdleClock {
 public:
  explicit IdleClock(c10::Device device) : guard_(device.type()), device_(device) {}

  void begin() {
    before_.emplace(record());
    began_ = host_seconds();
  }
  void end() {
    if (!before_.has_value()) return;
    if (has_timing_)
      pending_.emplace_back(std::move(*before_), record());
    else if (before_->query())
      seconds_ += host_seconds() - began_;  // at most that much
    before_.reset();
  }
  // Returns the seconds of the waits whose end the device has reached since the last call.
  double take() {
    while (!pending_.empty() && pending_.front().second.query()) {
      try {
        seconds_ += 1e-3 * pending_.front().first.elapsedTime(pending_.front().second);
        pending_.pop_front();
      } catch (const c10::Error&) {  // a backend's events need not have times
        has_timing_ = false;
        pending_.clear();
      }
    }
    return std::exchange(seconds_, 0.0);
  }

 private:
  c10::Event record() {
    c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // this flag turns timing on
    event.record(guard_.getStream(device_));
    return event;
  }

  c10::impl::VirtualGuardImpl guard_;
  c10::Device device_;
  std::optional<c10::Event> before_;
  std::deque<std::pair<c10::Event, c10::Event>> pending_;
  double began_ = 0, seconds_ = 0;
  bool has_timing_ = true;
};

}  // namespace runs

namespace {

// Returns the device to measure, or nothing for the CPU.
std::optional<c10::Device> device_to_measure(const MonitorOptions& options) {
  if (!options.device().has_value()) return device_in_use();
  const c10::Device device = *options.device();
  if (device.is_cpu()) return {};
  TORCH_CHECK_VALUE(!device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type()),
                    "Monitor: device: expected the CPU or an accelerator of this PyTorch, received ", device);
  return with_index(device);
}

const MonitorOptions& checked(const MonitorOptions& options) {
  const std::string error = runs::interval_error(options.interval());
  TORCH_CHECK_VALUE(error.empty(), "Monitor: ", error);
  return options;
}

}  // namespace

struct Monitor::State {
  explicit State(const MonitorOptions& options)
      : device(device_to_measure(options)),
        sampler(new runs::MonitorSampler(::getpid(), checked(options).interval(), device.has_value())) {
    if (device.has_value()) idle.emplace(*device);
    read_device();
  }

  // Passes on what the device has measured. The allocator keeps its peak, so that a peak between two calls
  // counts; a peak from before the monitor does not.
  void read_device() {
    if (!device.has_value()) return;
    sampler->starved(idle->take());
    try {
      const auto stats = at::getDeviceAllocator(device->type())->getDeviceStats(device->index());
      const auto& bytes = stats.allocated_bytes[0];
      const double peak = double(bytes.peak);
      sampler->device_memory(peak > last_peak && last_peak >= 0 ? peak : double(bytes.current));
      last_peak = peak;
    } catch (const c10::Error&) {
      // A backend's allocator need not keep figures.
    }
  }

  bool measures_device() const { return device.has_value() && !is_stopped && !sampler->is_elsewhere(); }

  std::optional<c10::Device> device;
  std::optional<runs::IdleClock> idle;
  runs::SamplerPointer sampler;
  double last_peak = -1;
  bool is_stopped = false;
};

Monitor::Monitor(const MonitorOptions& options) : state_(std::make_unique<State>(options)) {
  set_workers(options.workers());
}
Monitor::~Monitor() = default;

void Monitor::begin_wait() {
  if (state_->measures_device()) {
    state_->idle->begin();
    state_->read_device();
  }
  state_->sampler->begin_wait();
}

void Monitor::end_wait() {
  state_->sampler->end_wait();
  if (state_->measures_device()) state_->idle->end();
}

void Monitor::begin_step() { state_->sampler->begin_step(); }
void Monitor::end_step() { state_->sampler->end_step(); }
void Monitor::end_loop() { state_->sampler->end_loop(); }

void Monitor::set_workers(int64_t workers) {
  TORCH_CHECK_VALUE(workers >= -1, "Monitor: workers: expected -1 or more, received ", workers);
  state_->sampler->set_workers(workers);
}

MonitorReport Monitor::report() const {
  if (state_->measures_device()) state_->read_device();
  return state_->sampler->report();
}

MonitorReport Monitor::stop() {
  if (state_->measures_device()) state_->read_device();
  state_->is_stopped = true;
  state_->sampler->stop();
  return state_->sampler->report();
}

}  // namespace shoestring
