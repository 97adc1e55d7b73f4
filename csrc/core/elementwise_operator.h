#pragma once

// Registers an elementwise operator with a gradient, and the operators of its backward. A struct describes
// it:
//
//     struct Gate : elementwise::Differentiable<Gate> {
//       static constexpr const char* kName = "gate";
//       static constexpr const char* kInputs[] = {"x", "y"};  // names of the tensors in the schema
//       using Options = std::tuple<double>;                   // types of the options in the schema
//       explicit Gate(double slope);                          // its parameters are the options
//
//       void check(const char* op, const Tensor& x, const Tensor& y) const;  // also checks the options
//       Kernels tables() const;
//       // fp64, composed of ATen's operators:
//       Tensor forward_fp64(const Tensor& x, const Tensor& y) const;
//       std::array<Tensor, 2> backward_fp64(const Tensor& grad, const Tensor& x, const Tensor& y) const;
//     };
//     TORCH_LIBRARY_FRAGMENT(shoestring, m) {
//       // gate returns ...
//       elementwise::define<Gate>(m, "gate(Tensor x, Tensor y, float slope=1.) -> Tensor");
//     }
//     SHOESTRING_ELEMENTWISE(Gate)
//
// _gate_backward returns the gradients. _gate_backward_ writes them over the inputs: backward calls it if
// nothing else holds the inputs, since new memory would cost more time than the computation.

#include <array>
#include <iterator>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "core/arguments.h"
#include "core/autograd.h"
#include "core/call.h"
#include "core/elementwise.h"

namespace shoestring::elementwise {

/// Returns the schema of the backward operator NAME of an operator with `count` inputs: `schema` is that of
/// the operator. in_place: the gradients are written over the inputs.
std::string backward_schema(const std::string& schema, const std::string& name, size_t count, bool in_place);

template <size_t>
using Repeated = at::Tensor;
/// Reads the value of an option from the stack.
template <class T>
T option_of(const c10::IValue& value) {
  return value.to<T>();
}
template <>
inline c10::string_view option_of(const c10::IValue& value) {
  return value.toStringRef();
}

template <class Op, class Indices = std::make_index_sequence<std::size(Op::kInputs)>,
          class Options = typename Op::Options>
struct Operator;

template <class Op, size_t... i, class... Option>
struct Operator<Op, std::index_sequence<i...>, std::tuple<Option...>> {
  using Tensor = at::Tensor;
  static constexpr size_t kCount = sizeof...(i);
  using Gradients = std::conditional_t<kCount == 1, Tensor, std::tuple<Repeated<i>...>>;

  static const char* backward_name() {
    static const std::string name = std::string("_") + Op::kName + "_backward";
    return name.c_str();
  }
  static const char* in_place_name() {
    static const std::string name = std::string(backward_name()) + "_";
    return name.c_str();
  }

  // ---- Kernels. The last input is the model of the others.

  static const Tensor& last(const Repeated<i>&... inputs) {
    return std::get<kCount - 1>(std::tie(inputs...));
  }
  static Op checked(const char* op, const Repeated<i>&... inputs, Option... options) {
    const Op described{options...};
    described.check(op, inputs...);
    return described;
  }
  static Op checked_backward(const char* op, const Tensor& grad, const Repeated<i>&... inputs,
                             Option... options) {
    const Op described = checked(op, inputs..., options...);
    check_like(op, "grad", grad, Op::kInputs[kCount - 1], last(inputs...));
    return described;
  }

  template <Backend backend>
  static Tensor forward(const Repeated<i>&... inputs, Option... options) {
    const Op op = checked(Op::kName, inputs..., options...);
    if (last(inputs...).scalar_type() == at::kDouble) return op.forward_fp64(inputs...);
    return elementwise::forward(op.tables(), backend, {inputs.contiguous()...});
  }

  template <Backend backend>
  static Gradients backward(const Tensor& grad, const Repeated<i>&... inputs, Option... options) {
    const Op op = checked_backward(backward_name(), grad, inputs..., options...);
    std::array<Tensor, kCount> gradients;
    if (last(inputs...).scalar_type() == at::kDouble) {
      gradients = op.backward_fp64(grad, inputs...);
    } else {
      gradients = {like(inputs)...};
      elementwise::backward(op.tables(), backend, {grad.contiguous(), inputs.contiguous()...}, gradients);
    }
    return Gradients(std::move(gradients[i])...);
  }

  template <Backend backend>
  static void backward_in_place(const Tensor& grad, Repeated<i>&... inputs, Option... options) {
    const Op op = checked_backward(in_place_name(), grad, inputs..., options...);
    (check_written(in_place_name(), Op::kInputs[i], inputs), ...);
    const std::array<Tensor, kCount> gradients{inputs...};
    elementwise::backward(op.tables(), backend, {grad.contiguous(), inputs...}, gradients);
  }

  static Tensor forward_meta(const Repeated<i>&... inputs, Option... options) {
    checked(Op::kName, inputs..., options...);
    return at::empty_symint(last(inputs...).sym_sizes(), last(inputs...).options());
  }
  static Gradients backward_meta(const Tensor& grad, const Repeated<i>&... inputs, Option... options) {
    checked_backward(backward_name(), grad, inputs..., options...);
    return Gradients(at::empty_symint(inputs.sym_sizes(), inputs.options())...);
  }
  static void backward_in_place_meta(const Tensor& grad, Repeated<i>&... inputs, Option... options) {
    checked_backward(in_place_name(), grad, inputs..., options...);
  }

  // ---- Autograd

  static Tensor call(const Repeated<i>&... inputs, Option... options) {
    static auto op = find<decltype(forward_meta)>((std::string("shoestring::") + Op::kName).c_str());
    return op.call(inputs..., options...);
  }

  static constexpr const char* kOptions = "options";

  static Tensor record(torch::autograd::AutogradContext* ctx, const Repeated<i>&... inputs,
                       Option... options) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({inputs...});
    if constexpr (sizeof...(Option) > 0)
      ctx->saved_data[kOptions] = c10::ivalue::Tuple::create(std::vector<c10::IValue>{options...});
    return call(inputs..., options...);
  }

  template <size_t... k>
  static torch::autograd::variable_list gradients(torch::autograd::AutogradContext* ctx, const Tensor& grad,
                                                  std::index_sequence<k...>) {
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    [[maybe_unused]] const c10::IValue* options = nullptr;
    if constexpr (sizeof...(k) > 0) options = ctx->saved_data[kOptions].toTupleRef().elements().begin();
    if (used_once(grad) && (may_overwrite(saved[i]) && ...)) {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op =
          find<decltype(backward_in_place_meta)>((std::string("shoestring::") + in_place_name()).c_str());
      std::array<Tensor, kCount> gradients{saved[i].detach()...};
      op.call(grad, gradients[i]..., option_of<Option>(options[k])...);
      return {gradients[i]...};
    }
    Gradients gradients = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      static auto op = find<decltype(backward_meta)>((std::string("shoestring::") + backward_name()).c_str());
      return op.call(grad, saved[i]..., option_of<Option>(options[k])...);
    }();
    if constexpr (kCount == 1) {
      return once_differentiable(Op::kName, {gradients});
    } else {
      return once_differentiable(Op::kName, {std::get<i>(gradients)...});
    }
  }
  static torch::autograd::variable_list gradients(torch::autograd::AutogradContext* ctx, const Tensor& grad) {
    auto of_arguments = gradients(ctx, grad, std::index_sequence_for<Option...>());
    of_arguments.resize(kCount + sizeof...(Option));
    return of_arguments;
  }

  static Tensor autograd(const Repeated<i>&... inputs, Option... options) {
    if (needs_grad(inputs...)) return Op::apply(inputs..., options...);
    at::AutoDispatchBelowADInplaceOrView below;
    return call(inputs..., options...);
  }

  // ---- Registration

  template <Backend backend>
  static void implement(torch::Library& m) {
    m.impl(Op::kName, forward<backend>);
    m.impl(backward_name(), backward<backend>);
    m.impl(in_place_name(), backward_in_place<backend>);
  }
  static void implement_meta(torch::Library& m) {
    m.impl(Op::kName, forward_meta);
    m.impl(backward_name(), backward_meta);
    m.impl(in_place_name(), backward_in_place_meta);
  }
};

/// The autograd function of an operator. It is the base of Op, since each backward reads the name of the
/// type.
template <class Op>
struct Differentiable : torch::autograd::Function<Op> {
  template <class... Arguments>
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const Arguments&... arguments) {
    return Operator<Op>::record(ctx, arguments...);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& upstream) {
    return Operator<Op>::gradients(ctx, upstream[0]);
  }
};

/// Defines the operator and its backward operators.
template <class Op>
void define(torch::Library& m, const char* schema) {
  using Of = Operator<Op>;
  m.def(schema);
  m.def(backward_schema(schema, Of::backward_name(), Of::kCount, /*in_place=*/false).c_str());
  m.def(backward_schema(schema, Of::in_place_name(), Of::kCount, /*in_place=*/true).c_str());
}

}  // namespace shoestring::elementwise

/// Registers the implementations of an operator and of its backward operators.
#define SHOESTRING_ELEMENTWISE(Op)                                                                      \
  TORCH_LIBRARY_IMPL(shoestring, CPU, m) {                                                              \
    shoestring::elementwise::Operator<Op>::implement<shoestring::Backend::kCpu>(m);                     \
  }                                                                                                     \
  TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {                                                             \
    shoestring::elementwise::Operator<Op>::implement<shoestring::Backend::kCuda>(m);                    \
  }                                                                                                     \
  TORCH_LIBRARY_IMPL(shoestring, Meta, m) { shoestring::elementwise::Operator<Op>::implement_meta(m); } \
  TORCH_LIBRARY_IMPL(shoestring, Autograd, m) {                                                         \
    m.impl(Op::kName, shoestring::elementwise::Operator<Op>::autograd);                                 \
  }
