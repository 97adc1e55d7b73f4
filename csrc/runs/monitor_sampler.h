#pragma once

// The thread of a monitor, its samples, and the clock of the loop. It needs no PyTorch.

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <shoestring/runs/monitor.h>

#include "runs/monitor_nvml.h"
#include "runs/monitor_proc.h"

namespace shoestring::runs {

/// Returns the error of an interval, or "" if it can be used.
std::string interval_error(double interval);

class MonitorSampler {
 public:
  /// Measures the process `root` and its descendants. If `measures_starvation` is set, starved() is called;
  /// otherwise every wait counts as starvation.
  MonitorSampler(pid_t root, double interval, bool measures_starvation = false);
  /// Must not run in a forked child, which has no thread to wait for: see SamplerPointer.
  ~MonitorSampler();
  MonitorSampler(const MonitorSampler&) = delete;
  MonitorSampler& operator=(const MonitorSampler&) = delete;

  // The loop. In a forked child, these calls do nothing.
  void begin_wait();
  void end_wait();
  void begin_step();
  void end_step();
  void end_loop();
  void starved(double seconds);
  void device_memory(double bytes);
  void set_workers(int64_t workers);

  /// Returns what has been measured until now. In a forked child, the report is empty.
  MonitorReport report();
  /// Returns the last `seconds` as one sample.
  MonitorSample recent(double seconds);
  MonitorMachine machine();
  /// Takes a last sample, and ends the thread.
  void stop();

  /// Returns whether this is a forked child.
  bool is_elsewhere() const;

 private:
  void run();
  void sample();
  void push(const MonitorSample& sample);

  const pid_t owner_;
  const double interval_;
  const bool measures_starvation_;
  const double start_;

  std::mutex reading_;  // guards the readers
  ProcReader proc_;
  NvmlReader nvml_;
  double last_ = 0;

  std::mutex mutex_;  // guards the members below; no file is read while it is held
  std::condition_variable wake_;
  bool is_stopped_ = false;
  MonitorMachine machine_;
  std::vector<MonitorSample> samples_, recent_;
  size_t merged_ = 0, merge_ = 1;  // merge_ readings make a sample, merged_ are in the last one
  MonitorSample loop_;             // times of the interval that has not ended
  double wait_began_ = -1, step_began_ = -1;
  bool has_explicit_steps_ = false;

  std::thread thread_;
};

struct DeleteSampler {
  void operator()(MonitorSampler* sampler) const {
    if (!sampler->is_elsewhere()) delete sampler;
  }
};
/// Owns a sampler. A forked child leaves it alone.
using SamplerPointer = std::unique_ptr<MonitorSampler, DeleteSampler>;

}  // namespace shoestring::runs
