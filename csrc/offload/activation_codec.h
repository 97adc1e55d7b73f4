#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::offload {

/// How activations are written on the host.
enum class Compression { kNone, kBfloat16, k8bit };

Compression compression_of(const char* op, const std::string& name);

/// Whether elements of this type become fewer bytes.
bool compresses(Compression compression, at::ScalarType dtype);

/// The parts that elements of one storage are written as: shapes and types, one after the other.
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

/// elements (count) to host (bytes of the encoding), and back into elements.
void encode(const Encoding& encoding, const at::Tensor& elements, const at::Tensor& host);
void decode(const Encoding& encoding, const at::Tensor& host, const at::Tensor& elements);

}  // namespace shoestring::offload
