#pragma once

// Reads what a process tree and the machine use from /proc and /sys. It needs no PyTorch.

#include <sys/types.h>

#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <shoestring/runs/monitor.h>

namespace shoestring::runs {

/// Repeats a reading so seldom that it takes at most 0.2 % of one core.
class Paced {
 public:
  /// Calls `read` if it is time, or if `must` is set. Returns whether it was called.
  template <class Read>
  bool run(bool must, const Read& read) {
    if (!must && wall_seconds() < next_) return false;
    const double before = thread_seconds();
    read();
    next_ = wall_seconds() + 500 * (thread_seconds() - before);
    return true;
  }

 private:
  static double wall_seconds();
  static double thread_seconds();
  double next_ = 0;
};

class ProcReader {
 public:
  /// `root` is the process whose descendants count.
  explicit ProcReader(pid_t root);

  /// Returns what has been used since the last call, or since the constructor. Sets neither time, nor the
  /// loop's and the GPUs' members.
  MonitorSample read();
  /// Returns the machine, and the disk that was busy for the longest time so far.
  MonitorMachine machine() const;
  /// Returns the processes of the tree at the last call of read().
  const std::vector<pid_t>& tree() const { return tree_; }

 private:
  /// Counters that only grow.
  struct Counters {
    double cpu = 0, faults = 0, read = 0, written = 0, machine_cpu = 0, swapped = 0, memory_stall = 0;
  };

  void find_tree();
  Counters counters();
  double tree_memory();
  double busiest_thread();
  double machine_memory() const;
  double busiest_disk();

  pid_t root_;
  std::vector<pid_t> tree_;
  std::unordered_map<pid_t, pid_t> parents_;
  Paced find_, share_, threads_;
  std::vector<pid_t> shared_tree_;
  double shared_ = 0;  // pages that several processes share count this much too often
  std::unordered_map<pid_t, double> high_water_;
  std::unordered_map<uint64_t, double> thread_times_;
  std::map<std::string, double> disk_times_, disk_totals_;
  Counters last_;
  double memory_ = 0, cores_ = 1;
  std::string memory_folder_;  // the memory cgroup whose limit is the lowest
  bool is_cgroup_v1_ = false;
};

}  // namespace shoestring::runs
