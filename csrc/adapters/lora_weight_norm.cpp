// Computes the row norms of a weight with its LoRA adapter. For a row w of the weight, the matching row b of
// lora_B, A = lora_A and s = scaling:
//   |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b.
// Each product has rank columns, so no temporary is as large as the weight. The weight is read once.
//
// On the CPU, a thread computes the norms of 32 rows after the other. The sums of squares bring the rows into
// the cache, and the product with A reads them there. On AMX, the product of a bf16 weight takes A as a sum
// of three bf16 numbers (gemm/split_product.h), which is as exact as fp32.

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <shoestring/adapters/ops.h>

#include "adapters/weight_norm_table.h"
#include "core/call.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "gemm/amx_table.h"
#include "gemm/gemm.h"
#include "gemm/products.h"
#include "gemm/skinny_gemm_table.h"
#include "gemm/split_product.h"
#include "quantization/base_weight.h"

namespace shoestring::adapters {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kLoraWeightNorm = "lora_weight_norm";
// Number of weight elements that the CPU converts to the compute dtype at a time.
constexpr int64_t kPart = int64_t{1} << 20;
// Number of weight rows whose norms a CPU thread computes together.
constexpr int64_t kNormRows = 32;
// Largest rank with which the CPU multiplies a weight by lora_A without packing the weight.
constexpr int64_t kFewRanks = 48;
// Number of bf16 numbers that have an fp32 number as their sum.
constexpr int64_t kParts = 3;

void check(const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested, const Tensor& A,
           const Tensor& B, c10::string_view quant_type, int64_t block_size) {
  for (const auto& [name, t] : {std::pair("lora_A", A), std::pair("lora_B", B)}) {
    TORCH_CHECK(is_supported_float(t.scalar_type()) && t.dim() == 2 && t.device() == weight.device(),
                kLoraWeightNorm, ": ", name, ": expected a floating-point matrix on ", weight.device(),
                ", received ", t.scalar_type(), " ", t.sym_sizes(), " on ", t.device());
  }
  TORCH_CHECK(B.sym_size(1) == A.sym_size(0), kLoraWeightNorm, ": lora_B: expected shape (out_features, ",
              A.sym_size(0), "), the rank as in lora_A, received ", B.sym_sizes());
  if (absmax.has_value()) {
    return quantization::check_packed(kLoraWeightNorm, weight, *absmax, nested, B.sym_size(0) * A.sym_size(1),
                                      quant_type, block_size, weight.device());
  }
  TORCH_CHECK(!nested.has_value(), kLoraWeightNorm,
              ": nested: expected none without absmax, received a tensor");
  TORCH_CHECK(is_supported_float(weight.scalar_type()) && weight.dim() == 2 &&
                  weight.sym_size(0) == B.sym_size(0) && weight.sym_size(1) == A.sym_size(1),
              kLoraWeightNorm, ": weight: expected a floating-point matrix of shape (", B.sym_size(0), ", ",
              A.sym_size(1), "), received ", weight.scalar_type(), " ", weight.sym_sizes());
}

at::ScalarType norm_type(const Tensor& weight, const Tensor& A) {
  return weight.scalar_type() == at::kDouble ? at::kDouble : compute_type(A);
}

// Calls body(squares, multiply, data) with the kernels and the pointer for the elements of `matrix`.
template <class Body>
void with_norm_kernels(at::ScalarType type, const void* data, Body body) {
  const auto& norms = cpu::weight_norm();
  const auto& products = cpu::skinny_gemm();
  if (type == at::kFloat) {
    body(norms.squares_float, products.multiply_float, static_cast<const float*>(data));
  } else if (type == at::kBFloat16) {
    body(norms.squares_bf16, products.multiply_bf16, static_cast<const uint16_t*>(data));
  } else {
    body(norms.squares_fp16, products.multiply_fp16, static_cast<const uint16_t*>(data));
  }
}

// Writes the sum of squares of each row of the fp32 matrix to `out`. The sums equal those of norms_of_few().
void row_squares(const Tensor& matrix, const Tensor& out) {
  const Tensor m = matrix.contiguous();
  const int64_t columns = m.size(1);
  at::parallel_for(0, m.size(0), row_grain(4 * columns), [&](int64_t first, int64_t last) {
    cpu::weight_norm().squares_float(m.const_data_ptr<float>() + first * columns, columns, last - first,
                                     columns, out.mutable_data_ptr<float>() + first);
  });
}

// lora_A split into three bf16 numbers and packed for AMX, or nothing if AMX does not multiply the weight.
struct PackedA {
  PackedA(const Tensor& A, at::ScalarType weight) {
    if (weight != at::kBFloat16 || !gemm::multiplies_by_tiles() || A.numel() == 0) return;
    const auto parts = gemm::split(A, 1, {0, 1, 2}, 0);
    if (!parts.has_value()) return;
    tiles = gemm::parts_of(parts->size(0), kernels::kAmxLines);
    const int64_t panels = gemm::parts_of(parts->size(0), kernels::kAmxColumns);
    packed = at::empty({panels * kernels::amx_size(A.size(1), kernels::kAmxColumns)}, at::kFloat);
    cpu::amx().pack_right(const_bits(*parts), parts->size(0), A.size(1), A.size(1), 1,
                          packed.mutable_data_ptr<float>());
  }
  int64_t columns() const { return tiles * kernels::kAmxLines; }

  int64_t tiles = 0;
  Tensor packed;
};

// Computes the norms on the CPU for fp32 A and B. The rows come from `dense` or, if it is given, from
// `packed`.
Tensor norms_of_few(const Tensor& dense, const quantization::PackedReader* packed, const Tensor& A,
                    const Tensor& B, double scaling) {
  const int64_t rows = B.size(0), columns = A.size(1), rank = A.size(0);
  const Tensor weight = packed == nullptr && dense.stride(1) != 1 ? dense.contiguous() : dense;
  const auto type = packed == nullptr ? weight.scalar_type() : at::kFloat;
  const int64_t stride = packed == nullptr ? weight.stride(0) : columns;
  const PackedA split(A, type);
  Tensor out = at::empty({rows}, A.options());
  const float *a = A.const_data_ptr<float>(), *b = B.const_data_ptr<float>();
  std::vector<float> gram(rank * rank);  // s / 2 A A^T
  cpu::skinny_gemm().multiply_float(a, columns, rank, a, rank, columns, gram.data(), rank,
                                    static_cast<float>(scaling / 2), 0);
  const int64_t grain = row_grain(kNormRows * columns * (4 + rank));
  at::parallel_for(0, gemm::parts_of(rows, kNormRows), grain, [&](int64_t first, int64_t last) {
    std::vector<float> decoded(packed == nullptr ? 0 : kNormRows * columns),
        products(kNormRows * std::max(rank, split.columns()));
    if (split.tiles > 0) cpu::amx().begin();
    for (int64_t row = first * kNormRows; row < std::min(last * kNormRows, rows); row += kNormRows) {
      const int64_t count = std::min(kNormRows, rows - row);
      const void* data = decoded.data();
      if (packed != nullptr) {
        packed->read(row * columns, count * columns, decoded.data());
      } else {
        data = static_cast<const char*>(weight.const_data_ptr()) +
               row * stride * static_cast<int64_t>(weight.element_size());
      }
      with_norm_kernels(type, data, [&](auto squares, auto multiply, const auto* from) {
        float sums[kNormRows];
        squares(from, stride, count, columns, sums);
        const auto finish = [&](int64_t parts, int64_t step) {
          return cpu::weight_norm().norms(sums, products.data(), parts, step, b + row * rank, gram.data(),
                                          rank, static_cast<float>(scaling), count,
                                          out.mutable_data_ptr<float>() + row);
        };
        if (split.tiles > 0) {
          cpu::amx().unpacked(reinterpret_cast<const uint16_t*>(from), stride, count, columns,
                              split.packed.const_data_ptr<float>(), split.tiles, products.data());
          if (finish(kParts, split.columns())) return;
          // The parts of a number have different signs, so infinity times the number became NaN.
        }
        if (rank > 0) multiply(from, stride, count, a, rank, columns, products.data(), rank, 1, 0);
        finish(1, rank);
      });
    }
    if (split.tiles > 0) cpu::amx().end();
  });
  return out;
}

template <Backend backend>
Tensor run_lora_weight_norm(const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                            const Tensor& lora_A, const Tensor& lora_B, double scaling,
                            c10::string_view quant_type, int64_t block_size) {
  check(weight, absmax, nested, lora_A, lora_B, quant_type, block_size);
  const c10::OptionalDeviceGuard guard(weight.device());
  const auto type = norm_type(weight, lora_A);
  const auto options = lora_A.options().dtype(type);
  const Tensor A = lora_A.to(type).contiguous(), B = lora_B.to(type).contiguous();
  const int64_t rows = B.size(0), columns = A.size(1);
  const gemm::Products products(backend, at::empty({0}, options));
  std::optional<quantization::PackedReader> packed;
  if (absmax.has_value())
    packed.emplace(backend, kLoraWeightNorm, weight, *absmax, nested, quant_type, block_size);
  const bool on_cpu = backend == Backend::kCpu && type == at::kFloat;
  if (on_cpu && A.size(0) <= kFewRanks && columns > 0) {
    return norms_of_few(weight, packed.has_value() ? &*packed : nullptr, A, B, scaling);
  }
  const auto base = packed.has_value() ? quantization::BaseWeight::quantized(*packed, rows, columns, options)
                                       : quantization::BaseWeight::dense(
                                             backend == Backend::kCuda ? weight.to(type) : weight, type);
  // Computes the second term of mixed = W A^T + s / 2 B (A A^T), where s is `scaling`; the loop below adds
  // the first term. The squared norm of the adapted row w + s b A is |w|^2 + 2 s (m . b), where w, b and m
  // are equally numbered rows of W, B and `mixed`.
  Tensor mixed = gemm::multiply(products, B, gemm::multiply(products, A, A.t(), type), type,
                                scaling / 2);  // shape (rows, rank)
  Tensor squares = at::empty({rows}, options);
  const int64_t step =
      backend == Backend::kCuda ? rows : std::max<int64_t>(16, kPart / std::max<int64_t>(1, columns));
  base.for_each_panel([&](int64_t begin, const Tensor& panel) {
    for (int64_t i = 0; i < panel.size(0); i += step) {
      const int64_t size = std::min(step, panel.size(0) - i);
      const Tensor part = panel.narrow(0, i, size).to(type);
      Tensor row_norms = squares.narrow(0, begin + i, size);
      if (on_cpu) {
        row_squares(part, row_norms);
      } else {
        at::linalg_vector_norm_out(row_norms, part, 2, 1).square_();
      }
      gemm::gemm(mixed.narrow(0, begin + i, size), part, A.t(), /*beta=*/1);
    }
  });
  squares.add_(mixed.mul_(B).sum(1), 2 * scaling);
  if (!on_cpu) return squares.clamp_min_(0).sqrt_();
  // With a rank of 0, the kernel takes square roots. Those of ATen may differ from them in the last bit.
  float* norms = squares.mutable_data_ptr<float>();
  cpu::weight_norm().norms(norms, nullptr, 1, 0, nullptr, nullptr, 0, 0, rows, norms);
  return squares;
}

Tensor lora_weight_norm_meta(const Tensor& weight, const OptionalTensor& absmax, const OptionalTensor& nested,
                             const Tensor& lora_A, const Tensor& lora_B, double, c10::string_view quant_type,
                             int64_t block_size) {
  check(weight, absmax, nested, lora_A, lora_B, quant_type, block_size);
  return at::empty_symint({lora_B.sym_size(0)}, lora_A.options().dtype(norm_type(weight, lora_A)));
}

// Does not record the norm for autograd, because DoRA treats it as a constant.
Tensor lora_weight_norm_autograd(const Tensor& weight, const OptionalTensor& absmax,
                                 const OptionalTensor& nested, const Tensor& lora_A, const Tensor& lora_B,
                                 double scaling, c10::string_view quant_type, int64_t block_size) {
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = find<decltype(lora_weight_norm_meta)>("shoestring::lora_weight_norm");
  return op.call(weight, absmax, nested, lora_A, lora_B, scaling, quant_type, block_size);
}

TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kLoraWeightNorm, run_lora_weight_norm<Backend::kCpu>); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kLoraWeightNorm, run_lora_weight_norm<Backend::kCuda>); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kLoraWeightNorm, lora_weight_norm_meta); }
TORCH_LIBRARY_IMPL(shoestring, Autograd, m) { m.impl(kLoraWeightNorm, lora_weight_norm_autograd); }

}  // namespace

}  // namespace shoestring::adapters

namespace shoestring {

using at::Tensor;

Tensor lora_weight_norm(const LoraWeight& layer) {
  TORCH_CHECK(layer.lora_A().has_value() && layer.lora_B().has_value(), adapters::kLoraWeightNorm,
              ": lora_A and lora_B: expected both, received a layer without an adapter");
  static auto op = find<decltype(adapters::lora_weight_norm_meta)>("shoestring::lora_weight_norm");
  return op.call(layer.weight(), layer.absmax(), layer.nested(), *layer.lora_A(), *layer.lora_B(),
                 layer.scaling(), layer.quantize().quant_type(), layer.quantize().block_size());
}

}  // namespace shoestring
