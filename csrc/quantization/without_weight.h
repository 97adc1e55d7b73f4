#pragma once

#include <shoestring/quantization/quantized_linear.h>

namespace shoestring::quantization {

/// Returns a layer with these options, without a bias and with a weight of size 1 x 1, which set_weight or
/// set_parts replaces. A layer of full size would draw random values for a weight that is replaced anyway.
nn::QuantizedLinear without_weight(const nn::QuantizedLinearOptions& options);

}  // namespace shoestring::quantization
