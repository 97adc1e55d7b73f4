#pragma once

// Measures what a training run uses, and names its bottleneck.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <shoestring/core/export.h>

namespace shoestring {

/// The work of one GPU in the interval of a MonitorSample, as NVML reports it.
struct SHOESTRING_API MonitorGpu {
  /// Seconds in which the GPU ran at least one kernel.
  double busy_seconds = 0;
  /// Highest memory in use, by all processes, in bytes.
  double memory_peak = 0;
  /// Energy in joules.
  double energy = 0;
  /// Seconds in which the GPU lowered its clocks because of its temperature.
  double hot_seconds = 0;
  /// Seconds in which the GPU lowered its clocks because of a limit of its power, or of the power supply.
  double power_limited_seconds = 0;
  /// 1 if a process of the monitored tree had a context on the GPU, otherwise 0.
  double is_used = 0;
};

/// The measurements of one interval. The "tree" is the monitored process with all its descendants, such as
/// the workers of a data loader. A measure that this system does not report is 0.
struct SHOESTRING_API MonitorSample {
  /// End of the interval, in seconds since the monitor started.
  double time = 0;
  /// Length of the interval in seconds.
  double seconds = 0;
  /// Processor time of the tree, in seconds.
  double cpu_seconds = 0;
  /// Processor time of the busiest thread of the tree, in seconds.
  double thread_seconds = 0;
  /// Processor time of all processes of the machine, in seconds.
  double machine_cpu_seconds = 0;
  /// Highest memory of the tree in bytes. Pages that several processes share count once.
  double memory_peak = 0;
  /// Highest memory in use on the machine, or in the memory cgroup if that has a limit, in bytes.
  double machine_memory_peak = 0;
  /// Bytes that the machine has moved to and from swap space.
  double swapped_bytes = 0;
  /// Page faults of the tree that had to read from a disk.
  double major_faults = 0;
  /// Bytes that the tree has read from disks. Reads from the page cache do not count.
  double read_bytes = 0;
  /// Bytes that the tree has written, which go to a disk now or later.
  double written_bytes = 0;
  /// Seconds in which the busiest disk of the machine was busy.
  double disk_seconds = 0;
  /// Seconds in which at least one process of the machine waited for memory (PSI).
  double memory_stall_seconds = 0;
  /// Highest number of processes of the tree.
  double processes = 0;
  /// Seconds that the loop waited for its next batch.
  double wait_seconds = 0;
  /// Seconds of the waits in which the device had no work either. On the CPU, all of them.
  double starved_seconds = 0;
  /// Seconds of the steps.
  double step_seconds = 0;
  /// Number of steps that ended.
  double steps = 0;
  /// Highest memory that PyTorch's allocator had allocated on the device, in bytes.
  double device_memory_peak = 0;
  /// One entry for each GPU that NVML lists.
  std::vector<MonitorGpu> gpus{};
};

/// The machine, as far as processes may use it, and the loop.
struct SHOESTRING_API MonitorMachine {
  /// Number of cores that the monitored process may use, by its affinity and the quota of its cgroup.
  double cores = 1;
  /// Memory of the machine, or the limit of the memory cgroup, in bytes.
  double memory = 0;
  /// Name of the disk that was busy for the longest time.
  std::string disk{};
  /// Number of worker processes of the data loader, or -1 if unknown.
  int64_t workers = -1;
  /// Names of the GPUs.
  std::vector<std::string> gpu_names{};
  /// Memory of each GPU, in bytes.
  std::vector<double> gpu_memory{};
};

/// A bottleneck.
struct SHOESTRING_API MonitorFinding {
  /// "data", "memory", "cpu", "disk" or "gpu".
  std::string resource{};
  /// Share of the time that the bottleneck takes or puts at risk, from 0 to 1. Findings are sorted by it.
  double share = 0;
  /// The measurement, with numbers.
  std::string evidence{};
  /// The thing to do, in one line.
  std::string cure{};
};

/// The measurements of a monitor.
struct SHOESTRING_API MonitorReport {
  MonitorMachine machine{};
  /// The whole time as one sample: sums of times and counts, and maxima of peaks.
  MonitorSample total{};
  /// The bottlenecks, the largest share first. Empty if the run is bound by computing.
  std::vector<MonitorFinding> findings{};
  /// The intervals in their order. A long run has longer intervals, so that there are at most 4,096.
  std::vector<MonitorSample> samples{};

  /// Returns a table that people can read.
  std::string table() const;
  /// Returns all members as a JSON object. Python's MonitorReport.to_json() returns the same.
  std::string json() const;
};

/// Returns the report of samples. The findings depend on nothing but the arguments.
SHOESTRING_API MonitorReport monitor_report(MonitorMachine machine, std::vector<MonitorSample> samples);

struct SHOESTRING_API MonitorOptions {
  MonitorOptions(double interval = 0.5) : interval_(interval) {}
  /// Length of an interval in seconds, from 0.1 to 10.
  TORCH_ARG(double, interval);
  /// Device whose idle time and memory are measured. std::nullopt stands for the current device of the
  /// accelerator if this process has used it before, otherwise for the CPU.
  TORCH_ARG(std::optional<c10::Device>, device) = std::nullopt;
  /// Number of worker processes of the data loader, for the report; -1 if unknown.
  TORCH_ARG(int64_t, workers) = -1;
};

/// Measures this process and its children on a thread of its own, until it is stopped or destroyed. The
/// Python counterpart is shoestring.Monitor. Example:
///
///     shoestring::Monitor monitor;
///     for (auto& batch : monitor.watch(*loader)) {
///       train(batch);
///     }
///     std::cout << monitor.stop().table();
///
/// It reads /proc, and NVML (libnvidia-ml.so.1) if that is installed. Readings that take long, such as the
/// shared memory of large processes, are repeated less often, so that each takes at most 0.2 % of one core.
/// The loop may run on one thread only.
class SHOESTRING_API Monitor {
 public:
  /// Starts measuring. Throws c10::Error if an option is out of range.
  explicit Monitor(const MonitorOptions& options = {});
  /// Stops measuring.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// Begins and ends a wait for data. The time from the end of a wait to the next wait is a step, unless the
  /// loop calls begin_step() or step().
  void begin_wait();
  void end_wait();
  /// Begins and ends a step.
  void begin_step();
  void end_step();
  /// Ends the loop: the time until the next wait is not a step.
  void end_loop();
  /// Sets the number of worker processes of the data loader, for the report.
  void set_workers(int64_t workers);

  /// Ends a wait or a step when it is destroyed.
  class Span {
   public:
    Span(Monitor& monitor, void (Monitor::*end)()) : monitor_(monitor), end_(end) {}
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() { (monitor_.*end_)(); }

   private:
    Monitor& monitor_;
    void (Monitor::*end_)();
  };

  /// Measures a wait for data until the result is destroyed.
  [[nodiscard]] Span wait() {
    begin_wait();
    return Span(*this, &Monitor::end_wait);
  }
  /// Measures a step until the result is destroyed.
  [[nodiscard]] Span step() {
    begin_step();
    return Span(*this, &Monitor::end_step);
  }

  template <class Range>
  class Watched;
  /// Returns a range over the batches of another range, such as a data loader, that measures how long the
  /// loop waits for each. The monitor and the other range must live as long as the result.
  template <class Range>
  Watched<Range> watch(Range& range) {
    return Watched<Range>(*this, range);
  }

  /// Returns what has been measured so far.
  MonitorReport report() const;
  /// Stops measuring, and returns the report. The loop may go on; nothing is measured any more.
  MonitorReport stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class Range>
class Monitor::Watched {
  using Inner = decltype(std::declval<Range&>().begin());

 public:
  class iterator {
   public:
    decltype(auto) operator*() { return *inner_; }
    iterator& operator++() {
      const Span span = monitor_->wait();
      ++inner_;
      return *this;
    }
    bool operator!=(const iterator& other) const { return inner_ != other.inner_; }
    bool operator==(const iterator& other) const { return !(inner_ != other.inner_); }

   private:
    friend class Watched;
    iterator(Monitor& monitor, Inner inner) : monitor_(&monitor), inner_(std::move(inner)) {}
    Monitor* monitor_;
    Inner inner_;
  };

  Watched(Monitor& monitor, Range& range) : monitor_(monitor), range_(range) {}
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() { monitor_.end_loop(); }
  iterator begin() {
    const Span span = monitor_.wait();
    return iterator(monitor_, range_.begin());
  }
  iterator end() { return iterator(monitor_, range_.end()); }

 private:
  Monitor& monitor_;
  Range& range_;
};

}  // namespace shoestring
