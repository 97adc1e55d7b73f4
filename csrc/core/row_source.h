#pragma once

// Weights that are away from their device, and that an operator can read a few rows or matrices at a time.

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <shoestring/core/export.h>

namespace shoestring {

/// Matrices of a stack that were asked for. They stay on their device while this object lives.
class SHOESTRING_API ArrivingMatrices {
 public:
  virtual ~ArrivingMatrices() = default;
  /// Returns when the matrices have arrived. Rethrows an error of reading them.
  virtual void wait() = 0;
};

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

  /// Starts to bring the matrices e of `stack` (matrices, ...) for which offsets[e] < offsets[e + 1]. The
  /// stack has its address at once; its other matrices have undefined values.
  virtual std::unique_ptr<ArrivingMatrices> bring(const at::Tensor& stack,
                                                  c10::ArrayRef<int64_t> offsets) = 0;

  // Fewer rows than this at the end join the rows before them. Then each part has 8 pieces of the depth of a
  // product on the CPU, as the whole weight has, and sums over the rows have the same order.
  static constexpr int64_t kLeast = 4096;
};

/// Returns the source of a weight that is away, or null if the weight is on its device.
SHOESTRING_API std::shared_ptr<RowSource> row_source_of(const at::Tensor& weight);

/// Starts to bring matrices of a stack as RowSource::bring does, if its storage belongs to a source. Returns
/// null for other tensors, which are on their device.
SHOESTRING_API std::unique_ptr<ArrivingMatrices> bring_matrices(const at::Tensor& stack,
                                                                c10::ArrayRef<int64_t> offsets);

/// Returns a lock to hold while a storage that belongs to a source gets another address: another thread may
/// ask the storage for its source.
SHOESTRING_API std::unique_lock<std::mutex> lock_sources();

/// Returns the data pointer of a storage that belongs to a source. `memory` is that of the storage, which
/// `owner` keeps; null if the storage is away.
at::DataPtr pointer_to_source(std::weak_ptr<RowSource> source, c10::Device device, void* memory = nullptr,
                              const at::Tensor& owner = {});

}  // namespace shoestring
