#include "runs/monitor_nvml.h"

#include <dlfcn.h>

#include <algorithm>

namespace shoestring::runs {
namespace {

// The numbers of NVML's interface, https://docs.nvidia.com/deploy/nvml-api.
constexpr unsigned long long kNvmlPowerCap = 0x04, kNvmlSlowdown = 0x08, kNvmlSoftwareHeat = 0x20,
                             kNvmlHardwareHeat = 0x40, kNvmlPowerBrake = 0x80;
// Another process may take this much while a GPU is idle; a run takes more.
constexpr double kUsedMemory = 64e6;

}  // namespace

struct NvmlReader::Functions {
  // The types of NVML's interface.
  struct Utilization {
    unsigned int gpu, memory;
  };
  struct Memory {
    unsigned long long total, free, used;
  };
  struct Process {
    unsigned int pid;
    unsigned long long memory;
    unsigned int gpu_instance, compute_instance;
  };

  void* library = nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*count)(unsigned int*) = nullptr;
  int (*handle)(unsigned int, void**) = nullptr;
  int (*name)(void*, char*, unsigned int) = nullptr;
  int (*utilization)(void*, Utilization*) = nullptr;
  int (*memory)(void*, Memory*) = nullptr;
  int (*power)(void*, unsigned int*) = nullptr;
  int (*throttling)(void*, unsigned long long*) = nullptr;
  int (*processes)(void*, unsigned int*, Process*) = nullptr;

  template <class Function>
  bool find(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(::dlsym(library, symbol));
    return function != nullptr;
  }
};

NvmlReader::NvmlReader() {
  auto f = std::make_unique<Functions>();
  f->library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (f->library == nullptr) return;
  const bool good =
      f->find(f->init, "nvmlInit_v2") && f->find(f->shutdown, "nvmlShutdown") &&
      f->find(f->count, "nvmlDeviceGetCount_v2") && f->find(f->handle, "nvmlDeviceGetHandleByIndex_v2") &&
      f->find(f->name, "nvmlDeviceGetName") && f->find(f->utilization, "nvmlDeviceGetUtilizationRates") &&
      f->find(f->memory, "nvmlDeviceGetMemoryInfo");
  if (!good || f->init() != 0) {
    ::dlclose(f->library);
    return;
  }
  // Older drivers lack some of these, and some GPUs do not answer.
  f->find(f->power, "nvmlDeviceGetPowerUsage");
  f->find(f->throttling, "nvmlDeviceGetCurrentClocksThrottleReasons");
  f->find(f->processes, "nvmlDeviceGetComputeRunningProcesses_v3");
  functions_ = f.release();
  unsigned int count = 0;
  functions_->count(&count);
  for (unsigned int i = 0; i < count; ++i) {
    void* device = nullptr;
    char name[96] = "GPU";
    Functions::Memory memory{};
    if (functions_->handle(i, &device) != 0) continue;
    functions_->name(device, name, sizeof name);
    functions_->memory(device, &memory);
    devices_.push_back(device);
    names_.emplace_back(name);
    memory_.push_back(double(memory.total));
    first_memory_.push_back(double(memory.used));
  }
}

NvmlReader::~NvmlReader() {
  if (functions_ == nullptr) return;
  functions_->shutdown();
  ::dlclose(functions_->library);
  delete functions_;
}

std::vector<MonitorGpu> NvmlReader::read(double seconds, const std::vector<pid_t>& tree) {
  std::vector<MonitorGpu> gpus;
  for (size_t i = 0; i < devices_.size(); ++i) {
    MonitorGpu& gpu = gpus.emplace_back();
    Functions::Utilization utilization{};
    Functions::Memory memory{};
    if (functions_->utilization(devices_[i], &utilization) == 0)
      gpu.busy_seconds = seconds * utilization.gpu / 100;
    if (functions_->memory(devices_[i], &memory) == 0) gpu.memory_peak = double(memory.used);
    unsigned int milliwatts = 0;
    if (functions_->power != nullptr && functions_->power(devices_[i], &milliwatts) == 0)
      gpu.energy = seconds * milliwatts / 1000;
    unsigned long long reasons = 0;
    if (functions_->throttling != nullptr && functions_->throttling(devices_[i], &reasons) == 0) {
      if (reasons & (kNvmlSoftwareHeat | kNvmlHardwareHeat))
        gpu.hot_seconds = seconds;
      else if (reasons & (kNvmlPowerCap | kNvmlPowerBrake | kNvmlSlowdown))
        gpu.power_limited_seconds = seconds;
    }
    // In a container, NVML's process numbers are those of the host, so a growth of the memory counts too.
    bool is_used = gpu.memory_peak - first_memory_[i] >= kUsedMemory;
    Functions::Process processes[64];
    unsigned int count = 64;
    if (functions_->processes != nullptr && functions_->processes(devices_[i], &count, processes) == 0) {
      is_used = is_used || std::any_of(processes, processes + std::min(count, 64u), [&](const auto& process) {
                  return std::find(tree.begin(), tree.end(), pid_t(process.pid)) != tree.end();
                });
    }
    gpu.is_used = is_used ? 1 : 0;
  }
  return gpus;
}

void NvmlReader::describe(MonitorMachine& machine) const {
  machine.gpu_names = names_;
  machine.gpu_memory = memory_;
}

}  // namespace shoestring::runs
