#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/lion.h"
#include "ops/call.h"
#include "ops/optimizer.h"

namespace shoestring {
namespace {

using namespace optimizer;
using kernels::LionOptions;
using kernels::LionRule;

constexpr const char* kOp = "lion_";

using Operator = void(at::TensorList, const OptionalTensors&, const Tensor&, const Tensor&, const OptionalTensor&,
                      double, double, double, double, bool, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&);

template <void (*kRun)(const Arguments&, const LionOptions&)>
void unpacked(at::TensorList params, const OptionalTensors& grads, const Tensor& step, const Tensor& exp_avg,
              const OptionalTensor& exp_avg_scale, double lr, double beta1, double beta2, double weight_decay,
              bool maximize, const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale,
              const OptionalTensor& clip_coef, const OptionalTensor& found_inf) {
  const Arena moments[] = {{"exp_avg", exp_avg, exp_avg_scale}};
  const Arguments a{kOp, params, grads, step, moments, lr_tensor, grad_scale, clip_coef, found_inf};
  const LionOptions options{{lr, weight_decay, maximize}, beta1, beta2};
  check_options(a, options);
  check_fraction(kOp, "beta1", beta1);
  check_fraction(kOp, "beta2", beta2);
  kRun(a, options);
}

void on_cpu(const Arguments& a, const LionOptions& options) { step_cpu<LionRule>(a, options, cpu::lion()); }

void below_autograd(const Arguments& a, const LionOptions& o) {
  check_not_recorded(a);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<Operator>("shoestring::lion_");
  op.call(a.params, a.grads, a.step, a.moments[0].values, a.moments[0].scale, o.lr, o.beta1, o.beta2, o.weight_decay,
          o.maximize, a.lr_tensor, a.grad_scale, a.clip_coef, a.found_inf);
}

void checks_only(const Arguments&, const LionOptions&) {}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kOp, unpacked<on_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCPU, m) { m.impl(kOp, unpacked<on_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kOp, unpacked<step_cuda<LionRule>>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCUDA, m) { m.impl(kOp, unpacked<step_cuda<LionRule>>); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl(kOp, unpacked<below_autograd>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kOp, unpacked<checks_only>); }

}  // namespace

void lion_(const std::vector<Tensor>& params, const std::vector<OptionalTensor>& grads, LionState& state,
           const LionStepOptions& options) {
  static auto op = find<Operator>("shoestring::lion_");
  op.call(params, OptionalTensors(grads), state.step, state.exp_avg, state.exp_avg_scale, options.lr(),
          options.beta1(), options.beta2(), options.weight_decay(), options.maximize(), options.lr_tensor(),
          options.grad_scale(), options.clip_coef(), options.found_inf());
}

}  // namespace shoestring
