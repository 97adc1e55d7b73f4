#pragma once

// Optimizer state of parameters of which each process has a range of elements (SplitParameter::begins).

#include <optional>
#include <string>

#include "optim/core/arena.h"
#include "optim/split/split_params.h"

namespace shoestring::optim::detail {

/// Returns how processes split a tensor of the state of a split parameter, by its name and the shape that it
/// has in one process; nothing if each process has all of it.
std::optional<SplitTensor> split_of_state(const Rule& rule, const std::string& name, at::IntArrayRef sizes,
                                          const SplitParameter& of);

/// Returns the shapes that the tensors of the state but `step` have in one process, by name.
std::map<std::string, std::vector<int64_t>> whole_shapes(const Rule& rule, const Kind& kind,
                                                         const SplitParameter& split);

/// Returns the whole of a tensor, of which `part` begins with this process's elements. All ranks of the group
/// must call it.
Tensor gathered(const Tensor& part, const SplitTensor& split);

/// Returns this process's part of the state of a whole parameter, or raises c10::Error if the state does not
/// fit the rule and the parameter.
ParamState part_of_state(const Rule& rule, const Kind& kind, const ParamState& whole,
                         const SplitParameter& split);

}  // namespace shoestring::optim::detail
