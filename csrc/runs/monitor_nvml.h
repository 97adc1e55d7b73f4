#pragma once

// Reads GPUs through NVML, which is loaded when a monitor starts. It needs neither CUDA nor PyTorch.

#include <sys/types.h>

#include <string>
#include <vector>

#include <shoestring/runs/monitor.h>

namespace shoestring::runs {

class NvmlReader {
 public:
  /// Finds no GPU if libnvidia-ml.so.1 or a driver is missing.
  NvmlReader();
  ~NvmlReader();
  NvmlReader(const NvmlReader&) = delete;
  NvmlReader& operator=(const NvmlReader&) = delete;

  /// Returns what each GPU did in the last `seconds`. `tree` lists the monitored processes.
  std::vector<MonitorGpu> read(double seconds, const std::vector<pid_t>& tree);
  /// Sets the names and the memory of the GPUs.
  void describe(MonitorMachine& machine) const;

 private:
  struct Functions;
  Functions* functions_ = nullptr;
  std::vector<void*> devices_;
  std::vector<std::string> names_;
  std::vector<double> memory_, first_memory_;
};

}  // namespace shoestring::runs
