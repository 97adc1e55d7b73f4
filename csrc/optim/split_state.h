#pragma once

// Optimizer state of parameters of which each process has a range of elements (SplitParameter::begins).

#include "optim/arena.h"
#include "optim/split_params.h"

namespace shoestring::optim::detail {

/// Returns the state that one process would have of the whole parameter. All ranks of the group must call it.
/// Ranges must begin at multiples of 256 elements.
ParamState whole_state(const Rule& rule, const Kind& kind, const ParamState& part,
                       const SplitParameter& split);

/// Returns this process's part of the state of a whole parameter, or raises c10::Error if the state does not
/// fit the rule and the parameter.
ParamState part_of_state(const Rule& rule, const Kind& kind, const ParamState& whole,
                         const SplitParameter& split);

}  // namespace shoestring::optim::detail
