#include "runs/generators.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

namespace shoestring::runs {

void each_generator(const std::function<void(const std::string&, at::Generator)>& visit) {
  visit("random.cpu", at::globalContext().defaultGenerator(at::kCPU));
  const auto accelerator = at::getAccelerator();
  if (!accelerator.has_value()) return;
  for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i) {
    const at::Device device(*accelerator, i);
    visit(c10::str("random.", c10::DeviceTypeName(*accelerator, /*lower_case=*/true), ".", int{i}),
          at::globalContext().defaultGenerator(device));
  }
}

}  // namespace shoestring::runs
