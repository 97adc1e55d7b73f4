#include "offload/activation_codec.h"

// Encodes activations for host memory: unchanged, as bf16, or as 8-bit codes with scales.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <shoestring/quantization/ops.h>

#include "quantization/quantize_8bit_table.h"

namespace shoestring::offload {
namespace {

constexpr int64_t kPartAlignment = 64;  // alignment in bytes of each encoded part, for vector loads

at::Tensor part_of(const at::Tensor& host, const EncodedPart& part) {
  const int64_t bytes = part.count * static_cast<int64_t>(c10::elementSize(part.dtype));
  return host.narrow(0, part.offset, bytes).view(part.dtype);
}

// Adds NaN to the quantisation scale of each block of x that has an element that is not finite, and returns
// the scales. Such a block is then decoded as NaN.
at::Tensor checked_scale(const at::Tensor& x, const at::Tensor& scale) {
  const int64_t whole = x.numel() / kernels::kStateBlock, length = whole * kernels::kStateBlock;
  const at::Tensor zeros = at::zeros_like(scale), of = x * 0;
  zeros.narrow(0, 0, whole).copy_(of.narrow(0, 0, length).view({whole, kernels::kStateBlock}).sum(1));
  if (length < x.numel()) zeros.narrow(0, whole, 1).copy_(of.narrow(0, length, x.numel() - length).sum());
  return scale + zeros;
}

}  // namespace

Compression compression_of(const char* op, const std::string& name) {
  if (name == "none") return Compression::kNone;
  if (name == "bf16") return Compression::kBfloat16;
  if (name == "8bit") return Compression::k8bit;
  TORCH_CHECK(false, op, ": compression: expected none, bf16 or 8bit, received '", name, "'");
}

bool compresses(Compression compression, at::ScalarType dtype) {
  switch (compression) {
    case Compression::kNone:
      return false;
    case Compression::kBfloat16:
      return dtype == at::kFloat;
    case Compression::k8bit:
      return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  }
  return false;
}

Encoding encoding_of(Compression compression, int64_t count, at::ScalarType dtype) {
  Encoding encoding{compresses(compression, dtype) ? compression : Compression::kNone, {}, 0};
  const auto add = [&](int64_t elements, at::ScalarType type) {
    encoding.parts.push_back({encoding.bytes, elements, type});
    const int64_t bytes = elements * static_cast<int64_t>(c10::elementSize(type));
    encoding.bytes += (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  };
  switch (encoding.compression) {
    case Compression::kNone:
      add(count, dtype);
      break;
    case Compression::kBfloat16:
      add(count, at::kBFloat16);
      break;
    case Compression::k8bit:
      add(count, at::kByte);
      add((count + kernels::kStateBlock - 1) / kernels::kStateBlock, at::kFloat);
      break;
  }
  return encoding;
}

void encode(const Encoding& encoding, const at::Tensor& elements, const at::Tensor& host) {
  const at::Tensor first = part_of(host, encoding.parts[0]);
  // Convert the dtype before the copy, so that the temporary tensor of the conversion is on the device.
  if (encoding.compression != Compression::k8bit) {
    first.copy_(elements.to(first.scalar_type()), /*non_blocking=*/true);
    return;
  }
  const at::Tensor x = elements.to(at::kFloat);
  const auto [codes, scale] = quantize_8bit(x, /*is_signed=*/true);
  first.copy_(codes, true);
  part_of(host, encoding.parts[1]).copy_(checked_scale(x, scale), true);
}

void decode(const Encoding& encoding, const at::Tensor& host, const at::Tensor& elements) {
  const at::Tensor first = part_of(host, encoding.parts[0]);
  if (encoding.compression == Compression::kNone) {
    elements.copy_(first, true);
  } else if (encoding.compression == Compression::kBfloat16) {
    elements.copy_(first.to(elements.device(), /*non_blocking=*/true));
  } else {
    const at::Tensor scale = part_of(host, encoding.parts[1]).to(elements.device(), true);
    elements.copy_(dequantize_8bit(first.to(elements.device(), true), scale, /*is_signed=*/true));
  }
}

}  // namespace shoestring::offload
