#pragma once

// Functions of whole matrices that processes have split: each matrix is sent to one rank, its owner, and the
// result is sent back.

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <shoestring/core/export.h>

#include "optim/split/split_params.h"

namespace shoestring::optim::detail {

/// Returns the owner of each matrix. `costs`: the work for each one. Largest first, each to the rank with the
/// least work so far.
SHOESTRING_API std::vector<int64_t> owners_of(const std::vector<double>& costs, int64_t ranks);

/// Returns about the number of multiplications of a Newton-Schulz step of a matrix.
SHOESTRING_API double matrix_cost(at::IntArrayRef sizes);

/// A range of elements of a matrix on this rank, in fp32, and how the whole matrix is split.
struct SplitMatrix {
  at::Tensor part;
  const SplitParameter* split;
  double cost;
};

/// Replaces the part of each matrix by that of compute(i, whole matrix), which the owner of the matrix calls.
/// All matrices are split over one group; all of its ranks must call this with the same matrices. Results are
/// sent in the dtype that compute returns, which is `dtype`; without it, nothing is sent back. `first`: the
/// rank that counts as the first owner.
void on_owners(std::vector<SplitMatrix>& matrices, std::optional<at::ScalarType> dtype, int64_t first,
               const std::function<at::Tensor(size_t, at::Tensor)>& compute);

}  // namespace shoestring::optim::detail
