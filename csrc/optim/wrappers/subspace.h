#pragma once

#include <cstdint>
#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shoestring::optim::detail {

/// Returns the leading left singular vectors of an fp32 matrix (rows, columns) as (rows, count), in
/// descending order of the singular values. Uses randomised subspace iteration, algorithms 4.4 and 5.1 of
/// arXiv 0909.4061. With four iterations and 16 extra columns, the vectors capture less of the squared norm
/// than those of an SVD: they miss 1 to 3 % if the matrix is noise, and 0.1 % if the i-th singular value is
/// 1 / sqrt(i).
at::Tensor leading_vectors(const at::Tensor& matrix, int64_t count, int64_t seed);

/// Returns an fp32 matrix (rows, count) of random orthonormal columns.
at::Tensor random_basis(int64_t rows, int64_t count, int64_t seed, at::Device device);

/// Projects a gradient G (m, n) to low rank r, in fp32. Returns basis^T G, (r, n), if `left` is true, else G
/// basis, (m, r).
at::Tensor project(const at::Tensor& grad, const at::Tensor& basis, bool left);

/// Updates a parameter as a matrix, a slice of rows at a time. Multiplies each slice by `keep`, one number,
/// unless `keep` is undefined, and calls body(first row, number of rows, slice in fp32), which modifies the
/// slice in place. The result is rounded once to the parameter's dtype.
void change_rows(const at::Tensor& param, const at::Tensor& keep,
                 c10::function_ref<void(int64_t, int64_t, const at::Tensor&)> body);

/// Returns an fp32 matrix (rows, columns) of normally distributed random numbers. The numbers depend only on
/// the seed and the type of device: they are those of torch.randn with a generator of that seed.
at::Tensor normal(int64_t rows, int64_t columns, int64_t seed, at::Device device);

/// Hashes a list of numbers to a seed of 32 bits, since PyTorch's CPU generator uses only 32 bits.
int64_t mix(std::initializer_list<int64_t> numbers);

}  // namespace shoestring::optim::detail
