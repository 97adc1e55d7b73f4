#include "layers/rope.h"

#include <algorithm>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/layers/ops.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/cuda.h"
#include "core/huge_pages.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "layers/norm_table.h"
#include "layers/rope_table.h"

namespace shoestring::layers {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

// maximum number of partial sums over tokens on the CPU; independent of the number of threads
constexpr int64_t kRopeParts = 128;
// On CUDA, the gradients of q_weight and k_weight are first summed into at most kTeams partial sums, each
// over at least kHeadsEach heads.
constexpr int64_t kTeams = 8192, kHeadsEach = 16;

// Returns x, or a contiguous copy of x if the elements within a head are not contiguous.
Tensor dense_heads(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

kernels::HeadStrides strides_of(const Tensor& x) {
  if (x.dim() == 3) return {0, x.stride(1), x.stride(0)};
  return {x.stride(0), x.stride(1), x.stride(2)};
}

// The arguments of a rope call as the struct that kernels take, and the tensors to which its pointers point.
struct RopeProblem {
  kernels::Rope rope{};
  int64_t batches;
  std::vector<Tensor> kept;
  Tensor outs[2];

  RopeProblem(Backend backend, const RopeCall& call, const OptionalTensor* inputs);

 private:
  const void* keep(const Tensor& t) {
    kept.push_back(t);
    return t.const_data_ptr();
  }
  void set_tables(Backend backend, const RopeCall& call);
  void set_positions(Backend backend, const RopeCall& call);
};

// `inputs` is null in forward. In backward it points to q and k, while call.q and call.k are the gradients of
// the rotated q and k.
RopeProblem::RopeProblem(Backend backend, const RopeCall& call, const OptionalTensor* inputs) {
  const bool packed = call.q.dim() == 3;
  batches = packed ? 1 : call.q.size(0);
  rope.tokens = packed ? call.q.size(0) : call.q.size(2);
  rope.head_dim = call.q.size(-1);
  rope.rotary_dim = rotary_dim_of(call);
  rope.interleaved = call.interleaved;
  rope.eps = static_cast<float>(call.eps);
  rope.offset = static_cast<float>(call.offset);
  const OptionalTensor weights[] = {call.q_weight, call.k_weight};
  const auto has_call_dtype = [&](const OptionalTensor& t) {
    return !t.has_value() || t->scalar_type() == call.q.scalar_type();
  };
  rope.wide_weight = backend == Backend::kCpu || !has_call_dtype(weights[0]) || !has_call_dtype(weights[1]) ||
                     call.q.scalar_type() == at::kFloat;
  for (int side = 0; side < 2; ++side) {
    kernels::RopeHeads& of = rope.sides[side];
    const Tensor dense = dense_heads(side == 0 ? call.q : call.k);
    of.heads = dense.size(1);
    if (inputs == nullptr) {
      of.x = keep(dense);
      of.x_strides = strides_of(dense);
      outs[side] = in_huge_pages(empty_rotated(dense));
    } else {
      of.grad = keep(dense);
      of.grad_strides = strides_of(dense);
      outs[side] = in_huge_pages(empty_rotary_heads(dense));
      if (inputs[side].has_value()) {
        const Tensor x = dense_heads(*inputs[side]);
        of.x = keep(x);
        of.x_strides = strides_of(x);
      }
    }
    of.out = outs[side].mutable_data_ptr();
    of.out_strides = strides_of(outs[side]);
    if (weights[side].has_value()) {
      of.weight = keep(weights[side]->to(rope.wide_weight ? at::kFloat : call.q.scalar_type()).contiguous());
    }
  }
  set_tables(backend, call);
  if (call.position_ids.has_value()) set_positions(backend, call);
}

void RopeProblem::set_tables(Backend backend, const RopeCall& call) {
  const int64_t half = rope.rotary_dim / 2;
  const bool twice = call.cos.size(-1) != half;
  Tensor cos = call.cos, sin = call.sin;
  rope.table_step = 1;
  if (backend == Backend::kCpu) {
    const auto one = [&](const Tensor& t) {
      Tensor angles = !twice ? t : call.interleaved ? t.slice(-1, 0, 2 * half, 2) : t.narrow(-1, 0, half);
      angles = angles.to(at::kFloat);
      return call.interleaved ? at::stack({angles, angles}, -1).flatten(-2) : dense_heads(angles);
    };
    cos = one(cos);
    sin = one(sin);
    if (sin.strides() != cos.strides()) cos = cos.contiguous(), sin = sin.contiguous();
    if (call.interleaved) sin.slice(-1, 0, std::nullopt, 2).neg_();
    rope.table_bits = 32;
  } else {
    const auto type = cos.scalar_type();
    if (type == at::kDouble || cos.stride(-1) != 1 || sin.strides() != cos.strides()) {
      cos = cos.to(type == at::kDouble ? at::kFloat : type).contiguous();
      sin = sin.to(cos.scalar_type()).contiguous();
    }
    rope.table_step = call.interleaved && twice ? 2 : 1;
    rope.table_bits = cos.scalar_type() == at::kFloat ? 32 : cos.scalar_type() == at::kBFloat16 ? 16 : 15;
  }
  rope.cos = keep(cos);
  rope.sin = keep(sin);
  rope.table_rows = cos.size(-2);
  rope.table_token = cos.stride(-2);
  rope.table_batch = cos.dim() == 3 && cos.size(0) > 1 ? cos.stride(0) : 0;
}

void RopeProblem::set_positions(Backend backend, const RopeCall& call) {
  const Tensor& p = *call.position_ids;
  // Checks positions on the CPU only. For a position outside of the tables of cosines and sines, the CUDA
  // kernel writes NaN instead.
  if (backend == Backend::kCpu && p.numel() > 0) {
    const int64_t least = p.min().item<int64_t>(), most = p.max().item<int64_t>();
    TORCH_CHECK_INDEX(least >= 0 && most < rope.table_rows, kRopeOp,
                      ": position_ids: expected rows of cos, 0 to ", rope.table_rows - 1, ", received ",
                      least, " to ", most);
  }
  rope.positions = static_cast<const int64_t*>(keep(p));
  rope.position_token = p.stride(-1);
  rope.position_batch = p.dim() == 2 && p.size(0) > 1 ? p.stride(0) : 0;
}

template <class Run>
Run by_type(const Tensor& t, Run of_float, Run of_bf16, Run of_fp16) {
  return t.scalar_type() == at::kFloat ? of_float : t.scalar_type() == at::kBFloat16 ? of_bf16 : of_fp16;
}

int64_t rope_grain(const RopeProblem& p) {
  const int64_t heads = p.rope.sides[0].heads + p.rope.sides[1].heads;
  return row_grain(2 * heads * p.rope.head_dim * static_cast<int64_t>(p.outs[0].element_size()));
}

void run_rope_kernel(Backend backend, const RopeCall& call, const RopeProblem& p) {
  const int64_t all = p.batches * p.rope.tokens;
  if (all == 0 || p.rope.head_dim == 0) return;
  if (backend == Backend::kCuda) {
    const auto& k = cuda::table<kernels::RopeCuda>(kRopeOp);
    const auto run = by_type(call.q, k.forward_float, k.forward_bf16, k.forward_fp16);
    check_launch(kRopeOp, run(p.rope, p.batches, stream_of(call.q)));
    return;
  }
  const auto& k = cpu::rope();
  const auto run = by_type(call.q, k.forward_float, k.forward_bf16, k.forward_fp16);
  at::parallel_for(0, all, rope_grain(p), [&](int64_t begin, int64_t end) { run(p.rope, begin, end); });
}

// Runs the backward kernel of rope. If `sums`, returns the gradients of q_weight and k_weight as rows of one
// tensor (2, head_dim); else the result is undefined.
Tensor run_rope_backward_kernel(Backend backend, const RopeCall& call, const RopeProblem& p, bool sums) {
  const int64_t all = p.batches * p.rope.tokens, heads = p.rope.sides[0].heads + p.rope.sides[1].heads;
  const auto wide = call.q.options().dtype(at::kFloat);
  if (all == 0 || p.rope.head_dim == 0) return sums ? at::zeros({2, p.rope.head_dim}, wide) : Tensor();
  if (backend == Backend::kCuda) {
    const auto& k = cuda::table<kernels::RopeCuda>(kRopeOp);
    const auto run = by_type(call.q, k.backward_float, k.backward_bf16, k.backward_fp16);
    const int64_t rows = sums ? std::clamp<int64_t>(all * heads / kHeadsEach, 1, kTeams) : 0;
    const Tensor parts = sums ? at::empty({rows, 2 * p.rope.head_dim}, wide) : Tensor();
    check_launch(kRopeOp, run(p.rope, p.batches, rows, sums ? parts.mutable_data_ptr<float>() : nullptr,
                              stream_of(call.q)));
    if (!sums) return {};
    Tensor out = at::empty({2, p.rope.head_dim}, wide);
    check_launch(kRopeOp, cuda::table<kernels::NormCuda>("norm").sum_rows_float(
                              parts.const_data_ptr<float>(), rows, 2 * p.rope.head_dim,
                              out.mutable_data_ptr(), stream_of(call.q)));
    return out;
  }
  const auto& k = cpu::rope();
  const auto run = by_type(call.q, k.backward_float, k.backward_bf16, k.backward_fp16);
  if (!sums) {
    at::parallel_for(0, all, rope_grain(p),
                     [&](int64_t begin, int64_t end) { run(p.rope, begin, end, nullptr); });
    return {};
  }
  const int64_t each = (all + kRopeParts - 1) / kRopeParts, parts = (all + each - 1) / each;
  const Tensor part_sums = at::zeros({parts, 2, p.rope.head_dim}, wide);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      run(p.rope, part * each, std::min(all, (part + 1) * each),
          part_sums.mutable_data_ptr<float>() + part * 2 * p.rope.head_dim);
    }
  });
  return part_sums.sum(0);
}

template <Backend backend>
std::tuple<Tensor, Tensor> run_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                    std::optional<int64_t> rotary_dim, bool interleaved,
                                    const OptionalTensor& position_ids, const OptionalTensor& q_weight,
                                    const OptionalTensor& k_weight, double eps, double offset) {
  const RopeCall call{q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset};
  check_rope(call);
  const c10::OptionalDeviceGuard guard(q.device());
  if (q.scalar_type() == at::kDouble) return rope_forward_double(call);
  const RopeProblem p(backend, call, nullptr);
  run_rope_kernel(backend, call, p);
  return {p.outs[0], p.outs[1]};
}

template <Backend backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> run_rope_backward(
    const Tensor& grad_q, const Tensor& grad_k, const OptionalTensor& q, const OptionalTensor& k,
    const Tensor& cos, const Tensor& sin, std::optional<int64_t> rotary_dim, bool interleaved,
    const OptionalTensor& position_ids, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
    double eps, double offset, bool weight_grad) {
  const RopeCall call{grad_q,       grad_k,   cos,      sin, rotary_dim, interleaved,
                      position_ids, q_weight, k_weight, eps, offset};
  const c10::OptionalDeviceGuard guard(grad_q.device());
  const auto none = [&] { return at::empty({0}, grad_q.options()); };
  if (grad_q.scalar_type() == at::kDouble) {
    auto [to_q, to_k, to_q_weight, to_k_weight] = rope_backward_double(call, q, k);
    if (!weight_grad) return {to_q, to_k, none(), none()};
    return {to_q, to_k, to_q_weight, to_k_weight};
  }
  const OptionalTensor inputs[] = {q, k};
  const RopeProblem p(backend, call, inputs);
  const Tensor sums = run_rope_backward_kernel(backend, call, p, weight_grad);
  if (!weight_grad) return {p.outs[0], p.outs[1], none(), none()};
  // Copies the two rows of `sums`, because outputs of an operator must not share memory.
  return {p.outs[0], p.outs[1], sums.select(0, 0).to(q_weight->scalar_type(), false, /*copy=*/true),
          sums.select(0, 1).to(k_weight->scalar_type(), false, /*copy=*/true)};
}

std::tuple<Tensor, Tensor> rope_meta(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                     std::optional<int64_t> rotary_dim, bool interleaved,
                                     const OptionalTensor& position_ids, const OptionalTensor& q_weight,
                                     const OptionalTensor& k_weight, double eps, double offset) {
  check_rope({q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset});
  return {empty_rotated(q), empty_rotated(k)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rope_backward_meta(
    const Tensor& grad_q, const Tensor& grad_k, const OptionalTensor& q, const OptionalTensor& k,
    const Tensor& cos, const Tensor& sin, std::optional<int64_t> rotary_dim, bool interleaved,
    const OptionalTensor& position_ids, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
    double eps, double offset, bool weight_grad) {
  const auto like = [&](const OptionalTensor& weight) {
    return weight_grad ? at::empty_symint(weight->sym_sizes(), weight->options())
                       : at::empty({0}, grad_q.options());
  };
  return {empty_rotary_heads(grad_q), empty_rotary_heads(grad_k), like(q_weight), like(k_weight)};
}

std::tuple<Tensor, Tensor> call_rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                     std::optional<int64_t> rotary_dim, bool interleaved,
                                     const OptionalTensor& position_ids, const OptionalTensor& q_weight,
                                     const OptionalTensor& k_weight, double eps, double offset) {
  static auto op = find<decltype(call_rope)>("shoestring::rope");
  return op.call(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
}

using RopeBackwardSignature = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
    std::optional<int64_t>, bool, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
    double, bool);

// Autograd of rope. The backward of a rotation is the inverse rotation, which needs no inputs. q and k are
// therefore saved only if they are normalised before the rotation.
class Rope : public torch::autograd::Function<Rope> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& cos,
                               const Tensor& sin, std::optional<int64_t> rotary_dim, bool interleaved,
                               const OptionalTensor& position_ids, const OptionalTensor& q_weight,
                               const OptionalTensor& k_weight, double eps, double offset) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [new_q, new_k] =
        call_rope(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
    const bool normed = q_weight.has_value();
    const OptionalTensor none;
    save_fields(ctx, Saved{normed ? OptionalTensor(q) : none, normed ? OptionalTensor(k) : none, position_ids,
                           q_weight, k_weight, cos, sin, rotary_dim, interleaved,
                           wants_grad(q_weight) || wants_grad(k_weight), eps, offset});
    return {new_q, new_k};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& upstream) {
    const auto saved = saved_fields<Saved>(ctx);
    Tensor to_q, to_k, to_q_weight, to_k_weight;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<RopeBackwardSignature>("shoestring::_rope_backward");
      std::tie(to_q, to_k, to_q_weight, to_k_weight) =
          op.call(upstream[0], upstream[1], saved.q, saved.k, saved.cos, saved.sin, saved.rotary_dim,
                  saved.interleaved, saved.position_ids, saved.q_weight, saved.k_weight, saved.eps,
                  saved.offset, saved.weight_grad);
    }
    if (!saved.weight_grad) to_q_weight = to_k_weight = Tensor();
    const variable_list g = once_differentiable("rope", {to_q, to_k, to_q_weight, to_k_weight});
    return {g[0], g[1], {}, {}, {}, {}, {}, g[2], g[3], {}, {}};
  }

 private:
  struct Saved {
    OptionalTensor q, k, position_ids, q_weight, k_weight;
    Tensor cos, sin;
    std::optional<int64_t> rotary_dim;
    bool interleaved = false, weight_grad = false;
    double eps = 0, offset = 0;

    template <class Self, class Visitor>
    static void fields(Self& self, Visitor& visit) {
      visit.each(self.q, self.k, self.position_ids, self.q_weight, self.k_weight, self.cos, self.sin,
                 self.rotary_dim, self.interleaved, self.weight_grad, self.eps, self.offset);
    }
  };
};

std::tuple<Tensor, Tensor> rope_autograd(const Tensor& q, const Tensor& k, const Tensor& cos,
                                         const Tensor& sin, std::optional<int64_t> rotary_dim,
                                         bool interleaved, const OptionalTensor& position_ids,
                                         const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                         double eps, double offset) {
  TORCH_CHECK(!needs_grad(cos, sin),
              "rope: cos, sin: expected tables without gradients, received one with requires_grad; "
              "detach it, or rotate in plain PyTorch");
  const Tensor none;
  if (needs_grad(q, k, q_weight.value_or(none), k_weight.value_or(none))) {
    const variable_list results =
        Rope::apply(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_rope(q, k, cos, sin, rotary_dim, interleaved, position_ids, q_weight, k_weight, eps, offset);
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Applies the rotary position embedding to q and k: (batch, heads, tokens, head_dim) or (tokens, heads,
  // head_dim), with any strides. q and k may have different numbers of heads.
  // cos and sin: (tokens, width) or (1 or batch, tokens, width). If position_ids are given, int64 (tokens) or
  // (1 or batch, tokens), cos and sin are (positions, width). width is rotary_dim / 2, or rotary_dim if each
  // angle is given twice.
  // The first rotary_dim elements of a head (None: all) are rotated in pairs. The elements of a pair are
  // adjacent if interleaved is true, else rotary_dim / 2 apart. With q_weight and k_weight (head_dim),
  // RMSNorm first normalises each head and multiplies it by (offset + weight).
  m.def(R"(rope(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int? rotary_dim=None,
      bool interleaved=False, Tensor? position_ids=None, Tensor? q_weight=None, Tensor? k_weight=None,
      float eps=1e-06, float offset=0.) -> (Tensor, Tensor))");
  // Computes the gradients of rope. q and k must be given if there are weights. The gradients of q_weight and
  // k_weight are empty if weight_grad is false.
  m.def(R"(_rope_backward(Tensor grad_q, Tensor grad_k, Tensor? q, Tensor? k, Tensor cos, Tensor sin,
      int? rotary_dim, bool interleaved, Tensor? position_ids, Tensor? q_weight, Tensor? k_weight,
      float eps, float offset, bool weight_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight,
      Tensor grad_k_weight))");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("rope", run_rope<Backend::kCpu>);
  m.impl("_rope_backward", run_rope_backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("rope", run_rope<Backend::kCuda>);
  m.impl("_rope_backward", run_rope_backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("rope", rope_meta);
  m.impl("_rope_backward", rope_backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl("rope", rope_autograd); }

}  // namespace

}  // namespace shoestring::layers

namespace shoestring {

using at::Tensor;

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                                const RopeOptions& o) {
  static auto op = find<decltype(layers::rope_meta)>("shoestring::rope");
  return op.call(q, k, cos, sin, o.rotary_dim(), o.interleaved(), o.position_ids(), o.q_weight(),
                 o.k_weight(), o.eps(), o.offset());
}

}  // namespace shoestring
