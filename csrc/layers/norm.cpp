#include "layers/norm.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "core/cuda.h"
#include "core/huge_pages.h"
#include "core/tensors.h"
#include "core/threads.h"

namespace shoestring::layers::norm {
namespace {

using kernels::Norm;

constexpr const char* kKernels = "norm";
// On the CPU, sums over rows are computed in at most kParts parts of at least kLeastRows rows. This division
// does not depend on the number of threads. Within a part, kShort rows are summed before their sum is added
// to the total. A total of R rows thus has the rounding error of about kShort + R / kShort fp32 additions
// instead of R.
constexpr int64_t kParts = 64, kShort = 128, kLeastRows = 16;
// Number of additions up to which one thread adds the partial sums, because so few additions take less time
// than waking another thread.
constexpr int64_t kSums = int64_t{1} << 18;
// On CUDA, groups of threads first sum the gradients of weight and bias over some rows each. A group sums
// about kRowsEach rows or more, and there are at most kGroups groups.
constexpr int64_t kRowsEach = 8, kGroups = 1024;

int64_t features_of(const Tensor& x) { return x.size(-1); }
int64_t rows_of(const Tensor& x) { return x.numel() / std::max<int64_t>(1, features_of(x)); }
// Returns the minimum number of rows per thread for a loop that reads and writes `tensors` tensors like x.
int64_t grain(const Tensor& x, int64_t tensors) {
  return row_grain(tensors * features_of(x) * static_cast<int64_t>(x.element_size()));
}

// Weight and bias in the dtype in which kernels read them: x's dtype if both have it, else fp32.
struct Vectors {
  Tensor weight, bias;
  bool wide = true;
};
Vectors vectors_of(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto is_x = [&](const OptionalTensor& t) {
    return !t.has_value() || t->scalar_type() == x.scalar_type();
  };
  const bool wide = !is_x(weight) || !is_x(bias) || x.scalar_type() == at::kFloat;
  const auto type = wide ? at::kFloat : x.scalar_type();
  const auto convert = [&](const OptionalTensor& t) {
    return t.has_value() ? t->to(type).contiguous() : Tensor();
  };
  return {convert(weight), convert(bias), wide};
}

const void* address(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
void* room(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }
float* floats(const Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }

Norm problem(const Tensor& x, const Options& options, bool wide) {
  return {features_of(x), static_cast<float>(options.eps),    options.centred,
          options.upcast, static_cast<float>(options.offset), wide};
}

const kernels::NormRows& cpu_rows(const Tensor& x) {
  const auto& k = cpu::norm();
  return x.scalar_type() == at::kFloat      ? k.of_float
         : x.scalar_type() == at::kBFloat16 ? k.of_bf16
                                            : k.of_fp16;
}
// Returns the kernels for rows of dtype `row` whose y or gradient has dtype `out`, and for an x of dtype `x`.
const kernels::NormRows& cpu_rows(at::ScalarType x, const Tensor& row, at::ScalarType out) {
  const auto& k = cpu::norm();
  if (row.scalar_type() == out) {
    return x == out ? cpu_rows(row) : x == at::kBFloat16 ? k.bf16_widened : k.fp16_widened;
  }
  if (x == at::kFloat) return out == at::kBFloat16 ? k.float_to_bf16 : k.float_to_fp16;
  return out == at::kBFloat16 ? k.bf16_plus_float : k.fp16_plus_float;
}
// Returns a weight or bias plus `offset` as fp32, in the element order of the CPU kernels. If `vector` (the
// weight or bias) is undefined, each element of the result is `none`.
Tensor arranged(const Norm& norm, const Tensor& x, const Tensor& vector, float offset, float none) {
  Tensor out = at::empty({norm.features}, x.options().dtype(at::kFloat));
  if (vector.defined()) {
    cpu_rows(x).arrange(vector.const_data_ptr(), norm, offset, floats(out));
  } else {
    std::fill_n(floats(out), norm.features, none);
  }
  return out;
}

Tensor like(const Tensor& x, at::ScalarType dtype) {
  return in_huge_pages(at::empty(x.sizes(), x.options().dtype(dtype)));
}
Tensor like(const Tensor& x) { return like(x, x.scalar_type()); }
Tensor statistic(const Tensor& x) {
  return at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(statistics_type(x)));
}

// Computes rms_norm or layer_norm in fp64 with PyTorch's operators, for gradient checks.
Forward forward_double(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                       const Options& o) {
  Forward result;
  result.mean = o.centred ? x.mean(-1, /*keepdim=*/true) : at::zeros({}, x.options());
  const Tensor d = x - result.mean;
  result.rstd = (d.square().mean(-1, /*keepdim=*/true) + o.eps).rsqrt();
  result.y = d * result.rstd;
  if (weight.has_value()) result.y = result.y * (weight->to(at::kDouble) + o.offset);
  if (bias.has_value()) result.y = result.y + bias->to(at::kDouble);
  result.mean = o.centred ? result.mean.squeeze(-1) : Tensor();
  result.rstd = result.rstd.squeeze(-1);
  return result;
}

Backward backward_double(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x,
                         const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                         const Options& o, bool weight_grad, bool bias_grad) {
  const Tensor scale = rstd.unsqueeze(-1), h = (o.centred ? x - mean.unsqueeze(-1) : x) * scale;
  const Tensor g = weight.has_value() ? grad * (weight->to(at::kDouble) + o.offset) : grad;
  Tensor grad_x = g - h * (g * h).mean(-1, true);
  if (o.centred) grad_x = grad_x - g.mean(-1, true);
  grad_x = grad_x * scale;
  if (grad_sum.has_value()) grad_x = grad_x + *grad_sum;
  const auto columns = [&](const Tensor& t) { return t.reshape({rows_of(x), features_of(x)}).sum(0); };
  return {grad_x, weight_grad ? columns(grad * h) : Tensor(), bias_grad ? columns(grad) : Tensor(), {}};
}

// Computes grad_x and, if wanted, the gradients of weight and bias. Threads first sum the gradients of weight
// and bias over parts of the rows. The division into parts does not depend on the number of threads.
std::pair<Tensor, Tensor> backward_cpu(const Norm& problem, kernels::NormBackward io, const Tensor& x,
                                       at::ScalarType grad, const Vectors& vectors, bool weight_grad,
                                       bool bias_grad) {
  const auto& k = cpu_rows(x.scalar_type(), x, grad);
  const int64_t rows = rows_of(x), features = problem.features;
  const Tensor weight = arranged(problem, x, vectors.weight, problem.offset, 1);
  io.weight = address(weight);
  if (!weight_grad && !bias_grad) {
    at::parallel_for(0, rows, grain(x, 3),
                     [&](int64_t begin, int64_t end) { k.backward(problem, io, begin, end); });
    return {};
  }
  const int64_t each = std::max((rows + kParts - 1) / kParts, kLeastRows), parts = (rows + each - 1) / each;
  // Buffer of sums over rows, one row per part: the sums for the weight's gradient, then the sums for the
  // bias's gradient. A part of more than kShort rows has another set of these sums, for its latest kShort
  // rows.
  const int64_t width = problem.centred ? 2 * features : features, room = each <= kShort ? width : 2 * width;
  const Tensor part_sums = at::empty({parts, room}, x.options().dtype(at::kFloat));
  at::parallel_for(0, parts, std::max<int64_t>(1, grain(x, 3) / each), [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t end = std::min(rows, (part + 1) * each);
      float *sums = floats(part_sums) + part * room, *few_sums = sums + room - width;
      std::fill_n(sums, room, 0.f);
      for (int64_t row = part * each; row < end; row += kShort) {
        kernels::NormBackward few = io;
        few.grad_weight = few_sums;
        few.grad_bias = problem.centred ? few_sums + features : nullptr;
        k.backward(problem, few, row, std::min(row + kShort, end));
        if (few_sums == sums) continue;
        cpu::norm().sum_rows(sums, 2, width, 0, width, sums);
        std::fill_n(few_sums, width, 0.f);
      }
    }
  });
  at::parallel_for(0, width, std::max<int64_t>(64, kSums / parts), [&](int64_t begin, int64_t end) {
    cpu::norm().sum_rows(floats(part_sums), parts, room, begin, end, floats(part_sums));
  });
  const auto total = [&](bool is_requested, int64_t first) {
    if (!is_requested) return Tensor();
    Tensor out = at::empty({features}, x.options().dtype(problem.wide_weight ? at::kFloat : x.scalar_type()));
    k.restore(floats(part_sums) + first, problem, out.mutable_data_ptr());
    return out;
  };
  return {total(weight_grad, 0), total(bias_grad, features)};
}

std::pair<Tensor, Tensor> backward_cuda(const Norm& problem, kernels::NormBackward io, const Tensor& x,
                                        const Vectors& vectors, bool weight_grad, bool bias_grad) {
  const auto& k = cuda::table<kernels::NormCuda>(kKernels);
  const auto type = x.scalar_type();
  const int64_t rows = rows_of(x), features = problem.features;
  const bool sums = weight_grad || bias_grad;
  const int64_t parts = sums ? std::min((rows + kRowsEach - 1) / kRowsEach, kGroups) : rows;
  const auto room_for = [&](bool is_requested) {
    return is_requested ? at::empty({parts, features}, x.options().dtype(at::kFloat)) : Tensor();
  };
  const Tensor to_weight = room_for(weight_grad), to_bias = room_for(bias_grad);
  io.weight = address(vectors.weight);
  io.grad_weight = floats(to_weight);
  io.grad_bias = floats(to_bias);
  const auto run = type == at::kFloat      ? k.backward_float
                   : type == at::kBFloat16 ? k.backward_bf16
                                           : k.backward_fp16;
  check_launch(kKernels, run(problem, io, rows, parts, stream_of(x)));
  const auto add = problem.wide_weight     ? k.sum_rows_float
                   : type == at::kBFloat16 ? k.sum_rows_bf16
                                           : k.sum_rows_fp16;
  const auto total = [&](const Tensor& t) {
    if (!t.defined()) return Tensor();
    Tensor out = at::empty({features}, x.options().dtype(problem.wide_weight ? at::kFloat : type));
    check_launch(kKernels, add(floats(t), parts, features, out.mutable_data_ptr(), stream_of(x)));
    return out;
  };
  return {total(to_weight), total(to_bias)};
}

}  // namespace

void check_x(const char* op, const Tensor& x, double eps) {
  TORCH_CHECK(is_supported_float(x.scalar_type()) && x.dim() > 0, op,
              ": x: expected (..., features) of fp32, fp64, bf16 or fp16, received ", x.sym_sizes(), " of ",
              x.scalar_type());
  TORCH_CHECK(eps >= 0, op, ": eps: expected a number that is not negative, received ", eps);
}

void check_vector(const char* op, const char* name, const Tensor& x, const OptionalTensor& t) {
  if (!t.has_value()) return;
  TORCH_CHECK(t->dim() == 1 && t->sym_size(0) == x.sym_size(-1) && is_supported_float(t->scalar_type()) &&
                  t->device() == x.device(),
              op, ": ", name, ": expected (", x.sym_size(-1), ") of a floating-point type on ", x.device(),
              ", received ", t->sym_sizes(), " of ", t->scalar_type(), " on ", t->device());
}

void check_residual(const char* op, const Tensor& x, const OptionalTensor& residual,
                    c10::optional<at::ScalarType> out_dtype, const char* hint) {
  if (!residual.has_value()) return;
  // x may be narrower than the residual if y has the dtype of x.
  const bool narrow = residual->scalar_type() == at::kFloat && out_dtype == x.scalar_type();
  TORCH_CHECK(residual->sym_sizes() == x.sym_sizes() && residual->device() == x.device() &&
                  (residual->scalar_type() == x.scalar_type() || narrow),
              op, ": residual: expected x's shape, dtype and device, ", x.sym_sizes(), " of ",
              x.scalar_type(), " on ", x.device(), ", received ", residual->sym_sizes(), " of ",
              residual->scalar_type(), " on ", residual->device(), hint);
}

void check_out_dtype(const char* op, const Tensor& x, const OptionalTensor& residual,
                     c10::optional<at::ScalarType> out_dtype) {
  const auto type = residual.has_value() ? residual->scalar_type() : x.scalar_type();
  TORCH_CHECK(!out_dtype.has_value() || *out_dtype == type ||
                  (type == at::kFloat && (*out_dtype == at::kBFloat16 || *out_dtype == at::kHalf)),
              op, ": out_dtype: expected None, ", type, ", or bf16 or fp16 for rows of fp32, received ",
              *out_dtype);
}

Forward forward(Backend backend, const char* op, const Tensor& x, const OptionalTensor& residual,
                const OptionalTensor& weight, const OptionalTensor& bias, const Options& options) {
  const c10::OptionalDeviceGuard guard(x.device());
  const Tensor row = residual.has_value() ? *residual : x;  // has the dtype in which rows are normalised
  const auto type = row.scalar_type(), out = options.out_dtype.value_or(type);
  if (type == at::kDouble) {
    const Tensor sum = residual.has_value() ? x + *residual : Tensor();
    Forward result = forward_double(sum.defined() ? sum : x, weight, bias, options);
    result.sum = sum;
    return result;
  }
  const bool cuda = backend == Backend::kCuda;
  // The CUDA kernels have one dtype for x, residual and y, so conversions surround them.
  const Tensor source = (cuda ? x.to(type) : x).contiguous(),
               other = residual.has_value() ? residual->contiguous() : Tensor();
  const Vectors vectors = vectors_of(row, weight, bias);
  Forward result{like(source, cuda ? type : out), other.defined() ? like(other) : Tensor(),
                 options.centred ? statistic(x) : Tensor(), statistic(x)};
  const auto finished = [&] {
    result.y = result.y.to(out);
    return result;
  };
  if (x.numel() == 0) return finished();
  const Norm norm = problem(x, options, vectors.wide);
  kernels::NormForward io{address(source),  address(other), address(vectors.weight), address(vectors.bias),
                          room(result.sum), room(result.y), floats(result.mean),     floats(result.rstd)};
  if (cuda) {
    const auto& k = cuda::table<kernels::NormCuda>(kKernels);
    const auto run = type == at::kFloat      ? k.forward_float
                     : type == at::kBFloat16 ? k.forward_bf16
                                             : k.forward_fp16;
    check_launch(op, run(norm, io, rows_of(x), stream_of(x)));
    return finished();
  }
  const Tensor factors = arranged(norm, row, vectors.weight, norm.offset, 1);
  // A missing bias is replaced by -0, because x + (-0) is x even if x is -0.
  const Tensor terms = norm.centred ? arranged(norm, row, vectors.bias, -0.f, -0.f) : Tensor();
  io.weight = address(factors);
  io.bias = address(terms);
  const auto run = cpu_rows(x.scalar_type(), row, out).forward;
  at::parallel_for(0, rows_of(x), grain(x, other.defined() ? 4 : 2),
                   [&](int64_t begin, int64_t end) { run(norm, io, begin, end); });
  return result;
}

Backward backward(Backend backend, const char* op, const Tensor& grad, const OptionalTensor& grad_sum,
                  const Tensor& x, const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                  const Options& options, bool weight_grad, c10::optional<at::ScalarType> bias,
                  bool rounded_x) {
  const c10::OptionalDeviceGuard guard(x.device());
  if (x.scalar_type() == at::kDouble) {
    Backward result =
        backward_double(grad, grad_sum, x, weight, mean, rstd, options, weight_grad, bias.has_value());
    if (weight_grad) result.weight = result.weight.to(weight->scalar_type());
    if (bias) result.bias = result.bias.to(*bias);
    return result;
  }
  const bool cuda = backend == Backend::kCuda;
  const Tensor source = x.contiguous(), upstream = (cuda ? grad.to(x.scalar_type()) : grad).contiguous();
  const Tensor more = grad_sum.has_value() ? grad_sum->contiguous() : Tensor();
  const Vectors vectors = vectors_of(x, weight, std::nullopt);
  Backward result{like(source), {}, {}, rounded_x && !cuda ? like(source, grad.scalar_type()) : Tensor()};
  if (x.numel() == 0) {
    const auto none = [&](bool is_requested, auto type) {
      return is_requested ? at::zeros({features_of(x)}, x.options().dtype(type())) : Tensor();
    };
    result.weight = none(weight_grad, [&] { return weight->scalar_type(); });
    result.bias = none(bias.has_value(), [&] { return *bias; });
    if (rounded_x) result.rounded_x = result.x.to(grad.scalar_type(), false, /*copy=*/true);
    return result;
  }
  const kernels::NormBackward io{address(upstream), address(more), address(source), nullptr,
                                 floats(mean),      floats(rstd),  room(result.x),  room(result.rounded_x),
                                 nullptr,           nullptr};
  const Norm norm = problem(x, options, vectors.wide);
  auto [to_weight, to_bias] =
      cuda ? backward_cuda(norm, io, source, vectors, weight_grad, bias.has_value())
           : backward_cpu(norm, io, source, grad.scalar_type(), vectors, weight_grad, bias.has_value());
  if (weight_grad) result.weight = to_weight.to(weight->scalar_type());
  if (bias) result.bias = to_bias.to(*bias);
  if (rounded_x && cuda) result.rounded_x = result.x.to(grad.scalar_type(), false, /*copy=*/true);
  return result;
}

}  // namespace shoestring::layers::norm
