#pragma once

#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shoestring::optim::detail {

/// The leading left singular vectors of an fp32 matrix (rows, columns), largest first, by randomised subspace
/// iteration: algorithms 4.4 and 5.1 of arXiv 0909.4061, as in Python's shoestring.optim.projections. Returns
/// (rows, count).
at::Tensor leading_vectors(const at::Tensor& matrix, int64_t count, int64_t seed);

/// (rows, count) random orthonormal columns, fp32.
at::Tensor random_basis(int64_t rows, int64_t count, int64_t seed, at::Device device);

/// A gradient (m, n) at low rank, in fp32: basis^T G, (r, n), or G basis, (m, r).
at::Tensor project(const at::Tensor& grad, const at::Tensor& basis, bool left);

/// body(first, count, those rows of the parameter's matrix, times keep) changes rows in place: in fp32,
/// rounded once.
void change_rows(const at::Tensor& param, double keep,
                 c10::function_ref<void(int64_t, int64_t, const at::Tensor&)> body);

/// (rows, columns) normal numbers, fp32, which depend on the seed, and the kind of device, alone: Python's.
at::Tensor normal(int64_t rows, int64_t columns, int64_t seed, at::Device device);

/// A seed of 32 bits for each list of numbers.
int64_t mix(std::initializer_list<int64_t> numbers);

}  // namespace shoestring::optim::detail
