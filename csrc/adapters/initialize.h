#pragma once

#include <shoestring/nn/linear.h>

namespace shoestring::lora {

/// Takes the adapter's first values out of the layer's weight, which becomes weight - scaling lora_B lora_A;
/// a quantised one is dequantised for it, and the rest quantised again in its own form. quantize, nested:
/// what a dense rest will be quantised by; "loftq" needs it.
nn::AdapterImpl::Tensors take_out(nn::LinearImpl& layer, const nn::AdapterOptions& options,
                                  const QuantizeOptions* quantize, bool nested);

/// VeRA's matrices of a seed, PEFT's: vera_A (rank, in_features) and vera_B (out_features, rank), kaiming
/// uniform.
nn::AdapterImpl::Tensors projection(const nn::VeraOptions& options, int64_t in_features,
                                    int64_t out_features);

}  // namespace shoestring::lora
