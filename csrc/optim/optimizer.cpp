#include "optim/optimizer.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "core/threads.h"

namespace shoestring::optim::ops {
namespace {

using kernels::ElementType;
using kernels::StateType;

void check_arena(const char* op, const char* name, const Tensor& arena, at::ScalarType type, int64_t size,
                 c10::Device device) {
  TORCH_CHECK(
      arena.scalar_type() == type && arena.dim() == 1 && arena.numel() == size && arena.is_contiguous(), op,
      ": ", name, ": expected a contiguous ", type, " tensor of shape (", size, "), received ",
      arena.scalar_type(), " ", arena.sizes(), arena.is_contiguous() ? "" : ", not contiguous");
  TORCH_CHECK(arena.device() == device, op, ": ", name, ": expected the parameters' device, ", device,
              ", received ", arena.device());
}

void check_number(const char* op, const char* name, const OptionalTensor& number, c10::Device device) {
  if (!number.has_value()) return;
  TORCH_CHECK(number->scalar_type() == at::kFloat && number->numel() == 1 && number->device() == device, op,
              ": ", name, ": expected one fp32 number on the parameters' device, ", device, ", received ",
              number->scalar_type(), " ", number->sizes(), " on ", number->device());
}

bool is_supported(const Tensor& t) {
  const auto type = t.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void check_param(const char* op, int64_t i, const Tensor& param, c10::Device device) {
  TORCH_CHECK(is_supported(param), op, ": params[", i, "]: expected fp32, bf16 or fp16, received ",
              param.scalar_type());
  TORCH_CHECK(param.layout() == at::kStrided && param.device() == device, op, ": params[", i,
              "]: expected a dense tensor on the device of all parameters, ", device, ", received ",
              param.layout(), " on ", param.device());
  TORCH_CHECK(
      at::has_internal_overlap(param) != at::MemOverlap::Yes, op, ": params[", i,
      "]: expected a tensor without overlapping memory, received an expanded one; call .contiguous()");
}

// `piece`: number of elements that the call steps, if it steps a part of the parameter. The gradient may then
// have these elements alone.
void check_grad(const char* op, int64_t i, const Tensor& param, const Tensor& grad,
                std::optional<int64_t> piece) {
  TORCH_CHECK(grad.layout() == at::kStrided, op, ": grads[", i, "]: expected a dense tensor, received ",
              grad.layout(), "; sparse gradients are not supported");
  const bool is_piece = piece.has_value() && grad.dim() == 1 && grad.numel() == *piece;
  TORCH_CHECK(is_piece || grad.sizes() == param.sizes(), op, ": grads[", i,
              "]: expected the parameter's shape, ", param.sizes(), ", received ", grad.sizes());
  TORCH_CHECK(is_supported(grad) && grad.device() == param.device(), op, ": grads[", i,
              "]: expected fp32, bf16 or fp16 on the parameter's device, ", param.device(), ", received ",
              grad.scalar_type(), " on ", grad.device());
}

// Returns a moment that may be stored as codes. All such moments of an optimizer have the same storage
// format. Long moments (kLong in optimizer_table.h) change too little per step to be stored as codes.
const Moment& typical(const std::vector<Moment>& moments) {
  return *std::find_if(moments.begin(), moments.end(), [](const Moment& m) { return !m.rule->is_long; });
}

void check_moments(const Call& call, c10::Device device) {
  if (call.moments.empty()) return;
  const StateType state = state_of(call);
  const Moment& first = typical(call.moments);
  for (const Moment& m : call.moments) {
    TORCH_CHECK(m.rule->is_long || m.scale.has_value() == first.scale.has_value(), call.op, ": ",
                first.rule->scale, " and ", m.rule->scale,
                ": expected both (8- or 4-bit state) or neither (fp32 or bf16 state)");
  }
  const int64_t blocks = call.arena_blocks, elements = blocks * kStateBlock;
  for (const Moment& m : call.moments) {
    if (m.scale) {
      const bool four = state == StateType::k4Bit;
      check_arena(call.op, m.name(), *m.values, at::kByte, four ? elements / 2 : elements, device);
      check_arena(call.op, m.rule->scale.c_str(), *m.scale, at::kFloat,
                  blocks * kernels::scales_per_block(state, m.rule->is_signed), device);
    } else {
      const bool is_bf16 = kernels::state_of_moment(state, m.rule->is_long) == StateType::kBFloat16;
      check_arena(call.op, m.name(), *m.values, is_bf16 ? at::kBFloat16 : at::kFloat, elements, device);
    }
  }
}

}  // namespace

Arguments::Arguments(const LowMemoryOptions& options)
    : rule(detail::Access::rule(options)), extras(rule.extras.size()), lr(options.get_lr()),
      own(detail::Access::own_fields(options)), maximize(detail::Access::maximize(options)),
      seed(detail::Access::seed(options)) {
  moments.reserve(rule.moments.size());
  for (const detail::Moment& moment : rule.moments) moments.push_back({&moment});
}

void Arguments::call() const {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(("shoestring::" + std::string(rule.op)).c_str(), "");
  torch::jit::Stack stack;
  stack.reserve(op.schema().arguments().size());
  push_fields(stack, *this);
  op.callBoxed(stack);
}

Call::Call(const torch::jit::Stack& stack, size_t count, LowMemoryOptions& options)
    : Arguments(options), op(rule.op) {
  read_fields<Arguments>(stack, count, *this);
  std::erase_if(moments, [](const Moment& m) { return !m.values; });
  TORCH_CHECK(grads.size() == params.size(), op, ": grads: expected one (or None) for each of ",
              params.size(), " parameters, received ", grads.size());
  TORCH_CHECK(numbers.empty() || numbers.size() == params.size(), op,
              ": numbers: expected none or one for each of ", params.size(), " parameters, received ",
              numbers.size());
  for (int64_t n : numbers) {
    TORCH_CHECK(n >= 0 && n < 1 << kernels::kNumberBits, op, ": numbers: expected numbers in [0, 2^",
                kernels::kNumberBits, "), received ", n);
  }
  int64_t last_one = 0;
  arena_blocks = -first_block;
  for (const Tensor& p : params) arena_blocks += last_one = blocks_of(p);
  if (blocks) {
    const int64_t first_one = params.empty() ? 0 : blocks_of(params[0]);
    const int64_t least = params.size() < 2 ? 0 : arena_blocks - last_one;
    TORCH_CHECK(
        first_block >= 0 && first_block <= first_one && *blocks >= least && *blocks <= arena_blocks, op,
        ": first_block and blocks: expected blocks within the first and the last parameter, received ",
        first_block, " and ", *blocks);
    arena_blocks = *blocks;
  }
  const auto device = params.empty() ? step.device() : params[0].device();
  check_number(op, "lr_tensor", lr_tensor, device);
  check_number(op, "grad_scale", grad_scale, device);
  check_number(op, "clip_coef", clip_coef, device);
  check_number(op, "found_inf", found_inf, device);
  const detail::Reporter reporter{op, /*is_operator=*/true};
  if (!detail::kLrRange.holds(lr))
    reporter.refuse("lr", c10::str("a number ", detail::kLrRange.expected), lr);
  detail::check_ranges(own, reporter);
  detail::Access::check_together(options, reporter);
}

kernels::StepOptions Call::options(double weight_decay) const {
  const auto pointer = [](const OptionalTensor& t) { return t ? t->const_data_ptr<float>() : nullptr; };
  return {lr,
          weight_decay,
          maximize,
          pointer(lr_tensor),
          pointer(grad_scale),
          pointer(clip_coef),
          pointer(found_inf)};
}

ElementType type_of(const Tensor& t) {
  return t.scalar_type() == at::kFloat      ? ElementType::kFloat
         : t.scalar_type() == at::kBFloat16 ? ElementType::kBFloat16
                                            : ElementType::kHalf;
}

int64_t blocks_of(const Tensor& param) { return (param.numel() + kStateBlock - 1) / kStateBlock; }

StateType state_of(const Call& call) {
  if (call.moments.empty()) return StateType::kFloat;
  const Moment& m = typical(call.moments);
  if (!m.scale) return m.values->scalar_type() == at::kBFloat16 ? StateType::kBFloat16 : StateType::kFloat;
  return m.values->numel() * 2 == call.arena_blocks * kStateBlock ? StateType::k4Bit : StateType::k8Bit;
}

std::vector<Stepped> checked(const Call& call) {
  const auto device = call.params.empty() ? call.step.device() : call.params[0].device();
  std::vector<Stepped> work;
  work.reserve(call.params.size());
  const int64_t blocks = call.arena_blocks;
  int64_t begin = -call.first_block;
  for (size_t i = 0; i < call.params.size(); begin += blocks_of(call.params[i++])) {
    if (!call.grads[i]) continue;
    const Tensor &param = call.params[i], &grad = *call.grads[i];
    check_param(call.op, i, param, device);
    const int64_t last = std::min(blocks_of(param), blocks - begin);
    const int64_t first = std::max<int64_t>(-begin, 0);
    std::optional<int64_t> piece;
    if (!call.is_whole()) piece = std::min(last * kStateBlock, param.numel()) - first * kStateBlock;
    check_grad(call.op, i, param, grad, piece);
    const int64_t grad_begin = grad.sizes() == param.sizes() ? 0 : first * kStateBlock;
    work.push_back({static_cast<int64_t>(i), begin, first, last, param, grad, {}, grad_begin});
  }
  check_arena(call.op, "step", call.step, at::kFloat, call.params.size(), device);
  check_moments(call, device);
  const int64_t elements = blocks * kStateBlock;
  if (call.weight_remainder) {
    check_arena(call.op, "weight_remainder", *call.weight_remainder, at::kShort, elements, device);
    TORCH_CHECK(!call.stochastic_rounding, call.op,
                ": stochastic_rounding: expected False with "
                "weight_remainder, which leaves nothing to round");
  }
  if (call.accumulated) {
    const auto type = call.accumulated->scalar_type();
    check_arena(call.op, "accumulated", *call.accumulated, type == at::kBFloat16 ? type : at::kFloat,
                elements, device);
  }
  return work;
}

void drop_accumulated(const Call& call, const std::vector<Stepped>& work) {
  if (!call.accumulated) return;
  for (const Stepped& s : work) {
    call.accumulated->narrow(0, (s.block + s.first) * kStateBlock, (s.last - s.first) * kStateBlock).zero_();
  }
}

void make_contiguous(std::vector<Stepped>& work) {
  for (Stepped& s : work) {
    if (!s.param.is_inference()) s.param.unsafeGetTensorImpl()->bump_version();
    if (!s.param.is_contiguous()) {
      s.strided = s.param;
      s.param = s.param.contiguous();
    }
    if (!s.grad.is_contiguous()) s.grad = s.grad.contiguous();
  }
}

void copy_back(const std::vector<Stepped>& work) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (const Stepped& s : work) {
    if (s.strided.defined()) s.strided.copy_(s.param);
  }
}

void below_autograd(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const bool records = at::GradMode::is_enabled();
  for (const c10::IValue& p : torch::jit::peek(*stack, 0, schema.arguments().size()).toListRef()) {
    TORCH_CHECK(
        !records || !p.toTensor().requires_grad(), schema.name().substr(sizeof("shoestring::") - 1),
        ": params: a step on parameters that require gradients is not recorded for backward; call it under "
        "torch.no_grad()");
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

// Treats the blocks of all tensors as one sequence, so that a thousand small tensors occupy all threads as
// evenly as one large tensor.
void over_blocks(const std::vector<Stepped>& work, c10::function_ref<void(size_t, int64_t, int64_t)> body) {
  std::vector<int64_t> ends;  // end of each tensor in the sequence of all blocks, counted in blocks
  ends.reserve(work.size());
  for (const Stepped& s : work) ends.push_back((ends.empty() ? 0 : ends.back()) + s.last - s.first);
  // An element takes about a nanosecond: optimizers decode and encode their state.
  const int64_t grain = row_grain(32 * kStateBlock);
  at::parallel_for(0, ends.back(), grain, [&](int64_t first, int64_t last) {
    size_t i = std::upper_bound(ends.begin(), ends.end(), first) - ends.begin();
    for (int64_t block = first; block < last; ++i) {
      const int64_t begin = i == 0 ? 0 : ends[i - 1], end = std::min(last, ends[i]);
      body(i, work[i].first + block - begin, work[i].first + end - begin);
      block = end;
    }
  });
}

void check_aligned(const Call& call) {
  const auto check = [&](const char* name, const Tensor& arena) {
    TORCH_CHECK(reinterpret_cast<uintptr_t>(arena.const_data_ptr()) % 16 == 0, call.op, ": ", name,
                ": expected memory aligned to 16 bytes, received a view at an odd offset; call .clone()");
  };
  for (const Moment& m : call.moments) check(m.name(), *m.values);
  if (call.weight_remainder) check("weight_remainder", *call.weight_remainder);
  if (call.accumulated) check("accumulated", *call.accumulated);
}

}  // namespace shoestring::optim::ops
