#include "ops/optimizer.h"

#include <algorithm>
#include <string>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

namespace shoestring::optimizer {
namespace {

void check_arena(const char* op, const std::string& name, const Tensor& arena, at::ScalarType type, int64_t size,
                 c10::Device device) {
  TORCH_CHECK(arena.scalar_type() == type && arena.dim() == 1 && arena.numel() == size && arena.is_contiguous(), op,
              ": ", name, ": expected a contiguous ", type, " tensor of shape (", size, "), received ",
              arena.scalar_type(), " ", arena.sizes(), arena.is_contiguous() ? "" : ", not contiguous");
  TORCH_CHECK(arena.device() == device, op, ": ", name, ": expected the parameters' device, ", device, ", received ",
              arena.device());
}

void check_number(const char* op, const char* name, const OptionalTensor& number, c10::Device device) {
  if (!number.has_value()) return;
  TORCH_CHECK(number->scalar_type() == at::kFloat && number->numel() == 1 && number->device() == device, op, ": ", name,
              ": expected one fp32 number on the parameters' device, ", device, ", received ", number->scalar_type(),
              " ", number->sizes(), " on ", number->device());
}

void check_param(const char* op, int64_t i, const Tensor& param, c10::Device device) {
  const auto type = param.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, op, ": params[", i,
              "]: expected fp32, bf16 or fp16, received ", type);
  TORCH_CHECK(param.layout() == at::kStrided && param.device() == device, op, ": params[", i,
              "]: expected a dense tensor on the device of all, ", device, ", received ", param.layout(), " on ",
              param.device());
  TORCH_CHECK(at::has_internal_overlap(param) != at::MemOverlap::Yes, op, ": params[", i,
              "]: expected a tensor of its own memory, received an expanded one; call .contiguous()");
}

void check_grad(const char* op, int64_t i, const Tensor& param, const Tensor& grad) {
  TORCH_CHECK(grad.layout() == at::kStrided, op, ": grads[", i, "]: expected a dense tensor, received ", grad.layout(),
              "; sparse gradients are not supported");
  TORCH_CHECK(grad.sizes() == param.sizes(), op, ": grads[", i, "]: expected the parameter's shape, ", param.sizes(),
              ", received ", grad.sizes());
  TORCH_CHECK(grad.scalar_type() == param.scalar_type() && grad.device() == param.device(), op, ": grads[", i,
              "]: expected the parameter's dtype and device, ", param.scalar_type(), " on ", param.device(),
              ", received ", grad.scalar_type(), " on ", grad.device());
}

// Every moment has scales, or none has.
void check_scales(const Arguments& a) {
  for (const Arena& m : a.moments) {
    TORCH_CHECK(m.scale.has_value() == a.quantized(), a.op, ": ", a.moments[0].name, "_scale and ", m.name,
                "_scale: expected both (8-bit state) or neither (fp32 state)");
  }
}

}  // namespace

kernels::WeightType Stepped::type() const {
  return param.scalar_type() == at::kFloat      ? kernels::WeightType::kFloat
         : param.scalar_type() == at::kBFloat16 ? kernels::WeightType::kBFloat16
                                                : kernels::WeightType::kHalf;
}

int64_t blocks_of(const Tensor& param) { return (param.numel() + kStateBlock - 1) / kStateBlock; }

void check_at_least_zero(const char* op, const char* name, double number) {
  TORCH_CHECK(number >= 0, op, ": ", name, ": expected a number of at least 0, received ", number);
}

void check_fraction(const char* op, const char* name, double number) {
  TORCH_CHECK(number >= 0 && number < 1, op, ": ", name, ": expected a number in [0, 1), received ", number);
}

void check_options(const Arguments& a, const kernels::StepOptions& options) {
  check_at_least_zero(a.op, "lr", options.lr);
  check_at_least_zero(a.op, "weight_decay", options.weight_decay);
  TORCH_CHECK(a.grads.size() == a.params.size(), a.op, ": grads: expected one (or None) for each of ", a.params.size(),
              " parameters, received ", a.grads.size());
}

std::vector<Stepped> checked(const Arguments& a) {
  const auto device = a.params.empty() ? a.step.device() : a.params[0].device();
  std::vector<Stepped> work;
  work.reserve(a.params.size());
  int64_t blocks = 0;
  for (size_t i = 0; i < a.params.size(); blocks += blocks_of(a.params[i++])) {
    const OptionalTensor grad = a.grads.get(i);
    if (!grad.has_value() || !grad->defined()) continue;
    check_param(a.op, i, a.params[i], device);
    check_grad(a.op, i, a.params[i], *grad);
    work.push_back({static_cast<int64_t>(i), blocks, a.params[i], *grad, {}});
  }
  check_scales(a);
  check_arena(a.op, "step", a.step, at::kFloat, a.params.size(), device);
  for (const Arena& m : a.moments) {
    check_arena(a.op, m.name, m.values, a.quantized() ? at::kByte : at::kFloat, blocks * kStateBlock, device);
    if (a.quantized()) check_arena(a.op, std::string(m.name) + "_scale", *m.scale, at::kFloat, blocks, device);
  }
  check_number(a.op, "lr_tensor", a.lr_tensor, device);
  check_number(a.op, "grad_scale", a.grad_scale, device);
  check_number(a.op, "clip_coef", a.clip_coef, device);
  check_number(a.op, "found_inf", a.found_inf, device);
  return work;
}

void make_contiguous(std::vector<Stepped>& work) {
  for (Stepped& s : work) {
    if (!s.param.is_inference()) s.param.unsafeGetTensorImpl()->bump_version();
    if (!s.param.is_contiguous()) {
      s.strided = s.param;
      s.param = s.param.contiguous();
    }
    s.grad = s.grad.contiguous();
  }
}

void copy_back(const std::vector<Stepped>& work) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (const Stepped& s : work) {
    if (s.strided.defined()) s.strided.copy_(s.param);
  }
}

void check_not_recorded(const Arguments& a) {
  if (!at::GradMode::is_enabled()) return;
  for (const Tensor& p : a.params) {
    TORCH_CHECK(!p.requires_grad(), a.op, ": params: a step on parameters that require gradients is not recorded for "
                "backward; call it under torch.no_grad()");
  }
}

// All tensors are one row of blocks: a thousand small ones share the threads as one large one does.
void over_blocks(const std::vector<Stepped>& work, c10::function_ref<void(size_t, int64_t, int64_t)> body) {
  std::vector<int64_t> ends;  // in blocks, of each tensor
  ends.reserve(work.size());
  for (const Stepped& s : work) ends.push_back((ends.empty() ? 0 : ends.back()) + blocks_of(s.param));
  constexpr int64_t kGrain = 64;  // blocks: some ten microseconds, what it takes to wake a thread
  at::parallel_for(0, ends.back(), kGrain, [&](int64_t first, int64_t last) {
    size_t i = std::upper_bound(ends.begin(), ends.end(), first) - ends.begin();
    for (int64_t block = first; block < last; ++i) {
      const int64_t begin = i == 0 ? 0 : ends[i - 1], end = std::min(last, ends[i]);
      body(i, block - begin, end - begin);
      block = end;
    }
  });
}

void check_aligned(const Arguments& a) {
  for (const Arena& m : a.moments) {
    TORCH_CHECK(reinterpret_cast<uintptr_t>(m.values.const_data_ptr()) % 16 == 0, a.op, ": ", m.name,
                ": expected memory aligned to 16 bytes, received a view at an odd offset; call .clone()");
  }
}

}  // namespace shoestring::optimizer
