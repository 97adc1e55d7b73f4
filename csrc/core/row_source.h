#pragma once

// Weights that are away from their device, and that an operator can read a few rows at a time.

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <shoestring/core/export.h>

namespace shoestring {

/// Reads rows of weights whose storages have no memory on their device.
class SHOESTRING_API RowSource {
 public:
  virtual ~RowSource() = default;

  /// Calls body(first, rows) for all rows of `weight` (rows, columns), in order. `rows` is on the weight's
  /// device, and has `step` rows; the last ones have up to kLeast - 1 more. The next rows arrive while the
  /// body runs. Work that the body adds to the current stream may use `rows`; the host may not after the
  /// body.
  using Body = std::function<void(int64_t first, const at::Tensor& rows)>;
  virtual void for_each(const at::Tensor& weight, int64_t step, const Body& body) = 0;

  // Fewer rows than this at the end join the rows before them. Then each part has 8 pieces of the depth of a
  // product on the CPU, as the whole weight has, and sums over the rows have the same order.
  static constexpr int64_t kLeast = 4096;
};

/// Returns the source of a weight that is away, or null if the weight is on its device.
SHOESTRING_API std::shared_ptr<RowSource> row_source_of(const at::Tensor& weight);

/// Returns the data pointer of a storage that is away, from which row_source_of() finds the source.
at::DataPtr pointer_to_source(std::weak_ptr<RowSource> source, c10::Device device);

}  // namespace shoestring
