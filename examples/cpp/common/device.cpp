#include "device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <fstream>

#include "input_error.h"

namespace {

// The programs are linked without the CUDA libraries, which take 200 MB of memory even if no GPU is used.
// This function loads them if the driver is installed. A LibTorch without CUDA has no such libraries.
void load_cuda() {
  if (::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) == nullptr) return;
  if (::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) return;
  ::dlopen("libshoestring_cuda.so", RTLD_NOW | RTLD_GLOBAL);
}

// Returns the number of devices of a type, 0 if LibTorch has no device guard for the type.
int64_t device_count(at::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

}  // namespace

at::Device find_device(const LoopOptions& options) {
  if (options.device != "cpu") load_cuda();
  const auto accelerator = options.device == "cpu" ? std::nullopt : at::getAccelerator();
  const int64_t count = accelerator ? device_count(*accelerator) : 0;
  std::optional<at::Device> device;
  if (options.device == "auto") {
    device = count > 0 ? at::Device(*accelerator) : at::Device(at::kCPU);
  } else {
    try {
      device.emplace(options.device);
    } catch (const c10::Error&) {
      throw InputError("--device: expected auto, cpu, cuda or cuda:N, got " + options.device);
    }
  }
  if (device->is_cpu()) {
    device->set_index(-1);
  } else if (!device->is_meta() && std::max<int64_t>(0, device->index()) < device_count(device->type())) {
    const c10::impl::VirtualGuardImpl guard(device->type());
    if (device->has_index()) guard.setDevice(*device);
    device = guard.getDevice();
  } else {
    const std::string name = accelerator ? at::DeviceTypeName(*accelerator, /*lower_case=*/true) : "";
    const std::string last = count > 1 ? " to " + name + ":" + std::to_string(count - 1) : "";
    throw InputError("--device: expected a device of this machine, which LibTorch finds to be cpu" +
                     (count > 0 ? " and " + name + ":0" + last : "") + "; got " + options.device);
  }
  if (options.precision == "tf32" && !device->is_cuda()) {
    throw InputError("--precision tf32: expected a CUDA device, which computes in TF32, got " +
                     device->str() + "; take fp32 or bf16");
  }
  if (device->is_cuda()) {
    const auto precision =
        options.precision == "tf32" ? at::Float32Precision::TF32 : at::Float32Precision::IEEE;
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV})
      at::globalContext().setFloat32Precision(at::Float32Backend::CUDA, op, precision);
  }
  return *device;
}

at::ScalarType weight_dtype(const LoopOptions& options) {
  return options.weights == "fp32" ? at::kFloat : at::kBFloat16;
}

at::ScalarType base_dtype(const LoopOptions& options) {
  if (options.precision == "bf16") return at::kBFloat16;
  return options.precision == "fp16" ? at::kHalf : at::kFloat;
}

std::optional<shoestring::AutocastGuard> autocast(const LoopOptions& options, at::Device device) {
  const at::ScalarType dtype = base_dtype(options);
  if (dtype == at::kFloat) return std::nullopt;
  return std::optional<shoestring::AutocastGuard>(std::in_place, device.type(), dtype);
}

std::map<std::string, int64_t> device_memory(at::Device device) {
  if (device.is_cpu()) return {};
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return {};
  const auto stats = allocator->getDeviceStats(device.index());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {{"allocated", stats.allocated_bytes[kAll].current},
          {"peak", stats.allocated_bytes[kAll].peak},
          {"reserved", stats.reserved_bytes[kAll].current}};
}

int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

std::string memory_text(at::Device device) {
  std::string text = "peak " + std::to_string(peak_memory() >> 20) + " MiB";
  for (const auto& [name, bytes] : device_memory(device))
    text += ", " + device.str() + " " + name + " " + std::to_string(bytes >> 20) + " MiB";
  return text;
}
