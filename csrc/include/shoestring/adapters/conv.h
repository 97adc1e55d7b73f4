#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/options/conv.h>
#include <torch/nn/pimpl.h>

#include <shoestring/adapters/adapter.h>
#include <shoestring/core/export.h>

namespace shoestring::nn {

/// torch::nn::Conv1d, Conv2d or Conv3d, with the same options and parameter names, that also accepts LoRA and
/// DoRA adapters if groups is 1. lora_A is the weight of the same convolution with `rank` outputs, (rank,
/// in_channels, *kernel). lora_B is the weight of a pointwise convolution, (out_channels, rank, 1, ...).
/// DoRA's magnitude is (1, out_channels, 1, ...).
///
///     shoestring::nn::AdaptableConv2d conv(torch::nn::Conv2dOptions(3, 64, 7).stride(2).padding(3));
template <size_t D>
class SHOESTRING_API AdaptableConvImpl : public torch::nn::Cloneable<AdaptableConvImpl<D>>,
                                         public LowRankLayer {
 public:
  AdaptableConvImpl(int64_t in_channels, int64_t out_channels, torch::ExpandingArray<D> kernel_size)
      : AdaptableConvImpl(torch::nn::ConvOptions<D>(in_channels, out_channels, kernel_size)) {}
  explicit AdaptableConvImpl(const torch::nn::ConvOptions<D>& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  /// Maps x (batch, in_channels, *sizes), or x without the batch, to (batch, out_channels, *sizes).
  at::Tensor forward(const at::Tensor& x);

  Shapes shapes(const AnyAdapterOptions& options, const std::string& caller,
                const std::string& name) const override;

  torch::nn::ConvOptions<D> options;

 private:
  AdapterImpl::Tensors start(const AnyAdapterOptions& adapter_options) const override;
  at::Tensor matrix(const at::Tensor& value) const override { return value.flatten(1); }
  at::Tensor folded(const at::Tensor& value) const override { return value.view(weight.sizes()); }
  std::array<at::Tensor, 2> factors(const AdapterImpl& adapter) const override;
  void replace(const at::Tensor& new_weight, const at::Tensor& new_bias) override;
  at::Tensor convolve(const at::Tensor& x, const at::Tensor& by,
                      const std::optional<at::Tensor>& plus = std::nullopt) const;
};

extern template class AdaptableConvImpl<1>;
extern template class AdaptableConvImpl<2>;
extern template class AdaptableConvImpl<3>;

using AdaptableConv1dImpl = AdaptableConvImpl<1>;
using AdaptableConv2dImpl = AdaptableConvImpl<2>;
using AdaptableConv3dImpl = AdaptableConvImpl<3>;
TORCH_MODULE(AdaptableConv1d);
TORCH_MODULE(AdaptableConv2d);
TORCH_MODULE(AdaptableConv3d);

}  // namespace shoestring::nn
