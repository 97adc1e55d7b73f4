#include "optim/wrappers/subspace.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace shoestring::optim::detail {
namespace {

using at::Tensor;

constexpr int64_t kIterations = 4, kOversampling = 16;
// Maximum number of elements of a 16-bit matrix that are converted to fp32 at a time: 64 MiB of fp32.
constexpr int64_t kChunk = int64_t{1} << 24;

// Divides x by its largest magnitude, so that matrix products with x do not overflow in fp32.
Tensor scaled(const Tensor& x) { return x / x.abs().amax().clamp_min(std::numeric_limits<float>::min()); }

Tensor orthonormal(const Tensor& x) { return std::get<0>(at::linalg_qr(x)); }

int64_t rows_at_a_time(const Tensor& matrix) {
  return matrix.scalar_type() == at::kFloat ? matrix.size(0) : std::max<int64_t>(1, kChunk / matrix.size(1));
}

}  // namespace

Tensor leading_vectors(const Tensor& matrix, int64_t count, int64_t seed) {
  const int64_t width = std::min(count + kOversampling, matrix.size(0));
  Tensor sketch = at::mm(matrix, normal(matrix.size(1), width, seed, matrix.device()));
  for (int64_t i = 0; i < kIterations; ++i)
    sketch = at::mm(matrix, scaled(at::mm(matrix.mT(), orthonormal(sketch))));
  const Tensor basis = orthonormal(sketch);
  const Tensor within = scaled(at::mm(basis.mT(), matrix));
  // linalg_eigh returns the eigenvectors in ascending order of the eigenvalues.
  const Tensor vectors = std::get<1>(at::linalg_eigh(at::mm(within, within.mT())));
  return at::mm(basis, vectors.flip(1).narrow(1, 0, count)).contiguous();
}

Tensor random_basis(int64_t rows, int64_t count, int64_t seed, at::Device device) {
  return orthonormal(normal(rows, count, seed, device));
}

Tensor project(const Tensor& grad, const Tensor& basis, bool left) {
  const int64_t m = grad.size(0), n = grad.size(1), rank = basis.size(1), step = rows_at_a_time(grad);
  const Tensor low = at::zeros({left ? rank : m, left ? n : rank}, grad.options().dtype(at::kFloat));
  for (int64_t i = 0; i < m; i += step) {
    const int64_t count = std::min(step, m - i);
    const Tensor part = grad.narrow(0, i, count).to(at::kFloat);
    if (left) {
      low.addmm_(basis.narrow(0, i, count).mT(), part);
    } else {
      low.narrow(0, i, count).copy_(at::mm(part, basis));
    }
  }
  return low;
}

void change_rows(const Tensor& param, const Tensor& keep,
                 c10::function_ref<void(int64_t, int64_t, const Tensor&)> body) {
  // flatten() returns a copy if the strides of the parameter do not allow a view as a matrix.
  const Tensor matrix = param.flatten(1);
  const int64_t m = matrix.size(0), step = rows_at_a_time(matrix);
  for (int64_t i = 0; i < m; i += step) {
    const int64_t count = std::min(step, m - i);
    // `wide` is the slice `rows` in fp32. If the parameter is fp32, `wide` and `rows` are the same tensor.
    const Tensor rows = matrix.narrow(0, i, count), wide = rows.to(at::kFloat);
    if (keep.defined()) wide.mul_(keep);
    body(i, count, wide);
    if (!wide.is_same(rows)) rows.copy_(wide);
  }
  if (matrix.data_ptr() != param.data_ptr()) param.copy_(matrix.view(param.sizes()));
}

Tensor normal(int64_t rows, int64_t columns, int64_t seed, at::Device device) {
  at::Generator generator =
      device.is_cpu()
          ? at::make_generator<at::CPUGeneratorImpl>()
          : at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
  generator.set_current_seed(static_cast<uint64_t>(seed));
  return at::randn({rows, columns}, generator, at::TensorOptions().dtype(at::kFloat).device(device));
}

int64_t mix(std::initializer_list<int64_t> numbers) {
  uint64_t x = 0;
  for (const int64_t value : numbers) {  // one step of the hash function splitmix64 for each number
    x += static_cast<uint64_t>(value) + 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    x ^= x >> 31;
  }
  return static_cast<int64_t>(x & 0xFFFFFFFF);
}

}  // namespace shoestring::optim::detail
