#pragma once

// Prepares batches ahead of the training step and copies them to its device.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <shoestring/export.h>

namespace shoestring::data {

class PrefetchRing;
using Batch = std::vector<at::Tensor>;

struct SHOESTRING_API PrefetcherOptions {
  PrefetcherOptions(c10::Device device) : device_(device) {}
  /// Device of the tensors that next() returns. Without an index, the current device of its type.
  TORCH_ARG(c10::Device, device);
  /// Number of batches that exist at a time: the batch in use, and `depth - 1` batches that are read ahead.
  /// On a device, each has pinned host memory and device memory of the size of the largest batch.
  TORCH_ARG(int64_t, depth) = 2;
  /// Number of the first batch.
  TORCH_ARG(int64_t, start) = 0;
  /// Number after that of the last batch. Without it, the source says when it has ended.
  TORCH_ARG(std::optional<int64_t>, stop) = std::nullopt;
  /// For debugging: fill the device memory of a batch with 0xFF bytes (NaN, -1) when next() takes it back, so
  /// that code which still reads the batch shows. Has nothing to fill on the CPU.
  TORCH_ARG(bool, poison) = false;
};

/// The pinned host memory of the batch that a source is reading. A source that writes its batch there saves
/// the copy to pinned memory.
class SHOESTRING_API HostBuffers {
 public:
  /// Returns an uninitialised, contiguous CPU tensor. It is valid until the source returns; so are its views.
  /// The tensor is in ordinary memory, from where it is copied later, if the device is the CPU or if the
  /// batch is larger than all batches before it.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

 private:
  friend class Prefetcher;
  explicit HostBuffers(PrefetchRing& ring) : ring_(ring) {}
  PrefetchRing& ring_;
};

/// Reads batches on a thread of its own, one step ahead, and copies them to the device on a stream of its
/// own. The Python counterpart is shoestring.data.Prefetcher. Example:
///
///     shoestring::data::Prefetcher batches(
///         [&](int64_t number) { return shoestring::data::Batch{inputs_of(number), labels_of(number)}; },
///         shoestring::data::PrefetcherOptions(device).start(resumed).stop(1000));
///     while (const auto batch = batches.next()) {
///       loss_of(model, *batch).backward();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// The tensors of a batch have the values, sizes and dtypes that the source returned, and its strides if they
/// are dense. They are valid until the following call of next(), which takes their memory back once the work
/// that is in the current stream at that time has ended. Work on other streams must have joined the current
/// stream by then. Autograd raises if a later backward needs a tensor of an earlier batch. On the CPU next()
/// returns the source's own tensors, which stay valid.
///
/// Memory: `depth` times the largest batch, on the device and in pinned host memory. It grows if a batch is
/// larger than all batches before it. The host does not wait for the device until it is `depth` batches
/// ahead.
///
/// next() must be called by one thread. The source runs on another thread, one call after the other, and its
/// operators use one thread. In a forked child, next() raises; destruction is safe.
class SHOESTRING_API Prefetcher {
 public:
  /// Returns the batch of this number, in dense tensors on the CPU, or nullopt if there is none any more. If
  /// the batch depends on nothing but the number, a run resumes with PrefetcherOptions::start.
  using Source = std::function<std::optional<Batch>(int64_t number)>;
  using FillingSource = std::function<std::optional<Batch>(int64_t number, HostBuffers& buffers)>;

  /// Starts reading. Throws c10::Error if an option is invalid.
  Prefetcher(Source source, const PrefetcherOptions& options);
  Prefetcher(FillingSource source, const PrefetcherOptions& options);
  /// Waits until the source has returned, and until copies that have begun are done.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// Returns the next batch on the device, or nullopt after the last batch. Waits on the host only if the
  /// batch has not been read yet; the current stream waits for the copy. Rethrows the source's exception for
  /// this batch, again at each later call.
  std::optional<Batch> next();
  /// Returns the number of the batch that next() returns next. A checkpoint stores it.
  int64_t position() const;
  /// Returns the seconds that next() has waited for the source. The time in which the host waits because the
  /// device is behind does not count.
  double seconds_waited() const;

 private:
  struct Reader;
  std::shared_ptr<Reader> reader_;
};

}  // namespace shoestring::data
