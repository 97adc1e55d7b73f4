#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/quantization/ops.h>

#include "core/call.h"
#include "core/cuda.h"
#include "core/threads.h"
#include "quantization/compress_gradient_table.h"

namespace shoestring::quantization {
namespace {

using at::Tensor;

constexpr const char* kCompress = "compress_gradient_";
constexpr const char* kDecompress = "decompress_mean_";

struct CodecSizes {
  int64_t block, record;
};

CodecSizes codec_sizes(const char* op, int64_t bits) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4 || bits == 1, op, ": bits: expected 8, 4 or 1, received ", bits);
  return kernels::with_gradient_codec(static_cast<int>(bits), [](auto codec) {
    return CodecSizes{decltype(codec)::kBlock, decltype(codec)::kRecord};
  });
}

c10::SymInt gradient_bytes(const char* op, const c10::SymInt& numel, int64_t bits) {
  const auto [block, record] = codec_sizes(op, bits);
  return (numel + (block - 1)) / block * record;
}

void check_gradient_dtype(const char* op, const char* argument, const Tensor& x) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, op, ": ", argument,
              ": expected fp32, bf16 or fp16, received ", dtype, ". Convert it, or leave it uncompressed.");
}

void check_compress(const Tensor& error, const Tensor& gradient, const Tensor& codes, int64_t bits) {
  check_gradient_dtype(kCompress, "gradient", gradient);
  const c10::SymInt bytes = gradient_bytes(kCompress, gradient.sym_numel(), bits);
  TORCH_CHECK(
      error.scalar_type() == at::kFloat && error.is_contiguous() && error.sym_numel() == gradient.sym_numel(),
      kCompress, ": error: expected contiguous fp32 with ", gradient.sym_numel(),
      " elements, as gradient has, received ", error.scalar_type(), " ", error.sym_sizes());
  TORCH_CHECK(codes.scalar_type() == at::kByte && codes.is_contiguous() && codes.dim() == 1 &&
                  codes.sym_size(0) == bytes,
              kCompress, ": codes: expected contiguous uint8 of shape (", bytes, ") for ",
              gradient.sym_numel(), " elements in ", bits, " bits, received ", codes.scalar_type(), " ",
              codes.sym_sizes());
  TORCH_CHECK(error.device() == gradient.device() && codes.device() == gradient.device(), kCompress,
              ": error, codes: expected gradient's device, ", gradient.device(), ", received ",
              error.device(), " and ", codes.device());
}

void check_decompress(const Tensor& out, const Tensor& codes, int64_t bits) {
  check_gradient_dtype(kDecompress, "out", out);
  TORCH_CHECK(out.is_contiguous(), kDecompress, ": out: expected a contiguous tensor, received strides ",
              out.sym_strides());
  const c10::SymInt bytes = gradient_bytes(kDecompress, out.sym_numel(), bits);
  TORCH_CHECK(codes.scalar_type() == at::kByte && codes.dim() == 2 && codes.sym_size(0) >= 1 &&
                  codes.sym_size(1) >= bytes,
              kDecompress, ": codes: expected uint8 of shape (ranks, ", bytes, " or more) for ",
              out.sym_numel(), " elements in ", bits, " bits, received ", codes.scalar_type(), " ",
              codes.sym_sizes());
  TORCH_CHECK(codes.device() == out.device(), kDecompress, ": codes: expected out's device, ", out.device(),
              ", received ", codes.device());
}

// Returns codes whose rows are contiguous and, for the 4-byte accesses of the GPU, aligned.
Tensor readable_codes(const Tensor& codes) {
  const bool plain = codes.size(1) <= 1 || codes.stride(1) == 1;
  if (plain && codes.stride(0) % 4 == 0 && reinterpret_cast<uintptr_t>(codes.const_data_ptr()) % 4 == 0)
    return codes;
  const int64_t bytes = codes.size(1);
  Tensor rows = at::empty({codes.size(0), (bytes + 3) / 4 * 4}, codes.options()).narrow(1, 0, bytes);
  rows.copy_(codes);
  return rows;
}

kernels::GradientType gradient_type(const Tensor& x) {
  return x.scalar_type() == at::kFloat      ? kernels::GradientType::kFloat
         : x.scalar_type() == at::kBFloat16 ? kernels::GradientType::kBFloat16
                                            : kernels::GradientType::kHalf;
}

// Divides the blocks of n elements among all threads: body(first element, elements, first block).
template <class Body>
void for_gradient_blocks(int64_t n, int64_t block, int64_t bytes, Body body) {
  at::parallel_for(0, (n + block - 1) / block, row_grain(bytes), [&](int64_t first, int64_t last) {
    body(first * block, std::min(last * block, n) - first * block, first);
  });
}

void compress_gradient_cpu(Tensor& error, const Tensor& gradient, Tensor& codes, int64_t bits) {
  check_compress(error, gradient, codes, bits);
  const Tensor source = gradient.contiguous();
  const auto [block, record] = codec_sizes(kCompress, bits);
  const int64_t size = source.element_size();
  const auto* in = static_cast<const char*>(source.const_data_ptr());
  auto* sums = error.mutable_data_ptr<float>();
  auto* out = codes.mutable_data_ptr<uint8_t>();
  const auto& kernels = cpu::compress_gradient();
  for_gradient_blocks(source.numel(), block, block * (8 + size) + record,
                      [&](int64_t first, int64_t count, int64_t number) {
                        kernels.compress(static_cast<int>(bits), gradient_type(source), sums + first,
                                         in + first * size, count, out + number * record);
                      });
}

void decompress_mean_cpu(Tensor& out, const Tensor& codes, int64_t bits) {
  check_decompress(out, codes, bits);
  const Tensor rows = readable_codes(codes);
  const auto [block, record] = codec_sizes(kDecompress, bits);
  const int64_t size = out.element_size(), ranks = rows.size(0), stride = rows.stride(0);
  const auto* in = rows.const_data_ptr<uint8_t>();
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto& kernels = cpu::compress_gradient();
  for_gradient_blocks(
      out.numel(), block, block * size + ranks * record, [&](int64_t first, int64_t count, int64_t number) {
        kernels.decompress_mean(static_cast<int>(bits), gradient_type(out), in + number * record, stride,
                                ranks, count, to + first * size);
      });
}

void compress_gradient_cuda(Tensor& error, const Tensor& gradient, Tensor& codes, int64_t bits) {
  check_compress(error, gradient, codes, bits);
  TORCH_CHECK(reinterpret_cast<uintptr_t>(codes.const_data_ptr()) % 4 == 0, kCompress,
              ": codes: expected memory that is aligned to 4 bytes, received a view at another byte");
  const c10::OptionalDeviceGuard guard(gradient.device());
  const Tensor source = gradient.contiguous();
  check_launch(kCompress,
               cuda::table<kernels::CompressGradientCuda>("compress_gradient")
                   .compress(static_cast<int>(bits), gradient_type(source), error.mutable_data_ptr<float>(),
                             source.const_data_ptr(), source.numel(), codes.mutable_data_ptr<uint8_t>(),
                             stream_of(gradient)));
}

void decompress_mean_cuda(Tensor& out, const Tensor& codes, int64_t bits) {
  check_decompress(out, codes, bits);
  const c10::OptionalDeviceGuard guard(out.device());
  const Tensor rows = readable_codes(codes);
  check_launch(kDecompress, cuda::table<kernels::CompressGradientCuda>("compress_gradient")
                                .decompress_mean(static_cast<int>(bits), gradient_type(out),
                                                 rows.const_data_ptr<uint8_t>(), rows.stride(0), rows.size(0),
                                                 out.numel(), out.mutable_data_ptr(), stream_of(out)));
}

void compress_gradient_meta(Tensor& error, const Tensor& gradient, Tensor& codes, int64_t bits) {
  check_compress(error, gradient, codes, bits);
}

void decompress_mean_meta(Tensor& out, const Tensor& codes, int64_t bits) {
  check_decompress(out, codes, bits);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) {
  m.impl("compress_gradient_", compress_gradient_cpu);
  m.impl("decompress_mean_", decompress_mean_cpu);
}
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) {
  m.impl("compress_gradient_", compress_gradient_cuda);
  m.impl("decompress_mean_", decompress_mean_cuda);
}
TORCH_LIBRARY_IMPL(shoestring, Meta, m) {
  m.impl("compress_gradient_", compress_gradient_meta);
  m.impl("decompress_mean_", decompress_mean_meta);
}

}  // namespace

}  // namespace shoestring::quantization

namespace shoestring {

using at::Tensor;

int64_t compressed_gradient_bytes(int64_t numel, int64_t bits) {
  TORCH_CHECK_VALUE(numel >= 0, "compressed_gradient_bytes: numel: expected at least 0, received ", numel);
  return quantization::gradient_bytes("compressed_gradient_bytes", numel, bits).expect_int();
}

void compress_gradient_(Tensor& error, const Tensor& gradient, Tensor& codes, int64_t bits) {
  static auto op = find<decltype(quantization::compress_gradient_cpu)>("shoestring::compress_gradient_");
  op.call(error, gradient, codes, bits);
}

void decompress_mean_(Tensor& out, const Tensor& codes, int64_t bits) {
  static auto op = find<decltype(quantization::decompress_mean_cpu)>("shoestring::decompress_mean_");
  op.call(out, codes, bits);
}

}  // namespace shoestring
