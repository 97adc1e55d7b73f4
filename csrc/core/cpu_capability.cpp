#include <string>

#include <torch/library.h>

#include <shoestring/core/ops.h>

#include "core/capability.h"

namespace shoestring {

std::string cpu_capability() { return cpu::name(cpu::capability()); }

bool set_cpu_capability(const std::string& name) {
  for (auto candidate :
       {cpu::Capability::kPlain, cpu::Capability::kAvx2, cpu::Capability::kAvx512, cpu::Capability::kAmx}) {
    if (name == cpu::name(candidate)) return cpu::set_capability(candidate);
  }
  TORCH_CHECK(false, "set_cpu_capability: name: expected plain, avx2, avx512 or amx, received '", name, "'");
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_cpu_capability", cpu_capability);
  m.impl("_set_cpu_capability", [](std::string name) { return set_cpu_capability(name); });
}

}  // namespace shoestring
