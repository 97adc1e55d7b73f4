#pragma once

#include <cstdint>
#include <string>

namespace simdev {

/// Takes the CPU kernel of each operator in a namespace that has one besides a composition of other
/// operators. Otherwise PyTorch would take the composition, whose results differ in bits. Returns how many
/// there are.
int64_t prefer_cpu_kernels(const std::string& name_space);

/// Returns how often the host has waited for the shape of a result, which depends on data or is not inferred.
int64_t count_waits();

}  // namespace simdev
