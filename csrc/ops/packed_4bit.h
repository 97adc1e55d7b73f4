#pragma once

#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include "kernels/quantize_4bit.h"

namespace shoestring {

/// The code book of "nf4" or "fp4"; an error that names `op` for anything else.
const kernels::Codebook& codebook(const char* op, c10::string_view quant_type);

/// Refuses a block size that the format does not have.
void check_block_size(const char* op, int64_t block_size);

/// Refuses parts that do not fit a quantised tensor of `numel` elements on `device`.
void check_packed(const char* op, const at::Tensor& packed, const at::Tensor& absmax,
                  const std::optional<at::Tensor>& nested, const c10::SymInt& numel, c10::string_view quant_type,
                  int64_t block_size, c10::Device device);

/// A quantised tensor as its kernels read it. It holds the parts, made contiguous where they were not.
class PackedReader {
 public:
  PackedReader(const char* op, const at::Tensor& packed, const at::Tensor& absmax,
               const std::optional<at::Tensor>& nested, c10::string_view quant_type, int64_t block_size);

  const kernels::Packed& view() const { return view_; }

  /// On the CPU: elements [begin, begin + out.numel()) into `out`, contiguous fp32, bf16 or fp16, on all threads.
  void read(int64_t begin, const at::Tensor& out) const;

 private:
  at::Tensor packed_, absmax_, nested_;
  kernels::Packed view_;
};

}  // namespace shoestring
