#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shoestring::optim::detail {

/// The leading left singular vectors of an fp32 matrix (rows, columns), largest first, by randomised subspace
/// iteration: algorithms 4.4 and 5.1 of arXiv 0909.4061, as in Python's shoestring.optim.projections. Returns
/// (rows, count).
at::Tensor leading_vectors(const at::Tensor& matrix, int64_t count, int64_t seed);

/// (rows, count) random orthonormal columns, fp32.
at::Tensor random_basis(int64_t rows, int64_t count, int64_t seed, at::Device device);

/// A gradient (m, n) at low rank, in fp32: basis^T G, (r, n), or G basis, (m, r).
at::Tensor project(const at::Tensor& grad, const at::Tensor& basis, bool left);

/// param = param * keep + scale * basis low (from the left; else low basis^T): in fp32, rounded once.
void add_product(const at::Tensor& param, double keep, double scale, const at::Tensor& basis,
                 const at::Tensor& low, bool left);

/// The next seed, of 32 bits.
int64_t mix(int64_t seed, int64_t number = 0);

}  // namespace shoestring::optim::detail
