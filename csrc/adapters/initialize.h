#pragma once

#include <shoestring/adapters/adaptable_linear.h>

namespace shoestring::lora {

/// Computes the initial lora_A and lora_B of a PiSSA, OLoRA or LoftQ adapter from the layer's weight.
/// Subtracts scaling * lora_B lora_A from the weight. A quantised weight is dequantised, and the difference
/// is quantised to the same type.
/// quantize, double_quant: the options with which the caller will quantise a dense weight after the
/// subtraction. LoftQ needs `quantize` for a dense layer, because it fits the adapter to the quantisation
/// error.
nn::AdapterImpl::Tensors take_out(nn::AdaptableLinearImpl& layer, const nn::LoraOptions& options,
                                  const QuantizeOptions* quantize, bool double_quant);

/// Draws the two matrices that all VeRA layers share, from the seed in `options`, as PEFT does. Returns
/// vera_A (rank, in_features) and vera_B (out_features, rank), both kaiming uniform.
nn::AdapterImpl::Tensors projection(const nn::VeraOptions& options, int64_t in_features,
                                    int64_t out_features);

}  // namespace shoestring::lora
