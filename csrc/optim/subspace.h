#pragma once

#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shoestring::optim::detail {

/// Returns the leading left singular vectors of an fp32 matrix (rows, columns) as (rows, count), the largest
/// first. Uses randomised subspace iteration, algorithms 4.4 and 5.1 of arXiv 0909.4061, as
/// shoestring.optim.projections does in Python.
at::Tensor leading_vectors(const at::Tensor& matrix, int64_t count, int64_t seed);

/// Returns (rows, count) random orthonormal columns, fp32.
at::Tensor random_basis(int64_t rows, int64_t count, int64_t seed, at::Device device);

/// Projects a gradient (m, n) to low rank, in fp32: basis^T G, (r, n), or G basis, (m, r).
at::Tensor project(const at::Tensor& grad, const at::Tensor& basis, bool left);

/// Calls body(first, count, rows) for slices of the parameter's matrix, already multiplied by `keep`. `body`
/// modifies the rows in place, in fp32; they are then rounded once.
void change_rows(const at::Tensor& param, double keep,
                 c10::function_ref<void(int64_t, int64_t, const at::Tensor&)> body);

/// Returns (rows, columns) normal random numbers, fp32. They depend on the seed and the type of device only,
/// and are the same in Python.
at::Tensor normal(int64_t rows, int64_t columns, int64_t seed, at::Device device);

/// Hashes a list of numbers to a seed of 32 bits.
int64_t mix(std::initializer_list<int64_t> numbers);

}  // namespace shoestring::optim::detail
