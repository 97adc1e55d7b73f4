#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/List.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/adamw.h"
#include "ops/call.h"

namespace shoestring {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;
using kernels::AdamWTensor;
using kernels::kStateBlock;

constexpr const char* kOp = "adamw_";

int64_t blocks_of(int64_t count) { return (count + kStateBlock - 1) / kStateBlock; }

void check_options(double lr, double beta1, double beta2, double eps, double weight_decay) {
  TORCH_CHECK(lr >= 0, kOp, ": lr: expected a number of at least 0, received ", lr);
  TORCH_CHECK(beta1 >= 0 && beta1 < 1, kOp, ": beta1: expected a number in [0, 1), received ", beta1);
  TORCH_CHECK(beta2 >= 0 && beta2 < 1, kOp, ": beta2: expected a number in [0, 1), received ", beta2);
  TORCH_CHECK(eps >= 0, kOp, ": eps: expected a number of at least 0, received ", eps);
  TORCH_CHECK(weight_decay >= 0, kOp, ": weight_decay: expected a number of at least 0, received ", weight_decay);
}

void check_arena(const char* name, const Tensor& arena, at::ScalarType type, int64_t size) {
  TORCH_CHECK(arena.scalar_type() == type && arena.dim() == 1 && arena.numel() == size && arena.is_contiguous(), kOp,
              ": ", name, ": expected a contiguous ", type, " tensor of shape (", size, "), received ",
              arena.scalar_type(), " ", arena.sizes(), arena.is_contiguous() ? "" : ", not contiguous");
  TORCH_CHECK(arena.is_cpu(), kOp, ": ", name, ": expected the parameters' device, cpu, received ", arena.device());
}

void check_pair(int64_t i, const Tensor& param, const Tensor& grad) {
  const auto type = param.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, kOp, ": params[", i,
              "]: expected fp32, bf16 or fp16, received ", type);
  TORCH_CHECK(param.layout() == at::kStrided && param.is_cpu(), kOp, ": params[", i,
              "]: expected a dense tensor on the cpu, received ", param.layout(), " on ", param.device());
  TORCH_CHECK(at::has_internal_overlap(param) != at::MemOverlap::Yes, kOp, ": params[", i,
              "]: expected a tensor of its own memory, received an expanded one; call .contiguous()");
  TORCH_CHECK(grad.layout() == at::kStrided, kOp, ": grads[", i, "]: expected a dense tensor, received ", grad.layout(),
              "; sparse gradients are not supported");
  TORCH_CHECK(grad.sizes() == param.sizes(), kOp, ": grads[", i, "]: expected the parameter's shape, ", param.sizes(),
              ", received ", grad.sizes());
  TORCH_CHECK(grad.scalar_type() == type && grad.device() == param.device(), kOp, ": grads[", i,
              "]: expected the parameter's dtype and device, ", type, " on ", param.device(), ", received ",
              grad.scalar_type(), " on ", grad.device());
}

kernels::WeightType weight_type(const Tensor& param) {
  switch (param.scalar_type()) {
    case at::kFloat: return kernels::WeightType::kFloat;
    case at::kBFloat16: return kernels::WeightType::kBFloat16;
    default: return kernels::WeightType::kHalf;
  }
}

// All tensors are one row of blocks: a thousand small ones share the threads as one large one does.
void adamw_cpu(at::TensorList params, const OptionalTensors& grads, const Tensor& step, const Tensor& exp_avg,
               const OptionalTensor& exp_avg_scale, const Tensor& exp_avg_sq, const OptionalTensor& exp_avg_sq_scale,
               double lr, double beta1, double beta2, double eps, double weight_decay, bool maximize) {
  // Everything is checked before anything changes.
  check_options(lr, beta1, beta2, eps, weight_decay);
  const int64_t tensors = params.size();
  TORCH_CHECK(static_cast<int64_t>(grads.size()) == tensors, kOp, ": grads: expected one (or None) for each of ",
              tensors, " parameters, received ", grads.size());
  int64_t blocks = 0;
  std::vector<OptionalTensor> gradients(tensors);
  for (int64_t i = 0; i < tensors; ++i) {
    gradients[i] = grads.get(i);
    if (gradients[i].has_value() && gradients[i]->defined()) {
      check_pair(i, params[i], *gradients[i]);
    } else {
      gradients[i].reset();
    }
    blocks += blocks_of(params[i].numel());
  }
  const bool quantized = exp_avg_scale.has_value();
  TORCH_CHECK(exp_avg_sq_scale.has_value() == quantized, kOp,
              ": exp_avg_scale and exp_avg_sq_scale: expected both (8-bit state) or neither (fp32 state)");
  check_arena("step", step, at::kFloat, tensors);
  check_arena("exp_avg", exp_avg, quantized ? at::kByte : at::kFloat, blocks * kStateBlock);
  check_arena("exp_avg_sq", exp_avg_sq, quantized ? at::kByte : at::kFloat, blocks * kStateBlock);
  if (quantized) {
    check_arena("exp_avg_scale", *exp_avg_scale, at::kFloat, blocks);
    check_arena("exp_avg_sq_scale", *exp_avg_sq_scale, at::kFloat, blocks);
  }

  std::vector<AdamWTensor> work;
  std::vector<int64_t> ends;  // in blocks, of each entry of work
  std::vector<std::pair<Tensor, Tensor>> strided;  // a parameter, and the contiguous copy that is stepped
  std::vector<Tensor> keep;
  work.reserve(tensors);
  ends.reserve(tensors);
  kernels::AdamWRule rule{};
  float* steps = step.data_ptr<float>();
  const int64_t size = quantized ? 1 : sizeof(float);
  char* m = static_cast<char*>(exp_avg.data_ptr());
  char* v = static_cast<char*>(exp_avg_sq.data_ptr());
  float* m_scale = quantized ? exp_avg_scale->data_ptr<float>() : nullptr;
  float* v_scale = quantized ? exp_avg_sq_scale->data_ptr<float>() : nullptr;
  float previous = -1;
  for (int64_t i = 0, block = 0; i < tensors; block += blocks_of(params[i++].numel())) {
    if (!gradients[i].has_value()) continue;
    Tensor param = params[i];
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
    if (!param.is_contiguous()) {
      Tensor copy = param.contiguous();
      strided.emplace_back(param, copy);
      param = copy;
    }
    if (!gradients[i]->is_contiguous()) {
      keep.push_back(gradients[i]->contiguous());
      gradients[i] = keep.back();
    }
    steps[i] += 1;
    if (steps[i] != previous) {  // nearly always the same for all
      previous = steps[i];
      const double bias1 = 1 - std::pow(beta1, previous), bias2 = 1 - std::pow(beta2, previous);
      rule = {static_cast<float>(1 - lr * weight_decay),
              static_cast<float>(beta1),
              static_cast<float>(beta2),
              static_cast<float>(maximize ? beta1 - 1 : 1 - beta1),
              static_cast<float>(1 - beta2),
              static_cast<float>(lr / bias1),
              static_cast<float>(1 / std::sqrt(bias2)),
              static_cast<float>(eps)};
    }
    const int64_t offset = block * kStateBlock * size;
    work.push_back({rule, weight_type(param), param.data_ptr(), gradients[i]->const_data_ptr(), m + offset, v + offset,
                    quantized ? m_scale + block : nullptr, quantized ? v_scale + block : nullptr, param.numel()});
    ends.push_back((ends.empty() ? 0 : ends.back()) + blocks_of(param.numel()));
  }
  if (work.empty()) return;

  const auto& kernels = cpu::adamw();
  constexpr int64_t kGrain = 64;  // blocks: some ten microseconds, what it takes to wake a thread
  at::parallel_for(0, ends.back(), kGrain, [&](int64_t first, int64_t last) {
    size_t i = std::upper_bound(ends.begin(), ends.end(), first) - ends.begin();
    for (int64_t block = first; block < last; ++i) {
      const int64_t begin = i == 0 ? 0 : ends[i - 1], end = std::min(last, ends[i]);
      kernels.step(work[i], block - begin, end - begin);
      block = end;
    }
  });
  for (auto& [param, copy] : strided) {
    at::AutoDispatchBelowADInplaceOrView below;
    param.copy_(copy);
  }
}

// Nothing is returned and nothing allocated: under tracing only what cannot depend on values is checked.
void adamw_meta(at::TensorList params, const OptionalTensors& grads, const Tensor&, const Tensor&,
                const OptionalTensor&, const Tensor&, const OptionalTensor&, double lr, double beta1, double beta2,
                double eps, double weight_decay, bool) {
  check_options(lr, beta1, beta2, eps, weight_decay);
  TORCH_CHECK(grads.size() == params.size(), kOp, ": grads: expected one (or None) for each of ", params.size(),
              " parameters, received ", grads.size());
}

// An optimizer step is no part of a graph.
void adamw_autograd(at::TensorList params, const OptionalTensors& grads, const Tensor& step, const Tensor& exp_avg,
                    const OptionalTensor& exp_avg_scale, const Tensor& exp_avg_sq,
                    const OptionalTensor& exp_avg_sq_scale, double lr, double beta1, double beta2, double eps,
                    double weight_decay, bool maximize) {
  if (at::GradMode::is_enabled()) {
    for (const Tensor& p : params) {
      TORCH_CHECK(!p.requires_grad(), kOp, ": params: a step on parameters that require gradients is not recorded for "
                  "backward; call it under torch.no_grad()");
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(adamw_cpu)>("shoestring::adamw_");
  op.call(params, grads, step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, lr, beta1, beta2, eps,
          weight_decay, maximize);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl("adamw_", adamw_cpu); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("adamw_", adamw_autograd); }
// Sparse gradients come here too, to be refused in words.
TORCH_LIBRARY_IMPL(shoestring, SparseCPU, m) { m.impl("adamw_", adamw_cpu); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("adamw_", adamw_meta); }

}  // namespace

void adamw_(const std::vector<Tensor>& params, const std::vector<OptionalTensor>& grads, AdamWState& state,
            const AdamWStepOptions& options) {
  static auto op = find<decltype(adamw_cpu)>("shoestring::adamw_");
  op.call(params, OptionalTensors(grads), state.step, state.exp_avg, state.exp_avg_scale, state.exp_avg_sq,
          state.exp_avg_sq_scale, options.lr(), options.beta1(), options.beta2(), options.eps(),
          options.weight_decay(), options.maximize());
}

}  // namespace shoestring
