#pragma once

#include <functional>
#include <string>

#include <ATen/core/Generator.h>

namespace shoestring::runs {

/// Calls visit(name, generator) for the generators whose states a run has: "random.cpu", and
/// "random.<type>.<index>" for each accelerator.
void each_generator(const std::function<void(const std::string&, at::Generator)>& visit);

}  // namespace shoestring::runs
