#pragma once

#include "losses/linear_cross_entropy.h"

namespace shoestring::losses {

/// Returns whether linear_cross_entropy_by_tiles() computes this problem on this CPU. `tokens` is the number
/// of tokens that are not ignored.
bool fits_tiles(const LinearCrossEntropyProblem& problem, int64_t tokens);

/// Computes a problem of bf16 hidden states on a CPU with AMX. `rows` holds the numbers of the tokens that
/// are not ignored. The weight is bf16, or fp32 and rounded to bf16 while it is packed.
LinearCrossEntropyResult linear_cross_entropy_by_tiles(const LinearCrossEntropyProblem& problem,
                                                       const std::vector<int64_t>& rows);

}  // namespace shoestring::losses
