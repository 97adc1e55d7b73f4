#include "layers/seeded_dropout.h"

#include <cmath>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/cuda.h"
#include "core/tensors.h"
#include "core/threads.h"

namespace shoestring::layers {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

constexpr const char* kSeededDropoutOp = "seeded_dropout";

void drop_cpu(const Tensor& x, const Tensor& seed, kernels::Dropout rule, const Tensor& out) {
  const auto number = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  const auto& kernels = cpu::seeded_dropout();
  const int64_t count = x.numel(), blocks = (count + kernels::kDropoutBlock - 1) / kernels::kDropoutBlock;
  // Random numbers take about as long as reading and writing x twice.
  const int64_t grain = row_grain(4 * kernels::kDropoutBlock * static_cast<int64_t>(x.element_size()));
  at::parallel_for(0, blocks, grain, [&](int64_t first, int64_t last) {
    const int64_t begin = first * kernels::kDropoutBlock,
                  n = std::min(last * kernels::kDropoutBlock, count) - begin;
    switch (x.scalar_type()) {
      case at::kFloat:
        return kernels.drop_float(x.const_data_ptr<float>() + begin, begin, n, number, rule,
                                  out.data_ptr<float>() + begin);
      case at::kBFloat16:
        return kernels.drop_bf16(bits(x) + begin, begin, n, number, rule, bits(out) + begin);
      default:
        return kernels.drop_fp16(bits(x) + begin, begin, n, number, rule, bits(out) + begin);
    }
  });
}

void drop_cuda(const Tensor& x, const Tensor& seed, kernels::Dropout rule, const Tensor& out) {
  if (x.numel() == 0) return;
  const auto& kernels = cuda::table<kernels::SeededDropoutCuda>(kSeededDropoutOp);
  const auto run = x.scalar_type() == at::kFloat      ? kernels.drop_float
                   : x.scalar_type() == at::kBFloat16 ? kernels.drop_bf16
                                                      : kernels.drop_fp16;
  check_launch(kSeededDropoutOp, run(x.const_data_ptr(), x.numel(), seed.const_data_ptr<int64_t>(), rule,
                                     out.mutable_data_ptr(), stream_of(x)));
}

void check_seeded_dropout(const Tensor& x, const Tensor& seed, double p) {
  TORCH_CHECK(is_supported_float(x.scalar_type()), kSeededDropoutOp,
              ": x: expected fp32, fp64, bf16 or fp16, received ", x.scalar_type());
  check_dropout(kSeededDropoutOp, p, p == 0 ? std::optional<Tensor>() : seed, x.device());
}

template <Backend backend>
Tensor run_seeded_dropout(const Tensor& x, const Tensor& seed, double p) {
  check_seeded_dropout(x, seed, p);
  const c10::OptionalDeviceGuard guard(x.device());
  return p == 0 ? x.clone() : drop(backend, x, seed, p);
}

Tensor seeded_dropout_meta(const Tensor& x, const Tensor& seed, double p) {
  check_seeded_dropout(x, seed, p);
  return at::empty_symint(x.sym_sizes(), x.options());
}

Tensor call_seeded_dropout(const Tensor& x, const Tensor& seed, double p) {
  static auto op = find<Tensor(const Tensor&, const Tensor&, double)>("shoestring::seeded_dropout");
  return op.call(x, seed, p);
}

// Autograd of seeded_dropout. Its backward applies the same mask and scale to the gradient, so it is again
// seeded_dropout and differentiable.
class SeededDropout : public torch::autograd::Function<SeededDropout> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& seed, double p) {
    at::AutoDispatchBelowADInplaceOrView below;
    save_fields(ctx, Saved{seed, p});
    return call_seeded_dropout(x, seed, p);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto saved = saved_fields<Saved>(ctx);
    return {call_seeded_dropout(grad_outputs[0], saved.seed, saved.p), Tensor(), Tensor()};
  }

 private:
  struct Saved {
    Tensor seed;
    double p = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.seed, self.p);
    }
  };
};

Tensor seeded_dropout_autograd(const Tensor& x, const Tensor& seed, double p) {
  if (needs_grad(x)) return SeededDropout::apply(x, seed, p);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_seeded_dropout(x, seed, p);
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Drops each element of x with probability p and divides the remaining elements by 1 - p. The mask depends
  // only on the seed, one int64, and the index of the element. Backward recomputes the mask instead of saving
  // it.
  m.def("seeded_dropout(Tensor x, Tensor seed, float p) -> Tensor");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kSeededDropoutOp, run_seeded_dropout<Backend::kCpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kSeededDropoutOp, run_seeded_dropout<Backend::kCuda>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kSeededDropoutOp, seeded_dropout_meta); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("seeded_dropout", seeded_dropout_autograd); }

}  // namespace

void check_dropout(const char* op, double p, const std::optional<Tensor>& seed, c10::Device device) {
  TORCH_CHECK(p >= 0 && p < 1, op, ": dropout: expected a probability in [0, 1), received ", p);
  TORCH_CHECK(seed.has_value() == (p > 0), op,
              ": seed: expected a seed with dropout, and none without it, received ",
              seed.has_value() ? "a seed" : "none", " with dropout ", p);
  if (!seed.has_value()) return;
  TORCH_CHECK(seed->scalar_type() == at::kLong && seed->sym_numel() == 1 && seed->device() == device, op,
              ": seed: expected one int64 on ", device, ", received ", seed->sym_numel(), " of ",
              seed->scalar_type(), " on ", seed->device());
}

kernels::Dropout dropout_rule(double p) {
  const double threshold = std::min(std::round(p * 65536), 65535.0);
  return {static_cast<uint32_t>(threshold), static_cast<float>(65536 / (65536 - threshold))};
}

Tensor drop(Backend backend, const Tensor& x, const Tensor& seed, double p) {
  const auto rule = dropout_rule(p);
  const auto run = backend == Backend::kCuda ? drop_cuda : drop_cpu;
  // For fp64, which only gradient checks use, the mask of 0 and 1 is drawn in fp32.
  if (x.scalar_type() == at::kDouble) {
    Tensor mask = at::ones(x.sizes(), x.options().dtype(at::kFloat));
    run(mask, seed, {rule.threshold, 1}, mask);
    return x.mul(mask).mul_(65536.0 / (65536.0 - rule.threshold));
  }
  const Tensor source = x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  run(source, seed, rule, out);
  return out;
}

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;

Tensor seeded_dropout(const Tensor& x, const Tensor& seed, double p) {
  static auto op = find<decltype(layers::seeded_dropout_meta)>("shoestring::seeded_dropout");
  return op.call(x, seed, p);
}

}  // namespace shoestring
