// Implements the operator lora_linear for one layer, or for several layers that read the same input. Dropout
// runs once for all layers, and so does the product with their lora_A matrices, which are concatenated. Each
// layer's gradient with respect to the input is added to one sum.

#include <tuple>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/adapters/ops.h>

#include "adapters/column_dots_table.h"
#include "adapters/lora_layers.h"
#include "core/call.h"
#include "gemm/gemm.h"
#include "layers/seeded_dropout.h"
#include "layers/swiglu.h"
#include "quantization/base_weight.h"

namespace shoestring::adapters {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Names = c10::List<std::string>;

quantization::BaseWeight base(const gemm::Products& products, const LoraLayer& layer, int64_t columns,
                              at::TensorOptions like) {
  if (!layer.absmax.has_value()) return quantization::BaseWeight::dense(layer.weight, products.weight);
  return quantization::BaseWeight::quantized(
      quantization::PackedReader(products.backend, kLoraLinear, layer.weight, *layer.absmax, layer.nested,
                                 layer.quant_type, layer.block_size),
      layer.out_features(columns).expect_int(), columns, like.dtype(products.weight));
}

// Concatenates the lora_A matrices of all layers: (sum of ranks, in_features).
Tensor all_down(const std::vector<LoraLayer>& layers, at::ScalarType dtype) {
  std::vector<Tensor> matrices;
  for (const auto& layer : layers) {
    if (layer.lora_A.has_value()) matrices.push_back(layer.lora_A->to(dtype));
  }
  return matrices.empty() ? Tensor() : matrices.size() == 1 ? matrices[0] : at::cat(matrices);
}

Tensor to_type(const OptionalTensor& t, at::ScalarType dtype) {
  return t.has_value() ? t->to(dtype) : Tensor();
}

// Computes y = gain * (x W^T + scaling * low B^T) + bias for each layer with frozen weight W. Here low =
// low_scale * dropped(x) A^T, and dropped(x) is x after dropout. Returns y of each layer and the
// concatenation of all `low`, (tokens, sum of ranks). Backward needs `low`, which is small.
template <Backend backend>
std::tuple<std::vector<Tensor>, Tensor> forward(const Tensor& x, const LoraParts& parts,
                                                const OptionalTensor& gate, const OptionalTensor& seed,
                                                double dropout, at::ArrayRef<double> scaling,
                                                const Names& quant_type, at::IntArrayRef block_size) {
  const auto layers = checked_layers(x, parts, gate, seed, dropout, scaling, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(x.device());
  const gemm::Products products(backend, x);
  const auto other = products.other;
  const int64_t columns = x.size(-1);
  Tensor flat = as_matrix(gate.has_value() ? layers::swiglu_forward(backend, *gate, x) : x);
  // x is not converted here if the GEMM itself converts 16-bit inputs to fp32. With dropout, x is always
  // converted first, so that the output of dropout is not rounded to 16 bits.
  const Tensor wide = gemm::gemm_widens(other) && !seed.has_value() ? flat : flat.to(other);
  const Tensor A = all_down(layers, other);
  Tensor low = at::empty({flat.size(0), 0}, x.options().dtype(compute_type(x)));
  if (A.defined()) {
    low = gemm::multiply(products, seed.has_value() ? layers::drop(backend, wide, *seed, dropout) : wide,
                         A.t(), compute_type(x));
  }
  std::vector<Tensor> outputs;
  int64_t first = 0;
  for (const auto& layer : layers) {
    quantization::Adaptation adaptation;
    adaptation.scaling = layer.scaling;
    adaptation.gain = to_type(layer.gain, compute_type(x));
    adaptation.bias = to_type(layer.bias, layer.gain.has_value() ? compute_type(x) : other);
    if (layer.lora_A.has_value()) {
      Tensor layer_low = low.narrow(1, first, layer.lora_A->size(0));
      if (layer.low_scale.has_value()) layer_low.mul_(*layer.low_scale);
      first += layer_low.size(1);
      adaptation.low = layer_low.to(other);
      adaptation.up = layer.lora_B->to(other);
    }
    Tensor out = quantization::apply_weight(base(products, layer, columns, x.options()),
                                            products.weight == other ? wide : flat, adaptation,
                                            x.scalar_type(), products);
    outputs.push_back(out.view_symint(with_last(x, out.size(1))));
  }
  return {outputs, low};
}

Tensor none(const Tensor& like) { return at::empty({0}, like.options()); }

// Returns the gradients as the list that the operator returns. Undefined gradients become empty tensors.
std::vector<Tensor> flat_list(const LoraGradients& gradients, const Tensor& x) {
  std::vector<Tensor> list;
  LoraGradients::each(gradients, [&](const Tensor& t) { list.push_back(t.defined() ? t : none(x)); });
  return list;
}

Tensor column_products_cpu(const Tensor& a, const Tensor& b, const Tensor& offset) {
  Tensor sums = at::empty({a.size(1)}, a.options().dtype(at::kFloat));
  const Tensor x = a.contiguous(), y = b.contiguous(),
               shift = offset.defined() ? offset.contiguous() : offset;
  const float* away = shift.defined() ? shift.const_data_ptr<float>() : nullptr;
  const auto& kernels = cpu::column_dots();
  at::parallel_for(0, a.size(1), 256, [&](int64_t begin, int64_t end) {
    const auto run = [&](auto dots, auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      dots(static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(y.const_data_ptr()), away,
           x.size(0), x.size(1), begin, end, sums.mutable_data_ptr<float>());
    };
    switch (x.scalar_type()) {
      case at::kFloat:
        return run(kernels.dots_float, static_cast<float*>(nullptr));
      case at::kBFloat16:
        return run(kernels.dots_bf16, static_cast<uint16_t*>(nullptr));
      default:
        return run(kernels.dots_fp16, static_cast<uint16_t*>(nullptr));
    }
  });
  return sums;
}

// Returns the sum over tokens of a * (b - offset) for each column of the matrices a and b. The sums are fp64
// for fp64 inputs, else fp32.
Tensor column_products(const Tensor& a, const Tensor& b, const Tensor& offset, Backend backend) {
  const auto type = compute_type(a);
  if (backend == Backend::kCpu && type == at::kFloat && a.scalar_type() == b.scalar_type()) {
    return column_products_cpu(a, b, offset);
  }
  const int64_t tokens = a.size(0), step = 4096;
  Tensor sum = at::zeros({a.size(1)}, a.options().dtype(type));
  for (int64_t i = 0; i < tokens; i += step) {
    const int64_t n = std::min(step, tokens - i);
    Tensor part = b.narrow(0, i, n).to(type);
    part = offset.defined() ? part.sub(offset) : part;
    sum.add_(part.mul(a.narrow(0, i, n)).sum(0));
  }
  return sum;
}

// Backward of lora_linear for layers with frozen weight W. With G = grad_output * gain and, concatenated over
// all layers, D = scaling * low_scale * (G B):
//   grad_x = sum over layers of G W + dropped(D A)
//   grad_A = D^T dropped(x)
//   grad_B = scaling * G^T low
//   grad_gain = sum over tokens of grad_output * (y - bias) / gain
// dropped() applies the dropout of forward. outputs: y of each layer whose gain needs a gradient. `mask`
// selects the gradients of x, of gate, and of lora_A, lora_B and gain of each layer. A gradient that is not
// selected is returned as an empty tensor.
template <Backend backend>
std::vector<Tensor> backward(const LoraParts& grad_outputs, const LoraParts& outputs, const Tensor& x,
                             const Tensor& low, const LoraParts& parts, const OptionalTensor& gate,
                             const OptionalTensor& seed, double dropout, at::ArrayRef<double> scaling,
                             const Names& quant_type, at::IntArrayRef block_size, c10::List<bool> mask) {
  const auto layers = lora_layers(parts, scaling, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(x.device());
  const gemm::Products products(backend, x);
  const auto other = products.other, wide = compute_type(x);
  const int64_t columns = x.size(-1), tokens = low.size(0);
  const auto needed = LoraMask::from(mask, layers.size());
  const bool by_input = needed.x || (gate.has_value() && needed.gate);
  LoraGradients result(layers.size());
  std::vector<quantization::GradAndWeight> terms;
  const Tensor A = all_down(layers, other);
  Tensor grad_low = A.defined() ? at::zeros({tokens, A.size(0)}, x.options().dtype(other)) : Tensor();
  bool any_A = false;
  int64_t first = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto& layer = layers[i];
    const LoraMask::Layer& wants = needed.layers[i];
    LoraGradients::Layer& gradients = result.layers[i];
    const int64_t rank = layer.rank().expect_int(), begin = first;
    first += rank;
    any_A = any_A || wants.lora_A;
    const OptionalTensor upstream = grad_outputs.get(i);
    if (!upstream.has_value()) {  // the loss does not depend on this layer's output
      if (wants.lora_A) gradients.lora_A = at::zeros_like(*layer.lora_A);
      if (wants.lora_B) gradients.lora_B = at::zeros_like(*layer.lora_B);
      if (wants.gain) gradients.gain = at::zeros_like(*layer.gain);
      continue;
    }
    Tensor flat = as_matrix(*upstream), grad = gemm::gemm_widens(other) ? flat : flat.to(other);
    if (wants.gain) {
      const Tensor gain = layer.gain->to(wide);
      const Tensor sums =
          column_products(flat, as_matrix(*outputs.get(i)), to_type(layer.bias, wide), backend);
      gradients.gain = sums.div(gain).masked_fill_(gain.eq(0), 0).to(layer.gain->scalar_type());
    }
    // The gain is multiplied into the smaller factor of a product. For example, (grad_output * gain) B is
    // computed as grad_output (gain * B).
    const Tensor gain = to_type(layer.gain, compute_type(x));
    const auto gained = [&](const Tensor& rows) {
      return gain.defined() ? rows.mul(gain.unsqueeze(1)) : rows;
    };
    if (rank > 0 && (by_input || wants.lora_A)) {
      Tensor grad_of_layer = gemm::multiply(
          products, grad, gained(layer.lora_B->to(compute_type(x))).to(other), other, layer.scaling);
      if (layer.low_scale.has_value()) grad_of_layer.mul_(*layer.low_scale);
      grad_low.narrow(1, begin, rank).copy_(grad_of_layer);
    }
    if (wants.lora_B) {
      gradients.lora_B = gained(gemm::multiply(products, grad.t(), low.narrow(1, begin, rank).to(other),
                                               compute_type(x), layer.scaling))
                             .to(layer.lora_B->scalar_type());
    }
    if (by_input) {
      terms.push_back(
          {products.weight == other ? grad : flat, gain, base(products, layer, columns, x.options())});
    }
  }

  Tensor branch;  // input of the lora_A products, before dropout
  const bool direct = !seed.has_value() && A.defined();
  if (by_input) {
    // With dropout, a further term is added before the sum is rounded.
    const auto dtype = seed.has_value() && A.defined() ? wide : x.scalar_type();
    Tensor grad_x = quantization::times_weight(terms, tokens, columns, x.options(), dtype,
                                               direct ? grad_low : Tensor(), direct ? A : Tensor(), products);
    if (seed.has_value() && A.defined()) {
      grad_x.add_(
          layers::drop(backend, gemm::multiply(products, grad_low, A, grad_x.scalar_type()), *seed, dropout));
    }
    grad_x = grad_x.to(x.scalar_type()).view_symint(x.sym_sizes());
    if (gate.has_value()) {
      std::tie(result.gate, result.x, branch) = layers::swiglu_backward(backend, grad_x, *gate, x, any_A);
    } else {
      result.x = grad_x;
    }
  }
  if (!any_A) return flat_list(result, x);
  if (!branch.defined()) branch = gate.has_value() ? layers::swiglu_forward(backend, *gate, x) : x;
  branch = as_matrix(branch);
  if (!gemm::gemm_widens(other) || seed.has_value()) branch = branch.to(other);
  if (seed.has_value()) branch = layers::drop(backend, branch, *seed, dropout);
  const Tensor grad_A = gemm::multiply(products, grad_low.t(), branch, wide);
  first = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!layers[i].lora_A.has_value()) continue;
    const int64_t rank = layers[i].lora_A->size(0);
    if (needed.layers[i].lora_A)
      result.layers[i].lora_A =
          grad_A.narrow(0, first, rank).to(layers[i].lora_A->scalar_type(), false, true);
    first += rank;
  }
  return flat_list(result, x);
}

std::tuple<std::vector<Tensor>, Tensor> forward_meta(const Tensor& x, const LoraParts& parts,
                                                     const OptionalTensor& gate, const OptionalTensor& seed,
                                                     double dropout, at::ArrayRef<double> scaling,
                                                     const Names& quant_type, at::IntArrayRef block_size) {
  std::vector<Tensor> outputs;
  c10::SymInt ranks = 0;
  const auto layers = checked_layers(x, parts, gate, seed, dropout, scaling, quant_type, block_size);
  for (const auto& layer : layers) {
    outputs.push_back(at::empty_symint(with_last(x, layer.out_features(x.sym_size(-1))), x.options()));
    ranks = ranks + layer.rank();
  }
  return {outputs, at::empty_symint({tokens_of(x), ranks}, x.options().dtype(compute_type(x)))};
}

std::vector<Tensor> backward_meta(const LoraParts&, const LoraParts&, const Tensor& x, const Tensor&,
                                  const LoraParts& parts, const OptionalTensor& gate, const OptionalTensor&,
                                  double, at::ArrayRef<double> scaling, const Names& quant_type,
                                  at::IntArrayRef block_size, c10::List<bool> mask) {
  std::vector<Tensor> result;
  const auto add = [&](const OptionalTensor& like, bool is_result) {
    const bool is_requested = mask.get(result.size());
    result.push_back(is_requested || is_result ? at::empty_symint(like->sym_sizes(), like->options())
                                               : none(x));
  };
  const bool both = gate.has_value() && (mask.get(0) || mask.get(1));
  add(x, both);
  add(gate, both);
  for (const auto& layer : lora_layers(parts, scaling, quant_type, block_size)) {
    for (const auto& t : {layer.lora_A, layer.lora_B, layer.gain}) add(t, false);
  }
  return result;
}

// Implements lora_linear_group on every device if no gradient is needed. Calls _lora_linear_group_forward and
// drops `low`.
std::vector<Tensor> outputs_only(const Tensor& x, const LoraParts& parts, const OptionalTensor& gate,
                                 const OptionalTensor& seed, double dropout, at::ArrayRef<double> scaling,
                                 const Names& quant_type, at::IntArrayRef block_size) {
  static auto op = find<decltype(forward_meta)>("shoestring::_lora_linear_group_forward");
  return std::get<0>(op.call(x, parts, gate, seed, dropout, scaling, quant_type, block_size));
}

using Group = decltype(outputs_only);

Tensor one_layer(const Tensor& x, const Tensor& weight, const OptionalTensor& absmax,
                 const OptionalTensor& nested, const OptionalTensor& bias, const OptionalTensor& lora_A,
                 const OptionalTensor& lora_B, const OptionalTensor& gain, const OptionalTensor& low_scale,
                 const OptionalTensor& gate, const OptionalTensor& seed, double dropout, double scaling,
                 c10::string_view quant_type, int64_t block_size) {
  static auto op = find<Group>("shoestring::lora_linear_group");
  LoraParts parts({weight, absmax, nested, bias, lora_A, lora_B, gain, low_scale});
  return op.call(x, parts, gate, seed, dropout, {scaling}, Names({std::string(quant_type)}), {block_size})[0];
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("_lora_linear_group_forward", forward<Backend::kCpu>);
  m.impl("_lora_linear_group_backward", backward<Backend::kCpu>);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("_lora_linear_group_forward", forward<Backend::kCuda>);
  m.impl("_lora_linear_group_backward", backward<Backend::kCuda>);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("_lora_linear_group_forward", forward_meta);
  m.impl("_lora_linear_group_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("lora_linear_group", outputs_only); }
TORCH_LIBRARY_IMPL(shoestring, CompositeImplicitAutograd, m) { m.impl("lora_linear", one_layer); }

}  // namespace

}  // namespace shoestring::adapters

namespace shoestring {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::vector<Tensor> lora_linear_group(const Tensor& x, const std::vector<LoraWeight>& layers,
                                      const LoraInput& input) {
  static auto op = find<adapters::Group>("shoestring::lora_linear_group");
  adapters::LoraParts parts;
  std::vector<double> scaling;
  adapters::Names quant_type;
  std::vector<int64_t> block_size;
  for (const auto& layer : layers) {
    for (const OptionalTensor& t :
         {OptionalTensor(layer.weight()), layer.absmax(), layer.nested(), layer.bias(), layer.lora_A(),
          layer.lora_B(), layer.gain(), layer.low_scale()}) {
      parts.push_back(t);
    }
    scaling.push_back(layer.scaling());
    quant_type.push_back(layer.quantize().quant_type());
    block_size.push_back(layer.quantize().block_size());
  }
  return op.call(x, parts, input.gate(), input.seed(), input.dropout(), scaling, quant_type, block_size);
}

Tensor lora_linear(const Tensor& x, const LoraWeight& layer, const LoraInput& input) {
  return lora_linear_group(x, {layer}, input)[0];
}

}  // namespace shoestring
