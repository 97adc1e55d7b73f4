// Convolutions with LoRA and DoRA adapters.
#include <cmath>
#include <utility>

#include <ATen/Functions.h>
#include <torch/nn/functional/padding.h>
#include <torch/nn/init.h>

#include <shoestring/adapters/conv.h>
#include <shoestring/layers/ops.h>

#include "adapters/low_rank.h"

namespace shoestring::nn {

using at::Tensor;

namespace {

template <size_t D, class Padding>
Tensor convolved(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const torch::nn::ConvOptions<D>& o, const Padding& padding) {
  const at::IntArrayRef stride(*o.stride()), dilation(*o.dilation());
  if constexpr (D == 1) return at::conv1d(x, weight, bias, stride, padding, dilation, o.groups());
  if constexpr (D == 2) return at::conv2d(x, weight, bias, stride, padding, dilation, o.groups());
  if constexpr (D == 3) return at::conv3d(x, weight, bias, stride, padding, dilation, o.groups());
}

// Returns the padding on both sides of each dimension, the last dimension first, as
// torch::nn::functional::pad takes it.
template <size_t D>
std::vector<int64_t> sides(const torch::nn::ConvOptions<D>& o) {
  std::vector<int64_t> amounts;
  for (size_t i = D; i-- > 0;) {
    if (const auto* numbers = std::get_if<torch::ExpandingArray<D>>(&o.padding())) {
      amounts.insert(amounts.end(), 2, (**numbers)[i]);
    } else if (std::holds_alternative<torch::enumtype::kSame>(o.padding())) {
      const int64_t total = (*o.dilation())[i] * ((*o.kernel_size())[i] - 1);
      amounts.insert(amounts.end(), {total / 2, total - total / 2});
    } else {
      amounts.insert(amounts.end(), 2, 0);
    }
  }
  return amounts;
}

torch::nn::functional::PadFuncOptions::mode_t pad_mode(const torch::nn::detail::conv_padding_mode_t& mode) {
  if (std::holds_alternative<torch::enumtype::kReflect>(mode)) return torch::kReflect;
  if (std::holds_alternative<torch::enumtype::kReplicate>(mode)) return torch::kReplicate;
  return torch::kCircular;
}

}  // namespace

template <size_t D>
AdaptableConvImpl<D>::AdaptableConvImpl(const torch::nn::ConvOptions<D>& options) : options(options) {
  TORCH_CHECK_VALUE(options.groups() > 0 && options.in_channels() % options.groups() == 0 &&
                        options.out_channels() % options.groups() == 0,
                    "nn::AdaptableConv: groups: expected a number that divides in_channels, ",
                    options.in_channels(), ", and out_channels, ", options.out_channels(), ", received ",
                    options.groups());
  reset();
}

// Creates the parameters of the convolution, with the initial values of torch::nn::Conv2d. clone() calls
// reset() on the clone as well; AdaptableLinearImpl::reset explains why.
template <size_t D>
void AdaptableConvImpl<D>::reset() {
  const auto dtype = weight.defined() ? weight.scalar_type() : at::kFloat;
  const auto former_adapters = std::exchange(adapters, decltype(adapters)());
  former_.reset();
  std::vector<int64_t> shape{options.out_channels(), options.in_channels() / options.groups()};
  shape.insert(shape.end(), options.kernel_size()->begin(), options.kernel_size()->end());
  weight = this->register_parameter("weight", at::empty(shape, dtype));
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
  if (options.bias()) {
    const double bound = 1 / std::sqrt(static_cast<double>(weight[0].numel()));
    bias =
        this->register_parameter("bias", at::empty({options.out_channels()}, dtype).uniform_(-bound, bound));
  }
  if (!former_adapters.is_empty()) freeze();
  for (const auto& item : former_adapters)
    adapters.insert(item.key(), std::dynamic_pointer_cast<AdapterImpl>(item.value()->clone()));
  register_adapters();
}

template <size_t D>
AdaptableLayer::Shapes AdaptableConvImpl<D>::shapes(const AnyAdapterOptions& adapter_options,
                                                    const std::string& caller,
                                                    const std::string& name) const {
  const auto* lora = std::get_if<LoraOptions>(&adapter_options);
  TORCH_CHECK_VALUE(lora != nullptr && !lora->changes_base(), caller,
                    ": adapter: expected LoRA or DoRA with init 'default' or 'gaussian' for a convolution, "
                    "received other options for ",
                    name);
  TORCH_CHECK_VALUE(options.groups() == 1, caller,
                    ": target_modules: expected a convolution with groups=1, received ", name, " of ",
                    options.groups(), " groups");
  std::vector<int64_t> down = weight.sizes().vec(), up(D + 2, 1), magnitude(D + 2, 1);
  down[0] = up[1] = lora->rank();
  up[0] = magnitude[1] = options.out_channels();
  Shapes shapes;
  shapes.insert("lora_A", down);
  shapes.insert("lora_B", up);
  if (lora->lora_bias()) shapes.insert("lora_bias", {options.out_channels()});
  if (lora->dora()) shapes.insert("lora_magnitude_vector", magnitude);
  return shapes;
}

template <size_t D>
AdapterImpl::Tensors AdaptableConvImpl<D>::start(const AnyAdapterOptions& adapter_options) const {
  const auto& lora = std::get<LoraOptions>(adapter_options);
  const Shapes tensor_shapes = shapes(lora, "add_adapter", "this layer");
  auto values = draw(tensor_shapes["lora_A"], tensor_shapes["lora_B"], lora, weight.scalar_type());
  if (lora.dora()) {
    const Tensor norm = matrix(weight.detach().to(adapter_type())).norm(2, 1);
    values.insert("lora_magnitude_vector", norm.view(tensor_shapes["lora_magnitude_vector"]));
  }
  return values;
}

template <size_t D>
std::array<Tensor, 2> AdaptableConvImpl<D>::factors(const AdapterImpl& adapter) const {
  return {adapter["lora_A"].flatten(1), adapter["lora_B"].flatten(1)};
}

template <size_t D>
void AdaptableConvImpl<D>::replace(const Tensor& new_weight, const Tensor& new_bias) {
  this->parameters_.erase("weight");
  weight = this->register_parameter("weight", new_weight, /*requires_grad=*/false);
  if (bias.defined()) this->parameters_.erase("bias");
  bias = new_bias;
  if (bias.defined()) bias = this->register_parameter("bias", new_bias, /*requires_grad=*/false);
}

template <size_t D>
Tensor AdaptableConvImpl<D>::convolve(const Tensor& x, const Tensor& by,
                                      const std::optional<Tensor>& plus) const {
  if (!std::holds_alternative<torch::enumtype::kZeros>(options.padding_mode())) {
    const auto pad =
        torch::nn::functional::PadFuncOptions(sides(options)).mode(pad_mode(options.padding_mode()));
    return convolved(torch::nn::functional::pad(x, pad), by, plus, options,
                     at::IntArrayRef(std::vector<int64_t>(D, 0)));
  }
  if (const auto* numbers = std::get_if<torch::ExpandingArray<D>>(&options.padding()))
    return convolved(x, by, plus, options, at::IntArrayRef(**numbers));
  const bool same = std::holds_alternative<torch::enumtype::kSame>(options.padding());
  return convolved(x, by, plus, options, c10::string_view(same ? "same" : "valid"));
}

template <size_t D>
Tensor AdaptableConvImpl<D>::forward(const Tensor& x) {
  if (observer) observer(x);
  if (current().empty()) return convolve(x, weight, optional(bias));
  const Tensor base = convolve(x, weight);
  const int64_t features = base.dim() - 1 - static_cast<int64_t>(D);
  const LoraInput input = input_with(dropout(), x);
  const Tensor y = composed(base, x, features, [&](const AdapterImpl& adapter) {
    const Tensor read = input.seed().has_value() ? seeded_dropout(x, *input.seed(), input.dropout()) : x;
    const Tensor low = convolve(read.to(adapter["lora_A"].scalar_type()), adapter["lora_A"]);
    return convolved(low, adapter["lora_B"], std::nullopt, torch::nn::ConvOptions<D>(1, 1, 1),
                     at::IntArrayRef(std::vector<int64_t>(D, 0)));
  });
  std::vector<int64_t> vector(static_cast<size_t>(y.dim()), 1);
  vector[static_cast<size_t>(features)] = -1;
  return bias.defined() ? y + bias.view(vector) : y;
}

template <size_t D>
void AdaptableConvImpl<D>::pretty_print(std::ostream& stream) const {
  stream << "shoestring::nn::AdaptableConv" << D << "d(" << options.in_channels() << ", "
         << options.out_channels() << ", kernel_size=" << options.kernel_size();
  for (const auto& item : adapters)
    stream << (item.key() == adapters.front().key() ? ", adapters: " : ", ") << item.key();
  stream << ")";
}

template class AdaptableConvImpl<1>;
template class AdaptableConvImpl<2>;
template class AdaptableConvImpl<3>;

}  // namespace shoestring::nn
