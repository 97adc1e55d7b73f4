#pragma once

#include <optional>
#include <string>
#include <vector>

#include <shoestring/nn/quantized_linear.h>

#include "files/safetensors_files.h"

namespace shoestring::integrations {

/// A quantised weight in files under bitsandbytes' keys. A 4-bit weight has weight, weight.absmax,
/// weight.quant_map and weight.quant_state.bitsandbytes__nf4 (JSON), plus nested_absmax and nested_quant_map
/// if its scales are nested. An int8 weight has weight, SCB and weight_format. bitsandbytes has no int4,
/// which is stored like other 4-bit weights with weight.quant_state.shoestring__int4.
struct QuantizedKeys {
  std::vector<std::string> names;  // names of the tensors that make up the weight
  QuantizeOptions options;
  std::optional<float> offset;  // offset of the nested scales
  std::optional<at::ScalarType>
      dtype;  // dtype of the dense weight; unset for int8, whose keys do not store it
};

struct QuantizedParts {
  at::Tensor bytes, scales, second;  // the arguments of QuantizedLinearImpl::set_parts
};

/// Finds the quantised weight of the layer `prefix` ("model.layers.0.mlp.up_proj."), if the files have one.
/// Reads only its JSON description and small tables. Checks all other tensors against a layer of these sizes
/// by the headers alone.
std::optional<QuantizedKeys> find_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                                            int64_t out_features, int64_t in_features);

QuantizedParts read_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                              const QuantizedKeys& keys);

/// Adds the keys of a layer's quantised weight to `tensors`. The JSON description equals the text that
/// Python's json module writes.
void add_quantized(TensorDict& tensors, const std::string& prefix, const nn::QuantizedLinearImpl& layer);

}  // namespace shoestring::integrations
