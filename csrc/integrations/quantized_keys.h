#pragma once

#include <optional>
#include <string>
#include <vector>

#include <shoestring/quantization/quantized_linear.h>

#include "files/safetensors_files.h"

namespace shoestring::integrations {

/// The tensors of a quantised weight in safetensors files, with the keys that bitsandbytes uses. A 4-bit
/// weight has weight, weight.absmax, weight.quant_map and weight.quant_state.bitsandbytes__nf4 (JSON). If its
/// scales are nested, it also has weight.nested_absmax and weight.nested_quant_map. An int8 weight has
/// weight, SCB and weight_format. bitsandbytes has no int4, so an int4 weight is stored like other 4-bit
/// weights, with weight.quant_state.shoestring__int4.
struct QuantizedKeys {
  std::vector<std::string> names;  // keys of the tensors that make up the quantised weight
  QuantizeOptions options;
  std::optional<float> offset;  // offset that is added to nested scales; unset if scales are not nested
  std::optional<at::ScalarType>
      dtype;  // dtype of the dense weight; unset for int8, for which files store no dtype
};

struct QuantizedParts {
  at::Tensor bytes, scales, second;  // the arguments of QuantizedLinearImpl::set_parts
};

/// Finds the quantised weight of a layer in the files; returns nullopt if the files have none. prefix: the
/// layer's name with a dot, such as "model.layers.0.mlp.up_proj.". Reads the weight's JSON description and
/// small tables. Compares the sizes of the weight's other tensors with the layer; for this it reads the
/// headers of the files only.
std::optional<QuantizedKeys> find_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                                            int64_t out_features, int64_t in_features);

/// Reads the tensors that find_quantized() has found.
QuantizedParts read_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                              const QuantizedKeys& keys);

/// Adds the tensors of a layer's quantised weight to `tensors`, under bitsandbytes' keys. The JSON
/// description is byte for byte the text that Python's json module would write.
void add_quantized(TensorDict& tensors, const std::string& prefix, const nn::QuantizedLinearImpl& layer);

}  // namespace shoestring::integrations
