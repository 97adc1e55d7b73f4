#include <cmath>
#include <tuple>

#include <torch/nn/init.h>

#include <shoestring/quantization/quantized_linear.h>

#include "quantization/packed.h"
#include "quantization/without_weight.h"

namespace shoestring::quantization {

nn::QuantizedLinear without_weight(const nn::QuantizedLinearOptions& options) {
  const auto small = QuantizeOptions().quant_type(options.quantize().quant_type());
  nn::QuantizedLinear layer(
      nn::QuantizedLinearOptions(1, 1).bias(false).quantize(small).double_quant(options.double_quant()));
  layer->options = options;
  layer->options.bias(false);
  return layer;
}

}  // namespace shoestring::quantization

namespace shoestring::nn {

using at::Tensor;

QuantizedLinearImpl::QuantizedLinearImpl(const QuantizedLinearOptions& options) : options(options) {
  reset();
}

void QuantizedLinearImpl::reset() {
  // torch::nn::Module::clone() calls reset() on a copy of the layer that still refers to the tensors of the
  // original.
  packed = absmax = nested = Tensor();
  Tensor dense = torch::empty({options.out_features(), options.in_features()});
  torch::nn::init::kaiming_uniform_(dense, std::sqrt(5));
  set_weight(dense);
  packed = register_buffer("packed", packed);
  absmax = register_buffer("absmax", absmax);
  if (options.double_quant()) nested = register_buffer("nested", nested);
  if (options.bias()) {
    const double bound = 1 / std::sqrt(static_cast<double>(options.in_features()));
    bias = register_parameter("bias", torch::empty({options.out_features()}).uniform_(-bound, bound));
  }
}

void QuantizedLinearImpl::set_weight(const Tensor& dense) {
  TORCH_CHECK(
      dense.dim() == 2 && dense.size(0) == options.out_features() && dense.size(1) == options.in_features(),
      "QuantizedLinear: set_weight: dense: expected shape (", options.out_features(), ", ",
      options.in_features(), "), received ", dense.sizes());
  torch::NoGradGuard no_grad;
  const int64_t columns = options.in_features();
  int64_t& block = options.quantize().block_size();
  dtype = dense.scalar_type();
  if (options.quantize().quant_type() == "int8") {
    TORCH_CHECK(
        (block == QuantizeOptions().block_size() || block == columns) && !options.double_quant(),
        "QuantizedLinear: block_size and double_quant: expected the defaults with quant_type 'int8', whose "
        "rows have one "
        "fp32 scale each, received ",
        block, " and ", options.double_quant());
    block = columns;
    const auto [bytes, scales] = quantize_int8(dense);
    return take(bytes, scales, Tensor());
  }
  TORCH_CHECK(!options.double_quant() || options.quantize().quant_type() != "int4",
              "QuantizedLinear: double_quant: expected false with quant_type 'int4', whose scales are bf16, "
              "received true");
  auto [bytes, scales] = quantize_4bit(dense, options.quantize());
  Tensor second;
  if (options.double_quant()) std::tie(scales, second) = quantize_absmax(scales);
  take(bytes, scales, second);
}

void QuantizedLinearImpl::set_parts(const Tensor& bytes, const Tensor& scales, const Tensor& second,
                                    const QuantizeOptions& quantize) {
  quantization::check_packed("QuantizedLinear: set_parts", bytes, scales,
                             second.defined() ? std::optional<Tensor>(second) : std::nullopt,
                             options.out_features() * options.in_features(), quantize.quant_type(),
                             quantize.block_size(), bytes.device());
  // LibTorch cannot unregister a buffer. A layer with nested (double-quantised) scales has the buffer
  // `nested` and so cannot change to plain scales.
  TORCH_CHECK(
      second.defined() || !options.double_quant(),
      "QuantizedLinear: set_parts: second: expected nested scales, as the layer has them, received none");
  options.quantize(quantize).double_quant(second.defined());
  take(bytes, scales, second);
}

// Replaces the layer's quantised weight. Codes and scales are reshaped to one row per output feature if each
// row consists of whole blocks, otherwise flattened.
void QuantizedLinearImpl::take(Tensor bytes, Tensor scales, const Tensor& second) {
  const int64_t rows = options.out_features(), columns = options.in_features(),
                block = options.quantize().block_size();
  if (options.quantize().quant_type() == "int8") {
    bytes = bytes.view({rows, columns});
    scales = scales.view({rows});
  } else if (columns > 0 && columns % block == 0) {
    bytes = bytes.view({rows, columns / 2});
    scales = scales.view({rows, columns / block});
  } else {
    bytes = bytes.flatten();
    scales = scales.flatten();
  }
  // In the constructor the buffers do not exist yet; reset() registers them afterwards.
  if (!packed.defined()) {
    packed = bytes;
    absmax = scales;
    nested = second;
    return;
  }
  packed.set_data(bytes);
  absmax.set_data(scales);
  if (nested.defined() && second.defined()) {
    nested.set_data(second);
  } else if (second.defined()) {
    nested = register_buffer("nested", second);
  }
}

Tensor QuantizedLinearImpl::dequantize(at::ScalarType dtype) const {
  if (options.quantize().quant_type() == "int8") return dequantize_int8(packed, absmax, dtype);
  return dequantize_4bit(packed, absmax, {options.out_features(), options.in_features()}, dtype,
                         nested.defined() ? std::optional<Tensor>(nested) : std::nullopt, options.quantize());
}

Tensor QuantizedLinearImpl::forward(const Tensor& x) {
  return quantized_linear(
      x, packed, absmax, options.out_features(), bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
      nested.defined() ? std::optional<Tensor>(nested) : std::nullopt, options.quantize());
}

// Restores codes and scales after torch::nn::Module::to(), which converts the dtype of every buffer,
// including integers. The restored tensors are on the device to which the module was moved.
void QuantizedLinearImpl::keep_parts(const Tensor& packed_was, const Tensor& absmax_was,
                                     const Tensor& nested_was) {
  packed.set_data(packed_was.to(packed.device()));
  absmax.set_data(absmax_was.to(absmax.device()));
  if (nested.defined()) nested.set_data(nested_was.to(nested.device()));
}

void QuantizedLinearImpl::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  Tensor bytes = packed.detach(), scales = absmax.detach(),
         second = nested.defined() ? nested.detach() : nested;
  Module::to(device, dtype, non_blocking);
  keep_parts(bytes, scales, second);
}

void QuantizedLinearImpl::to(torch::Dtype dtype, bool non_blocking) {
  Tensor bytes = packed.detach(), scales = absmax.detach(),
         second = nested.defined() ? nested.detach() : nested;
  Module::to(dtype, non_blocking);
  keep_parts(bytes, scales, second);
}

void QuantizedLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::QuantizedLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << (options.bias() ? "true" : "false")
         << ", " << options.quantize().quant_type() << ", block_size=" << options.quantize().block_size()
         << ", double_quant=" << (options.double_quant() ? "true" : "false") << ")";
}

}  // namespace shoestring::nn
