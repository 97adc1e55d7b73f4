#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::offload {

/// How activations are encoded in host memory.
enum class Compression { kNone, kBfloat16, k8bit };

Compression compression_of(const char* op, const std::string& name);

/// Returns whether the encoding of this dtype is smaller than the elements.
bool compresses(Compression compression, at::ScalarType dtype);

/// The parts of the encoding of one storage, one after the other: offsets in bytes, element counts and
/// dtypes.
struct EncodedPart {
  int64_t offset, count;
  at::ScalarType dtype;
};
struct Encoding {
  Compression compression = Compression::kNone;
  std::vector<EncodedPart> parts;
  int64_t bytes = 0;
};
Encoding encoding_of(Compression compression, int64_t count, at::ScalarType dtype);

/// encode writes elements (count) to host memory (encoding.bytes); decode writes the encoding back into
/// elements.
void encode(const Encoding& encoding, const at::Tensor& elements, const at::Tensor& host);
void decode(const Encoding& encoding, const at::Tensor& host, const at::Tensor& elements);

}  // namespace shoestring::offload
