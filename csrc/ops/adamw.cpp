#include <algorithm>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/List.h>
#include <torch/library.h>

#include <shoestring/ops.h>

#include "kernels/adamw.h"
#include "ops/call.h"
#include "ops/cuda.h"

namespace shoestring {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;
using kernels::AdamWTensor;
using kernels::kStateBlock;

constexpr const char* kOp = "adamw_";

// The operator's arguments, under the names of its schema.
struct Arguments {
  at::TensorList params;
  const OptionalTensors& grads;
  const Tensor& step;
  const Tensor& exp_avg;
  const OptionalTensor& exp_avg_scale;
  const Tensor& exp_avg_sq;
  const OptionalTensor& exp_avg_sq_scale;
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize;
  const OptionalTensor& lr_tensor;
  const OptionalTensor& grad_scale;
  const OptionalTensor& clip_coef;
  const OptionalTensor& found_inf;

  bool quantized() const { return exp_avg_scale.has_value(); }
};

using Operator = void(at::TensorList, const OptionalTensors&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const OptionalTensor&, double, double, double, double, double, bool,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);

template <void (*kRun)(const Arguments&)>
void unpacked(at::TensorList params, const OptionalTensors& grads, const Tensor& step, const Tensor& exp_avg,
              const OptionalTensor& exp_avg_scale, const Tensor& exp_avg_sq, const OptionalTensor& exp_avg_sq_scale,
              double lr, double beta1, double beta2, double eps, double weight_decay, bool maximize,
              const OptionalTensor& lr_tensor, const OptionalTensor& grad_scale, const OptionalTensor& clip_coef,
              const OptionalTensor& found_inf) {
  kRun({params, grads, step, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, lr, beta1, beta2, eps, weight_decay,
        maximize, lr_tensor, grad_scale, clip_coef, found_inf});
}

void call(const Arguments& a) {
  static auto op = find<Operator>("shoestring::adamw_");
  op.call(a.params, a.grads, a.step, a.exp_avg, a.exp_avg_scale, a.exp_avg_sq, a.exp_avg_sq_scale, a.lr, a.beta1,
          a.beta2, a.eps, a.weight_decay, a.maximize, a.lr_tensor, a.grad_scale, a.clip_coef, a.found_inf);
}

int64_t blocks_of(const Tensor& param) { return (param.numel() + kStateBlock - 1) / kStateBlock; }

// ---- What must fit ------------------------------------------------------------------------------------------------

void check_options(const Arguments& a) {
  TORCH_CHECK(a.lr >= 0, kOp, ": lr: expected a number of at least 0, received ", a.lr);
  TORCH_CHECK(a.beta1 >= 0 && a.beta1 < 1, kOp, ": beta1: expected a number in [0, 1), received ", a.beta1);
  TORCH_CHECK(a.beta2 >= 0 && a.beta2 < 1, kOp, ": beta2: expected a number in [0, 1), received ", a.beta2);
  TORCH_CHECK(a.eps >= 0, kOp, ": eps: expected a number of at least 0, received ", a.eps);
  TORCH_CHECK(a.weight_decay >= 0, kOp, ": weight_decay: expected a number of at least 0, received ", a.weight_decay);
  TORCH_CHECK(a.grads.size() == a.params.size(), kOp, ": grads: expected one (or None) for each of ", a.params.size(),
              " parameters, received ", a.grads.size());
}

void check_arena(const char* name, const Tensor& arena, at::ScalarType type, int64_t size, c10::Device device) {
  TORCH_CHECK(arena.scalar_type() == type && arena.dim() == 1 && arena.numel() == size && arena.is_contiguous(), kOp,
              ": ", name, ": expected a contiguous ", type, " tensor of shape (", size, "), received ",
              arena.scalar_type(), " ", arena.sizes(), arena.is_contiguous() ? "" : ", not contiguous");
  TORCH_CHECK(arena.device() == device, kOp, ": ", name, ": expected the parameters' device, ", device, ", received ",
              arena.device());
}

void check_number(const char* name, const OptionalTensor& number, c10::Device device) {
  if (!number.has_value()) return;
  TORCH_CHECK(number->scalar_type() == at::kFloat && number->numel() == 1 && number->device() == device, kOp, ": ",
              name, ": expected one fp32 number on the parameters' device, ", device, ", received ",
              number->scalar_type(), " ", number->sizes(), " on ", number->device());
}

void check_param(int64_t i, const Tensor& param, c10::Device device) {
  const auto type = param.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, kOp, ": params[", i,
              "]: expected fp32, bf16 or fp16, received ", type);
  TORCH_CHECK(param.layout() == at::kStrided && param.device() == device, kOp, ": params[", i,
              "]: expected a dense tensor on the device of all, ", device, ", received ", param.layout(), " on ",
              param.device());
  TORCH_CHECK(at::has_internal_overlap(param) != at::MemOverlap::Yes, kOp, ": params[", i,
              "]: expected a tensor of its own memory, received an expanded one; call .contiguous()");
}

void check_grad(int64_t i, const Tensor& param, const Tensor& grad) {
  TORCH_CHECK(grad.layout() == at::kStrided, kOp, ": grads[", i, "]: expected a dense tensor, received ", grad.layout(),
              "; sparse gradients are not supported");
  TORCH_CHECK(grad.sizes() == param.sizes(), kOp, ": grads[", i, "]: expected the parameter's shape, ", param.sizes(),
              ", received ", grad.sizes());
  TORCH_CHECK(grad.scalar_type() == param.scalar_type() && grad.device() == param.device(), kOp, ": grads[", i,
              "]: expected the parameter's dtype and device, ", param.scalar_type(), " on ", param.device(),
              ", received ", grad.scalar_type(), " on ", grad.device());
}

// ---- What every device does with them -----------------------------------------------------------------------------

// A parameter with a gradient, both contiguous.
struct Stepped {
  int64_t index, block;  // among the parameters; of the arena, at which its state begins
  Tensor param, grad;
  Tensor strided;  // the parameter itself, where `param` is a copy

  kernels::WeightType type() const {
    return param.scalar_type() == at::kFloat      ? kernels::WeightType::kFloat
           : param.scalar_type() == at::kBFloat16 ? kernels::WeightType::kBFloat16
                                                  : kernels::WeightType::kHalf;
  }
};

// Everything is checked before anything changes.
std::vector<Stepped> checked(const Arguments& a) {
  check_options(a);
  const auto device = a.params.empty() ? a.step.device() : a.params[0].device();
  std::vector<Stepped> work;
  work.reserve(a.params.size());
  int64_t blocks = 0;
  for (size_t i = 0; i < a.params.size(); blocks += blocks_of(a.params[i++])) {
    const OptionalTensor grad = a.grads.get(i);
    if (!grad.has_value() || !grad->defined()) continue;
    check_param(i, a.params[i], device);
    check_grad(i, a.params[i], *grad);
    work.push_back({static_cast<int64_t>(i), blocks, a.params[i], *grad, {}});
  }
  TORCH_CHECK(a.exp_avg_sq_scale.has_value() == a.quantized(), kOp,
              ": exp_avg_scale and exp_avg_sq_scale: expected both (8-bit state) or neither (fp32 state)");
  const auto type = a.quantized() ? at::kByte : at::kFloat;
  check_arena("step", a.step, at::kFloat, a.params.size(), device);
  check_arena("exp_avg", a.exp_avg, type, blocks * kStateBlock, device);
  check_arena("exp_avg_sq", a.exp_avg_sq, type, blocks * kStateBlock, device);
  if (a.quantized()) {
    check_arena("exp_avg_scale", *a.exp_avg_scale, at::kFloat, blocks, device);
    check_arena("exp_avg_sq_scale", *a.exp_avg_sq_scale, at::kFloat, blocks, device);
  }
  check_number("lr_tensor", a.lr_tensor, device);
  check_number("grad_scale", a.grad_scale, device);
  check_number("clip_coef", a.clip_coef, device);
  check_number("found_inf", a.found_inf, device);
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

kernels::AdamWOptions options_of(const Arguments& a) {
  const auto number = [](const OptionalTensor& t) { return t.has_value() ? t->const_data_ptr<float>() : nullptr; };
  return {a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.maximize,
          number(a.lr_tensor), number(a.grad_scale), number(a.clip_coef), number(a.found_inf)};
}

kernels::AdamWState state_of(const Arguments& a) {
  return {a.exp_avg.mutable_data_ptr(), a.exp_avg_sq.mutable_data_ptr(),
          a.quantized() ? a.exp_avg_scale->mutable_data_ptr<float>() : nullptr,
          a.quantized() ? a.exp_avg_sq_scale->mutable_data_ptr<float>() : nullptr};
}

// ---- Devices ------------------------------------------------------------------------------------------------------

// All tensors are one row of blocks: a thousand small ones share the threads as one large one does.
void step_cpu(const Arguments& a) {
  std::vector<Stepped> stepped = checked(a);
  const kernels::AdamWOptions options = options_of(a);
  if (stepped.empty() || options.skips()) return;
  make_contiguous(stepped);
  std::vector<AdamWTensor> work;
  std::vector<int64_t> ends;  // in blocks, of each entry of work
  work.reserve(stepped.size());
  ends.reserve(stepped.size());
  kernels::AdamWRule rule{};
  const kernels::AdamWState state = state_of(a);
  const int64_t size = a.quantized() ? 1 : sizeof(float);
  float* steps = a.step.mutable_data_ptr<float>();
  float previous = -1;
  for (const Stepped& s : stepped) {
    steps[s.index] += 1;
    if (steps[s.index] != previous) {  // nearly always the same for all
      previous = steps[s.index];
      rule = options.rule(previous);
    }
    const int64_t offset = s.block * kStateBlock * size;
    work.push_back({rule, s.type(), s.param.mutable_data_ptr(), s.grad.const_data_ptr(),
                    static_cast<char*>(state.exp_avg) + offset, static_cast<char*>(state.exp_avg_sq) + offset,
                    a.quantized() ? state.exp_avg_scale + s.block : nullptr,
                    a.quantized() ? state.exp_avg_sq_scale + s.block : nullptr, s.param.numel()});
    ends.push_back((ends.empty() ? 0 : ends.back()) + blocks_of(s.param));
  }

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
  copy_back(stepped);
}

// Whatever lies on the device is read there: nothing waits for it.
void step_cuda(const Arguments& a) {
  std::vector<Stepped> stepped = checked(a);
  if (stepped.empty()) return;
  const c10::OptionalDeviceGuard guard(a.step.device());
  const kernels::AdamWState state = state_of(a);
  for (const auto& [name, data] : {std::pair{"exp_avg", state.exp_avg}, std::pair{"exp_avg_sq", state.exp_avg_sq}}) {
    TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, kOp, ": ", name,
                ": expected memory aligned to 16 bytes, received a view at an odd offset; call .clone()");
  }
  make_contiguous(stepped);
  std::vector<kernels::AdamWEntry> entries(a.params.size(), {nullptr, nullptr, 0, kernels::kNoGradient, 0, 0});
  for (const Stepped& s : stepped) {
    entries[s.index] = {s.param.mutable_data_ptr(), s.grad.const_data_ptr(), static_cast<uint64_t>(s.param.numel()),
                        static_cast<uint64_t>(s.type()), static_cast<uint32_t>(s.block), 0};
  }
  const Tensor rules = at::empty({a.step.numel(), sizeof(kernels::AdamWRule)}, a.step.options().dtype(at::kByte));
  check_launch(kOp, cuda::table<kernels::AdamWCuda>("adamw").step(
                        entries.data(), entries.size(), options_of(a), state, a.step.mutable_data_ptr<float>(),
                        static_cast<kernels::AdamWRule*>(rules.mutable_data_ptr()), stream_of(a.step)));
  copy_back(stepped);
}

// An optimizer step is no part of a graph.
void step_autograd(const Arguments& a) {
  if (at::GradMode::is_enabled()) {
    for (const Tensor& p : a.params) {
      TORCH_CHECK(!p.requires_grad(), kOp, ": params: a step on parameters that require gradients is not recorded for "
                  "backward; call it under torch.no_grad()");
    }
  }
  at::AutoDispatchBelowADInplaceOrView below;
  call(a);
}

// Sparse gradients come to the first two as well, to be refused in words.
TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl("adamw_", unpacked<step_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCPU, m) { m.impl("adamw_", unpacked<step_cpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("adamw_", unpacked<step_cuda>); }
TORCH_LIBRARY_IMPL(shoestring, SparseCUDA, m) { m.impl("adamw_", unpacked<step_cuda>); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("adamw_", unpacked<step_autograd>); }
// Nothing is returned and nothing allocated: under tracing only what cannot depend on values is checked.
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl("adamw_", unpacked<check_options>); }

}  // namespace

void adamw_(const std::vector<Tensor>& params, const std::vector<OptionalTensor>& grads, AdamWState& state,
            const AdamWStepOptions& options) {
  call({params, OptionalTensors(grads), state.step, state.exp_avg, state.exp_avg_scale, state.exp_avg_sq,
        state.exp_avg_sq_scale, options.lr(), options.beta1(), options.beta2(), options.eps(), options.weight_decay(),
        options.maximize(), options.lr_tensor(), options.grad_scale(), options.clip_coef(), options.found_inf()});
}

}  // namespace shoestring
