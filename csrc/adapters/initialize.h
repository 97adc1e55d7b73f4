#pragma once

#include <shoestring/nn/linear.h>

namespace shoestring::lora {

/// Computes the initial lora_A and lora_B of an adapter from the layer's weight and subtracts scaling *
/// lora_B lora_A from the weight. A quantised weight is dequantised for this, and the rest is quantised again
/// to the same type. quantize, nested: how the caller will quantise the rest of a dense weight. "loftq"
/// requires `quantize` for a dense layer.
nn::AdapterImpl::Tensors take_out(nn::LinearImpl& layer, const nn::AdapterOptions& options,
                                  const QuantizeOptions* quantize, bool nested);

/// Draws VeRA's shared matrices from the seed as PEFT does: vera_A (rank, in_features) and vera_B
/// (out_features, rank), kaiming uniform.
nn::AdapterImpl::Tensors projection(const nn::VeraOptions& options, int64_t in_features,
                                    int64_t out_features);

}  // namespace shoestring::lora
