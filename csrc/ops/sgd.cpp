#include <cmath>

#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/sgd.h"
#include "ops/call.h"
#include "ops/optimizer.h"

namespace shoestring {
namespace {

using namespace optimizer;
using kernels::SGDOptions;
using kernels::SGDRule;

constexpr const char* kOp = "sgd_";

using Operator = void(at::TensorList, const OptionalTensors&, const Tensor&, const Tensor&, const OptionalTensor&,
                      double, double, double, double, bool, bool, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&);

void check_own(const SGDOptions& o) {
  TORCH_CHECK(o.momentum > 0, kOp, ": momentum: expected a number above 0, received ", o.momentum,
              "; without momentum there is no state to keep: use torch.optim.SGD");
  TORCH_CHECK(std::isfinite(o.dampening), kOp, ": dampening: expected a finite number, received ", o.dampening);
  TORCH_CHECK(!o.nesterov || o.dampening == 0, kOp, ": dampening: expected 0 with nesterov=True, received ",
              o.dampening);
}

template <void (*kRun)(const Arguments&, const SGDOptions&)>
void unpacked(at::TensorList params, const OptionalTensors& grads, const Tensor& step, const Tensor& momentum_buffer,
              const OptionalTensor& momentum_buffer_scale, double lr, double momentum, double dampening,
              double weight_decay, bool nesterov, bool maximize, const OptionalTensor& lr_tensor,
              const OptionalTensor& grad_scale, const OptionalTensor& clip_coef, const OptionalTensor& found_inf) {
  const Arena moments[] = {{"momentum_buffer", momentum_buffer, momentum_buffer_scale}};
  const Arguments a{kOp, params, grads, step, moments, lr_tensor, grad_scale, clip_coef, found_inf};
  const SGDOptions options{{lr, weight_decay, maximize}, momentum, dampening, nesterov};
  check_options(a, options);
  check_own(options);
  kRun(a, options);
}

void on_cpu(const Arguments& a, const SGDOptions& options) { step_cpu<SGDRule>(a, options, cpu::sgd()); }

void below_autograd(const Arguments& a, const SGDOptions& o) {
  check_not_recorded(a);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<Operator>("shoestring::sgd_");
  op.call(a.params, a.grads, a.step, a.moments[0].values, a.moments[0].scale, o.lr, o.momentum, o.dampening,
          o.weight_decay, o.nesterov, o.maximize, a.lr_tensor, a.grad_scale, a.clip_coef, a.found_inf);
}

void checks_only(const Arguments&, const SGDOptions&) {}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kOp, unpacked<on_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCPU, m) { m.impl(kOp, unpacked<on_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kOp, unpacked<step_cuda<SGDRule>>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCUDA, m) { m.impl(kOp, unpacked<step_cuda<SGDRule>>); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl(kOp, unpacked<below_autograd>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kOp, unpacked<checks_only>); }

}  // namespace

void sgd_(const std::vector<Tensor>& params, const std::vector<OptionalTensor>& grads, SGDState& state,
          const SGDStepOptions& options) {
  static auto op = find<Operator>("shoestring::sgd_");
  op.call(params, OptionalTensors(grads), state.step, state.momentum_buffer, state.momentum_buffer_scale, options.lr(),
          options.momentum(), options.dampening(), options.weight_decay(), options.nesterov(), options.maximize(),
          options.lr_tensor(), options.grad_scale(), options.clip_coef(), options.found_inf());
}

}  // namespace shoestring
