// mixup and cutmix: convex combinations of the rows of a batch. All random numbers are drawn on the host from
// Philox, as a function of seed, step and row. The device therefore gets only tensor operations, and the host
// never waits for it.

#include <cmath>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorIndexing.h>
#include <torch/library.h>

#include <shoestring/data/data.h>

#include "core/arguments.h"
#include "core/philox.h"
#include "core/tensors.h"
#include "data/mixing.h"

namespace shoestring::data {
namespace {

using at::Tensor;

constexpr const char* kMixup = "mixup";
constexpr const char* kCutmix = "cutmix";

// A stream of random numbers that depends only on the seed, the step and the number of the stream.
class Draws {
 public:
  Draws(const MixCall& call, uint64_t stream)
      : seed_(static_cast<uint64_t>(call.seed)), step_(static_cast<uint64_t>(call.step)),
        next_(stream << 32) {}

  // Returns a number in (0, 1), with 52 random bits.
  double uniform() {
    const auto bits = kernels::philox_at(seed_, step_, next_++);
    return ((uint64_t{bits.value[0]} << 20 | bits.value[1] >> 12) + 0.5) * 0x1p-52;
  }
  // Returns a whole number in [0, count).
  int64_t below(int64_t count) { return std::min(static_cast<int64_t>(uniform() * count), count - 1); }
  // Returns a number with the distribution Beta(alpha, alpha).
  double beta(double alpha) {
    const double a = log_gamma(alpha), b = log_gamma(alpha);
    return 1 / (1 + std::exp(b - a));
  }

 private:
  double normal() {  // by Box and Muller
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  // Returns the logarithm of a number with the distribution Gamma(shape), by the method of Marsaglia and
  // Tsang
  // ("A simple method for generating gamma variables", 2000). A small shape gives numbers below the smallest
  // double, but their logarithms are exact.
  double log_gamma(double shape) {
    if (shape < 1) {
      const double larger = log_gamma(shape + 1);
      return larger + std::log(uniform()) / shape;
    }
    const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
    for (;;) {
      const double x = normal(), root = 1 + c * x, v = root * root * root;
      if (root > 0 && std::log(uniform()) < x * x / 2 + d - d * v + d * std::log(v))
        return std::log(d) + std::log(v);
    }
  }

  uint64_t seed_, step_, next_;
};

// The rows [top, bottom) and columns [left, right) of an image that cutmix replaces.
struct Box {
  int64_t top, bottom, left, right;

  // The sides of the box before clipping are sqrt(1 - share) times those of the image. The centre is any
  // pixel.
  Box(Draws& draws, double share, int64_t height, int64_t width) {
    const double ratio = std::sqrt(1 - share);
    const auto side = [&](int64_t size, int64_t& first, int64_t& last) {
      const auto length = static_cast<int64_t>(ratio * size);
      const int64_t begin = draws.below(size) - length / 2;
      first = std::max<int64_t>(begin, 0);
      last = std::min(begin + length, size);
    };
    side(height, top, bottom);
    side(width, left, right);
  }
  int64_t area() const { return (bottom - top) * (right - left); }
};

void check_mix(const char* op, const MixCall& call) {
  const Tensor &inputs = call.inputs, &target = call.target;
  TORCH_CHECK_VALUE(std::isfinite(call.alpha) && call.alpha > 0, op,
                    ": alpha: expected a positive number, received ", call.alpha);
  TORCH_CHECK_VALUE(call.step >= 0, op, ": step: expected a number of at least 0, received ", call.step);
  TORCH_CHECK_VALUE(inputs.dim() >= 1, op, ": inputs: expected shape (rows, ...), received a scalar");
  TORCH_CHECK_VALUE(target.dim() >= 1 && target.size(0) == inputs.size(0), op,
                    ": target: expected shape (rows, ...) with ", inputs.size(0), " rows, received ",
                    target.sizes());
  TORCH_CHECK_VALUE(target.device() == inputs.device(), op, ": target: expected the device of inputs, ",
                    inputs.device(), ", received ", target.device());
}

// Returns which row each row is mixed with: row i with row (i + shift) % rows, never itself if there are two.
int64_t shift_of(Draws& draws, int64_t rows) { return rows > 1 ? 1 + draws.below(rows - 1) : 0; }
Tensor partners(const Tensor& x, int64_t shift) { return shift == 0 ? x.clone() : x.roll(-shift, 0); }

// The memory is not pinned: CUDA takes a copy of these few bytes and does not wait.
template <class T>
Tensor on_device(const std::vector<T>& values, const Tensor& like) {
  return at::tensor(values, at::dtype(c10::CppTypeToScalarType<T>::value))
      .to(like.device(), /*non_blocking=*/true);
}

// Returns the shape (rows, 1, ...), in which the numbers of the rows broadcast to x.
Tensor per_row(const Tensor& numbers, const Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[0] = x.size(0);
  return numbers.view(shape);
}

MixResult mix_result(const MixCall& call, Tensor inputs, int64_t shift, const std::vector<float>& shares) {
  const Tensor mix = call.per_row
                         ? per_row(on_device(shares, call.inputs), call.target).expand_as(call.target)
                         : at::full({}, shares[0], call.inputs.options().dtype(at::kFloat));
  return {std::move(inputs), call.target, partners(call.target, shift), mix};
}

MixResult mixup_of(const MixCall& call) {
  check_mix(kMixup, call);
  const Tensor& x = call.inputs;
  TORCH_CHECK_VALUE(is_supported_float(x.scalar_type()), kMixup,
                    ": inputs: expected fp32, fp64, bf16 or fp16, received ", x.scalar_type(),
                    "; call inputs.float()");
  Draws whole(call, 0);
  const int64_t rows = x.size(0), shift = shift_of(whole, rows);
  const Tensor mixed_in = partners(x, shift);
  std::vector<float> shares;
  if (!call.per_row) {
    shares.push_back(static_cast<float>(whole.beta(call.alpha)));
    return mix_result(call, at::lerp(mixed_in, x, shares[0]), shift, shares);
  }
  for (int64_t i = 0; i < rows; ++i)
    shares.push_back(static_cast<float>(Draws(call, i + 1).beta(call.alpha)));
  const auto compute = compute_type(x);
  const Tensor weight = per_row(on_device(shares, x), x).to(compute);
  return mix_result(call, at::lerp(mixed_in.to(compute), x.to(compute), weight).to(x.scalar_type()), shift,
                    shares);
}

MixResult cutmix_of(const MixCall& call) {
  check_mix(kCutmix, call);
  const Tensor& x = call.inputs;
  TORCH_CHECK_VALUE(x.dim() >= 3, kCutmix, ": inputs: expected shape (rows, ..., height, width), received ",
                    x.sizes());
  const int64_t rows = x.size(0), height = x.size(-2), width = x.size(-1);
  TORCH_CHECK_VALUE(height > 0 && width > 0, kCutmix,
                    ": inputs: expected images with pixels, received shape ", x.sizes());
  Draws whole(call, 0);
  const int64_t shift = shift_of(whole, rows);
  std::vector<float> shares;
  const auto box_of = [&](Draws& draws) {
    const Box box(draws, draws.beta(call.alpha), height, width);
    shares.push_back(static_cast<float>(1 - static_cast<double>(box.area()) / (height * width)));
    return box;
  };
  if (!call.per_row) {
    const Box box = box_of(whole);
    const auto cut = [&](const Tensor& t) {
      return t.slice(-2, box.top, box.bottom).slice(-1, box.left, box.right);
    };
    Tensor mixed = x.clone();
    cut(mixed).copy_(partners(cut(x), shift));
    return mix_result(call, mixed, shift, shares);
  }
  std::vector<int64_t> edges[4];
  for (int64_t i = 0; i < rows; ++i) {
    Draws draws(call, i + 1);
    const Box box = box_of(draws);
    edges[0].push_back(box.top);
    edges[1].push_back(box.bottom);
    edges[2].push_back(box.left);
    edges[3].push_back(box.right);
  }
  const auto edge = [&](int i) { return per_row(on_device(edges[i], x), x); };
  const auto index = at::dtype(at::kLong).device(x.device());
  const Tensor row = at::arange(height, index).unsqueeze(1), column = at::arange(width, index);
  const Tensor inside = row.ge(edge(0))
                            .logical_and(row.lt(edge(1)))
                            .logical_and(column.ge(edge(2)).logical_and(column.lt(edge(3))));
  return mix_result(call, at::where(inside, partners(x, shift), x), shift, shares);
}

template <MixResult (*mixed)(const MixCall&)>
void boxed_mix(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const MixResult result = mixed(read_fields<MixCall>(*stack));
  torch::jit::drop(*stack, count_of<MixCall>());
  push_fields(*stack, result);
}

TORCH_LIBRARY_IMPL(shoestring, CompositeImplicitAutograd, m) {
  m.impl(kMixup, torch::CppFunction::makeFromBoxedFunction<&boxed_mix<mixup_of>>());
  m.impl(kCutmix, torch::CppFunction::makeFromBoxedFunction<&boxed_mix<cutmix_of>>());
}

MixCall mix_call(const Tensor& inputs, const Tensor& target, const MixOptions& o, double alpha) {
  return {inputs, target, o.alpha().value_or(alpha), o.seed(), o.step(), o.per_row()};
}

}  // namespace

Mixed mixup(const Tensor& inputs, const Tensor& target, const MixOptions& options) {
  return mixup_of(mix_call(inputs, target, options, 0.2));
}

Mixed cutmix(const Tensor& inputs, const Tensor& target, const MixOptions& options) {
  return cutmix_of(mix_call(inputs, target, options, 1));
}

}  // namespace shoestring::data
