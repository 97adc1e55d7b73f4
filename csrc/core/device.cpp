#include "core/device.h"

#include <string>
#include <typeinfo>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/cuda.h"

namespace shoestring {

void synchronize(c10::Device device) {
  if (is_asynchronous(device))
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(with_index(device).index());
}

c10::Device with_index(c10::Device device) {
  if (is_asynchronous(device) && !device.has_index())
    device.set_index(c10::impl::VirtualGuardImpl(device.type()).getDevice().index());
  return device;
}

c10::Device default_device() {
  const auto type = at::getAccelerator();
  if (!type || !c10::impl::hasDeviceGuardImpl(*type)) return c10::kCPU;
  return c10::impl::VirtualGuardImpl(*type).deviceCount() > 0 ? c10::Device(*type) : c10::Device(c10::kCPU);
}

const cuda::Runtime* cuda::find_runtime(c10::Device device) {
  // The emulator of the tests runs CUDA kernels on tensors of the CPU.
  if (device.is_cuda() || device.is_cpu()) return &table<Runtime>("runtime");
  const std::string name = "runtime_" + c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  return static_cast<const Runtime*>(find_provided(name.c_str(), typeid(Runtime)));
}

}  // namespace shoestring
