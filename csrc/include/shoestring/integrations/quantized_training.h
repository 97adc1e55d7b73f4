#pragma once

#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <shoestring/core/export.h>
#include <shoestring/quantization/ops.h>

namespace shoestring {

struct PrepareQuantizedOptions {
  /// The format to which convert_quantized will quantise the weights: "nf4", "fp4", "int4" or "int8", with
  /// the block size of 4-bit weights.
  TORCH_ARG(QuantizeOptions, quantize) = {};
  /// Whether convert_quantized quantises the scales as well (double quantisation); for "nf4" and "fp4" only.
  TORCH_ARG(bool, double_quant) = false;
  /// Layers to prepare: full names, or the last components of a name. An empty list selects every
  /// shoestring::nn::AdaptableLinear.
  TORCH_ARG(std::vector<std::string>, target_modules) = {};
  /// Layers that stay as they are: full names, or the last components of a name, such as "lm_head".
  TORCH_ARG(std::vector<std::string>, skip) = {};
};

/// Prepares shoestring::nn::AdaptableLinear layers of a module for quantisation-aware training: their forward
/// computes with fake-quantised weights. The weights stay dense, trainable parameters. Layers that an earlier
/// call prepared keep their format. Returns the names of the layers. Raises ValueError, and changes nothing,
/// if a name matches nothing, or if a layer has an adapter or a quantised weight.
SHOESTRING_API std::vector<std::string> prepare_quantized(torch::nn::Module& module,
                                                          const PrepareQuantizedOptions& options = {});

/// Quantises the weights of the layers that prepare_quantized prepared. The dequantised weights equal, bit
/// for bit, the weights with which forward has computed. save_model then writes them quantised. Returns the
/// names of the layers, and raises ValueError if there are none.
SHOESTRING_API std::vector<std::string> convert_quantized(torch::nn::Module& module);

}  // namespace shoestring
