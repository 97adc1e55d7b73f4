#pragma once

#include <optional>
#include <string>
#include <vector>

#include <shoestring/nn/quantized_linear.h>

#include "files/safetensors_files.h"

namespace shoestring::integrations {

/// A quantised weight in files, under the keys that bitsandbytes gives it. Of 4 bits: weight, weight.absmax,
/// weight.quant_map, weight.quant_state.bitsandbytes__nf4 (JSON), and nested_absmax and nested_quant_map of
/// nested scales; of int8: weight, SCB, weight_format. int4, which it has not, is as 4 bits, with
/// weight.quant_state.shoestring__int4.
struct QuantizedKeys {
  std::vector<std::string> names;  // the tensors that it consists of
  QuantizeOptions options;
  std::optional<float> offset;          // of nested scales
  std::optional<at::ScalarType> dtype;  // of the dense weight; int8 does not say
};

struct QuantizedParts {
  at::Tensor bytes, scales, second;  // see QuantizedLinearImpl::set_parts
};

/// The quantised weight of the layer `prefix` ("model.layers.0.mlp.up_proj."), if the files have one. Its
/// description is read and everything else checked against a layer of these sizes by the headers alone.
std::optional<QuantizedKeys> find_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                                            int64_t out_features, int64_t in_features);

QuantizedParts read_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                              const QuantizedKeys& keys);

/// Adds the keys of a layer's weight. The text of the description is Python's, byte for byte.
void add_quantized(TensorDict& tensors, const std::string& prefix, const nn::QuantizedLinearImpl& layer);

}  // namespace shoestring::integrations
