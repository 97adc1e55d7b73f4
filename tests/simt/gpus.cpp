// The properties of GPUs that host code can read, and by which it selects kernels.

#include <cstdlib>

#include "internal.h"

namespace simt {

const std::vector<Gpu>& gpus() {
  static const std::vector<Gpu> all = {{"T4", 75, 64 << 10, 40},        {"A100", 80, 163 << 10, 108},
                                       {"RTX 3090", 86, 99 << 10, 82},  {"L4", 89, 99 << 10, 58},
                                       {"RTX 4090", 89, 99 << 10, 128}, {"H100", 90, 227 << 10, 132},
                                       {"B200", 100, 227 << 10, 148},   {"RTX 5090", 120, 99 << 10, 170}};
  return all;
}

namespace {

const Gpu* find(int capability) {
  for (const Gpu& gpu : gpus()) {
    if (gpu.capability == capability) return &gpu;
  }
  return nullptr;
}

const Gpu*& selected() {
  static const Gpu* gpu = [] {
    const char* text = std::getenv("SIMT_CAPABILITY");
    const Gpu* wanted = find(text ? std::atoi(text) : 80);
    return wanted != nullptr ? wanted : find(80);
  }();
  return gpu;
}

}  // namespace

const Gpu& gpu() { return *selected(); }

bool set_gpu(const std::string& name) {
  for (const Gpu& gpu : gpus()) {
    if (name == gpu.name) return selected() = &gpu, true;
  }
  return false;
}

bool set_capability(int capability) {
  const Gpu* wanted = find(capability);
  if (wanted != nullptr) selected() = wanted;
  return wanted != nullptr;
}

}  // namespace simt
