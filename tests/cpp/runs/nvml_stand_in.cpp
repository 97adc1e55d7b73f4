// A stand-in for libnvidia-ml.so.1 with one GPU, which is busy for a quarter of the time, is hot, draws 250
// W, and lists this process and its parent.

#include <unistd.h>

#include <cstring>

#define STAND_IN extern "C" __attribute__((visibility("default"))) int

namespace {
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
int device;
}  // namespace

STAND_IN nvmlInit_v2() { return 0; }
STAND_IN nvmlShutdown() { return 0; }
STAND_IN nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = 1;
  return 0;
}
STAND_IN nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** handle) {
  *handle = &device;
  return index == 0 ? 0 : 2;
}
STAND_IN nvmlDeviceGetName(void*, char* name, unsigned int size) {
  std::strncpy(name, "Stand-in", size);
  return 0;
}
STAND_IN nvmlDeviceGetUtilizationRates(void*, Utilization* rates) {
  *rates = {25, 10};
  return 0;
}
STAND_IN nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = {16ull << 30, 12ull << 30, 4ull << 30};
  return 0;
}
STAND_IN nvmlDeviceGetPowerUsage(void*, unsigned int* milliwatts) {
  *milliwatts = 250000;
  return 0;
}
STAND_IN nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  *reasons = 0x40;  // hardware slowdown for heat
  return 0;
}
STAND_IN nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned int* count, Process* processes) {
  processes[0] = {static_cast<unsigned int>(::getpid()), 1ull << 30, 0, 0};
  *count = 1;
  return 0;
}
