#include "ops/norm.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "ops/cuda.h"
#include "ops/huge_pages.h"

namespace shoestring::norm {
namespace {

using kernels::Norm;

constexpr const char* kKernels = "norm";
constexpr int64_t kGrain = int64_t{1} << 14;  // elements that a thread is worth starting for
// Sums over rows on the CPU: so many parts at most, whatever the number of threads, and within a part so many rows before
// they join the others. The error is that of short sums.
constexpr int64_t kParts = 64, kShort = 128, kLeastRows = 16;
constexpr int64_t kSums = int64_t{1} << 18;  // of parts, in the time that it takes to wake a thread
// On CUDA: a group of threads has at least so many rows, and there are at most so many groups.
constexpr int64_t kRowsEach = 8, kGroups = 1024;

int64_t features_of(const Tensor& x) { return x.size(-1); }
int64_t rows_of(const Tensor& x) { return x.numel() / std::max<int64_t>(1, features_of(x)); }
int64_t grain(int64_t features) { return std::max<int64_t>(1, kGrain / features); }

// Weight and bias as the kernels take them: fp32, or on CUDA x's type.
struct Vectors {
  Tensor weight, bias;
  bool wide = true;
};
Vectors vectors_of(Backend backend, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  const auto is_x = [&](const OptionalTensor& t) { return !t.has_value() || t->scalar_type() == x.scalar_type(); };
  const bool wide = backend == Backend::kCpu || !is_x(weight) || !is_x(bias) || x.scalar_type() == at::kFloat;
  const auto type = wide ? at::kFloat : x.scalar_type();
  const auto convert = [&](const OptionalTensor& t) { return t.has_value() ? t->to(type).contiguous() : Tensor(); };
  return {convert(weight), convert(bias), wide};
}

const void* address(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
void* room(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }
float* floats(const Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; }

Norm problem(const Tensor& x, const Options& options, bool wide) {
  return {features_of(x), static_cast<float>(options.eps), options.centred, options.casting,
          static_cast<float>(options.offset), wide};
}

Tensor like(const Tensor& x) { return in_huge_pages(at::empty(x.sizes(), x.options())); }
Tensor statistic(const Tensor& x) {
  return at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(statistics_type(x)));
}

// In plain PyTorch, for checks of gradients.
Forward forward_double(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, const Options& o) {
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

std::tuple<Tensor, Tensor, Tensor> backward_double(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& x,
                                                   const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                                                   const Options& o, bool weight_grad, bool bias_grad) {
  const Tensor scale = rstd.unsqueeze(-1), h = (o.centred ? x - mean.unsqueeze(-1) : x) * scale;
  const Tensor g = weight.has_value() ? grad * (weight->to(at::kDouble) + o.offset) : grad;
  Tensor grad_x = g - h * (g * h).mean(-1, true);
  if (o.centred) grad_x = grad_x - g.mean(-1, true);
  grad_x = grad_x * scale;
  if (grad_sum.has_value()) grad_x = grad_x + *grad_sum;
  const auto columns = [&](const Tensor& t) { return t.reshape({rows_of(x), features_of(x)}).sum(0); };
  return {grad_x, weight_grad ? columns(grad * h) : Tensor(), bias_grad ? columns(grad) : Tensor()};
}

// grad_x by rows; with sums, parts of them on the threads, each over the same rows whatever the number of threads.
std::pair<Tensor, Tensor> backward_cpu(const Norm& problem, kernels::NormBackward io, const Tensor& x, bool weight_grad,
                                       bool bias_grad) {
  const auto& k = cpu::norm();
  const auto run = x.scalar_type() == at::kFloat      ? k.backward_float
                   : x.scalar_type() == at::kBFloat16 ? k.backward_bf16
                                                      : k.backward_fp16;
  const int64_t rows = rows_of(x), features = problem.features;
  if (!weight_grad && !bias_grad) {
    at::parallel_for(0, rows, grain(features), [&](int64_t begin, int64_t end) { run(problem, io, begin, end); });
    return {};
  }
  const int64_t each = std::max((rows + kParts - 1) / kParts, kLeastRows), parts = (rows + each - 1) / each;
  // Of each part, the sum of all its rows and, if those are many, that of the last few.
  const bool single = each <= kShort;
  const int64_t width = single ? features : 2 * features;
  const auto room_for = [&](bool wanted, at::IntArrayRef sizes) {
    return wanted ? at::empty(sizes, x.options().dtype(at::kFloat)) : Tensor();
  };
  const Tensor to_weight = room_for(weight_grad, {parts, width}), to_bias = room_for(bias_grad, {parts, width});
  const Tensor all[] = {room_for(weight_grad, {features}), room_for(bias_grad, {features})};
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t end = std::min(rows, (part + 1) * each);
      for (const Tensor* sums : {&to_weight, &to_bias}) {
        if (sums->defined()) std::fill_n(floats(*sums) + part * width, width, 0.f);
      }
      for (int64_t row = part * each; row < end; row += kShort) {
        kernels::NormBackward few = io;
        for (auto [sums, at] : {std::pair{&to_weight, &few.grad_weight}, {&to_bias, &few.grad_bias}}) {
          if (sums->defined()) *at = floats(*sums) + part * width + (single ? 0 : features);
        }
        run(problem, few, row, std::min(row + kShort, end));
        for (float* sums : {few.grad_weight, few.grad_bias}) {
          if (sums == nullptr || single) continue;
          k.sum_rows(sums - features, 2, features, 0, features, sums - features);
          std::fill_n(sums, features, 0.f);
        }
      }
    }
  });
  at::parallel_for(0, features, std::max<int64_t>(64, kSums / parts), [&](int64_t begin, int64_t end) {
    for (const auto& [sums, out] : {std::pair{&to_weight, &all[0]}, {&to_bias, &all[1]}}) {
      if (sums->defined()) k.sum_rows(floats(*sums), parts, width, begin, end, floats(*out));
    }
  });
  return {all[0], all[1]};
}

std::pair<Tensor, Tensor> backward_cuda(const Norm& problem, kernels::NormBackward io, const Tensor& x, bool weight_grad,
                                        bool bias_grad) {
  const auto& k = cuda::table<kernels::NormCuda>(kKernels);
  const auto type = x.scalar_type();
  const int64_t rows = rows_of(x), features = problem.features;
  const bool sums = weight_grad || bias_grad;
  const int64_t parts = sums ? std::min((rows + kRowsEach - 1) / kRowsEach, kGroups) : rows;
  const auto room_for = [&](bool wanted) {
    return wanted ? at::empty({parts, features}, x.options().dtype(at::kFloat)) : Tensor();
  };
  const Tensor to_weight = room_for(weight_grad), to_bias = room_for(bias_grad);
  io.grad_weight = floats(to_weight);
  io.grad_bias = floats(to_bias);
  const auto run = type == at::kFloat ? k.backward_float : type == at::kBFloat16 ? k.backward_bf16 : k.backward_fp16;
  check_launch(kKernels, run(problem, io, rows, parts, stream_of(x)));
  const auto add = problem.wide_weight ? k.sum_rows_float : type == at::kBFloat16 ? k.sum_rows_bf16 : k.sum_rows_fp16;
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
  TORCH_CHECK(at::isFloatingType(x.scalar_type()) && x.dim() > 0, op,
              ": x: expected (..., features) of fp32, fp64, bf16 or fp16, received ", x.sym_sizes(), " of ", x.scalar_type());
  TORCH_CHECK(eps >= 0, op, ": eps: expected a number that is not negative, received ", eps);
}

void check_vector(const char* op, const char* name, const Tensor& x, const OptionalTensor& t) {
  if (!t.has_value()) return;
  TORCH_CHECK(t->dim() == 1 && t->sym_size(0) == x.sym_size(-1) && at::isFloatingType(t->scalar_type()) &&
                  t->device() == x.device(),
              op, ": ", name, ": expected (", x.sym_size(-1), ") of a floating-point type on ", x.device(), ", received ",
              t->sym_sizes(), " of ", t->scalar_type(), " on ", t->device());
}

Forward forward(Backend backend, const char* op, const Tensor& x, const OptionalTensor& residual,
                const OptionalTensor& weight, const OptionalTensor& bias, const Options& options) {
  const c10::OptionalDeviceGuard guard(x.device());
  const auto type = x.scalar_type();
  if (type == at::kDouble) {
    const Tensor sum = residual.has_value() ? x + *residual : Tensor();
    Forward result = forward_double(sum.defined() ? sum : x, weight, bias, options);
    result.sum = sum;
    return result;
  }
  const Tensor source = x.contiguous(), other = residual.has_value() ? residual->contiguous() : Tensor();
  const Vectors vectors = vectors_of(backend, x, weight, bias);
  Forward result{like(source), other.defined() ? like(source) : Tensor(), options.centred ? statistic(x) : Tensor(),
                 statistic(x)};
  if (x.numel() == 0) return result;
  const Norm norm = problem(x, options, vectors.wide);
  const kernels::NormForward io{address(source),  address(other), address(vectors.weight), address(vectors.bias),
                                room(result.sum), room(result.y), floats(result.mean),     floats(result.rstd)};
  if (backend == Backend::kCuda) {
    const auto& k = cuda::table<kernels::NormCuda>(kKernels);
    const auto run = type == at::kFloat ? k.forward_float : type == at::kBFloat16 ? k.forward_bf16 : k.forward_fp16;
    check_launch(op, run(norm, io, rows_of(x), stream_of(x)));
    return result;
  }
  const auto& k = cpu::norm();
  const auto run = type == at::kFloat ? k.forward_float : type == at::kBFloat16 ? k.forward_bf16 : k.forward_fp16;
  at::parallel_for(0, rows_of(x), grain(norm.features), [&](int64_t begin, int64_t end) { run(norm, io, begin, end); });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> backward(Backend backend, const char* op, const Tensor& grad,
                                            const OptionalTensor& grad_sum, const Tensor& x,
                                            const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                                            const Options& options, bool weight_grad, c10::optional<at::ScalarType> bias) {
  const c10::OptionalDeviceGuard guard(x.device());
  if (x.scalar_type() == at::kDouble) {
    auto [to_x, to_weight, to_bias] =
        backward_double(grad, grad_sum, x, weight, mean, rstd, options, weight_grad, bias.has_value());
    return {to_x, weight_grad ? to_weight.to(weight->scalar_type()) : to_weight, bias ? to_bias.to(*bias) : to_bias};
  }
  const Tensor source = x.contiguous(), upstream = grad.contiguous();
  const Tensor more = grad_sum.has_value() ? grad_sum->contiguous() : Tensor();
  const Vectors vectors = vectors_of(backend, x, weight, std::nullopt);
  const Tensor grad_x = like(source);
  if (x.numel() == 0) {
    const auto none = [&](bool wanted, auto type) {
      return wanted ? at::zeros({features_of(x)}, x.options().dtype(type())) : Tensor();
    };
    return {grad_x, none(weight_grad, [&] { return weight->scalar_type(); }), none(bias.has_value(), [&] { return *bias; })};
  }
  const kernels::NormBackward io{address(upstream), address(more), address(source), address(vectors.weight),
                                 floats(mean),      floats(rstd),  room(grad_x)};
  const auto run = backend == Backend::kCuda ? backward_cuda : backward_cpu;
  auto [to_weight, to_bias] = run(problem(x, options, vectors.wide), io, source, weight_grad, bias.has_value());
  return {grad_x, weight_grad ? to_weight.to(weight->scalar_type()) : Tensor(), bias ? to_bias.to(*bias) : Tensor()};
}

}  // namespace shoestring::norm
