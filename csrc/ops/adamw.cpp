#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/adamw.h"
#include "ops/call.h"
#include "ops/optimizer.h"

namespace shoestring {
namespace {

using namespace optimizer;
using kernels::AdamWOptions;
using kernels::AdamWRule;

constexpr const char* kOp = "adamw_";

using Operator = void(at::TensorList, const OptionalTensors&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const OptionalTensor&, double, double, double, double, double, bool,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);

template <void (*kRun)(const Arguments&, const AdamWOptions&)>
void unpacked(at::TensorList params, const OptionalTensors& grads, const Tensor& step, const Tensor& exp_avg,
              const OptionalTensor& exp_avg_scale, const Tensor& exp_avg_sq, const OptionalTensor& exp_avg_sq_scale,
              double lr, double beta1, double beta2, double eps, double weight_decay, bool maximize,
              const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale, const OptionalTensor& clip_coef,
              const OptionalTensor& found_inf) {
  const Arena moments[] = {{"exp_avg", exp_avg, exp_avg_scale}, {"exp_avg_sq", exp_avg_sq, exp_avg_sq_scale}};
  const Arguments a{kOp, params, grads, step, moments, lr_tensor, grad_scale, clip_coef, found_inf};
  const AdamWOptions options{{lr, weight_decay, maximize}, beta1, beta2, eps};
  check_options(a, options);
  check_fraction(kOp, "beta1", beta1);
  check_fraction(kOp, "beta2", beta2);
  check_at_least_zero(kOp, "eps", eps);
  kRun(a, options);
}

void on_cpu(const Arguments& a, const AdamWOptions& options) { step_cpu<AdamWRule>(a, options, cpu::adamw()); }

void below_autograd(const Arguments& a, const AdamWOptions& o) {
  check_not_recorded(a);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<Operator>("shoestring::adamw_");
  op.call(a.params, a.grads, a.step, a.moments[0].values, a.moments[0].scale, a.moments[1].values, a.moments[1].scale,
          o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.maximize, a.lr_tensor, a.grad_scale, a.clip_coef,
          a.found_inf);
}

// Nothing is returned and nothing allocated: under tracing only what cannot depend on values is checked.
void checks_only(const Arguments&, const AdamWOptions&) {}

// Sparse gradients come to the first two as well, to be refused in words.
TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kOp, unpacked<on_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCPU, m) { m.impl(kOp, unpacked<on_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kOp, unpacked<step_cuda<AdamWRule>>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCUDA, m) { m.impl(kOp, unpacked<step_cuda<AdamWRule>>); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl(kOp, unpacked<below_autograd>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kOp, unpacked<checks_only>); }

}  // namespace

void adamw_(const std::vector<Tensor>& params, const std::vector<OptionalTensor>& grads, AdamWState& state,
            const AdamWStepOptions& options) {
  static auto op = find<Operator>("shoestring::adamw_");
  op.call(params, OptionalTensors(grads), state.step, state.exp_avg, state.exp_avg_scale, state.exp_avg_sq,
          state.exp_avg_sq_scale, options.lr(), options.beta1(), options.beta2(), options.eps(), options.weight_decay(),
          options.maximize(), options.lr_tensor(), options.grad_scale(), options.clip_coef(), options.found_inf());
}

}  // namespace shoestring
