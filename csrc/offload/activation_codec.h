#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shoestring::offload {

/// How activations are encoded in host memory.
enum class Compression { kNone, kBfloat16, k8bit };

/// Returns the compression of a name; raises for other names. `op` begins the error message.
Compression compression_of(const char* op, const std::string& name);

/// Returns whether elements of `dtype` take fewer bytes when they are encoded with `compression`.
bool compresses(Compression compression, at::ScalarType dtype);

/// The parts of the encoding of one storage, which follow one another in host memory. Each part has an offset
/// in bytes, an element count and a dtype.
struct EncodedPart {
  int64_t offset, count;
  at::ScalarType dtype;
};
struct Encoding {
  Compression compression = Compression::kNone;
  std::vector<EncodedPart> parts;
  int64_t bytes = 0;
};
/// Returns where the parts of `count` encoded elements are.
Encoding encoding_of(Compression compression, int64_t count, at::ScalarType dtype);

/// encode() writes the encoding of the flat tensor `elements` to `host`, which has encoding.bytes bytes.
/// decode() writes the decoded values back into `elements`.
void encode(const Encoding& encoding, const at::Tensor& elements, const at::Tensor& host);
void decode(const Encoding& encoding, const at::Tensor& host, const at::Tensor& elements);

}  // namespace shoestring::offload
